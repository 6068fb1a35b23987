import json
from dataclasses import replace
from datetime import timedelta

import pytest

from policy.budget import BudgetConfig, DisruptionBudget
from policy.decide import decide
from policy.fleet import JobView, Level, Marks
from policy.plan import PolicyState
from policy.stages import StagesConfig
from scheduler.ports.stored_state import state_from_json, state_json
from tests.policy.decide_world import HOUR, STEP, T0, carry_out, config, healthy, node, once, signals, verbs, why

DAY = timedelta(days=1)


@pytest.mark.parametrize(
    ("risk", "tier", "wanted"),
    [
        (0.05, "clear", []),
        (0.1, "watch", ["publish"]),
        (0.3, "elevated", ["avoid", "publish"]),
        (0.6, "high", ["swap", "drain", "publish"]),
        (0.999, "high", ["swap", "drain", "publish"]),
        (1.0, "high", ["swap", "drain", "publish"]),
    ],
)
def test_each_tier_reaches_its_action_the_worst_score_most_of_all(risk, tier, wanted):
    # In Ceph the worst prediction became a zero, the zero meant "no prediction", and the disk was never taken out.
    plan = once([node("n", risk), *healthy(12)], config())
    assert verbs(plan, "n") == wanted
    if wanted:
        assert plan.nodes["n"].tier == tier


@pytest.mark.parametrize(("stage", "most"), [("shadow", Level.NONE), ("soft", Level.AVOID), ("hard", Level.DRAIN)])
def test_a_stage_caps_what_is_done_and_the_decision_is_recorded_all_the_same(stage, most):
    plan = once([node("n", 0.9), *healthy(12)], config(stage=stage))
    assert max((action.to for action in plan.actions), default=Level.NONE) == most
    assert plan.nodes["n"].wanted is Level.DRAIN
    assert plan.nodes["n"].target is most
    assert plan.alerts[0].tier == "high"
    assert plan.alerts[0].unit == "n-0"


def test_actions_say_why_until_when_and_what_a_drain_is_worth():
    busy = node("n", 0.9, 0.01, jobs=(JobView("j", 8, started_at=T0 - HOUR),))
    plan = once([busy, *healthy(12)], config())
    drain = plan.actions[1]
    assert (drain.verb, drain.tier, drain.to) == ("drain", "high", Level.DRAIN)
    assert drain.expires_at == T0 + 2 * STEP
    assert drain.risk == pytest.approx(0.901)
    assert drain.worth.saved > drain.worth.lost
    reasons = "; ".join(drain.reasons)
    assert "from clear to high: a risk of 90.1% at 2026-03-01 00:00 UTC" in reasons
    assert "a node risk of 90.1%, mostly of n-0 90.0%" in reasons
    assert "n-0: its errors rise" in reasons
    assert "a drain now saves " in reasons


def test_releases_come_first_and_then_the_riskiest():
    old = node("old", 0.01, marks=Marks(soft=True))
    fleet = [node("b", 0.7), node("a", 0.9), node("z", 0.01, facts=["xid 79"]), old, *healthy(40)]
    plan = once(fleet, config(free=True))
    assert [(action.verb, action.node) for action in plan.actions] == [
        ("release", "old"), ("swap", "z"), ("swap", "a"), ("swap", "b"), ("drain", "z"), ("drain", "a"),
        ("drain", "b"), ("publish", "z"), ("publish", "a"), ("publish", "b"),
    ]  # fmt: skip


def test_over_budget_means_softly_tainted_and_listed():
    settings = config(budget=BudgetConfig((DisruptionBudget("cluster", max_unavailable=1),), ()))
    plan = once([node("a", 0.7), node("b", 0.9), *healthy(30)], settings)
    assert verbs(plan, "b") == ["swap", "drain", "publish"]
    assert verbs(plan, "a") == ["avoid", "publish"]
    assert plan.over_budget == {"a": "cluster c: 1 of 32 nodes are out of service, 1 may be"}
    assert "over budget, soft taint only: cluster c" in why(plan, "a")
    assert plan.uses[0].lost == 1


