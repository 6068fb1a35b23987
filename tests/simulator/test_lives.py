from collections.abc import Callable

import numpy as np
import pytest

from simulator.hazards import PRECURSOR, FailureCause, mean_multiplier
from simulator.run import Simulation
from simulator.scenarios.named import SCENARIOS
from tests.simulator.conftest import failure_rows, gpu_years

Fleet = Callable[..., Simulation]


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


def test_failures_come_at_the_calibrated_rate(large: Simulation) -> None:
    # Llama-3: 0.111 GPU failures a GPU-year; the bounds of the studies are 0.05 to 0.30.
    rate = len(failure_rows(large)) / gpu_years(large)
    assert 0.10 < rate < 0.16


def test_half_of_the_failures_have_no_precursor(large: Simulation) -> None:
    rows = failure_rows(large)
    share = {name: np.mean([PRECURSOR[cause] == name for cause in rows[:, 5]]) for name in set(PRECURSOR)}
    assert share["none"] + share["structural"] == pytest.approx(0.5, abs=0.07)
    assert share["weak"] == pytest.approx(0.3, abs=0.06)
    assert share["strong"] == pytest.approx(0.2, abs=0.06)


def test_acceleration_multiplies_incidents_and_keeps_the_leads(fleet: Fleet) -> None:
    slow, fast = fleet("noprecursor", 4000, 120), fleet("noprecursor", 4000, 120, acceleration=4.0)
    rates = [len(failure_rows(lives)) / gpu_years(lives) for lives in (slow, fast)]
    assert rates[1] / rates[0] == pytest.approx(4.0, rel=0.3)
    assert np.array_equal(slow.chain.heal, fast.chain.heal)
    assert np.array_equal(slow.chain.fail, fast.chain.fail)
    assert np.allclose(4.0 * slow.chain.onset, fast.chain.onset)


def test_without_precursors_failures_have_no_memory(fleet: Fleet) -> None:
    simulation = fleet("noprecursor", 4000, 120, acceleration=4.0)
    rows = failure_rows(simulation)
    assert set(rows[:, 5]) == {FailureCause.DIRECT}
    count = np.bincount(rows[:, 0], minlength=len(simulation.nodes))
    assert count.var() / count.mean() == pytest.approx(1.0, abs=0.25)
    assert mean_multiplier(SCENARIOS["noprecursor"].parameters.heterogeneity) == 1.0
    degraded = sum(int((life.segments[:, 4] > 0).sum()) for life in simulation.lives)
    assert degraded > 100  # they still look ill now and then
