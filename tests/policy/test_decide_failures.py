"""Known failures of other tools: each first shown to be possible with the obvious rule, then not to happen."""

from dataclasses import replace
from datetime import timedelta

import pytest

from policy.budget import BudgetConfig, DisruptionBudget
from policy.decide import carried_out
from policy.fleet import NO_MARKS, Level, UnitView
from policy.node_tier.hysteresis import HysteresisConfig
from policy.plan import PolicyState
from tests.policy.decide_world import (
    HOUR,
    STEP,
    T0,
    THRESHOLDS,
    carry_out,
    config,
    healthy,
    node,
    once,
    score,
    verbs,
    why,
)

HARD = {"swap", "drain"}


def naive(fleet, now):
    """Who would be drained by risk alone."""
    return {
        node.name for node in fleet for unit in node.units
        if unit.score and unit.score.risk is not None and THRESHOLDS.tier(unit.score.risk) == "high"
    }  # fmt: skip


def hard(plan):
    return {action.node for action in plan.actions if action.verb in HARD}


def marked(*risks, at=T0, extra=40, **others):
    """A fleet whose first node was drained at T0, and the state kept."""
    fleet = [node("n", *(risks or (0.9,)), at=at, **others), *healthy(extra)]
    plan = once(fleet, config())
    return carry_out(fleet, plan.actions, T0), carried_out(plan.state, plan.actions)


def test_drain_storm_everything_is_risky_at_once():
    fleet = [node(f"n{i:02}", 0.9) for i in range(60)]
    assert len(naive(fleet, T0)) == 60
    plan = once(fleet, config())
    assert hard(plan) == set()
    assert "60 of 60 nodes of the fleet are at risk at the same time, at most 20 % allowed" in why(plan, "n00")
    # Without the breaker, budget and rate still hold: 5 % of the fleet an hour.
    closed = once(fleet, config(), T0, plan.state, reset_breaker_at=T0)
    assert len(hard(closed)) == 3


def test_drain_storm_by_a_rule_gone_wild_is_stopped_as_well():
    # One vendor rule raised 672 fatal events in three hours on healthy nodes (NVSentinel#1710).
    fleet = [node(f"n{i:02}", 0.01, facts=["xid 95"] if i < 20 else ()) for i in range(60)]
    assert hard(once(fleet, config())) == set()


def test_a_reset_breaker_would_replay_the_backlog_and_goes_on_at_its_rate():
    fleet = [node(f"n{i:02}", 0.9) for i in range(10)] + healthy(90)
    plan = once(fleet, config(), missing_channels=("x",))
    assert hard(plan) == set()
    assert len(naive(fleet, T0)) == 10
    after = once(fleet, config(), T0, plan.state, missing_channels=("x",), reset_breaker_at=T0)
    assert len(hard(after)) == 4


def test_a_tripped_breaker_also_blocks_releases_elsewhere_and_not_here():
    # NVSentinel's README (PR#1852): a tripped breaker keeps recovered nodes cordoned.
    fleet, state = marked()
    now = T0 + 2 * STEP
    fleet = [replace(node("n", 0.01, at=now), marks=fleet[0].marks), *healthy(40, now)]
    first = once(fleet, config(), now, state, missing_channels=("x",), scheduler_error="503")
    now += STEP
    fleet = [replace(node("n", 0.01, at=now), marks=fleet[0].marks), *healthy(40, now)]
    plan = once(fleet, config(), now, first.state, missing_channels=("x",), scheduler_error="503")
    assert plan.open_causes
    assert verbs(plan, "n") == ["release"]


def test_a_budget_in_memory_is_emptied_by_a_restart_and_the_marks_on_the_nodes_remember():
    fleet = [node(f"n{i}", 0.9 - i / 100) for i in range(6)] + healthy(90)
    plan = once(fleet, config())
    assert hard(plan) == {"n0", "n1", "n2", "n3"}
    fleet = carry_out(fleet, plan.actions, T0)
    soon = T0 + timedelta(minutes=10)
    later = T0 + 5 * HOUR  # by a clock that was ahead
    ahead = [replace(node, marks=replace(node.marks, hard_since=node.marks.hard_since and later)) for node in fleet]
    for known, state in ((fleet, plan.state), (fleet, PolicyState()), (ahead, PolicyState())):
        assert hard(once(known, config(), soon, state)) == set()
    assert hard(once(fleet, config(), T0 + HOUR, plan.state)) == {"n4", "n5"}


