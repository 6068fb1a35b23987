"""A checkpoint that cannot be asked for is one answer among a round's, and never holds a deadline up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.controller.metrics import RoundMetrics
from scheduler.ports.workloads import HookReply
from tests.scheduler.evacuation.emptying_cluster import EmptyingCluster, Recording, draining


@pytest.mark.parametrize("kind", ["timeout", "refused"])
def test_a_webhook_that_cannot_be_reached_would_fail_whole_rounds_and_is_one_answer(kind):
    hook = Recording(HookReply(kind, "w1.example: refused"))
    cluster = EmptyingCluster(hooks={"webhook": hook})
    offer = replace(cluster.workloads.running["w1-uid"].checkpoint, means="webhook")
    cluster.runs("w1-uid", checkpoint=offer)
    cluster.scored(n1=0.9)
    first = cluster.round()
    assert not first.failed
    (step,) = first.work
    assert (step.verb, step.came_to) == ("checkpoint", {"timeout": "unknown", "refused": "failed"}[kind])
    assert step.words == "w1.example: refused; it is asked again until 2026-03-01 00:05:00 UTC, then moved all the same"
    numbers = RoundMetrics()
    numbers.note(first, 0.1)
    assert f'predrain_act_work_total{{came_to="{step.came_to}",verb="checkpoint"}} 1.0' in numbers.exposition()
    assert 'predrain_act_rounds_total{result="failed"} 0.0' in numbers.exposition()
    cluster.later(4)
    assert cluster.evicted() == [], "the deadline holds"
    moved = cluster.later(2)
    assert cluster.evicted() == ["w1-uid"]
    assert not moved.failed


def test_an_eviction_that_is_refused_fails_the_round():
    cluster = draining()
    cluster.workloads.faults.plan("refused", "evict")
    assert cluster.later(6).failed
