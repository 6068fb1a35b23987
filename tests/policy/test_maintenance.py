"""Boots, maintenance and rest: no evidence, and nothing new on a node meanwhile."""

from dataclasses import replace
from datetime import timedelta

import pytest

from policy.breaker import BreakerConfig
from policy.budget import BudgetConfig, DisruptionBudget
from policy.decide import carried_out
from policy.fleet import Fact, Marks, UnitView
from policy.maintenance import MAX_LENGTH, MaintenanceWindow, planned
from policy.node_tier.hard_rules import reported
from policy.plan import PolicyState
from telemetry.kernel_log.catalogue import parse_xid_message
from tests.policy.decide_world import HOUR, STEP, T0, carry_out, config, healthy, node, once, score, verbs, why


def event(kind, code, at, gpu="g", detail=None, name="n"):
    return {
        "node": name, "gpu": gpu, "type": kind, "code": code, "detail": detail, "timestamp": at, "known_at": at,
    }  # fmt: skip


def ruled(*events, now=T0 + 2 * HOUR):
    """The facts that hold, by unit."""
    return {unit: [fact.name for fact in facts] for unit, (facts, _) in reported(events, now).items()}


BOOTED = event("other", "boot", T0 + HOUR, None)


def recovery(at, change):
    """The driver's announcement of another recovery action."""
    message = parse_xid_message(f"NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed from {change}")
    return event("xid", message.code, at, detail=message.detail)


BACK = recovery(T0 + HOUR, "0x2 (Node Reboot Required) to 0x0 (None)")
ASKED = recovery(T0, "0x0 (None) to 0x2 (Node Reboot Required)")


@pytest.mark.parametrize("cure", [BOOTED, BACK])
def test_a_fault_that_a_restart_cured_would_drain_for_two_days_and_ends_with_it(cure):
    lost = event("xid", "79", T0)
    assert ruled(lost, ASKED) == {"g": ["xid 79", "recovery_action reboot"]}
    assert ruled(lost, ASKED, cure) == {}
    assert ruled(lost, cure, now=T0 + HOUR / 2) == {"g": ["xid 79"]}, "it has not booted yet"
    assert ruled(cure, event("xid", "79", T0 + 1.5 * HOUR)) == {"g": ["xid 79"]}, "it came back"
    assert ruled(lost, {**cure, "node": "other", "gpu": None if cure is BOOTED else "h"}) == {"g": ["xid 79"]}


def test_no_boot_ends_a_fault_whose_remedy_is_a_replacement():
    broken = event("xid", "64", T0), event("diagnostic", "fail", T0)
    assert ruled(*broken) == {"g": ["xid 64", "diagnostic_failed"]}
    assert ruled(*broken, BOOTED) == {"g": ["diagnostic_failed"]}, "XID 64 asks for a reset"


WINDOW = MaintenanceWindow(T0 - HOUR, T0 + HOUR, ("sick*",))


@pytest.mark.parametrize(
    ("window", "concerned"),
    [(WINDOW, True), (MaintenanceWindow(T0, T0 + HOUR), True), (replace(WINDOW, nodes=("other",)), False),
     (replace(WINDOW, nodes=(), domains=("r1",)), True), (replace(WINDOW, nodes=(), domains=("r2",)), False)],
)  # fmt: skip
def test_nothing_new_is_put_on_a_node_in_a_maintenance_of_the_calendar(window, concerned):
    plan = once([node("sick", 0.9, rack="r1"), *healthy(12)], config(maintenance=(window,)))
    assert ("drain" not in verbs(plan, "sick")) is concerned


def test_what_was_seen_in_a_maintenance_is_no_evidence_after_it_and_older_evidence_is():
    later = T0 + 3 * HOUR
    fleet = [
        replace(node("sick1"), units=(UnitView("a", score(0.01, later), (Fact("xid 79", T0),)),)),
        replace(node("sick2"), units=(UnitView("b", score(0.9, T0)),)),
        replace(node("sick3"), units=(UnitView("c", score(0.01, later), (Fact("xid 79", T0 - 2 * HOUR),)),)),
        *healthy(40, later),
    ]
    plan = once(fleet, config(maintenance=(WINDOW,)), later)
    assert {action.node for action in plan.actions if action.verb == "drain"} == {"sick3"}


def at_work(begins, code, gpu=None, **others):
    return {**event("maintenance", code, begins, gpu), **others}


