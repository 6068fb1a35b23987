import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from evaluation.backtest.threshold_choice import ScoredDecisions, for_budget, for_precisions

NONE = np.zeros(0, int)
NOTHING = ScoredDecisions(np.zeros(0), np.zeros(0, bool), NONE, NONE, NONE, NONE)


def for_precision(data, target, confidence):
    (decision,) = for_precisions(data, (target,), confidence)
    return decision


def evidence(rng, units=400, times=8, slope=2.0, shift=-4.0, risk_step=None):
    """Rows whose chance of a hit rises with the score; rows of one unit share most of theirs."""
    latent = rng.normal(size=units)
    score = (latent[:, None] + 0.3 * rng.normal(size=(units, times))).ravel()
    luck = np.repeat(rng.random(units), times)
    hit = luck < expit(slope * np.repeat(latent, times) * 2 + shift)
    risk = expit(score)
    if risk_step:
        risk = np.round(risk / risk_step) * risk_step
    unit = np.repeat(np.arange(units), times)
    incident = np.where(hit, unit, -1)
    return ScoredDecisions(risk, hit, unit, np.tile(np.arange(times), units) * 3_600_000, incident, incident)


@cache
def population(slope=2.0, shift=-4.0, draws=400_000):
    """Every threshold and the true precision above it."""
    rng = np.random.default_rng(99)
    latent = rng.normal(size=draws)
    risk = expit(latent + 0.3 * rng.normal(size=draws))
    order = np.argsort(-risk)
    return -risk[order], np.cumsum(expit(slope * latent * 2 + shift)[order]) / np.arange(1, draws + 1)


def truth(threshold):
    risk, precision = population()
    return precision[max(np.searchsorted(risk, -threshold, side="right") - 1, 0)]


@pytest.mark.parametrize("target", [0.3, 0.5, 0.8])
def test_a_promised_precision_is_broken_no_more_often_than_stated(target):
    rng = np.random.default_rng(1)
    promised = broken = 0
    for _ in range(120):
        decision = for_precision(evidence(rng), target, 0.9)
        if decision.promised:
            promised += 1
            broken += truth(decision.threshold) < target - 0.002
    assert promised > 24
    assert broken / 120 <= 0.1 + 3 * math.sqrt(0.1 * 0.9 / 120)


@pytest.mark.parametrize("right", [None, 12, 30, 60])
def test_a_refused_precision_names_the_highest_that_is_promised_when_asked(right):
    data = evidence(np.random.default_rng(0))
    if right:  # only the riskiest units fail
        data = replace(data, hit=np.argsort(np.argsort(-data.risk.reshape(400, 8).max(1)))[data.node] < right)
    decision = for_precision(data, 0.95, 0.9)
    assert not decision.promised
    assert decision.threshold is None
    assert decision.drains_per_decision == 0
    best = np.floor(1000 * decision.best) / 10
    assert decision.why.endswith(f"the highest precision that can be promised is {best:.1f}%")
    assert for_precision(data, best / 100, 0.9).promised
    assert for_precision(data, best / 100, 0.9).best == decision.best
    assert not for_precision(data, best / 100 + 0.001, 0.9).promised


def test_without_incidents_nothing_is_promised_and_the_reason_given():
    rng = np.random.default_rng(0)
    data = evidence(rng)
    none = np.full(len(data.hit), -1)
    data = ScoredDecisions(data.risk, np.zeros(len(data.hit), bool), data.node, data.time, none, none)
    decision = for_precision(data, 0.3, 0.9)
    assert not decision.promised
    assert decision.best is None
    assert decision.why == "no incident among 3200 earlier decisions: no precision can be promised"
    assert math.isnan(decision.recall)


def test_without_evidence_there_is_no_threshold_of_any_kind():
    assert not for_precision(NOTHING, 0.5, 0.9).promised
    decision = for_budget(NOTHING, 3, 0.9)
    assert not decision.promised
    assert decision.why == "there are no earlier decisions"


def test_too_few_nodes_name_how_many_are_needed():
    data = evidence(np.random.default_rng(0), units=3)
    data = ScoredDecisions(data.risk, np.ones(len(data.hit), bool), data.node, data.time, data.node, data.node)
    why = for_precision(data, 0.85, 0.9).why
    assert why == (
        "a promise of 85% needs 45 nodes, and the riskiest tenth of earlier decisions has 1 (44 missing); "
        "no precision can be promised"
    )


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), k=st.floats(0.3, 40), step=st.sampled_from([None, 0.05]))
def test_a_budget_is_never_exceeded_and_spent_where_no_ties_forbid(seed, k, step):
    data = evidence(np.random.default_rng(seed), units=60, risk_step=step)
    decision = for_budget(data, k, 0.9)
    if decision.threshold is None:
        assert decision.why == "more rows share the highest risk than the budget allows"
        return
    alerts = int((data.risk >= decision.threshold).sum())
    assert alerts == decision.bound.alerts
    assert alerts <= k * data.times
    if step is None:
        assert alerts > k * data.times - 1
    assert decision.recall == data.recall(data.risk >= decision.threshold)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), step=st.sampled_from([None, 0.05]))
def test_the_threshold_alerts_exactly_what_was_bounded(seed, step):
    data = evidence(np.random.default_rng(seed), risk_step=step)
    decision = for_precision(data, 0.4, 0.9)
    if decision.promised:
        chosen = data.risk >= decision.threshold
        assert (int(chosen.sum()), int(data.hit[chosen].sum())) == (decision.bound.alerts, decision.bound.hits)
        assert decision.drains_per_decision == pytest.approx(chosen.sum() / 8)
        assert decision.best >= 0.4


def test_evidence_refuses_risks_that_are_no_numbers():
    with pytest.raises(ValueError, match="not a number"):
        ScoredDecisions(np.array([np.nan]), np.zeros(1, bool), *[np.zeros(1, int)] * 4)
