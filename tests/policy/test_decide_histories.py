"""Many random histories of small fleets, as fast as they go: three in four of all; `make histories` draws others.

Blocks of them run side by side, and a failure names the history that broke. A history has a few nodes, and begins with
whatever marks and risks; what takes a further decision to check is checked now and then.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from random import Random

import pytest

from policy.budget import BudgetConfig, DisruptionBudget, RateLimit
from policy.decide import decide
from policy.fleet import Level, Marks, NodeView, Published
from policy.ladder.cost_benefit import CostBenefitConfig
from policy.plan import Plan
from scheduler.ports.stored_state import state_from_json, state_json
from tests.histories import COUNT, SEED
from tests.policy.decide_world import HOUR, STEP, T0, carry_out, score
from tests.policy.fleet_history import EVENTS, World, check

DECISIONS = COUNT * 3 // 4
BLOCK = 1000

REACHED = (
    "nodes are out of service", "nodes taken out in", "the breaker is open", "expired at", "was repaired",
    "took it out of service", "owns it", "it opted out", "no other state", "drain postponed",
    "not re-applied during this episode", "the kill switch is set", "XID 79", "stays high", "releases included",
    "edited", "idle at a risk of", "exceeds the cost of a checkpoint",
)  # fmt: skip
"""Words of what every block must come to, so that it does not pass for want of anything to refuse."""


def begin(random: Random) -> World:
    """Begin with whatever marks and risks, nothing being remembered."""
    world = World(
        random.choice(("shadow", "soft", "hard", "hard")), random.randint(1, 2), random.choice(("any", "worst")),
        random.randint(3, 6),
    )  # fmt: skip
    if random.random() < 0.5:  # then a drain may wait for the end of its jobs
        world.config, ends = replace(world.config, cost_benefit=CostBenefitConfig()), T0 + random.random() * 24 * HOUR
        world.nodes = [
            replace(node, jobs=tuple(replace(job, gpus=64, ends_at=ends) for job in node.jobs)) for node in world.nodes
        ]
    marked = random.choice((0.0, 0.0, 0.5))
    world.nodes = [_begun(node, random, random.random() < marked) for node in world.nodes]
    world.starts = [
        (node.marks.hard_since.timestamp(), node.name) for node in world.nodes if node.marks.hard_since is not None
    ]
    if random.random() < 0.5:  # then some checkpoints pay from the beginning
        saved = T0 - random.random() * 12 * HOUR
        world.nodes = [
            replace(node, jobs=tuple(replace(job, checkpointed_at=saved) for job in node.jobs)) for node in world.nodes
        ]
    return world


def _begun(node: NodeView, random: Random, marked: bool) -> NodeView:
    risk = random.random() ** 3
    marks = node.marks
    if marked:
        tainted = random.random() < 0.5
        since = T0 - random.random() * 48 * HOUR if tainted else None
        marks = Marks(Published("high", T0 + HOUR), not tainted, tainted, tainted and random.random() < 0.5, since)
    first = replace(node.units[0], score=score(risk, T0, STEP))
    return replace(node, units=(first, *node.units[1:]), marks=marks)


def now_and_then(random: Random) -> Callable[[], bool]:
    """Draw whether to look at one thing more."""
    return lambda: random.random() < 0.1


def words(plan: Plan) -> str:
    """All reasons of a plan."""
    decided = [reason for decision in plan.nodes.values() for reason in decision.reasons]
    decided += [reason for request in plan.requests for reason in request.reasons]
    return "; ".join((*plan.reasons, *plan.over_budget.values(), *decided))


def played(random: Random, number: int) -> Iterator[tuple[World, Plan]]:
    """Play a history, and give the fleet and the plan of each decision."""
    world = begin(random)
    for step in range(2 + min(int(random.expovariate(1 / 7)), 58)):
        # the marks of the beginning are seen once before a person may take one off, as a decision would
        for kind in ("score",) * random.randrange(3) + (random.choice(EVENTS),) if step else ():
            world.step((kind, random.randrange(len(world.nodes)), random.random()))
        try:
            plan = check(world, now_and_then(random))
        except AssertionError as error:
            raise AssertionError(f"SEED={SEED!r}: history {number}, step {step}") from error
        yield world, plan


@pytest.mark.parametrize("block", range(-(-DECISIONS // BLOCK)))
def test_whatever_happens_no_floor_is_broken(block: int) -> None:
    numbers = range(block * BLOCK, min((block + 1) * BLOCK, DECISIONS))
    missing = {*REACHED}
    for number in numbers:
        for world, plan in played(Random(f"{SEED} {number}"), number):  # noqa: B007 - the last world is used below
            if missing:
                reasons = words(plan)
                missing = {reason for reason in missing if reason not in reasons}
        assert state_from_json(json.loads(json.dumps(state_json(world.state)))) == world.state, number
    assert not missing or len(numbers) < BLOCK


NO_ROOM = BudgetConfig((DisruptionBudget("fleet", max_unavailable=0),), (RateLimit("cluster", 0, HOUR),))


def test_a_release_that_is_due_is_never_blocked() -> None:
    marked_in = 0
    for number in range(0, DECISIONS, 80):
        random = Random(f"{SEED} {number} released")
        *_, (world, _) = played(random, number)
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
