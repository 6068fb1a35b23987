"""Which scores count for which node."""

from __future__ import annotations

from dataclasses import replace

from policy.fleet import Level
from tests.policy.decide_world import HOUR, STEP, T0
from tests.scheduler.cluster import Cluster


def without_names(cluster):
    """A scheduler that does not know which GPUs are in its nodes."""
    for name in cluster.names:
        cluster.change(name, units=())


def test_scores_of_the_machine_before_would_drain_another_one_under_its_name_and_do_not():
    cluster = Cluster()
    without_names(cluster)
    cluster.scored(n1=0.9, n4=0.9)
    cluster.clock.move(HOUR)
    cluster.change("n1", since=T0 + HOUR / 2)  # deleted, and created again
    report = cluster.round()
    assert cluster.level("n4") is Level.DRAINED
    assert cluster.level("n1") is Level.NONE
    assert report.plan is not None
    cluster.clock.move(STEP)
    cluster.scored(n1=0.9)
    cluster.round()
    assert cluster.level("n1") is Level.DRAINED, "what was scored on it since counts"


def test_a_gpu_that_the_scheduler_names_is_the_same_one_in_whatever_node():
    cluster = Cluster()
    cluster.scored(n1=0.9)
    cluster.clock.move(HOUR)
    cluster.change("n1", since=T0 + HOUR / 2)
    cluster.round()
    assert cluster.level("n1") is Level.DRAINED


def test_a_node_created_anew_between_the_decision_and_its_mark_gets_none():
    cluster = Cluster()
    without_names(cluster)
    cluster.scored(n1=0.9)
    read = cluster.scheduler.revalidate

    def created_anew(node):
        cluster.change(node, since=cluster.clock.now() + HOUR)
        return read(node)

    cluster.scheduler.revalidate = created_anew
    report = cluster.round()
    assert cluster.levels() == {}
    assert "its scores or facts changed since the decision" in {step.message for step in report.steps}


def test_names_that_differ_between_scores_and_scheduler_are_reported():
    cluster = Cluster(nodes=5)
    without_names(cluster)
    assert cluster.round().notes == []
    risks = cluster.risks.risks
    cluster.risks.risks = replace(risks, nodes={f"{name}.local": units for name, units in risks.nodes.items()})
    assert cluster.round().notes == [
        "scores of n0.local, n1.local, n2.local and 2 more are of no node here: names must be the same in both",
        "nothing was scored on n0, n1, n2 and 2 more: neither counted nor acted on",
    ]
