from collections.abc import Callable

import numpy as np
import pytest

from simulator.fleet import DAY, HOUR
from simulator.lives import DOWN
from simulator.records import CounterEvent
from simulator.run import Simulation, node_devices
from simulator.samples import Device, sample_table, signatures

Fleet = Callable[..., Simulation]


@pytest.fixture(scope="module")
def simulation(fleet: Fleet) -> Simulation:
    return fleet("base", 64, 20, acceleration=1.0)


@pytest.fixture(scope="module")
def plain(simulation: Simulation) -> Device:
    """A sound device of a busy node with NVLink, without any mark."""
    for number, node in enumerate(simulation.nodes):
        model = simulation.parameters.fleet.models[node.model]
        if node.spare or node.flaky or node.mig or not model.has_nvlink:
            continue
        for device in node_devices(simulation, number):
            _, chronic = simulation.traits[number][(device.slot, device.installation)]
            if not chronic and device.last - device.first == simulation.clock.steps:
                return with_states(device, [(0, simulation.clock.end)], simulation)
    raise AssertionError("no plain device in the fleet")


def with_states(device: Device, states: list[tuple[int, int]], simulation: Simulation, **more: object) -> Device:
    """The device with given (state, until) in place of its life, and no marks or reloads unless given."""
    begin = simulation.clock.origin
    rows = []
    for state, until in states:
        rows.append(
            (device.slot, device.installation, begin, until, state, begin, -1, begin if state == DOWN else until)
        )
        begin = until
    given: dict[str, object] = {
        "counter_events": np.empty((0, 3), np.int64),
        "reloads": np.empty(0, np.int64),
        **more,
    }
    return device._replace(segments=np.array(rows, np.int64), **given)


def state_of(simulation: Simulation, name: str) -> int:
    return simulation.chain.names.split().index(name)


def frame(device: Device, simulation: Simulation) -> dict[str, np.ndarray]:
    clock = simulation.clock
    signs = signatures(simulation.parameters, simulation.chain)
    table = sample_table([device], signs, seed=simulation.seed, start=clock.start, step=clock.step)
    out = {
        name: table.column(name).to_numpy() for name in table.column_names if name not in ("node", "gpu", "timestamp")
    }
    out["time"] = table.column("timestamp").cast("int64").to_numpy()
    return out


def test_samples_do_not_know_the_future(simulation: Simulation, plain: Device) -> None:
    clock = simulation.clock
    ill = state_of(simulation, "bus_advanced")
    begins, ends = clock.start + 5 * DAY, clock.start + 6 * DAY
    fails = frame(with_states(plain, [(0, begins), (ill, ends), (DOWN, clock.end)], simulation), simulation)
    heals = frame(with_states(plain, [(0, begins), (ill, ends), (0, clock.end)], simulation), simulation)
    before = heals["time"] < ends
    assert fails["time"].max() < ends
    for name, values in fails.items():
        assert np.array_equal(values, heals[name][before], equal_nan=True), name


@pytest.mark.parametrize(
    ("state", "channel", "least"),
    [
        ("thermal_advanced", "gpu_temp_c", 2.0),
        ("bus_advanced", "pcie_replay_total", 10 * 60 * 24 * 2.0),
        ("nvlink_advanced", "nvlink_crc_flit_total", 60 * 86400 * 2.0),
        ("hbm_weak", "ecc_sbe_volatile_total", 100.0),
    ],
)
def test_a_degradation_shows_in_its_own_channel(simulation, plain, state, channel, least):
    clock = simulation.clock
    begins, ends = clock.start + 5 * DAY, clock.start + 7 * DAY
    ill = frame(
        with_states(plain, [(0, begins), (state_of(simulation, state), ends), (0, clock.end)], simulation), simulation
    )
    sound = frame(plain, simulation)
    during = (ill["time"] >= begins) & (ill["time"] < ends)
    if channel.endswith("_total"):
        rise = ill[channel][during][-1] - ill[channel][during][0]
        usual = (sound["time"] >= begins) & (sound["time"] < ends)
        assert rise - (sound[channel][usual][-1] - sound[channel][usual][0]) > least
    else:
        usual = (sound["time"] >= begins) & (sound["time"] < ends)
        assert ill[channel][during].mean() - sound[channel][usual].mean() > least


def test_samples_go_missing_in_the_structural_state(simulation: Simulation, plain: Device) -> None:
    clock = simulation.clock
    ill = frame(with_states(plain, [(state_of(simulation, "bus_structural"), clock.end)], simulation), simulation)
    sound = frame(plain, simulation)
    assert len(sound["time"]) > 0.97 * clock.steps
    assert len(ill["time"]) < 0.85 * len(sound["time"])


def test_the_xid_gauge_is_latched_until_the_driver_is_loaded_again(simulation: Simulation, plain: Device) -> None:
    clock = simulation.clock
    at, load = clock.start + 2 * DAY + 1, clock.start + 4 * DAY
    events = np.array([(at, CounterEvent.XID, 31), (at + HOUR, CounterEvent.XID, 94)], np.int64)
    samples = frame(
        with_states(plain, [(0, clock.end)], simulation, counter_events=events, reloads=np.array([load], np.int64)),
        simulation,
    )
    time, xid = samples["time"], samples["xid_last"]
    assert set(xid[time < at]) == {0}
    assert set(xid[(time >= at) & (time < at + HOUR)]) == {31}
    assert set(xid[(time >= at + HOUR) & (time < load)]) == {94}
    assert set(xid[time >= load]) == {0}


def test_counters_only_fall_when_the_driver_is_loaded_again(simulation: Simulation, plain: Device) -> None:
    clock = simulation.clock
    load = clock.start + 10 * DAY
    events = np.array(
        [(clock.start + DAY, CounterEvent.UNCORRECTED, 2), (clock.start + DAY, CounterEvent.REMAPPED, 1)], np.int64
    )
    samples = frame(
        with_states(plain, [(0, clock.end)], simulation, counter_events=events, reloads=np.array([load], np.int64)),
        simulation,
    )
    later = samples["time"] >= load
    for name in ("pcie_replay_total", "ecc_sbe_volatile_total", "ecc_dbe_volatile_total", "nvlink_crc_flit_total"):
        for part in (samples[name][~later], samples[name][later]):
            assert (np.diff(part) >= 0).all(), name
    assert samples["ecc_dbe_volatile_total"][~later].max() == 2
    assert samples["ecc_dbe_volatile_total"][later].max() == 0
    remaps = samples["row_remap_uncorrectable_total"]
    assert remaps[-1] == remaps[0] + 1  # remaps are kept on the board
