"""What each rung costs and saves, and the risk from which it pays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.budget import BudgetConfig, DisruptionBudget
from policy.fleet import JobView
from policy.ladder.cost_benefit import CostBenefitConfig, JobHours, hours_of
from policy.ladder.probes import ProbeConfig
from policy.ladder.rungs import RUNGS, prices
from policy.node_tier.hard_rules import HardRule, HardRulesConfig
from tests.policy.decide_world import HOUR, T0, config, healthy, node, once, verbs

COSTS = CostBenefitConfig()
HOURS = st.floats(0, 500)
JOBS = st.builds(JobHours, HOURS, HOURS, HOURS, HOURS, HOURS, st.floats(0, 1))


@given(JOBS, st.floats(0, 1), st.floats(0.001, 0.999))
def test_a_rung_pays_on_average_exactly_above_its_break_even(jobs, found, risk):
    priced = prices(8, jobs, COSTS, ProbeConfig(found={"other": found}))
    assert list(priced) == list(RUNGS)
    for price in priced.values():
        expected, even = risk * price.saved - (1 - risk) * price.unneeded, price.break_even
        if even is None:
            assert expected <= 1e-9
        elif abs(risk - even) > 1e-6 and even > 0:
            assert (expected > 0) == (risk > even)


def test_what_costs_nothing_pays_at_any_risk():
    priced = prices(8, JobHours(5, 10), COSTS, ProbeConfig())
    assert (priced["publish"].break_even, priced["avoid"].break_even) == (0, 0)


@pytest.mark.parametrize(("unsaved", "even"), [(4.0, 0.25), (10.0, 0.1), (1.0, None), (0.5, None)])
def test_a_checkpoint_pays_when_the_work_since_the_last_one_exceeds_its_cost_over_the_risk(unsaved, even):
    assert prices(8, JobHours(checkpoint=1.0, unsaved=unsaved), COSTS, ProbeConfig())["checkpoint"].break_even == even


def test_a_diagnostic_that_finds_less_makes_a_drain_pay_later():
    evens = [
        prices(8, JobHours(3, 10), COSTS, ProbeConfig(found={"other": share}))["drain"].break_even
        for share in (1.0, 0.5, 0.05)
    ]
    assert evens[0] < evens[1]
    assert evens[2] is None


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(0.1, 40)), min_size=1, max_size=4), st.floats(0, 30))
def test_the_longer_gpus_idle_until_the_last_job_ends_the_later_a_swap_pays(jobs, longer):
    evens = []
    for extended in (0, longer):
        rest = [hours + extended * (hours == max(jobs, key=lambda job: job[1])[1]) for _, hours in jobs]
        views = [JobView("j", gpus, ends_at=T0 + HOUR * hours) for (gpus, _), hours in zip(jobs, rest, strict=True)]
        even = prices(8, hours_of(8, views, 24 * HOUR, COSTS, T0), COSTS, ProbeConfig())["swap"].break_even
        evens.append(2.0 if even is None else even)
    assert evens[0] <= evens[1] + 1e-9


@pytest.mark.parametrize(
    ("job", "rung"),
    [({"ends_at": T0 + HOUR}, "swap"), ({"ends_at": T0 + 20 * HOUR}, "avoid"), ({}, "avoid"),
     ({"started_at": T0 - HOUR}, "swap"), ({"started_at": T0 - 20 * HOUR}, "avoid"),
     ({"started_at": T0 - HOUR, "ends_at": T0 + 20 * HOUR}, "avoid")],
    ids=["ends soon", "ends late", "nothing known", "began just now", "began long ago", "a known end counts"],
)  # fmt: skip
def test_a_node_whose_gpus_would_idle_too_long_is_avoided_instead_of_swapped(job, rung):
    sick = node("sick", 0.9, 0.01, jobs=(JobView("j", 1, **job),))
    assert verbs(once([sick, *healthy(12)], config(rungs=RUNGS[:-1])), "sick")[0] == rung


JOB = (JobView("j", 8, T0, T0, can_checkpoint=True),)


@pytest.mark.parametrize(
    ("rungs", "jobs", "last"),
    [(RUNGS, JOB, "drain"), (RUNGS[:-1], JOB, "swap"), (RUNGS[:-1], (), "drain"), (RUNGS[:2], (), "avoid"),
     (("publish",), JOB, "publish"), (("publish", "drain"), JOB, "drain")],
)  # fmt: skip
def test_a_prediction_leads_to_no_rung_that_the_settings_leave_out(rungs, jobs, last):
    policy = config(rungs=rungs, cost_benefit=CostBenefitConfig(always=True, may_wait=False))
    plan = once([node("sick", 0.9, jobs=jobs), *healthy(12)], policy)
    done = [action.verb for action in plan.actions if action.node == "sick" and action.verb != "publish"]
    assert (done or ["publish"])[-1] == last


@pytest.mark.parametrize(("tier", "verb"), [("high", "drain"), ("elevated", "avoid")])
def test_a_reported_fault_is_acted_on_whatever_the_rungs(tier, verb):
    rules = HardRulesConfig((HardRule("xid 63", tier, HOUR, "a row remap is pending"),))
    policy = config(rungs=("publish",), rules=rules)
    plan = once([node("sick", 0.01, facts=["xid 63"], jobs=JOB), *healthy(12)], policy)
    assert verb in verbs(plan, "sick")


def test_a_drain_beyond_the_budget_sets_no_soft_taint_where_avoid_is_not_among_the_rungs():
    policy = config(
        rungs=("publish", "drain"), budget=BudgetConfig((DisruptionBudget("fleet", max_unavailable=1),), ())
    )
    fleet = [node("a", 0.9), node("b", 0.95), *healthy(12)]
    plan = once(fleet, policy)
    assert len(plan.over_budget) == 1
    assert not [action for action in plan.actions if action.verb == "avoid"]
