"""Reasons are told in the order in which they decided: a release never begins with why the tier once rose."""

from dataclasses import replace

import pytest

from policy.fleet import UnitView
from tests.policy.decide_world import HOUR, STEP, T0, carry_out, config, healthy, node, once, score


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
    assert reasons[1] == "its tier is high: from clear to high: a risk of 90.0% at 2026-03-01 00:00 UTC"
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
        "from clear to high: a risk of 90.0% at 2026-03-01 00:00 UTC",
        "group c/g is in stage soft",
    )
