"""Simulation without samples: hazards of the scenario, and the history, records and jobs of every node."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.fleet import NEVER, SimulatedNode, SimulatedTime, build_fleet, gpu_name
from simulator.hazards import Chain, build_chain, epidemic_by_day
from simulator.lives import DOWN, Laws, Lives, live, make_laws
from simulator.parameters import Parameters
from simulator.randomness import Purpose, generator
from simulator.records import Records, write_records
from simulator.samples import Device, device_traits, sample_range
from simulator.scenarios import Scenario
from simulator.workload import OUTCOMES, Jobs, node_series, schedule

Traits = dict[tuple[int, int], tuple[NDArray[np.float64], list[str]]]


@dataclass(frozen=True, slots=True)
class Simulation:
    """Hidden history of a fleet, and its records; lists have one entry per node.

    ``traits``: by (slot, installation), a device's constants and its chronic anomalies.
    """

    parameters: Parameters
    clock: SimulatedTime
    seed: int
    chain: Chain
    laws: Laws
    nodes: list[SimulatedNode]
    lives: list[Lives]
    records: list[Records]
    jobs: list[Jobs]
    traits: list[Traits]
    inflation: float


def run_fleet(scenario: Scenario, clock: SimulatedTime, *, gpus: int, seed: int, acceleration: float) -> Simulation:
    """Simulate a fleet without samples."""
    parameters = scenario.parameters
    detects = "health_check" in scenario.drifts
    chain = build_chain(parameters, acceleration=acceleration, detects=detects)
    epidemic = epidemic_by_day(parameters, clock, enabled="epidemic" in scenario.drifts)
    laws = make_laws(parameters, chain, epidemic, clock, detects=detects)
    nodes = build_fleet(parameters, clock, gpus=gpus, seed=seed)
    lives = [live(node, parameters, clock, laws, seed=seed) for node in nodes]
    traits: list[Traits] = []
    records, jobs = [], []
    for node, life in zip(nodes, lives, strict=True):
        devices = life.installations[:, :2].tolist()
        constants = {
            (slot, installation): device_traits(parameters, node, seed, slot, installation)
            for slot, installation in devices
        }
        chronic = {device for device, (_, ways) in constants.items() if "sbe" in ways}
        written = write_records(node, life, parameters, chain, clock, seed, acceleration, chronic)
        errors = np.array(sorted(written.app_errors), np.int64)
        shifts = "workload" in scenario.drifts
        traits.append(constants)
        records.append(written)
        ended = outages(node, life, clock)
        jobs.append(schedule(node, parameters, clock, seed, outages=ended, errors=errors, shifts=shifts))
    low, high = parameters.drift.counter_factor
    dice = float(generator(seed, -1, Purpose.LAYOUT).random())
    inflation = low * (high / low) ** dice if "counters" in scenario.drifts else 1.0
    return Simulation(parameters, clock, seed, chain, laws, nodes, lives, records, jobs, traits, inflation)


def outages(node: SimulatedNode, life: Lives, clock: SimulatedTime) -> NDArray[np.int64]:
    """Return the times when a node accepts no jobs: start, end, and the outcome of a job that they end."""
    rows = [(begin, end, OUTCOMES.index("drained")) for begin, end in node.drains.tolist()]
    failed = OUTCOMES.index("node_fail")
    rows += [(begin, end, failed) for _, _, begin, end, state, _, _ in life.segments.tolist() if state == DOWN]
    for slot, installation, _, removed, _ in life.installations.tolist():
        following = life.installations[
            (life.installations[:, 0] == slot) & (life.installations[:, 1] == installation + 1)
        ]
        if removed < NEVER:
            returns = int(following[0, 2]) if len(following) else clock.end
            rows.append((removed, max(returns, removed + 1), OUTCOMES.index("drained")))
    return np.array(rows, np.int64).reshape(-1, 3)


def node_devices(simulation: Simulation, number: int) -> list[Device]:
    """Return the devices of one node as inputs of :func:`simulator.samples.sample_table`, if they have samples."""
    clock, parameters = simulation.clock, simulation.parameters
    node, life, records = simulation.nodes[number], simulation.lives[number], simulation.records[number]
    model = parameters.fleet.models[node.model]
    series = node_series(node, parameters, clock, simulation.seed, simulation.jobs[number])
    noise = parameters.noise
    electrical = np.array(
        [
            model.idle_w, model.tdp_w, model.clock_mhz, model.memory_mib, model.has_memory_sensor, model.has_nvlink,
            not node.mig, noise.sample_loss + (noise.flaky_loss if node.flaky else 0.0),
            parameters.workload.rise_c_at_tdp,
        ],
        np.float64,
    )  # fmt: skip
    segments = _with_lingering(life, records)
    counter_events = np.array(records.counter_events, np.int64).reshape(-1, 5)
    reloads = np.array(records.reloads, np.int64)
    inflated = node.upgrades[0] if node.upgrades and simulation.inflation != 1.0 else NEVER
    devices = []
    for slot, installation, installed, removed, _ in life.installations.tolist():
        first, last = sample_range(installed, removed, clock.start, clock.step, clock.steps)
        if first == last:
            continue
        is_device = (segments[:, 0] == slot) & (segments[:, 1] == installation)
        of_device = (counter_events[:, 0] == slot) & (counter_events[:, 1] == installation)
        devices.append(
            Device(
                name=gpu_name(simulation.seed, node.index, slot, installation),
                node=node.name,
                node_index=node.index,
                slot=slot,
                installation=installation,
                first=first,
                last=last,
                segments=np.ascontiguousarray(segments[is_device]),
                counter_events=np.ascontiguousarray(counter_events[of_device][:, 2:]),
                reloads=reloads[reloads >= max(installed, clock.start)],
                inflated_from=inflated,
                inflation=simulation.inflation,
                traits=simulation.traits[number][(slot, installation)][0],
                electrical=electrical,
                series=series,
            )
        )
    return devices


def _with_lingering(life: Lives, records: Records) -> NDArray[np.int64]:
    """Append a column to the segments: until when the (failed) GPU still reports."""
    until = {
        (int(row[0]), int(row[1]), int(row[2])): end for row, end in zip(life.failures, records.lingers, strict=True)
    }
    last = [
        until.get((slot, installation, begin), begin) if state == DOWN else end
        for slot, installation, begin, end, state, _, _ in life.segments.tolist()
    ]
    return np.column_stack([life.segments, np.array(last, np.int64)])
