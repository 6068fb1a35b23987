"""Risks, lives and drifts of simulated GPUs."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from scipy.linalg import expm

from simulator.fleet import DAY, HOUR
from simulator.hazards import LOG_GRID, PRECURSOR, FailureCause, mean_multiplier, multiplier_index
from simulator.risk import HiddenRows, generator_matrix, hidden_rows, recurrence_survival, true_risk
from simulator.run import Simulation, node_devices
from simulator.scenarios import SCENARIOS
from tests.simulator.conftest import failure_rows, gpu_years, outcomes

Fleet = Callable[..., Simulation]


def risks(simulation: Simulation) -> tuple[HiddenRows, np.ndarray, np.ndarray]:
    """Hidden rows whose interval ends in time, their risks, and what came."""
    parameters, clock = simulation.parameters, simulation.clock
    rows = hidden_rows(
        simulation.nodes, simulation.lives, simulation.laws, clock, interval=parameters.risk_every_h * HOUR
    )
    risk = true_risk(rows, simulation.laws, parameters, clock)
    table = failure_rows(simulation)
    failures = pd.DataFrame({"unit": table[:, 0] << 32 | table[:, 1] << 24 | table[:, 2], "start": table[:, 3]})
    unit = rows.node << 32 | rows.slot << 24 | rows.installation
    came = outcomes(rows.time, unit, failures, parameters.gap_s * 1000, parameters.horizon_s * 1000)
    usable = rows.time + (parameters.gap_s + parameters.horizon_s) * 1000 <= clock.end
    kept = HiddenRows(*(getattr(rows, name)[usable] for name in HiddenRows.__slots__))
    return kept, risk[usable], came[usable]


def full_generator(simulation: Simulation, model: int, regime: int, multiplier: int) -> np.ndarray:
    """The sub-generator over (lemon, state) without lumping, written down state by state."""
    chain, mixed = simulation.laws.chain, simulation.parameters.heterogeneity
    n = chain.states
    matrix = np.zeros((2 * n, 2 * n))
    off = 1 / (mixed.lemon_mean_days * 24)
    on = off * mixed.lemon_share / (1 - mixed.lemon_share)
    for lemon in (0, 1):
        factor = np.exp(LOG_GRID * multiplier) * (simulation.laws.lemon_factor if lemon else 1.0)
        for state in range(n):
            row = lemon * n + state
            if state == 0:
                for target in range(1, n):
                    matrix[row, lemon * n + target] += factor * chain.onset[model, target]
            else:
                matrix[row, lemon * n] += chain.heal[state]
                if chain.advance[state]:
                    matrix[row, row + 1] += chain.advance[state]
            matrix[row, (1 - lemon) * n + state] += off if lemon else on
            dies = factor * chain.direct[model].sum() + chain.fail[regime, state]
            matrix[row, row] = -matrix[row].sum() - dies
    return matrix


@pytest.mark.parametrize("scenario", ["base", "drift", "announced"])
def test_the_lumped_chain_has_the_law_of_the_full_one(fleet: Fleet, scenario: str) -> None:
    simulation = fleet(scenario, 16, 10, acceleration=5.0)
    chain = simulation.laws.chain
    lump = chain.lumps()
    n = int(lump.max()) + 1
    assert n < chain.states
    for model, regime, multiplier in ((0, 0, 0), (1, 1, 90)):
        short = generator_matrix(
            simulation.laws, simulation.parameters, model=model, regime=regime, multiplier=multiplier
        )
        long = full_generator(simulation, model, regime, multiplier)
        alive_short = expm(short * 24.0).sum(axis=1)
        alive_long = expm(long * 24.0).sum(axis=1)
        for lemon in (0, 1):
            for state in range(chain.states):
                assert alive_short[lemon * n + lump[state]] == pytest.approx(
                    alive_long[lemon * chain.states + state], abs=1e-12
                )


def test_true_risks_are_calibrated(fleet: Fleet) -> None:
    _, risk, came = risks(fleet("base", 3000, 60, acceleration=5.0))
    for low, high in ((0.0, 1.0), (0.0, 1e-3), (1e-3, 1e-2), (1e-2, 0.05), (0.05, 0.3), (0.3, 1.0)):
        chosen = (risk >= low) & (risk < high)
        expected = risk[chosen].sum()
        # Four rows of one failure go together, so the error is twice that of independent rows.
        assert abs(came[chosen].sum() - expected) < 4 * 2 * np.sqrt(expected) + 1, (low, high)


def test_drifting_risks_are_calibrated_before_and_after(fleet: Fleet) -> None:
    simulation = fleet("drift", 3000, 40, acceleration=5.0)
    rows, risk, came = risks(simulation)
    after = rows.time >= simulation.laws.check_day
    for chosen in (after, ~after):
        assert abs(came[chosen].sum() - risk[chosen].sum()) < 8 * np.sqrt(risk[chosen].sum())
    assert risk[after].mean() > 1.2 * risk[~after].mean()


@pytest.mark.parametrize(("scenario", "gpus", "low", "high"), [("announced", 1024, 0.9, 1.0), ("base", 3000, 0.0, 0.5)])
def test_only_an_announced_fleet_lets_the_oracle_reach_its_precision(fleet, scenario, gpus, low, high):
    _, risk, came = risks(fleet(scenario, gpus, 60, acceleration=5.0))
    hits = np.cumsum(came[np.argsort(-risk, kind="stable")])
    needed = int(np.searchsorted(hits, 0.3 * came.sum())) + 1
    assert low <= hits[needed - 1] / needed <= high


def test_without_precursors_all_gpus_of_a_model_have_one_risk(fleet: Fleet) -> None:
    rows, risk, _ = risks(fleet("noprecursor", 400, 20, acceleration=4.0))
    for model in np.unique(rows.model):
        own = risk[rows.model == model]
        assert own.max() - own.min() < 1e-12


def test_recurrence_survival_ends_at_the_share_that_is_cured(fleet: Fleet) -> None:
    simulation = fleet("base", 16, 10, acceleration=5.0)
    hazards = simulation.parameters.hazards
    ages = np.array([0.0, hazards.recurrence_median_h * HOUR, 1e6 * 365 * DAY])
    survival = recurrence_survival(ages, simulation.laws.recurrence)
    assert survival[0] == 1.0
    assert survival[1] == pytest.approx(1 - hazards.recurs / 2)
    assert survival[2] == pytest.approx(1 - hazards.recurs, abs=1e-3)


@pytest.fixture(scope="module")
def large(fleet: Fleet) -> Simulation:
    return fleet("base", 8000, 348)


def test_segments_tile_each_stay(fleet: Fleet) -> None:
    simulation = fleet("drift", 160, 60, acceleration=20.0)
    clock = simulation.clock
    for life in simulation.lives:
        for slot, installation, installed, removed, _ in life.installations.tolist():
            own = life.segments[(life.segments[:, 0] == slot) & (life.segments[:, 1] == installation)]
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
