"""Random histories of decisions about small fleets: three in four of all histories, as fast as they go."""

from dataclasses import replace
from datetime import timedelta
from random import Random

import pytest

from policy.budget import BudgetConfig, DisruptionBudget, RateLimit
from policy.decide import decide
from policy.fleet import Level
from tests.histories import COUNT, SEED, blocks, play_all
from tests.policy.decide_world import HOUR, carry_out
from tests.policy.fleet_history import REACHED, FleetHistory

DECISIONS = COUNT * 3 // 4


@pytest.mark.parametrize("block", blocks(DECISIONS))
def test_whatever_happens_no_floor_is_broken(block: range) -> None:
    play_all(FleetHistory, block, REACHED)


NO_ROOM = BudgetConfig((DisruptionBudget("fleet", max_unavailable=0),), (RateLimit("cluster", 0, HOUR),))


def test_a_release_that_is_due_is_never_blocked() -> None:
    marked_in = 0
    for number in range(0, DECISIONS, 80):
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
    assert marked_in > DECISIONS // 80 // 4
