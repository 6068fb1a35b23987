"""Random histories of decisions alone: rate limits, stages and probes, which those of a cluster seldom reach."""

import re
from dataclasses import replace
from datetime import datetime, timedelta
from random import Random

import pytest

from policy.budget import BudgetConfig, DisruptionBudget, RateLimit
from policy.decide import carried_out, decide
from policy.fleet import Level
from scheduler.ports.stored_state import state_json
from tests.histories import COUNT, SEED, blocks, play_all
from tests.policy.decide_world import HOUR, carry_out, score
from tests.policy.fleet_history import REACHED, FleetHistory

DECISIONS = COUNT * 3 // 10


@pytest.mark.parametrize("block", blocks(DECISIONS))
def test_whatever_happens_no_floor_is_broken(block: range) -> None:
    play_all(FleetHistory, block, REACHED)


def test_nothing_waits_for_longer_because_the_clock_was_ahead():
    found = set()
    for number in range(COUNT // 100):
        random = Random(f"{SEED} {number} ahead")
        world = FleetHistory(random)
        for name, _ in FleetHistory.drawn(random):
            world.happen(name)
            world.check()
        ahead = world.now + random.choice([1, 5, 300]) * HOUR
        fresh = [replace(unit, score=score(random.random(), ahead)) for node in world.nodes for unit in node.units]
        nodes = [replace(node, units=tuple(fresh[2 * k : 2 * k + 2])) for k, node in enumerate(world.nodes)]
        nodes[0] = replace(nodes[0], software="570", marker_removed=True)
        signals = replace(world.signals(), read_at=ahead, release_all=random.random() < 0.2)
        plan = decide(nodes[:-1], world.state, signals, world.config, ahead)
        nodes = carry_out(nodes, plan.actions, ahead)
        found |= {name for name, _ in _after(world.now, state_json(carried_out(plan.state, plan.actions)))}
        back = decide(nodes, carried_out(plan.state, plan.actions), world.signals(), world.config, world.now)
        assert _after(world.now, state_json(back.state)) == [], (SEED, number)
    assert found >= {"at", "last_at", "episode", "marker_removed_at", "changed_at", "absent_since"}


def _after(now: datetime, value: object, name: str = "") -> list[tuple[str, datetime]]:
    """Remembered instants after ``now``, except those that end something, or belong to evidence."""
    if isinstance(value, dict):
        return [late for key, item in value.items() if key != "support" for late in _after(now, item, key)]
    if isinstance(value, list):
        return [late for item in value for late in _after(now, item, name)]
    ends = name in ("expires_at", "counted_until", "seen_until")
    if ends or not isinstance(value, str) or not re.match(r"\d{4}-\d\d-\d\dT", value):
        return []
    at = datetime.fromisoformat(value)
    return [(name, at)] if at > now else []


NO_ROOM = BudgetConfig((DisruptionBudget("fleet", max_unavailable=0),), (RateLimit("cluster", 0, HOUR),))


def test_a_release_that_is_due_is_never_blocked() -> None:
    marked_in = 0
    for number in range(COUNT // 100):
        random = Random(f"{SEED} {number} released")
        world = FleetHistory(random)
        for name, _ in FleetHistory.drawn(random):
            world.happen(name)
            world.check()
        kill, drift, budget, stage, unread = (random.random() < 0.5 for _ in range(5))
        world.nodes = [replace(node, readable=True, unwritable=None) for node in world.nodes]
        world.now += timedelta(days=10)
        settings = replace(world.config, budget=NO_ROOM) if budget else world.config
        if stage:
            settings = replace(settings, stages=replace(settings.stages, pinned={"c/g0": "shadow", "c/g1": "soft"}))
        signals = replace(world.signals(), kill=kill, missing_channels=("fleet",) if drift else ())
        if unread:
            signals = replace(signals, read_at=None, scheduler_error="timeout")
        plan = decide(world.nodes, world.state, signals, settings, world.now)
        marked = {node.name for node in world.nodes if node.marks.level}
        marked_in += bool(marked)
        assert {action.node for action in plan.actions if action.verb == "release"} == marked, (SEED, number)
        after = carry_out(world.nodes, plan.actions, world.now)
        assert all(node.marks.level is Level.NONE for node in after), (SEED, number)
    assert marked_in > COUNT // 400