def test_a_budget_goes_to_the_drain_that_saves_most_and_before_all_to_a_fault_that_is_there():
    settings = config(budget=BudgetConfig((DisruptionBudget("cluster", max_unavailable=1),), ()))
    dear = node("b", 0.9, jobs=(JobView("big", 512, started_at=T0 - 10 * HOUR),))  # a move costs hours of work
    assert set(once([node("a", 0.7), dear, *healthy(30)], settings).over_budget) == {"b"}
    faulty = node("z", 0.01, facts=["xid 79"], jobs=dear.jobs)
    assert set(once([node("a", 0.7), faulty, *healthy(30)], settings).over_budget) == {"a"}


def test_a_job_that_ends_soon_is_waited_for_behind_the_taint_and_the_drain_follows():
    ends = T0 + HOUR / 2
    busy = node("n", 0.7, jobs=(JobView("j", 512, started_at=T0 - 2 * HOUR, ends_at=ends),))
    fleet = [busy, *healthy(12)]
    plan = once(fleet, config())
    assert verbs(plan, "n") == ["swap", "publish"]
    assert "drain postponed" in why(plan, "n")
    fleet = carry_out(fleet, plan.actions, T0)
    fleet[0] = replace(fleet[0], jobs=())
    assert verbs(once(fleet, config(), ends, plan.state), "n") == ["drain"]


def test_a_node_over_budget_whose_risk_went_down_is_not_taken_when_there_is_room():
    # Executor on what was true when it was queued is what draino#50 did.
    full = config(budget=BudgetConfig((DisruptionBudget("cluster", max_unavailable=0),), ()))
    fleet = [node("n", 0.7), *healthy(12)]
    plan = once(fleet, full)
    fleet = carry_out(fleet, plan.actions, T0)
    now = T0 + STEP
    lower = [replace(node("n", 0.4, at=now), marks=fleet[0].marks), *healthy(12, now)]
    later = once(lower, config(), now, plan.state)
    assert later.nodes["n"].tier == "high"
    assert not {"swap", "drain"} & set(verbs(later, "n"))
    assert "risk is below the threshold of tier high" in why(later, "n")


def test_a_demoted_group_gives_its_hard_marks_back():
    fleet = [node("n", 0.9), *healthy(12)]
    plan = once(fleet, config())
    fleet = carry_out(fleet, plan.actions, T0)
    soft = once(fleet, config(stage="soft"), T0, plan.state)
    assert verbs(soft, "n") == ["release", "avoid"]
    assert soft.actions[0].to is Level.PUBLISH, "no soft taint stands that could stay"
    shadow = once(fleet, config(stage="shadow"), T0, plan.state)
    assert verbs(shadow, "n") == ["release"]
    assert shadow.actions[0].to is Level.NONE


def test_the_hold_out_stays_softly_tainted_but_a_fault_that_is_there_does_not():
    settings = config(stages=StagesConfig(pinned={"c/g": "hard"}, holdout=1.0))
    plan = once([node("n", 0.9), node("sick", 0.9, facts=["xid 79"]), *healthy(30)], settings)
    assert verbs(plan, "n") == ["avoid", "publish"]
    assert plan.nodes["n"].held_out
    assert {alert.unit: alert.held_out for alert in plan.alerts} == {"n-0": True, "sick-0": False}
    assert verbs(plan, "sick") == ["swap", "drain", "publish"]


def test_the_kill_switch_stands_above_everything_but_a_release():
    fleet = [node("new", 0.99, facts=["xid 79"]), node("old", 0.9), node("over", 0.01, marks=Marks(tainted=True))]
    fleet = [*fleet, *healthy(30)]
    plan = once(fleet, config(free=True), kill=True)
    assert [(action.verb, action.node) for action in plan.actions] == [("release", "over")]
    assert plan.reasons[0] == "the kill switch is set: no new actions"
    assert "the kill switch is set" in why(plan, "new")


