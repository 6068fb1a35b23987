import numpy as np
import pytest

from evaluation.backtest.threshold_choice import ScoredDecisions, for_costs
from models.config import CostsSection

HOUR = 3_600_000


def costs(unneeded_drain, missed_failure, **more):
    return CostsSection(unneeded_drain=unneeded_drain, missed_failure=missed_failure, **more)


def evidence(rows):
    risk, hit, unit, hours, incident = map(np.array, zip(*rows, strict=True))
    return ScoredDecisions(risk.astype(float), hit.astype(bool), unit, hours * HOUR, incident, incident, 24 * HOUR)


ROWS = [
    (0.9, 1, 0, 0, 7), (0.8, 1, 0, 6, 7), (0.6, 0, 1, 0, -1), (0.7, 0, 1, 6, -1), (0.6, 0, 1, 30, -1),
    (0.05, 1, 2, 6, 8), (0.01, 0, 3, 0, -1), (0.01, 0, 3, 30, -1),
]  # fmt: skip


def test_a_failure_is_saved_once_and_a_false_drain_counts_each_time_it_begins():
    decision = for_costs(evidence(ROWS), costs(1.0, 2.0, lost_job=1.0), 0.9)
    assert decision.threshold == pytest.approx(0.25)
    # One failure saved at 3, and unit 1 drained twice, at hours 0 and 30, in three decision times.
    assert decision.saving == pytest.approx((3 - 2) / 3)
    assert decision.recall == pytest.approx(0.5)
    assert decision.saving_lower < decision.saving
    assert decision.why.startswith("1 failures saved and 2 unneeded drains in 3 decision times")


def test_a_clear_saving_is_promised_and_a_doubtful_one_is_not():
    rng = np.random.default_rng(0)
    risk = np.where(rng.random(4000) < 0.05, 0.6, 0.001)
    hit = rng.random(4000) < risk
    unit = np.arange(4000)
    good = ScoredDecisions(risk, hit, unit, np.zeros(4000, int), *[np.where(hit, unit, -1)] * 2)
    assert for_costs(good, costs(1, 3), 0.9).promised
    lying = ScoredDecisions(risk, rng.random(4000) < 0.01, unit, np.zeros(4000, int), *[np.where(hit, unit, -1)] * 2)
    assert not for_costs(lying, costs(1, 3), 0.9).promised


def test_the_break_even_threshold_is_the_cheapest_where_risks_are_calibrated():
    rng = np.random.default_rng(1)
    risk = rng.beta(0.3, 3, 60_000)
    hit = rng.random(60_000) < risk
    given = costs(1.0, 4.0, needed_drain=0.5)

    def saving(threshold):
        chosen = risk >= threshold
        return given.saved * hit[chosen].sum() - given.unneeded_drain * (~hit[chosen]).sum()

    best = max(np.linspace(0.02, 0.9, 45), key=saving)
    assert abs(best - given.break_even) < 0.08
    unit = np.arange(60_000)
    decision = for_costs(ScoredDecisions(risk, hit, unit, np.zeros(60_000, int), unit, unit), given, 0.9)
    assert decision.saving == pytest.approx(saving(given.break_even))


def test_no_risk_high_enough_saves_nothing_and_says_so():
    decision = for_costs(evidence(ROWS), costs(99.0, 1.0), 0.9)
    assert not decision.promised
    assert decision.saving == 0
    assert decision.why == "no earlier decision had a risk of 99.0%, above the break-even of a drain"
    nothing = ScoredDecisions(np.zeros(0), np.zeros(0, bool), *[np.zeros(0, int)] * 4)
    assert for_costs(nothing, costs(1, 1), 0.9).why == "there are no earlier decisions"
