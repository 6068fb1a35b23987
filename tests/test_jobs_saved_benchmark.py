"""benchmarks/replayed_cluster.py counts what a hand would count, on a fleet of ten nodes with one failure."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from benchmarks.replayed_cluster import HOUR, Assumed, Failure, Fleet, Job, Place, ReplayedCluster
from policy.cost_benefit import CostBenefitConfig
from policy.fleet import Score, UnitView
from scheduler.ports.risks import MemoryFacts, Risks
from tests.policy.decide_world import THRESHOLDS, config
from tests.scheduler.cluster import MODEL

T0 = datetime(2026, 1, 1, tzinfo=UTC)
STEP = 6 * HOUR
NODES = [f"n{i}" for i in range(10)]
FAILS = Failure("n3-gpu", "n3", T0 + 20 * HOUR, T0 + 30 * HOUR)
TRAINING = Job("train-3", "n3", 8, T0 - HOUR, FAILS.at, T0 + 18 * HOUR)
NEXT = Job("train-3b", "n3", 8, T0 + 32 * HOUR, T0 + 40 * HOUR, None)
OTHER = Job("serve-5", "n5", 8, T0 - HOUR, T0 + 100 * HOUR, None)


def fleet(**others) -> Fleet:
    made = Fleet(
        (TRAINING, NEXT, OTHER),
        (FAILS,),
        tuple(Place(f"{name}-gpu", name, T0 - 100 * HOUR, None) for name in NODES),
        dict.fromkeys(NODES, "g"),
        {name: f"rack-{name}" for name in NODES},
        T0,
        T0 + 48 * HOUR,
    )
    return replace(made, **others)


class Foretold:
    """n3 is at high risk from the second decision on; a score holds for 12 hours."""

    def __init__(self, clock) -> None:
        self._clock = clock
        self._held: dict[datetime, Risks] = {}

    def read(self) -> Risks:
        at = T0 + ((self._clock.now() - T0) // STEP) * STEP
        if at not in self._held:
            risk = 0.9 if T0 + STEP <= at < FAILS.at else 0.01
            nodes = {
                name: (UnitView(f"{name}-gpu", Score(risk if name == "n3" else 0.01, at, at + 2 * STEP)),)
                for name in NODES
            }
            self._held[at] = Risks(nodes, at, MODEL, T0 - HOUR)
        return self._held[at]


def counted(stage: str, *, job_nodes: int = 1, sighted: bool | None = None, **others):
    policy = replace(
        config(stage=stage), thresholds=THRESHOLDS, cost_benefit=CostBenefitConfig(always=True, may_wait=False),
        stages=replace(config().stages, pinned={"cluster/g": stage}),
    )  # fmt: skip
    cluster = ReplayedCluster(
        fleet(**others).with_jobs_of(job_nodes), Foretold, MemoryFacts(), policy, Assumed(), 72 * HOUR,
        None if sighted is None else 2 * HOUR, sighted=bool(sighted),
    )  # fmt: skip
    return cluster.run(T0 + k * STEP + timedelta(minutes=10) for k in range(8))


def test_where_nobody_acts_the_failure_hits_the_job_and_costs_its_work_and_a_restart():
    count = counted("shadow")
    assert (count.failures, count.hits, count.moved, count.drains) == (1, 1, 0, 0)
    assert count.lost == pytest.approx(8 * 2.25)
    assert (count.spent, count.idle) == (0, 0)


def test_a_job_that_was_moved_before_is_not_hit_and_what_that_costs_is_counted():
    count = counted("hard")
    assert (count.hits, count.moved, count.drains, count.unneeded, count.most_out) == (0, 1, 1, 0, 1)
    assert count.lost == 0
    assert count.spent == pytest.approx(8 * (5 + 15) / 60)
    # of one GPU: from the drain at 6:10 to the failure at 20:00, and from the repair to the second calm decision
    assert count.idle == pytest.approx(13 + 50 / 60 + 10 / 60)


def test_a_drain_before_no_failure_is_unneeded_and_its_node_lay_idle():
    count = counted("hard", failures=())
    assert (count.failures, count.hits, count.drains, count.unneeded) == (0, 0, 1, 1)


def test_a_job_on_sixteen_nodes_loses_sixteen_times_as_much_and_costs_as_much_more_to_move():
    assert counted("shadow", job_nodes=16).lost == pytest.approx(16 * 8 * 2.25)
    moved = counted("hard", job_nodes=16)
    assert (moved.hits, moved.moved) == (0, 1)
    assert moved.spent == pytest.approx(16 * 8 * (5 + 15) / 60)
    assert moved.idle == counted("hard").idle, "its other nodes stand elsewhere"


def test_a_diagnostic_gives_a_sound_node_back_at_once_and_a_perfect_one_keeps_a_sick_one():
    sound = counted("hard", sighted=False, failures=())
    assert sound == counted("hard", sighted=True, failures=())
    assert sound.idle < counted("hard", failures=()).idle, "not until its risk is calm"
    blind, perfect = counted("hard", sighted=False), counted("hard", sighted=True)
    assert blind.drains > 1, "given back, and drained again by the next scores"
    assert (perfect.drains, perfect.hits, perfect.unneeded) == (1, 0, 0)
    assert perfect.idle > blind.idle
