"""`thresholds_from: costs`: a node is high where a drain of it, with the jobs on it, is worth its cost."""

from dataclasses import replace
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from policy.fleet import JobView, Level
from policy.ladder.cost_benefit import CostBenefitConfig, evaluate_drain, hours_of
from policy.ladder.rungs import RUNGS, prices
from policy.node_tier.hysteresis import NodeRiskConfig
from policy.tiers import TierThresholds
from tests.policy.decide_world import HOUR, T0, config, healthy, node, once, verbs, why


def by_costs(**others):
    made = config("g", free=True, node_risk=NodeRiskConfig("worst"), **others)
    return replace(made, thresholds=TierThresholds(watch=0.015, elevated=0.02), thresholds_from="costs")


def job(gpus, saved_ago=None, **others):
    return JobView("j", gpus, T0 - 20 * HOUR, None if saved_ago is None else T0 - saved_ago * HOUR, **others)


def test_the_same_risk_is_high_under_a_job_that_can_write_a_checkpoint_and_not_under_one_that_loses_a_days_work():
    asked = once([node("n", 0.7, jobs=(job(512, 1, can_checkpoint=True),)), *healthy(12)], by_costs())
    assert verbs(asked, "n") == ["swap", "drain", "publish"]
    lone = CostBenefitConfig(checkpoint_every=timedelta(hours=48))
    lost = once([node("n", 0.7, jobs=(job(512, 19),)), *healthy(12)], by_costs(cost_benefit=lone))
    assert lost.nodes["n"].tier == "elevated"
    assert "from clear to elevated: a risk of 70 %" in why(lost, "n")


@given(st.floats(0.02, 1), st.integers(1, 4096), st.floats(0, 40), st.booleans())
def test_a_node_is_high_exactly_where_its_drain_saves_at_least_what_it_costs(risk, gpus, age, can):
    settings = by_costs(cost_benefit=CostBenefitConfig(may_wait=False))
    mine = node("n", risk, jobs=(job(gpus, age, can_checkpoint=can),))
    plan = once([mine, *healthy(12)], settings)
    worth = evaluate_drain(1, mine.jobs, risk, settings.horizon, settings.cost_benefit, T0, settings.probes.mean_found)
    decision = plan.nodes["n"]
    assert decision.worth == worth if decision.tier in ("elevated", "high") else True
    enough = worth.break_even is not None and risk >= max(0.02, worth.break_even)
    assert (decision.tier == "high") == enough
    if enough and worth.saved - worth.lost > 1e-9:
        assert decision.target is Level.DRAIN


def test_without_drain_among_the_rungs_high_is_the_break_even_of_a_swap():
    rungs, job_ends = RUNGS[:-1], job(1, ends_at=T0 + 2 * HOUR)
    settings = by_costs(rungs=rungs)
    hours = hours_of(1, [job_ends], settings.horizon, settings.cost_benefit, T0)
    even = prices(1, hours, settings.cost_benefit, settings.probes)["swap"].break_even
    tiers = [
        once([node("n", risk, jobs=(job_ends,)), *healthy(12)], settings).nodes["n"].tier
        for risk in (even - 0.01, even + 0.01)
    ]
    assert tiers == ["elevated", "high"]


def test_where_no_drain_is_ever_worth_it_no_node_is_high_but_by_a_rule():
    settings = by_costs(cost_benefit=CostBenefitConfig(planned_repair=timedelta(days=9)))
    assert once([node("n", 1.0), *healthy(12)], settings).nodes["n"].tier == "elevated"
    assert once([node("n", 1.0, facts=["xid 79"]), *healthy(12)], settings).nodes["n"].tier == "high"
