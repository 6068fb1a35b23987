"""Records as JSON, the stored state, marks on a node."""

import json
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.episodes import Alert, AlertOutcome
from policy.fleet import Level, NodeView, Signals
from policy.plan import Action, PolicyState
from scheduler.ports.codec import object_of, plain_of
from scheduler.ports.node_object import Keys, NodeObject, Taint, after, marks_of, view_of, writes_between
from scheduler.ports.stored_state import packed, unpacked
from tests.policy.decide_world import HOUR, T0, config, node, once

KEYS = Keys()


def action(verb, to, tier="high", ends=T0 + 12 * HOUR):
    return Action(verb, "n", tier, to, 0.9, None if verb == "release" else ends, ("why",))


FORWARD = [
    action("publish", Level.PUBLISH),
    action("avoid", Level.AVOID),
    action("swap", Level.SWAP),
    action("drain", Level.DRAIN),
]
RELEASES = [action("release", level) for level in (Level.NONE, Level.PUBLISH, Level.AVOID, Level.SWAP)]


def test_every_setting_and_signal_comes_back_from_json():
    alert = Alert("g", "c/g", "high", T0, timedelta(hours=24), held_out=True)
    signals = Signals(T0, missing_channels=("x",), outcomes=(AlertOutcome(alert, "right", "w"),), reset_breaker_at=T0)
    given_ = config("g", rise_after=2)
    for value in (signals, given_, node("n", 0.5, None, facts=["xid 79"])):
        assert object_of(type(value), json.loads(json.dumps(plain_of(value))), "x") == value


def test_the_state_comes_back_and_a_damaged_one_is_refused():
    state = once([node("n", 0.9), node("m", 0.4)], config()).state
    text = packed("predrain-state 1", state, "the state", "forget")
    assert unpacked("predrain-state 1", PolicyState, text, "the state") == state
    for damaged in (text[:-8], text[:40] + text[41:], "", "predrain-state 2 x y", text + "!"):
        with pytest.raises(ValueError, match="the state"):
            unpacked("predrain-state 1", PolicyState, damaged, "the state")


@given(
    steps=st.lists(st.sampled_from([*FORWARD, *RELEASES]), max_size=8), more=st.lists(st.text("ab", min_size=1)),
)  # fmt: skip
def test_actions_change_only_what_is_ours_stand_afterwards_and_may_be_repeated(steps, more):
    theirs = NodeObject("n", dict.fromkeys(more, "x"), {"note": "y"}, (Taint("team", "a", "NoSchedule"),))
    target, level = theirs, Level.NONE
    for step in steps:
        then = after(step, target, KEYS, T0)
        level = min(level, step.to) if step.verb == "release" else max(level, step.to)
        assert after(step, then, KEYS, T0) == then
        assert writes_between(then, then) == ()
        assert (then.taints[0], then.annotations["note"]) == (theirs.taints[0], "y")
        assert marks_of(then, KEYS, T0).level <= level
        assert not view_of(then, NodeView("n", "c", "g"), KEYS, T0).undone
        target = then
    assert after(RELEASES[0], target, KEYS, T0) == theirs


def test_a_mark_that_is_gone_before_its_time_was_taken_off_by_somebody_and_afterwards_nobody_knows():
    target = NodeObject("n")
    for step in FORWARD:
        target = after(step, target, KEYS, T0)
    base = NodeView("n", "c", "g")
    assert marks_of(target, KEYS, T0).hard_since == T0
    assert not view_of(target, base, KEYS, T0 + HOUR).undone
    gone = replace(target, taints=())
    assert view_of(gone, base, KEYS, T0 + HOUR).undone
    assert not view_of(gone, base, KEYS, T0 + 12 * HOUR).undone
    assert not view_of(after(RELEASES[0], gone, KEYS, T0), base, KEYS, T0).undone
