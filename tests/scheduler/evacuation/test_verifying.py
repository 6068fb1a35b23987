"""The diagnostic on an empty node, and what its result leads to."""

from dataclasses import replace
from typing import Any

from policy.fleet import Fact, Level
from scheduler.evacuation.settings import VerificationSettings
from scheduler.ports.readings import Switches
from scheduler.ports.risks import ReportedFacts
from scheduler.ports.workloads import DiagnosticResult
from tests.policy.decide_world import HOUR, STEP
from tests.scheduler.evacuation.emptying_cluster import FAST, MINUTE, EmptyingCluster, draining, findings, workload


def diagnosed(*result: Any) -> EmptyingCluster:
    """Node n1 is empty, and its diagnostic comes to this."""
    cluster = draining()
    cluster.leave("w1-uid")
    cluster.later()
    cluster.verification.results["n1"] = DiagnosticResult(*result)
    return cluster


def test_a_node_that_failed_is_tested_again_after_a_repair_and_comes_back_by_itself():
    cluster = diagnosed("failed", "memory")
    cluster.later()
    cluster.clock.move(2 * STEP)
    cluster.scored(**dict.fromkeys(cluster.names, 0.01))
    cluster.scheduler.edit("n1", lambda node: replace(node, boot_id=None))
    for _ in range(3):
        cluster.later()
    assert len(cluster.verification.started) == 1, "nothing about it has changed, that is known"
    cluster.scheduler.edit("n1", lambda node: replace(node, boot_id="after the repair"))
    cluster.verification.results["n1"] = DiagnosticResult("passed")
    for _ in range(5):
        cluster.later()
    assert len(cluster.verification.started) == 2
    assert cluster.levels() == {}


def test_a_node_that_failed_is_tested_again_each_day_and_stays_out_as_long_as_it_fails():
    cluster = diagnosed("failed", "memory")
    cluster.later()
    for _ in range(30):
        cluster.later(12 * 60)
        cluster.scored(**dict.fromkeys(cluster.names, 0.01))
        cluster.later()
        assert cluster.level("n1") is Level.DRAIN, "longer than the rule on one failed diagnostic holds"
    assert [f[2] for f in findings(cluster) if f[1] == "escalated"] == ["the diagnostic failed: memory"]


def test_an_inconclusive_diagnostic_is_tried_again_then_reported_and_frees_nothing():
    cluster = diagnosed("inconclusive", "aborted")
    for _ in range(5):
        cluster.later()
    assert len(cluster.verification.started) == 2
    assert cluster.level("n1") is Level.DRAIN
    assert cluster.progress().nodes["n1"].phase == "inconclusive"
    assert [f[2] for f in findings(cluster) if f[1] == "escalated"] == ["the diagnostic inconclusive: aborted"]


def test_a_diagnostic_without_a_result_is_inconclusive_after_a_while():
    cluster = draining(
        settings=replace(FAST, verification=VerificationSettings(method="scheduler", timeout=10 * MINUTE, attempts=1))
    )
    cluster.leave("w1-uid")
    cluster.later()
    cluster.later(9)
    assert cluster.progress().nodes["n1"].phase == "verifying"
    cluster.later(2)
    assert cluster.progress().nodes["n1"].phase == "inconclusive"
    assert len(cluster.verification.dropped) == 1


def test_what_came_onto_an_empty_node_is_reported_and_moved_before_the_diagnostic_begins():
    cluster = draining()
    cluster.acknowledge("w1-uid")
    cluster.later()
    cluster.leave("w1-uid")
    cluster.verification.faults.plan("refused", "start")
    cluster.later()
    late = workload("late", "n1", uid="late-uid", checkpoint=None)
    cluster.workloads.running[late.uid] = late
    assert ("hold", "held", "no longer empty: late") in [
        (step.verb, step.outcome, step.message) for step in cluster.later().work
    ]
    cluster.later()
    assert cluster.evicted() == ["w1-uid", "late-uid"]
    assert cluster.verification.started == {}


def test_a_diagnostic_is_not_begun_while_something_runs_and_dropped_where_the_mark_goes():
    cluster = draining()
    cluster.leave("w1-uid")
    on_node = cluster.workloads.on_node

    def somebody_comes(node):
        result = on_node(node)
        if node == "n1" and not result:
            cluster.workloads.running["new"] = workload("new", "n1", uid="new")
        return result

    cluster.workloads.on_node = somebody_comes
    cluster.later()
    assert cluster.verification.started == {}
    cluster.workloads.on_node = on_node
    cluster.leave("new")
    cluster.later()
    cluster.later()
    assert len(cluster.verification.started) == 1
    cluster.scheduler.set_switches(Switches(release_all=True))
    cluster.later()
    assert cluster.levels() == {}
    assert cluster.verification.dropped == list(cluster.verification.started)


def test_the_jobs_of_a_node_that_passed_lately_are_not_moved_again_by_the_model_alone():
    cluster = diagnosed("passed")
    cluster.later()
    cluster.later()
    assert cluster.levels() == {}
    cluster.workloads.running["back"] = workload("back", "n1", uid="back", checkpoint=None)
    cluster.clock.move(HOUR)
    cluster.scored(n1=0.95)
    cluster.round()
    assert cluster.level("n1") is Level.DRAIN
    for _ in range(3):
        report = cluster.later()
    assert cluster.evicted() == []
    assert "it passed a diagnostic at" in report.work[0].message
    cluster.facts.facts["n1-0"] = ReportedFacts((Fact("xid 79", cluster.clock.now()),))
    cluster.later()
    assert cluster.evicted() == ["back"], "a fault that it reports since is something else"


def test_an_empty_node_that_passed_lately_is_tested_again_when_that_has_passed_and_nobody_is_told_meanwhile():
    cluster = diagnosed("passed")
    cluster.later()
    cluster.later()
    cluster.clock.move(HOUR)
    for _ in range(13):
        cluster.clock.move(HOUR)
        cluster.scored(n1=0.95)
        cluster.round()
    assert len(cluster.verification.started) == 2
    assert not [f for f in findings(cluster) if f[1] == "escalated"]