@pytest.mark.parametrize(
    ("events", "end"),
    [
        ([at_work(T0, (T0 + HOUR).isoformat())], T0 + HOUR),
        ([at_work(T0, " 2026-03-01t01:00:00z ", "g")], T0 + HOUR),
        ([at_work(T0, "begin")], T0 + MAX_LENGTH),
        ([at_work(T0, "begin"), at_work(T0 + HOUR, "END"), at_work(T0 + 2 * HOUR, "end")], T0 + HOUR),
        ([at_work(T0, "begin"), at_work(T0 + HOUR, "end", "g"), at_work(T0 - HOUR, "end")], T0 + MAX_LENGTH),
        ([at_work(T0, "begin"), at_work(T0 + HOUR, "end", known_at=T0 + 3 * HOUR)], T0 + MAX_LENGTH),
        ([at_work(T0, "when it is done")], None),
        ([at_work(T0, "2099-01-01T00:00:00")], None),
        ([at_work(T0, (T0 + HOUR).isoformat(), known_at=T0 + 3 * HOUR)], None),
        ([at_work(T0 - 20 * 24 * HOUR, (T0 - 10 * 24 * HOUR).isoformat())], None),
    ],
)
def test_events_tell_of_a_maintenance_as_it_was_known(events, end):
    assert planned(events, T0 + 2 * HOUR) == ({} if end is None else {"n": ((T0, end),)})


def test_nothing_new_is_put_on_a_node_in_a_maintenance_that_events_tell_of_and_nothing_in_it_is_evidence():
    sick = node("sick", 0.9, planned=((T0 - HOUR, T0 + HOUR),))
    plan = once([sick, *healthy(12)], config())
    assert "drain" not in verbs(plan, "sick")
    later = T0 + 3 * HOUR
    said = (Fact("xid 79", T0),)
    sick = replace(sick, units=(UnitView("a", score(0.01, later), said),))
    assert "drain" not in verbs(once([sick, *healthy(12, later)], config(), later), "sick")
    assert "drain" in verbs(once([replace(sick, planned=()), *healthy(12, later)], config(), later), "sick")


def test_a_maintenance_that_the_scheduler_tells_of_is_remembered():
    state, fleet = PolicyState(), [node("sick", 0.01, maintenance="a maintenance reservation"), *healthy(12)]
    for minutes in range(0, 120, 4):
        now = T0 + timedelta(minutes=minutes)
        fleet[0] = replace(fleet[0], units=(UnitView("a", score(0.01, now), (Fact("xid 79", T0 + HOUR / 2),)),))
        plan = once(fleet, config(), now, state)
        assert not {"swap", "drain"} & set(verbs(plan, "sick"))
        fleet, state = carry_out(fleet, plan.actions, now), carried_out(plan.state, plan.actions)
    risky = replace(fleet[0], units=(UnitView("a", score(0.9, now - HOUR)),))
    assert "it is in a maintenance reservation" in why(once([*fleet[1:], risky], config(), now), "sick")
    now, fleet[0] = now + HOUR / 2, replace(fleet[0], maintenance=None)
    assert "drain" not in verbs(once(fleet, config(), now, state), "sick"), "the rack is returned"
    own = (Fact("xid 79", now - timedelta(minutes=1)),)
    fleet[0] = replace(fleet[0], units=(UnitView("a", score(0.01, now), own),))
    assert "drain" in verbs(once(fleet, config(), now, state), "sick"), "a fault after it"
    later = now + 8 * 24 * HOUR
    done = once([node("sick", at=later), *healthy(12, later)], config(), later, state)
    assert done.state.nodes.get("sick") is None or done.state.nodes["sick"].maintenance is None


def test_a_node_that_was_drained_before_keeps_its_mark_in_a_maintenance():
    fleet = [node("sick", 0.9), *healthy(12)]
    first = once(fleet, config())
    fleet = carry_out(fleet, first.actions, T0)
    fleet[0] = replace(fleet[0], maintenance="maintenance")
    assert "release" not in verbs(once(fleet, config(), T0 + HOUR, first.state), "sick")


def test_a_window_that_ends_before_it_begins_is_refused():
    with pytest.raises(ValueError, match=r"end is .*: give a time after start"):
        MaintenanceWindow(T0, T0 - STEP)


ASLEEP = "powered down to save power"
ONE_IN_TEN = {"budget": BudgetConfig((DisruptionBudget("cluster", max_unavailable_share=0.10),), ())}


def fleet(awake: int, asleep: int, risky: int = 1, **at_rest: object):
    """A fleet with risky nodes among those that are awake; nodes at rest have no score that is still valid."""
    rest = [replace(each, resting=ASLEEP, **at_rest) for each in healthy(asleep, T0 - 100 * HOUR, start=awake)]
    return [*[node(f"r{i}", 0.9) for i in range(risky)], *healthy(awake - risky), *rest]


@pytest.mark.parametrize("asleep", [0, 3, 12, 200])
def test_nodes_asleep_use_no_budget_up_and_open_no_breaker(asleep):
    plan = once(fleet(10, asleep, down=True), config("g", **ONE_IN_TEN))
    assert verbs(plan, "r0")[:2] == ["swap", "drain"]
    assert dict(plan.open_causes) == {}
    assert plan.over_budget == {}


