"""Decisions, their hard rules, and the order of their reasons."""

import json
from dataclasses import replace
from datetime import timedelta

import pytest

from policy.budget import BudgetConfig, DisruptionBudget
from policy.decide import decide
from policy.fleet import Fact, JobView, Level, Marks, UnitView
from policy.node_tier.hard_rules import RULES, HardRule, HardRulesConfig, rule_hits
from policy.plan import PolicyState
from policy.stages import StagesConfig
from scheduler.ports.stored_state import state_from_json, state_json
from tests.policy.decide_world import HOUR, STEP, T0, carry_out, config, healthy, node, once, score, signals, verbs, why

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
    busy = node("n", 0.9, 0.01, jobs=(JobView("j", 8, started_at=T0 - HOUR / 4),))
    plan = once([busy, *healthy(12)], config())
    drain = plan.actions[1]
    assert (drain.verb, drain.tier, drain.to) == ("drain", "high", Level.DRAIN)
    assert drain.expires_at == T0 + 2 * STEP
    assert drain.risk == pytest.approx(0.901)
    worth = plan.nodes["n"].worth
    assert worth.saved > worth.lost
    reasons = "; ".join(drain.reasons)
    assert "from clear to high: a risk of 90 % at 2026-03-01 00:00 UTC" in reasons
    assert "a node risk of 90 %, mostly of n-0 90 %" in reasons
    assert "n-0: its errors rise" in reasons
    assert "a drain now is expected to save " in reasons


def test_a_fault_explains_the_tier_that_the_risk_alone_does_not():
    reasons = once([node("n", 0.3, facts=["xid 79"]), *healthy(12)], config()).nodes["n"].reasons
    assert reasons[0].startswith("hard rule: n-0: ")
    assert reasons[1].startswith("by risk alone, from clear to elevated: a risk of 30 %")
    assert sum("xid 79" in reason.lower() for reason in reasons) == 1
    assert "because the fault is certain" in "; ".join(reasons)


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
    assert plan.over_budget == {"a": "cluster c: 1 of 32 nodes are out of service, at most 1 allowed"}
    assert "over budget, soft taint only: cluster c" in why(plan, "a")
    assert plan.uses[0].lost == 1


def test_a_budget_goes_to_the_drain_that_saves_most_and_before_all_to_a_fault_that_is_there():
    settings = config(budget=BudgetConfig((DisruptionBudget("cluster", max_unavailable=1),), ()))
    dear = node("b", 0.9, jobs=(JobView("big", 512, started_at=T0 - 10 * HOUR),))  # a move costs hours of work
    assert set(once([node("a", 0.7), dear, *healthy(30)], settings).over_budget) == {"b"}
    faulty = node("z", 0.01, facts=["xid 79"], jobs=dear.jobs)
    assert set(once([node("a", 0.7), faulty, *healthy(30)], settings).over_budget) == {"a"}


@pytest.mark.parametrize(
    ("risk", "then"), [(0.7, ["drain"]), (0.4, ["drain"]), (0.2, ["drain"]), (None, [])],
    ids=["still high", "below high", "low", "unknown"],
)  # fmt: skip
def test_a_job_that_ends_soon_is_waited_for_behind_the_taint_and_the_node_is_tested_then(risk, then):
    ends = T0 + HOUR / 2
    busy = node("n", 0.7, jobs=(JobView("j", 512, started_at=T0 - 2 * HOUR, ends_at=ends),))
    fleet = [busy, *healthy(12)]
    plan = once(fleet, config())
    assert verbs(plan, "n") == ["swap", "publish"]
    assert "drain postponed" in why(plan, "n")
    fleet = carry_out(fleet, plan.actions, T0)
    fleet[0] = node("n", risk, at=ends, marks=fleet[0].marks)
    assert [verb for verb in verbs(once(fleet, config(), ends, plan.state), "n") if verb != "publish"] == then


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
    settings = config(free=True, stages=StagesConfig(pinned={"c/g": "hard"}, holdout=1.0))
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
        (lambda it: it.update(format=9), r"the safety state has format 9, but this code reads 1"),
        (lambda it: it["nodes"]["a"].update(seen="up"), r"state.nodes.a.seen: "),
        (lambda it: it["nodes"]["a"]["tier"].update(tier="awful"), r"state.nodes.a.tier.tier: "),
        (lambda it: it["nodes"]["a"].update(episode="noon"), r"state.nodes.a.episode: "),
        (lambda it: it["nodes"]["a"].update(episod=1), r"state.nodes.a.episod: unknown key. Did you mean 'episode'\?"),
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
    with pytest.raises(ValueError, match=r"^node a was given twice: give each node once, under one name$"):
        once([node("a"), node("b"), node("a")], config())
    with pytest.raises(ValueError, match=r"^now is 2026-03-01 00:00:00: give a time with a zone$"):
        decide([], PolicyState(), signals(), config(), T0.replace(tzinfo=None))


def drained():
    fleet = [node("n", 0.9), *healthy(40)]
    plan = once(fleet, config())
    return carry_out(fleet, plan.actions, T0), plan.state


def changed(fleet, **others):
    return [replace(fleet[0], **others), *fleet[1:]]


