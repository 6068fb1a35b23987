"""Random histories of a fleet: what must hold at every step, whatever happens."""

import json
from dataclasses import replace
from datetime import timedelta

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policy.budget import BudgetConfig, RateLimit
from policy.budget import DisruptionBudget as Budget
from policy.decide import decide
from policy.fleet import Level
from scheduler.ports.stored_state import state_from_json, state_json
from tests.policy.decide_world import HOUR, carry_out
from tests.policy.fleet_history import EVENTS, NODES, World, check

STEPS = st.lists(
    st.tuples(st.sampled_from(EVENTS), st.integers(0, NODES - 1), st.floats(0, 1, width=16)), min_size=8, max_size=60
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    stage=st.sampled_from(["shadow", "soft", "hard", "hard", "hard"]), rise_after=st.integers(1, 2),
    basis=st.sampled_from(["any", "worst"]), steps=STEPS,
)  # fmt: skip
def test_floors_hold_nothing_foreign_is_touched_and_nothing_stands_on_expired_evidence(stage, rise_after, basis, steps):
    world = World(stage, rise_after, basis)
    for step in steps:
        world.step(step)
        check(world)
        if stage == "shadow":
            assert all(node.marks.level is Level.NONE for node in world.nodes)
        if stage == "soft":
            assert not any(node.marks.level.hard for node in world.nodes)
    assert state_from_json(json.loads(json.dumps(state_json(world.state)))) == world.state


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS, blocks=st.sets(st.sampled_from(["kill", "drift", "budget", "stage", "unread"])))
def test_a_release_that_is_due_is_never_blocked(steps, blocks):
    world = World("hard", 1, "any")
    for step in steps:
        world.step(step)
        check(world)
    world.nodes = [replace(node, readable=True, unwritable=None) for node in world.nodes]
    world.now += 10 * timedelta(days=1)
    settings_ = world.config
    if "budget" in blocks:
        settings_ = replace(
            settings_, budget=BudgetConfig((Budget("fleet", max_unavailable=0),), (RateLimit("cluster", 0, HOUR),))
        )
    if "stage" in blocks:
        settings_ = replace(settings_, stages=replace(settings_.stages, pinned={"c/g0": "shadow", "c/g1": "soft"}))
    heard = replace(world.signals(), kill="kill" in blocks, missing_channels=("fleet",) if "drift" in blocks else ())
    if "unread" in blocks:
        heard = replace(heard, read_at=None, scheduler_error="timeout")
    plan = decide(world.nodes, world.state, heard, settings_, world.now)
    marked = {node.name for node in world.nodes if node.marks.level}
    assert {action.node for action in plan.actions if action.verb == "release"} == marked
    assert all(node.marks.level is Level.NONE for node in carry_out(world.nodes, plan.actions, world.now))