def test_nodes_asleep_do_not_stand_in_for_capacity():
    plan = once(fleet(10, 90, risky=2), config("g", **ONE_IN_TEN))
    assert [verbs(plan, name)[0] for name in ("r0", "r1")] == ["swap", "avoid"]
    assert "1 of 10 nodes are out of service, at most 1 allowed" in why(plan, "r1")
    assert [(use.nodes, use.lost, use.allowed) for use in plan.uses] == [(10, 1, 1)]


def test_a_share_of_the_nodes_awake_that_is_down_opens_the_breaker_however_many_sleep():
    nodes = fleet(10, 90)
    nodes[1:5] = [replace(each, down=True) for each in nodes[1:5]]
    plan = once(nodes, config("g", **ONE_IN_TEN))
    assert "4 of 10 nodes are down" in plan.open_causes["down"].message


def test_a_node_that_rests_and_is_taken_out_counts_from_then_on():
    nodes = [*healthy(10), replace(node("a", 0.9), resting=ASLEEP), replace(node("b", 0.9), resting=ASLEEP)]
    plan = once(nodes, config("g", **ONE_IN_TEN))
    assert [verbs(plan, name)[0] for name in ("a", "b")] == ["swap", "avoid"]
    then = once(carry_out(nodes, plan.actions, T0), config("g", **ONE_IN_TEN), T0, plan.state)
    assert verbs(then, "b") == []
    assert [(use.nodes, use.lost) for use in then.uses] == [(11, 1)]


def test_a_fleet_that_falls_asleep_or_is_scaled_down_did_not_lose_its_nodes():
    settings = config("g", breaker=BreakerConfig(max_risky=1.0))
    awake = once(fleet(20, 0), settings)
    asleep = once(fleet(4, 16), settings, T0 + HOUR, awake.state)
    gone = once(fleet(4, 0), settings, T0 + 2 * HOUR, asleep.state)
    assert [dict(plan.open_causes) for plan in (awake, asleep, gone)] == [{}, {}, {}]
    cut = once(fleet(4, 0), settings, T0 + HOUR, awake.state)
    assert "listing" in cut.open_causes


def test_nothing_is_written_to_a_node_that_reboots_and_its_mark_goes_afterwards():
    marked = replace(
        node("n", 0.01), marks=Marks(None, tainted=True, hard_since=T0), unwritable="a reboot is under way"
    )
    plan = once([marked, *healthy(9)], config(), T0 + HOUR)
    assert plan.actions == ()
    assert "a reboot is under way" in why(plan, "n")
    after = once([replace(marked, unwritable=None), *healthy(9)], config(), T0 + HOUR)
    assert verbs(after, "n") == ["release"]


def test_marks_that_go_soon_on_several_nodes_are_removed_by_a_program_and_set_no_more():
    nodes = [*[node(f"r{i}", 0.9) for i in range(3)], *healthy(7)]
    settings = config(free=True, breaker=BreakerConfig(max_risky=1.0))
    state = once(nodes, settings).state
    for minutes in (1, 2, 30):
        now = T0 + timedelta(minutes=minutes)
        stripped = [replace(each, marker_removed=True, marked_at=T0) for each in nodes[:3]]
        plan = once([*stripped, *nodes[3:]], settings, now, state)
        state = plan.state
        assert {action.verb for action in plan.actions} <= {"publish"}
        assert all("within 60 s, on 3 nodes: another controller or an admission webhook" in why(plan, f"r{i}")
                   for i in range(3))  # fmt: skip
    by_hand = [replace(nodes[0], marker_removed=True, marked_at=T0 - 2 * HOUR), *nodes[1:]]
    assert "an operator or another tool removed" in why(once(by_hand, settings, T0, PolicyState()), "r0")


def test_what_an_operator_should_look_at_is_reported_of_calm_nodes_too():
    noted = replace(node("n", 0.01), notice="the taint was edited")
    assert "n: the taint was edited" in once([noted, *healthy(3)], config()).reasons
    many = [replace(each, notice="x") for each in healthy(30)]
    assert [reason for reason in once(many, config()).reasons if "more nodes" in reason] == [
        "and 10 more nodes with a notice"
    ]


def test_each_node_that_is_taken_out_at_rest_makes_the_scope_one_larger():
    nodes = [*healthy(18), replace(node("a", 0.9), resting=ASLEEP), replace(node("b", 0.9), resting=ASLEEP)]
    plan = once(nodes, config("g", breaker=BreakerConfig(max_risky=1.0), **ONE_IN_TEN))
    assert [verbs(plan, name)[0] for name in ("a", "b")] == ["swap", "swap"]
    assert [(use.nodes, use.lost, use.allowed) for use in plan.uses] == [(20, 2, 2)]
