"""Incidents in which one cause makes many nodes look sick: none of them is drained, and the breaker says why."""

from dataclasses import replace
from datetime import timedelta

import pytest

from policy.breaker import CommonCauseConfig, Report, bursts
from policy.decide import carried_out
from policy.fleet import Fact, JobView, NodeView, UnitView
from policy.node_assessment import reported
from policy.plan import PolicyState
from tests.policy.decide_world import HOUR, STEP, T0, carry_out, config, healthy, node, once, score, verbs

SECOND = timedelta(seconds=1)
OWN = "own"


def own():
    """A node with a fault of its own, five hours earlier."""
    return replace(node(OWN), units=(UnitView("own-0", score(0.01), (Fact("xid 95", T0 - 5 * HOUR),)),))


def reporting(name, at, xid="xid 79", **others):
    """A node that reported an XID at a time."""
    return replace(node(name, **others), units=(UnitView(f"{name}-0", score(0.01), (Fact(xid, at),)),))


def drained(fleet, hours=12, state=None, **settings):
    """All nodes that hard marks are put on in hourly rounds, and the first plan."""
    state, hard, first = state or PolicyState(), set(), None
    for hour in range(hours):
        now = T0 + hour * HOUR
        fleet = [
            replace(one, units=tuple(replace(unit, score=again(unit.score, now)) for unit in one.units))
            for one in fleet
        ]
        plan = once(fleet, config(**settings), now, state)
        first = first or plan
        hard |= {action.node for action in plan.actions if action.verb in ("swap", "drain")}
        fleet, state = carry_out(fleet, plan.actions, now), carried_out(plan.state, plan.actions)
    return hard, first


def again(known, now):
    """The same risk of a later decision."""
    return score(known.risk, max(known.decided_at, now), 2 * STEP)


def usual(size, share):
    """What is remembered of some days with a share of the fleet at risk."""
    state = PolicyState()
    for day in range(6):
        at = T0 - (6 - day) * 4 * HOUR
        fleet = [node(f"h{i:04}", 0.4 if i < share * size else 0.01, at=at) for i in range(size)]
        state = once(fleet, config(), at, state).state
    return state


@pytest.mark.parametrize(("size", "share"), [(400, None), (400, 0.05), (2000, 0.01)])
def test_one_xid_on_77_nodes_in_one_second_is_one_piece_of_evidence(size, share):
    state = None if share is None else usual(size, share)
    crash = [reporting(f"h{i:04}", T0 - SECOND * (i % 2)) for i in range(77)]
    hard, first = drained([own(), *crash, *healthy(size - 77, start=77)], hours=2, state=state)
    assert hard == {OWN}
    assert any("77 nodes of the fleet report xid 79 together" in reason for reason in first.reasons)
    assert [key.split()[0] for key in first.open_causes] == ["together"]


def test_the_crash_of_one_job_on_half_the_fleet_drains_nobody():
    job = (JobView("train", 1152),)
    crash = [
        reporting(f"h{i:03}", T0 - 8 * SECOND * i, ("xid 79", "xid 95", "xid 64")[i % 3], jobs=job) for i in range(144)
    ]
    assert drained([own(), *crash, *healthy(144, start=500)])[0] == {OWN}


def test_racks_that_reboot_over_an_hour_drain_nobody():
    def rebooting(i):
        return reporting(f"h{i:03}", T0 - HOUR + 15 * SECOND * i, rack=f"r{i // 18}")

    hard, first = drained([own(), *(rebooting(i) for i in range(214)), *healthy(74, start=500)])
    assert hard == {OWN}
    assert first.open_causes


def test_a_rack_whose_nodes_report_some_minutes_after_each_other_is_one_cause_and_other_nodes_are_not():
    rack = [reporting(f"r{i}", T0 - 10 * 60 * SECOND * i, rack="r7") for i in range(5)]
    apart = [reporting(f"a{i}", T0 - 10 * 60 * SECOND * i, rack=f"s{i}") for i in range(2)]
    assert drained([*rack, *apart, *healthy(200)], hours=1)[0] == {"a0", "a1"}


def test_a_counter_that_a_new_driver_multiplies_in_some_racks_drains_nobody():
    # the scheduler does not name the driver, and three racks of 100 are no jump
    upgraded = [node(f"u{i:02}", 0.99, rack=f"r{i // 18}") for i in range(54)]
    hard, first = drained([own(), *upgraded, *healthy(746)], hours=8)
    assert hard == {OWN}
    assert sum(key.startswith("together rack") for key in first.open_causes) == 3


def test_an_exporter_restart_that_resets_all_counters_drains_nobody():
    fleet = [node(f"h{i:03}", 0.9, rack=f"r{i // 18}") for i in range(288)]
    assert drained(fleet, hours=12)[0] == set()


def test_a_flood_of_one_xid_drains_its_node_alone_and_ties_no_others_together():
    rows = [
        {"gpu": "f-0", "node": "f", "timestamp": T0 - HOUR + timedelta(milliseconds=4.5 * i), "type": "xid",
         "code": "79", "detail": None, "known_at": T0 - HOUR}
        for i in range(8_000)
    ]  # fmt: skip
    facts, _ = reported(rows * 10, T0)["f-0"]
    assert len(facts) == 1
    noisy = tuple(Fact("xid 79", T0 - HOUR + 20 * SECOND * i) for i in range(180))
    flood = replace(node("f"), units=(UnitView("f-0", score(0.01), noisy),))
    others = [reporting(f"o{i}", T0 - 20 * 60 * SECOND * (i + 1)) for i in range(2)]
    assert drained([flood, *others, *healthy(200)], hours=1)[0] == {"f", "o0", "o1"}


def test_a_person_who_closes_the_breaker_lets_the_budget_take_the_nodes():
    fleet = [reporting(f"h{i:03}", T0) for i in range(20)] + healthy(200, start=500)
    first = once(fleet, config())
    assert not [action for action in first.actions if action.verb == "drain"]
    let = once(fleet, config(), T0 + HOUR, first.state, reset_breaker_at=T0 + HOUR)
    assert sum(action.verb == "drain" for action in let.actions) == 4
    assert "release" not in {verb for i in range(20) for verb in verbs(let, f"h{i:03}")}


def test_two_nodes_are_chance_and_failed_tests_are_no_burst_beyond_a_rack():
    two = [(NodeView(f"n{i}", "c", "g"), (Report("xid 79", T0),)) for i in range(2)]
    assert bursts(two, CommonCauseConfig()) == ()
    tests = [(NodeView(f"n{i}", "c", "g", f"r{i // 3}"), (Report("diagnostic_failed", T0),)) for i in range(6)]
    assert [burst.nodes for burst in bursts(tests, CommonCauseConfig())] == [("n0", "n1", "n2"), ("n3", "n4", "n5")]
    assert bursts([(replace(one, rack=None), seen) for one, seen in tests], CommonCauseConfig()) == ()
