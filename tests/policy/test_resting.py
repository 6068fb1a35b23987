"""Nodes at rest as planned are no failures, and no capacity that stands in for others."""

from dataclasses import replace
from datetime import timedelta

import pytest

from policy.breaker import BreakerConfig
from policy.budget import BudgetConfig, DisruptionBudget
from policy.fleet import Marks
from policy.plan import PolicyState
from tests.policy.decide_world import HOUR, T0, carry_out, config, healthy, node, once, verbs, why

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
    assert "1 of 10 nodes are out of service, 1 may be" in why(plan, "r1")
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
        stripped = [replace(each, undone=True, marked_at=T0) for each in nodes[:3]]
        plan = once([*stripped, *nodes[3:]], settings, now, state)
        state = plan.state
        assert {action.verb for action in plan.actions} <= {"publish"}
        assert all("within 60 s, on 3 nodes: another controller or an admission webhook" in why(plan, f"r{i}")
                   for i in range(3))  # fmt: skip
    by_hand = [replace(nodes[0], undone=True, marked_at=T0 - 2 * HOUR), *nodes[1:]]
    assert "an operator or another tool removed" in why(once(by_hand, settings, T0, PolicyState()), "r0")


def test_what_an_operator_should_look_at_is_reported_of_calm_nodes_too():
    noted = replace(node("n", 0.01), notice="the taint was edited")
    assert "n: the taint was edited" in once([noted, *healthy(3)], config()).reasons
    many = [replace(each, notice="x") for each in healthy(30)]
    assert [reason for reason in once(many, config()).reasons if "more nodes" in reason] == [
        "and 10 more nodes with this notice"
    ]


def test_each_node_that_is_taken_out_at_rest_makes_the_scope_one_larger():
    nodes = [*healthy(18), replace(node("a", 0.9), resting=ASLEEP), replace(node("b", 0.9), resting=ASLEEP)]
    plan = once(nodes, config("g", breaker=BreakerConfig(max_risky=1.0), **ONE_IN_TEN))
    assert [verbs(plan, name)[0] for name in ("a", "b")] == ["swap", "swap"]
    assert [(use.nodes, use.lost, use.allowed) for use in plan.uses] == [(20, 2, 2)]
