"""The breaker, and incidents in which one cause makes many nodes look sick."""

from dataclasses import replace
from datetime import timedelta

import pytest

from policy.breaker import BreakerConfig, BreakerState, CommonCauseConfig, ObservedNode, bursts, watch
from policy.decide import carried_out
from policy.fleet import Fact, JobView, NodeView, UnitView
from policy.node_tier.hard_rules import reported
from policy.plan import PolicyState
from tests.policy.decide_world import HOUR, STEP, T0, carry_out, config, healthy, node, once, score, signals, verbs

CONFIG = BreakerConfig()
DAY = timedelta(days=1)


def fleet(total, risky=0, *, group="g", **others):
    """So many nodes of a group, the first of them at risk."""
    return [
        ObservedNode(node(f"{group}{i:03}", 0.01, group=group, **others), i < risky, 1, False) for i in range(total)
    ]


def run(nodes, state=None, now=T0, decided_at=T0, config=CONFIG, **others):
    return watch(state or BreakerState(), nodes, signals(now, **others), decided_at, config, now)


def history(total, risky, steps=6):
    """A state that has seen that many nodes at risk for a while."""
    state = BreakerState()
    for k in range(steps):
        now = T0 + k * STEP
        state, _ = run(fleet(total, risky), state, now, now)
    return state, T0 + steps * STEP


def test_a_share_over_the_limit_opens_it_and_says_why():
    assert run(fleet(100, 20))[0].causes == {}
    state, reasons = run(fleet(100, 21))
    cause = "21 of 100 nodes of the fleet are at risk at the same time, at most 20 % allowed"
    assert f"breaker opened: {cause}" in reasons
    assert cause in state.frozen("c/g")


def test_one_bad_node_of_three_would_open_a_plain_share_and_does_not():
    # 1 of 3 is 33 %, over the 20 % that blocks Karpenter's repair.
    assert CONFIG.max_risky < 1 / 3
    assert run(fleet(3, 1))[0].causes == {}
    assert run(fleet(3, 2))[0].causes == {}
    assert run(fleet(3, 3))[0].causes != {}


def test_a_jump_under_the_absolute_limit_opens_it():
    state, now = history(300, 3)
    after, _ = run(fleet(300, 11), state, now, now)
    assert after.frozen("c/g") == (), "four times the usual one percent is twelve"
    after, reasons = run(fleet(300, 13), state, now, now)
    assert after.frozen("c/g")
    assert "breaker opened: 13 of 300 nodes of the fleet are at risk at the same time, usually 1.0 %" in reasons


def test_what_opened_it_does_not_become_what_is_usual():
    state, now = history(300, 3)
    for k in range(40):
        at = now + k * STEP
        state, _ = run(fleet(300, 40), state, at, at)
    assert state.frozen("c/g")
    assert max(share.share for share in state.shares[""]) == pytest.approx(0.01)


def test_nodes_without_gpus_would_water_the_share_down_and_are_not_given_to_it():
    # As a share of 200 nodes, half of them without a GPU, 25 of 100 look harmless (NVSentinel#1228).
    bare = [replace(node(f"cpu{i}"), units=()) for i in range(100)]
    assert run([*fleet(100, 25), *(ObservedNode(one, False, 0, False) for one in bare)])[0].causes == {}
    assert once([*(node(f"r{i}", 0.9) for i in range(25)), *healthy(75), *bare], config()).open_causes


def test_a_group_of_its_own_is_frozen_alone():
    nodes = fleet(200, 0, group="a") + fleet(20, 8, group="b")
    state, _ = run(nodes)
    assert state.frozen("c/b") == ("8 of 20 nodes of group c/b are at risk at the same time, at most 20 % allowed",)
    assert state.frozen("c/a") == ()


@pytest.mark.parametrize(
    ("others", "cause"),
    [
        ({"read_at": None}, "the scheduler was not read"),
        ({"read_at": T0 - HOUR}, "the scheduler was last read at 2026-02-28 23:00 UTC"),
        ({"scheduler_error": "503"}, "cannot read the scheduler: 503"),
        ({"model_fitted_at": None}, "the age of the model is unknown"),
        ({"model_fitted_at": T0 - 30 * DAY}, "the model's data ended 30 days ago, at most 21 allowed"),
        ({"missing_channels": ("power_w",)}, "channel power_w of the model no longer arrives"),
    ],
)
def test_signals_of_the_whole_fleet_open_it(others, cause):
    state, _ = run(fleet(50), **others)
    assert state.frozen("c/g") == (cause,)


def test_missing_scores_open_it_and_nodes_that_are_down_are_not_missing():
    dark = [replace(node, known=0) for node in fleet(10)]
    state, _ = run(dark + fleet(20, group="g2"))
    assert "10 of 30 units of the fleet have no valid score" in state.frozen("c/g2")
    down = [replace(node, node=replace(node.node, down=True)) for node in dark[:2]]
    assert run(down + fleet(3, group="g2"))[0].causes == {}


def test_many_nodes_down_at_once_are_taken_for_a_sick_control_plane():
    nodes = fleet(10)
    nodes = [replace(node, node=replace(node.node, down=k < 4)) for k, node in enumerate(nodes)]
    assert run(nodes)[0].frozen("c/g") == ("4 of 10 nodes are down: probably a failure of the control plane",)


def test_unreadable_nodes_and_a_listing_that_shrank_open_it():
    nodes = [replace(node, node=replace(node.node, readable=k > 3)) for k, node in enumerate(fleet(10))]
    assert run(nodes)[0].frozen("c/g") == ("the state of 4 of 10 nodes cannot be read",)
    state, _ = run(fleet(100))
    state, _ = run(fleet(10), state)
    assert state.frozen("c/g") == ("the number of listed nodes with known GPUs fell from 100 to 10",)
    empty, _ = run([], run(fleet(100))[0])
    assert empty.frozen("c/g") == ("the number of listed nodes with known GPUs fell from 100 to 0",)


