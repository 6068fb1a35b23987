from collections.abc import Callable

import numpy as np
import pytest

from simulator.fleet import DAY, NEVER
from simulator.hazards import PRECURSOR, Cause, Phase, mean_multiplier
from simulator.lives import DOWN
from simulator.run import Simulation
from simulator.scenarios import SCENARIOS

Fleet = Callable[..., Simulation]
Tools = dict[str, Callable[..., object]]


@pytest.fixture(scope="module")
def large(fleet: Fleet) -> Simulation:
    return fleet("base", 8000, 348)


def test_segments_tile_each_stay(fleet: Fleet) -> None:
    simulation = fleet("drift", 160, 60, acceleration=20.0)
    clock = simulation.clock
    for life in simulation.lives:
        for slot, stay, installed, removed, _ in life.stays.tolist():
            own = life.segments[(life.segments[:, 0] == slot) & (life.segments[:, 1] == stay)]
            assert own[0, 2] == max(installed, clock.origin)
            assert own[-1, 3] == min(removed, clock.end)
            assert (own[1:, 2] == own[:-1, 3]).all()
            assert (own[:, 3] >= own[:, 2]).all()


def test_failures_come_at_the_calibrated_rate(large: Simulation, tools: Tools) -> None:
    # Llama-3: 0.111 GPU failures a GPU-year; the bounds of the studies are 0.05 to 0.30.
    rate = len(tools["failure_rows"](large)) / tools["gpu_years"](large)
    assert 0.10 < rate < 0.16


def test_half_of_the_failures_have_no_precursor(large: Simulation, tools: Tools) -> None:
    rows = tools["failure_rows"](large)
    share = {name: np.mean([PRECURSOR[cause] == name for cause in rows[:, 5]]) for name in set(PRECURSOR)}
    assert share["none"] + share["structural"] == pytest.approx(0.5, abs=0.07)
    assert share["weak"] == pytest.approx(0.3, abs=0.06)
    assert share["strong"] == pytest.approx(0.2, abs=0.06)


def test_most_degradations_heal_and_none_always_fails(large: Simulation) -> None:
    ended: dict[str, list[int]] = {}
    phase = large.chain.phase
    for life in large.lives:
        table = life.segments
        following = table[1:]
        for now, then in zip(table[:-1], following, strict=True):
            if now[4] > 0 and (now[:2] == then[:2]).all() and then[4] != now[4] + 1:
                name = Phase(int(phase[now[4]])).name
                ended.setdefault(name, []).append(int(then[4] == DOWN))
    assert np.mean(ended["WEAK"]) == pytest.approx(0.15, abs=0.04)
    assert np.mean(ended["ADVANCED"]) == pytest.approx(0.7, abs=0.08)
    assert np.mean(ended["UNDETECTED"]) < 0.02
    strong = np.array(ended["MILD"] + ended["ADVANCED"])
    assert strong.sum() / len(strong) < 0.5
    everything = np.concatenate([np.array(each) for each in ended.values()])
    assert everything.mean() < 0.3


def test_a_fault_makes_another_within_a_month_likely(large: Simulation, tools: Tools) -> None:
    rows = tools["failure_rows"](large)
    again, asked = 0, 0
    for node in np.unique(rows[:, 0]):
        times = np.sort(rows[rows[:, 0] == node][:, 3])
        usable = times < large.clock.end - 30 * DAY
        following = np.append(times[1:], NEVER)
        asked += int(usable.sum())
        again += int((following - times <= 30 * DAY)[usable].sum())
    assert 0.25 < again / asked < 0.5  # StepFun: 0.42 with a base of 0.12; here 0.06


def test_acceleration_multiplies_incidents_and_keeps_the_leads(fleet: Fleet, tools: Tools) -> None:
    slow, fast = fleet("noprecursor", 4000, 120), fleet("noprecursor", 4000, 120, acceleration=4.0)
    rates = [len(tools["failure_rows"](each)) / tools["gpu_years"](each) for each in (slow, fast)]
    assert rates[1] / rates[0] == pytest.approx(4.0, rel=0.3)
    assert np.array_equal(slow.chain.heal, fast.chain.heal)
    assert np.array_equal(slow.chain.fail, fast.chain.fail)
    assert np.allclose(4.0 * slow.chain.onset, fast.chain.onset)


def test_without_precursors_failures_have_no_memory(fleet: Fleet, tools: Tools) -> None:
    simulation = fleet("noprecursor", 4000, 120, acceleration=4.0)
    rows = tools["failure_rows"](simulation)
    assert set(rows[:, 5]) == {Cause.DIRECT}
    count = np.bincount(rows[:, 0], minlength=len(simulation.nodes))
    assert count.var() / count.mean() == pytest.approx(1.0, abs=0.25)
    assert mean_multiplier(SCENARIOS["noprecursor"].parameters.heterogeneity) == 1.0
    degraded = sum(int((life.segments[:, 4] > 0).sum()) for life in simulation.lives)
    assert degraded > 100  # they still look ill now and then
