from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from scipy.linalg import expm

from simulator.fleet import DAY, HOUR
from simulator.hazards import LOG_GRID
from simulator.risk import HiddenRows, generator_matrix, hidden_rows, recurrence_survival, true_risk
from simulator.run import Simulation
from tests.simulator.conftest import failure_rows, outcomes

Fleet = Callable[..., Simulation]


def risks(simulation: Simulation) -> tuple[HiddenRows, np.ndarray, np.ndarray]:
    """Hidden rows whose interval ends in time, their risks, and what came."""
    parameters, clock = simulation.parameters, simulation.clock
    rows = hidden_rows(simulation.nodes, simulation.lives, simulation.laws, clock, every=parameters.risk_every_h * HOUR)
    risk = true_risk(rows, simulation.laws, parameters, clock)
    table = failure_rows(simulation)
    failures = pd.DataFrame({"unit": table[:, 0] << 32 | table[:, 1] << 24 | table[:, 2], "start": table[:, 3]})
    unit = rows.node << 32 | rows.slot << 24 | rows.stay
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
def test_only_an_announced_fleet_lets_the_oracle_reach_its_precision(
    fleet: Fleet, scenario: str, gpus: int, low: float, high: float
) -> None:
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