def test_a_lost_state_would_release_what_is_well_founded_and_keeps_it():
    settings = config(rise_after=2)
    fleet = [node("n", 0.9), *healthy(12)]
    first = once(fleet, settings)
    assert not hard(first), "with nothing remembered a tier must rise anew"
    now = T0 + STEP
    fleet = [node("n", 0.9, at=now), *healthy(12, now)]
    fleet = carry_out(fleet, once(fleet, settings, now, first.state).actions, now)
    assert fleet[0].marks.level is Level.DRAIN
    assert once(fleet, settings, now, PolicyState()).actions == ()


def test_a_restart_would_replay_a_stale_prediction_on_a_node_that_was_repaired():
    # NVSentinel#1280 replayed an old event and rebooted a healthy node under load.
    fleet = [node("n", 0.9), *healthy(12)]
    assert hard(once(fleet, config())) == {"n"}
    fleet[0] = replace(fleet[0], units=(replace(fleet[0].units[0], valid_from=T0 + HOUR),))
    assert once(fleet, config(), T0 + 2 * HOUR).actions == ()
    scored_since = replace(fleet[0].units[0], score=score(0.9, T0 + HOUR))
    assert hard(once([replace(fleet[0], units=(scored_since,)), *fleet[1:]], config(), T0 + 2 * HOUR)) == {"n"}
    fleet[0] = replace(fleet[0], units=(UnitView("another"),))
    assert once(fleet, config(), T0 + 2 * HOUR).actions == ()


@pytest.mark.parametrize("later", [0.0, None])
def test_an_expired_prediction_would_keep_its_taint_for_ever_and_does_not(later):
    fleet, state = marked()
    assert naive(fleet, T0 + timedelta(days=30)) == {"n"}
    now = T0 + 2 * STEP
    units = (UnitView("n-0", None if later is None else score(None, now)),)
    fleet = [replace(fleet[0], units=units), *healthy(40, now)]
    plan = once(fleet, config(), now, state)
    assert verbs(plan, "n") == ["release"]
    assert plan.actions[0].tier == "unknown"
    assert "the prediction on n-0 expired at 2026-03-01 12:00 UTC" in why(plan, "n")


@pytest.mark.parametrize(("fall_share", "fall_after", "flaps"), [(1.0, 1, True), (0.5, 1, False), (1.0, 2, False)])
def test_flapping_risks_would_taint_and_release_all_day_and_do_not(fall_share, fall_after, flaps):
    settings = config(hysteresis=HysteresisConfig(1, fall_after, fall_share))
    state, fleet, seen = PolicyState(), [node("n", 0.65), *healthy(12)], []
    for k in range(12):
        now, risk = T0 + k * STEP, 0.65 if k % 2 == 0 else 0.5
        fleet = [replace(node("n", risk, at=now), marks=fleet[0].marks), *healthy(12, now)]
        plan = once(fleet, settings, now, state)
        fleet, state = carry_out(fleet, plan.actions, now), plan.state
        seen += [verb for verb in verbs(plan, "n") if verb != "publish"]
    assert seen[:2] == ["swap", "drain"]
    assert bool(seen[2:]) is flaps


def test_a_node_that_a_person_returned_would_be_taken_again_and_is_left_alone_for_the_episode():
    fleet, state = marked()  # draino#17
    returned = [replace(fleet[0], marks=NO_MARKS), *fleet[1:]]
    assert naive(returned, T0) == {"n"}
    now = T0 + HOUR
    plan = once(returned, config(), now, state)
    assert verbs(plan, "n") == ["publish"]
    assert "not re-applied during this episode" in why(plan, "n")
    now = T0 + STEP
    still = [node("n", 0.95, at=now), *healthy(40, now)]
    assert not hard(once(still, config(), now, plan.state))
    # A new episode: two calm decisions, and a new risk.
    state = plan.state
    for k, risk in [(1, 0.01), (2, 0.01), (3, 0.9)]:
        now = T0 + k * STEP
        plan = once([node("n", risk, at=now), *healthy(40, now)], config(), now, state)
        state = plan.state
    assert hard(plan) == {"n"}