def released(fleet, state, settings=None, now=T0 + HOUR, **signals):
    plan = once(fleet, settings or config(), now, state, **signals)
    (action,) = [action for action in plan.actions if action.verb == "release"]
    assert plan.nodes["n"].reasons == action.reasons
    return action.reasons


@pytest.mark.parametrize(
    ("node_change", "given", "first"),
    [
        ({}, {"release_all": True}, "release-all is set"),
        ({"opt_out": "predrain.io/managed=false"}, {}, "it opted out (predrain.io/managed=false)"),
        ({}, {"settings": config(stage="soft")}, "group c/g is in stage soft"),
    ],
)
def test_where_a_limit_takes_a_mark_off_it_comes_first_and_the_tier_after_it(node_change, given, first):
    fleet, state = drained()
    reasons = released(changed(fleet, **node_change), state, **given)
    assert reasons[0] == first
    assert reasons[1] == "its tier is high: from clear to high: a risk of 90 % at 2026-03-01 00:00 UTC"
    assert sum("from clear to high" in reason for reason in reasons) == 1


def test_of_several_limits_the_last_that_lowered_it_decided():
    fleet, state = drained()
    reasons = released(changed(fleet, cordoned_by="ann"), state, config(stage="soft"))
    assert "from clear to high" not in reasons[0]
    assert any(reason == "group c/g is in stage soft" for reason in reasons[:2])


def test_where_the_tier_fell_by_itself_that_comes_first():
    fleet, state = drained()
    now = T0 + 2 * STEP
    gone = changed(fleet, units=(UnitView("n-0", score(None, now)),))
    reasons = released([gone[0], *healthy(40, now)], state, now=now)
    assert reasons[0].startswith("from high to clear: the prediction on n-0 expired")


def test_where_a_mark_is_put_on_the_tier_comes_first_and_what_held_more_back_after_it():
    fleet = [node("n", 0.9), *healthy(40)]
    plan = once(fleet, config(stage="soft"))
    (soft,) = [action for action in plan.actions if action.verb == "avoid"]
    assert soft.reasons[:2] == (
        "from clear to high: a risk of 90 % at 2026-03-01 00:00 UTC",
        "group c/g is in stage soft",
    )


RULED = HardRulesConfig()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.fact)
def test_each_rule_reaches_its_action_whatever_the_model_says_and_ends_with_its_reason(rule):
    fleet = [node("sick", 0.001, facts=[rule.fact]), *healthy(12)]
    plan = once(fleet, config())
    last = "drain" if rule.tier == "high" else "avoid"
    assert verbs(plan, "sick")[-2:] == [last, "publish"]
    assert rule.description in why(plan, "sick")
    assert plan.nodes["sick"].expires_at == T0 + rule.holds

    fleet = carry_out(fleet, plan.actions, T0)
    end = T0 + rule.holds
    still = once(fleet, config(), end - timedelta(seconds=1), plan.state)
    assert "release" not in verbs(still, "sick")
    over = once(fleet, config(), end, plan.state)
    assert verbs(over, "sick") == ["release"]


def test_the_rules_named_by_the_vendor_are_there():
    high = {rule.fact for rule in RULES if rule.tier == "high"}
    assert {"xid 64", "xid 79", "xid 95", "diagnostic_failed"} <= high
    assert {"recovery_action reset", "recovery_action reboot", "recovery_action drain_and_reset"} <= high


def test_a_gauge_that_keeps_its_last_xid_would_hold_a_node_for_ever_and_the_time_of_the_event_does_not():
    # The exporter shows XID 79 at every scrape until it restarts: a rule on the scrape's time never ends.
    later = T0 + timedelta(days=30)
    scraped = replace(node("n"), units=(replace(node("n").units[0], facts=(Fact("xid 79", later),)),))
    assert rule_hits(scraped, RULED, later)
    happened = node("n", facts=["xid 79"])
    assert not rule_hits(happened, RULED, later)


def test_what_a_repair_or_a_wrong_clock_made_void_does_not_count():
    sick = node("n", facts=["xid 79"])
    fixed = replace(sick, units=(replace(sick.units[0], valid_from=T0 + HOUR),))
    assert not rule_hits(fixed, RULED, T0 + 2 * HOUR)
    since = replace(fixed.units[0], facts=(Fact("xid 79", T0 + HOUR),))
    assert rule_hits(replace(fixed, units=(since,)), RULED, T0 + 2 * HOUR), "a fault after the repair"
    assert not rule_hits(sick, RULED, T0 - HOUR)
    assert not rule_hits(node("n", facts=["xid 45", "xid 31"]), RULED, T0)


def test_the_worst_rule_comes_first_and_each_fact_once_with_its_newest_time():
    unit = node("n").units[0]
    facts = (Fact("xid 63", T0), Fact("xid 79", T0 - HOUR), Fact("xid 79", T0))
    rules = HardRulesConfig((HardRule("xid 63", "elevated", HOUR, "a row remap is pending"), *RULES))
    hits = rule_hits(replace(node("n"), units=(replace(unit, facts=facts),)), rules, T0)
    assert [hit.rule.fact for hit in hits] == ["xid 79", "xid 63"]
    assert hits[0].seen_at == T0
    assert hits[0].reason == (
        "n-0: XID 79: the GPU has fallen off the bus (seen 2026-03-01 00:00 UTC, valid until 2026-03-03 00:00 UTC;"
        " remedy: reboot the node)"
    )