def test_new_software_on_part_of_a_group_freezes_the_group():
    nodes = [replace(node, changed=k < 3) for k, node in enumerate(fleet(20))] + fleet(20, group="b")
    state, _ = run(nodes)
    assert state.frozen("c/g") == ("driver or exporter changed on 3 of 20 nodes of group c/g in the last 24 h",)
    assert state.frozen("c/b") == ()


def test_a_clock_that_goes_back_opens_it():
    ahead = T0 + 3000 * DAY
    state, _ = run(fleet(50, 20), now=ahead, decided_at=ahead)
    state, _ = run(fleet(50), state, T0)
    assert "the clock went backwards from 2034-05-18 00:00 UTC" in state.frozen("c/g")


def test_it_closes_after_a_quiet_time_and_not_before():
    state, _ = run(fleet(50), missing_channels=("a",))
    state, _ = run(fleet(50), state, T0 + HOUR - timedelta(seconds=1))
    assert state.frozen("c/g")
    state, reasons = run(fleet(50), state, T0 + HOUR)
    assert state.frozen("c/g") == ()
    assert reasons == ("breaker closed, cause gone: channel a of the model no longer arrives",)


def test_a_hand_closes_it_for_what_is_there_and_a_new_cause_or_the_same_anew_opens_it_again():
    state, _ = run(fleet(50), missing_channels=("a",))
    later = T0 + timedelta(minutes=1)
    reset = {"reset_breaker_at": later}
    state, reasons = run(fleet(50), state, later, missing_channels=("a",), **reset)
    assert reasons == ("breaker closed by manual reset: channel a of the model no longer arrives",)
    assert state.frozen("c/g") == ()
    state, _ = run(fleet(50), state, later + HOUR, missing_channels=("a",), **reset)
    assert state.frozen("c/g") == ()
    state, _ = run(fleet(50), state, later + HOUR, missing_channels=("a", "b"), **reset)
    assert state.frozen("c/g") == ("channel b of the model no longer arrives",)
    state, _ = run(fleet(50), state, later + 3 * HOUR, **reset)
    state, _ = run(fleet(50), state, later + 4 * HOUR, missing_channels=("a",), **reset)
    assert state.frozen("c/g") == ("channel a of the model no longer arrives",)


def test_a_hand_that_closed_an_earlier_breaker_does_not_close_one_whose_state_was_lost():
    long_ago = {"reset_breaker_at": T0 - 21 * DAY}
    state, reasons = run(fleet(50), missing_channels=("a",), **long_ago)
    assert state.frozen("c/g") == ("channel a of the model no longer arrives",)
    assert "manual reset ignored: it was requested at 2026-" in reasons[0]
    again, reasons = run(fleet(50), state, T0 + HOUR, missing_channels=("a",), **long_ago)
    assert again.frozen("c/g") == ("channel a of the model no longer arrives",)
    assert reasons == (), "said once"
    state, _ = run(fleet(50), again, T0 + HOUR, missing_channels=("a",), reset_breaker_at=T0 + HOUR / 2)
    assert state.frozen("c/g") == ()


@pytest.mark.parametrize("first", [T0 + 5 * HOUR, T0 - HOUR / 2])
def test_a_hand_is_followed_at_once_whose_clock_is_ahead_or_came_after_one_that_was(first):
    state, _ = run(fleet(50), missing_channels=("a",))
    state, reasons = run(fleet(50), state, T0, missing_channels=("a",), reset_breaker_at=first)
    assert len(reasons) == 1
    again = {"missing_channels": ("a", "b"), "reset_breaker_at": first}
    state, _ = run(fleet(50), state, T0 + HOUR, **again)
    assert len(state.frozen("c/g")) == 1, "the same hand is followed once"
    again["reset_breaker_at"] = T0 + HOUR
    assert run(fleet(50), state, T0 + HOUR, **again)[0].frozen("c/g") == ()


def test_a_hand_is_followed_however_late_where_the_breaker_was_watched_all_along():
    state, _ = run(fleet(50), missing_channels=("a",))
    state, _ = run(fleet(50), state, T0 + 9 * HOUR, missing_channels=("a",), reset_breaker_at=T0 + HOUR)
    assert state.frozen("c/g") == ()


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


def test_an_old_reset_dismisses_nothing_after_a_lost_state_and_a_release_of_everything():
    fleet = [reporting(f"h{i:03}", T0) for i in range(20)] + healthy(200, start=500)
    long_ago = {"reset_breaker_at": T0 - 21 * DAY}
    state = once(fleet, config(), release_all=True, **long_ago).state
    resumed = once(fleet, config(), T0 + STEP, state, **long_ago)
    assert "drain" not in {action.verb for action in resumed.actions}
    assert "manual reset ignored" in resumed.reasons[0]


def test_two_nodes_are_chance_and_failed_tests_are_no_burst_beyond_a_rack():
    two = [(NodeView(f"n{i}", "c", "g"), (Fact("xid 79", T0),)) for i in range(2)]
    assert bursts(two, CommonCauseConfig()) == ()
    tests = [(NodeView(f"n{i}", "c", "g", f"r{i // 3}"), (Fact("diagnostic_failed", T0),)) for i in range(6)]
    assert [burst.nodes for burst in bursts(tests, CommonCauseConfig())] == [("n0", "n1", "n2"), ("n3", "n4", "n5")]
    assert bursts([(replace(one, rack=None), seen) for one, seen in tests], CommonCauseConfig()) == ()