def test_a_person_is_overruled_by_a_new_fault_but_not_by_an_old_state_read_again():
    fleet, state = marked(0.9, facts=["recovery_action reset"])
    now = T0 + HOUR
    seen = replace(node("n", 0.9, facts=["recovery_action reset"]), marks=NO_MARKS)
    plan = once([seen, *fleet[1:]], config(), now, state)
    assert not hard(plan)
    now = T0 + 2 * HOUR
    read_again = replace(seen, units=node("n", 0.9, at=now, facts=["recovery_action reset"]).units)
    assert not hard(once([read_again, *fleet[1:]], config(), now, plan.state))
    new_fault = replace(seen, units=node("n", 0.9, at=now, facts=["xid 79"]).units)
    assert hard(once([new_fault, *fleet[1:]], config(), now, plan.state)) == {"n"}


def test_a_person_who_undoes_our_cordon_gets_the_node_back_whole_and_keeps_it():
    fleet, state = marked()
    plan = once([replace(fleet[0], marker_removed=True, uncordoned=True), *fleet[1:]], config(), T0 + HOUR, state)
    assert verbs(plan, "n") == ["release"]
    assert [action.to for action in plan.actions] == [Level.PUBLISH]
    assert plan.nodes["n"].reasons[0] == "an operator uncordoned the node: the other predrain markers are removed"
    free = carry_out(fleet, plan.actions, T0 + HOUR)
    assert not hard(once(free, config(), T0 + 2 * HOUR, plan.state))
    lost_state = once([node("n", 0.9, marker_removed=True), *healthy(12)], config())
    assert verbs(lost_state, "n") == ["publish"], "the adapter saw the person"


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"cordoned_by": "ann"}, "ann took it out of service"),
        ({"owner": "NVSentinel"}, "NVSentinel owns it"),
        ({"opt_out": "predrain.io/managed=false"}, "it opted out (predrain.io/managed=false)"),
        ({"readable": False}, "its state cannot be read"),
    ],
)
def test_what_is_not_ours_would_be_written_over_and_is_not(others, reason):
    fleet = [node("n", 0.99, facts=["xid 79"], **others), *healthy(12)]
    assert naive(fleet, T0) == {"n"}
    plan = once(fleet, config(free=True))
    assert set(verbs(plan, "n")) <= {"publish"}
    assert reason in why(plan, "n")


def test_a_hard_mark_on_a_foreign_node_is_given_back_and_not_exchanged_for_a_soft_one():
    fleet, state = marked()
    fleet[0] = replace(fleet[0], cordoned_by="ann")
    assert once(fleet, config(), T0, state).actions == ()
    plan = once(fleet, config(stage="soft"), T0, state)
    assert verbs(plan, "n") == ["release"]


def test_an_opt_out_takes_our_marks_off_and_an_unreadable_node_keeps_them():
    fleet, state = marked()
    assert verbs(once([replace(fleet[0], opt_out="managed=false"), *fleet[1:]], config(), T0, state), "n") == [
        "release"
    ]
    # Read as "no reason", the note "ADMIN SHUTDOWN" was written over and the node later put online (mej/nhc#134).
    late = T0 + timedelta(days=9)
    assert once([replace(fleet[0], readable=False), *fleet[1:]], config(), late, state).actions[:1] == ()


def test_one_bad_node_of_three_would_be_blocked_and_is_drained_but_never_the_second():
    # karpenter#2134: 20 % of three nodes is none.
    fleet = [node("a", 0.9), node("b", 0.8), node("c", 0.01)]
    plan = once(fleet, config())
    assert verbs(plan, "a") == ["swap", "drain", "publish"]
    assert list(plan.over_budget) == ["b"]
    fleet = carry_out(fleet, plan.actions, T0)
    assert not hard(once(fleet, config(), T0 + timedelta(days=0, hours=5), plan.state))


def test_a_one_node_cluster_is_never_emptied():
    assert list(once([node("only", 0.99)], config()).over_budget) == ["only"]


def test_an_api_server_that_lists_nothing_or_little_would_start_a_drain_of_what_is_left():
    full = once(healthy(40), config())
    little = [node("n", 0.9), *healthy(3)]
    assert hard(once(little, config())) == {"n"}
    plan = once(little, config(), T0, full.state)
    assert hard(plan) == set()
    assert "fell from 40 to 4" in why(plan, "n")