def test_what_is_published_is_renewed_when_its_end_moves_and_not_at_every_round():
    fleet = [node("n", 0.2), *healthy(12)]
    plan = once(fleet, config())
    fleet = carry_out(fleet, plan.actions, T0)
    soon = T0 + timedelta(minutes=5)
    assert once(fleet, config(), soon, plan.state).actions == ()
    now = T0 + STEP
    again = [replace(node("n", 0.2, at=now), marks=fleet[0].marks), *healthy(12, now)]
    renewed = once(again, config(), now, plan.state)
    assert verbs(renewed, "n") == ["publish"]
    assert renewed.actions[0].expires_at == now + 2 * STEP


def test_an_alert_is_reported_once_an_episode_and_again_when_it_gets_worse():
    fleet = [node("n", 0.4), *healthy(12)]
    plan = once(fleet, config())
    assert [(alert.tier, alert.at, alert.by_rule) for alert in plan.alerts] == [("elevated", T0, False)]
    assert once(fleet, config(), T0 + HOUR, plan.state).alerts == ()
    now = T0 + STEP
    worse = once([node("n", 0.9, at=now), *healthy(12, now)], config(), now, plan.state)
    assert [alert.tier for alert in worse.alerts] == ["high"]


def test_nodes_without_units_are_neither_counted_nor_touched():
    cpu = [replace(node(f"cpu{i}"), units=()) for i in range(90)]
    settings = config(budget=BudgetConfig((DisruptionBudget("cluster", max_unavailable_share=0.1),), ()))
    plan = once([node("a", 0.9), node("b", 0.8), *healthy(8), *cpu], settings)
    # A tenth of the ten nodes with GPUs is one; of all hundred it would be ten.
    assert list(plan.over_budget) == ["b"]
    assert not any(name.startswith("cpu") for name in plan.nodes)


def test_the_state_survives_json_and_anything_damaged_is_refused_with_its_place():
    plan = once([node("a", 0.9), node("b", 0.2), *healthy(5)], config(), missing_channels=("x",))
    content = json.loads(json.dumps(state_json(plan.state)))
    assert state_from_json(content) == plan.state
    for change, message in [
        (lambda it: it.update(format=9), r"the safety state has format 9, this code reads 1"),
        (lambda it: it["nodes"]["a"].update(seen="up"), r"state.nodes.a.seen: "),
        (lambda it: it["nodes"]["a"]["tier"].update(tier="awful"), r"state.nodes.a.tier.tier: "),
        (lambda it: it["nodes"]["a"].update(episode="noon"), r"state.nodes.a.episode: "),
        (lambda it: it["nodes"]["a"].update(epoch=1), r"state.nodes.a.epoch: unknown key. Did you mean 'episode'\?"),
        (lambda it: it.update(starts=[{}]), r"state.starts.0.node: "),
        (lambda it: it.update(starts={}), r"state.starts: "),
    ]:
        broken = json.loads(json.dumps(content))
        change(broken)
        with pytest.raises(ValueError, match=f"^{message}"):
            state_from_json(broken)


def test_nodes_that_left_are_forgotten_in_time():
    plan = once([node("a", 0.9), *healthy(5)], config())
    later = once(healthy(5), config(), T0 + DAY, plan.state)
    assert later.state.nodes["a"].absent_since == T0 + DAY
    assert "a" not in once(healthy(5), config(), T0 + 8 * DAY, later.state).state.nodes


def test_inputs_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"^node a was given twice: give each node once, under its own name$"):
        once([node("a"), node("b"), node("a")], config())
    with pytest.raises(ValueError, match=r"^now is 2026-03-01 00:00:00: give a time with a zone$"):
        decide([], PolicyState(), signals(), config(), T0.replace(tzinfo=None))
