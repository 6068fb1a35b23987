from collections.abc import Callable

import numpy as np
import pytest

from simulator.fleet import DAY
from simulator.hazards import FailureCause, multiplier_index
from simulator.run import Simulation, node_devices
from simulator.scenarios.named import SCENARIOS
from tests.simulator.conftest import failure_rows

Fleet = Callable[..., Simulation]


@pytest.mark.parametrize("scenario", sorted(set(SCENARIOS) - {"drift"}))
def test_only_drift_inflates_a_counter(fleet: Fleet, scenario: str) -> None:
    assert fleet("drift", 64, 20).inflation > 9.9
    simulation = fleet(scenario, 64, 20)
    assert simulation.inflation == 1.0
    assert all(device.inflation == 1.0 for device in node_devices(simulation, 0))


def test_only_drift_finds_the_faults_nobody_looked_for(fleet: Fleet) -> None:
    simulation = fleet("drift", 2000, 100, acceleration=5.0)
    rows = failure_rows(simulation)
    faults = rows[rows[:, 5] == FailureCause.HEALTH_CHECK]
    assert len(faults) > 30
    assert faults[:, 3].min() >= simulation.laws.check_day
    assert (simulation.laws.check_day - simulation.clock.start) % DAY == 0
    late = rows[rows[:, 3] >= simulation.laws.check_day]
    bus = late[(late[:, 4] == 0)]
    assert len(faults) / len(bus) == pytest.approx(1.0, abs=0.5)  # the apparent rate of the class doubles
    base = failure_rows(fleet("base", 3000, 60, acceleration=5.0))
    assert FailureCause.HEALTH_CHECK not in set(base[:, 5])


def test_an_epidemic_grows_where_it_is_on(fleet: Fleet) -> None:
    ages = fleet("base", 16, 10, acceleration=5.0).laws.ages
    for name in SCENARIOS:
        laws = fleet(name, 64, 120).laws
        if "epidemic" in SCENARIOS[name].drifts:
            assert laws.epidemic[0] == 1.0
            assert laws.epidemic[-3] > 20.0
            assert (np.diff(laws.epidemic) >= 0).all()
        else:
            assert set(laws.epidemic) == {-1.0}
    sound = multiplier_index(400 * DAY, 0, False, 1.0, 22.0, ages)
    ill = multiplier_index(400 * DAY, 0, True, 1.0, 22.0, ages)
    assert sound == 0
    assert ill == pytest.approx(np.log(22.0) / 0.02, abs=1)