def test_an_old_reading_of_the_scheduler_leads_to_nothing_new_at_all():
    fleet = [node("n", 0.9), *healthy(12)]
    assert hard(once(fleet, config())) == {"n"}
    for others in ({"read_at": None}, {"read_at": T0 - HOUR}):
        assert once(fleet, config(), **others).actions == ()


def test_a_clock_that_jumps_ahead_releases_what_expired_and_one_that_goes_back_takes_no_new_node():
    fleet, state = marked()
    ahead = T0 + timedelta(days=3000)
    plan = once(fleet, config(), ahead, state)
    assert verbs(plan, "n") == ["release"]
    fleet = carry_out(fleet, plan.actions, ahead)
    back = [node("m", 0.9), *fleet]
    later = once(back, config(), T0, plan.state)
    assert hard(later) == set()
    assert any("the clock went back" in cause.message for cause in later.open_causes.values())
    # The breaker closes after its quiet time, and the slots booked in the far future do not count for years.
    settled = once(back, config(), T0 + 2 * HOUR, later.state)
    assert "m" in hard(settled)


def test_a_new_driver_would_make_the_old_model_drain_the_node_and_does_not_for_a_day():
    fleet = [node("n", 0.01, software="550"), *healthy(20)]
    plan = once(fleet, config())
    now = T0 + STEP
    fleet = [node("n", 0.9, at=now, software="560"), *healthy(20, now)]
    assert naive(fleet, now) == {"n"}
    changed = once(fleet, config(), now, plan.state)
    assert verbs(changed, "n") == ["avoid", "publish"]
    assert "its driver or exporter changed after the model was fitted" in why(changed, "n")
    sick = [node("n", 0.9, at=now, facts=["xid 79"], software="560"), *healthy(20, now)]
    assert hard(once(sick, config(), now, plan.state)) == {"n"}
    later = now + timedelta(hours=24)
    fleet = [node("n", 0.9, at=later, software="560"), *healthy(20, later)]
    assert hard(once(fleet, config(), later, changed.state)) == {"n"}


def test_a_sick_gpu_that_stops_answering_would_lose_its_taint_at_once_and_keeps_it_until_it_expires():
    # The management interface hangs on the sick GPU (DCGM#313): unknown is then a sign of the fault, not of health.
    fleet, state = marked(0.9, 0.01)
    at_once = config(hysteresis=HysteresisConfig(1, 1))
    now = T0 + STEP
    silent = replace(node("n", None, 0.01, at=now), marks=fleet[0].marks)
    assert naive([silent], now) == set()
    plan = once([silent, *healthy(40, now)], at_once, now, state)
    assert plan.actions == ()
    now = T0 + 2 * STEP
    silent = replace(node("n", None, 0.01, at=now), marks=fleet[0].marks)
    assert verbs(once([silent, *healthy(40, now)], at_once, now, plan.state), "n") == ["release"]


def test_no_limits_and_a_closed_breaker_are_what_these_tests_would_fail_under():
    fleet = [node(f"n{i:02}", 0.9) for i in range(10)] + healthy(90)
    free = replace(config(), budget=BudgetConfig((), ()))
    assert hard(once(fleet, free)) == naive(fleet, T0)


def test_a_node_that_is_given_back_makes_room_from_the_next_decision_on_and_not_when_the_same_is_asked_again():
    one = config(budget=BudgetConfig((DisruptionBudget("fleet", max_unavailable=1),), ()))
    fleet = [node("a", 0.9), *healthy(40)]
    first = once(fleet, one)
    fleet, state, later = carry_out(fleet, first.actions, T0), carried_out(first.state, first.actions), T0 + 3 * STEP
    fleet = [replace(node("a", None, at=later), marks=fleet[0].marks), node("b", 0.9, at=later), *healthy(40, later)]
    plan = once(fleet, one, later, state)
    assert [action.verb for action in plan.actions if action.node == "a"] == ["release"]
    fleet = carry_out(fleet, plan.actions, later)
    for state in (plan.state, carried_out(plan.state, plan.actions)):
        assert once(fleet, one, later, state).actions == ()
        assert hard(once(fleet, one, later + timedelta(minutes=1), state)) == {"b"}
