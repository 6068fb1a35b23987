"""What keeps a step of a plan from being carried out: a step before it, the node, and the ledger."""

from dataclasses import replace
from typing import Any

from policy.fleet import Level
from scheduler.controller.executor import settled_by_reading
from scheduler.controller.releases import release_plan
from scheduler.ports.errors import LedgerError
from tests.policy.decide_world import STEP
from tests.scheduler.cluster import Cluster, marked


def drained() -> Cluster:
    cluster = marked(3, n1=0.9)
    assert cluster.level("n1") is Level.DRAIN
    return cluster


def test_a_node_that_becomes_unreadable_before_its_release_is_not_written() -> None:
    cluster = drained()
    cluster.clock.move(2 * STEP)
    read = cluster.scheduler.revalidate

    def unreadable(node: str) -> Any:
        reading = read(node)
        return replace(reading, view=replace(reading.view, readable=False))

    cluster.scheduler.revalidate = unreadable
    came = {(step.outcome, step.message) for step in cluster.round().steps if step.action.verb == "release"}
    assert came == {("skipped", "its state cannot be read now")}
    assert cluster.level("n1") is Level.DRAIN


def test_after_a_release_that_is_refused_the_node_gets_no_other_marker() -> None:
    cluster = drained()
    for refused in (False, True):
        cluster.clock.move(STEP)
        cluster.scored(n1=0.2)
        if refused:
            cluster.scheduler.faults.plan("refused", "apply")
        report = cluster.round()
    came = [(step.action.verb, step.outcome) for step in report.steps if step.action.verb != "publish"]
    assert came == [("release", "failed"), ("avoid", "skipped")]
    assert [taint.effect for taint in cluster.scheduler.nodes["n1"].object.taints] == ["NoSchedule"]


def test_a_release_whose_decision_cannot_be_recorded_is_no_call_of_an_evacuation() -> None:
    cluster = drained()

    def full(*_: Any) -> int:
        raise LedgerError("full")

    for call in ("begin", "begin_releases"):
        setattr(cluster.ledger, call, full)
    cluster.clock.move(2 * STEP)
    cluster.round()
    assert cluster.levels() == {}
    assert cluster.ledger._read("SELECT id FROM calls WHERE round IS NULL") == []


def test_a_ledger_that_takes_longer_than_the_lease_stops_no_release() -> None:
    cluster = drained()
    call = cluster.ledger.call

    def slow(intent: Any) -> int:
        cluster.clock.move(cluster.settings.lease)
        return call(intent)

    cluster.ledger.call = slow
    cluster.clock.move(2 * STEP)
    assert [step.outcome for step in cluster.round().steps] == ["done"]
    assert cluster.levels() == {}


def test_a_release_without_an_answer_is_not_confirmed_by_a_node_that_is_gone_or_unreadable() -> None:
    cluster = Cluster(3)
    (action,), now = release_plan(["n1"], cluster.clock.now()).actions, cluster.clock.now()
    readings = [cluster.scheduler.revalidate("n1")]
    cluster.change("n1", readable=False)
    readings += [cluster.scheduler.revalidate("n1"), None]
    settled = [settled_by_reading(action, reading, now, "cut") for reading in readings]
    assert [(item.kind, item.confirmed) for item in settled] == [("found", True), ("not_found", False), ("gone", False)]
