"""Probes of idle nodes and checkpoints of running jobs, by the real controller over the cluster in memory."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from policy.episodes import OutcomeEvent
from policy.fleet import JobView, Level
from policy.ladder.cost_benefit import CostBenefitConfig
from policy.ladder.probes import ProbeConfig
from policy.ladder.rungs import RUNGS
from scheduler.controller.facts import NodeHistories
from scheduler.ledger.reader import LedgerReader
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.readings import Switches
from scheduler.ports.workloads import DiagnosticResult
from tests.policy.decide_world import HOUR, STEP, config
from tests.scheduler.evacuation.emptying_cluster import EmptyingCluster, findings, work, workload

PROBES = ProbeConfig(max_concurrent=1)
IDLE = ("n5", "n6", "n7")


def idle_cluster(ledger: SqliteLedger | None = None, **others: Any) -> EmptyingCluster:
    """Nodes n5 to n7 have no job; the others have."""
    settings: dict[str, Any] = {"rungs": RUNGS, "stage": "soft", "free": True, "probes": PROBES, **others}
    cluster = EmptyingCluster(policy=config("g", **settings), ledger=ledger)
    for name in IDLE:
        cluster.change(name, jobs=())
    return cluster


def probed(cluster: EmptyingCluster) -> list[str]:
    return [node for key, (node, _) in cluster.verification.started.items() if key in cluster.verification.probes]


def test_the_riskiest_idle_node_is_probed_first_and_keeps_its_place_in_service():
    cluster = idle_cluster()
    cluster.scored(n4=0.25, n6=0.05, n7=0.08)
    report = cluster.round()
    assert not report.failed, report.errors
    assert probed(cluster) == ["n7"], "n4 has a job, n6 is less at risk, and one probe may run"
    assert not cluster.level("n7").hard
    cluster.later()
    assert probed(cluster) == ["n7"]
    cluster.verification.results["n7"] = DiagnosticResult("passed")
    cluster.later()
    cluster.later()
    assert probed(cluster) == ["n7", "n6"]
    assert cluster.workloads.evicted == []


def test_a_failed_probe_is_a_hard_fact_that_drains_the_node(tmp_path: Path):
    cluster = idle_cluster(SqliteLedger(tmp_path / "ledger"), stage="hard")
    cluster.scored(n7=0.08)
    cluster.round()
    ended_at = cluster.clock.now() + timedelta(minutes=15)
    cluster.verification.results["n7"] = DiagnosticResult("failed", "memory", at=ended_at)
    cluster.later(25)
    assert ("n7", "probed", "failed: memory") in findings(cluster)
    reader = LedgerReader(tmp_path / "ledger")
    (result,) = reader.results()
    assert result["idle_gpu_hours"] == 0.5, "two GPUs until it ended, not until it was read"
    assert [(call["node"], call["decision"]) for call in reader.actions(verb="probe")] == [("n7", None)]
    cluster.later()
    assert cluster.level("n7") is Level.DRAIN


def test_a_passed_probe_lowers_the_risk_for_a_while_and_is_counted_apart():
    cluster = idle_cluster()
    cluster.scored(n7=0.4)
    cluster.round()
    assert cluster.level("n7") is Level.AVOID
    cluster.verification.results["n7"] = DiagnosticResult("passed")
    cluster.later()
    cluster.clock.move(STEP)
    cluster.scored(n7=0.4)
    cluster.round()
    lower = cluster.policy.probes.mean_found
    assert cluster.controller.round().plan.nodes["n7"].risk == pytest.approx(
        1 - (1 - 0.4 * (1 - lower) / (1 - 0.4 * lower)) * (1 - 0.01 * (1 - lower) / (1 - 0.01 * lower))
    )
    (result,) = cluster.progress().results
    assert (result.kind, result.rung) == ("passed", "probe")
    cluster.clock.move(4 * timedelta(days=1))
    cluster.scored(n7=0.4)
    cluster.round()
    assert cluster.controller.round().plan.nodes["n7"].risk == pytest.approx(1 - 0.6 * 0.99)


def test_a_probe_that_is_preempted_or_times_out_is_neither_passed_nor_failed():
    for outcome in (DiagnosticResult("inconclusive", "preempted"), DiagnosticResult("missing"), None):
        cluster = idle_cluster(probes=replace(PROBES, every=timedelta(days=2)))
        cluster.scored(n7=0.08)
        cluster.round()
        if outcome is not None:
            cluster.verification.results["n7"] = outcome
        cluster.later(31)
        (result,) = cluster.progress().results
        assert result.kind == "inconclusive"
        assert "n7" not in cluster.progress().nodes
        facts = cluster.controller.facts.read(cluster.clock.now())
        assert "n7-0" not in facts


def test_a_node_is_probed_again_after_a_day_or_once_its_risk_has_doubled():
    cluster = idle_cluster()
    for name in IDLE[:2]:
        cluster.change(name, jobs=(JobView("theirs", 8),))
    cluster.verification.results["n7"] = DiagnosticResult("inconclusive")
    cluster.scored(n7=0.05)
    for _ in range(3):
        cluster.later()
    assert probed(cluster) == ["n7"]
    cluster.clock.move(STEP)
    cluster.scored(n7=0.09)
    cluster.round()
    assert probed(cluster) == ["n7"]
    cluster.clock.move(STEP)
    cluster.scored(n7=0.12)
    cluster.round()
    cluster.later()
    assert probed(cluster) == ["n7", "n7"]
    cluster.clock.move(timedelta(days=1))
    cluster.scored(n7=0.05)
    cluster.round()
    assert probed(cluster) == ["n7", "n7", "n7"]


STOPS = {
    "a job wants the node": lambda c: c.change("n7", jobs=(JobView("late", 8),)),
    "kill": lambda c: setattr(c.scheduler, "switches", Switches(kill=True)),
    "release all": lambda c: setattr(c.scheduler, "switches", Switches(release_all=True)),
    "a person cordons it": lambda c: c.change("n7", cordoned_by="ann"),
    "it opts out": lambda c: c.change("n7", opt_out="label predrain.io/ignore"),
    "another tool owns it": lambda c: c.change("n7", owner="NVSentinel"),
    "the score expires": lambda c: c.clock.move(3 * STEP),
    "the stage falls": lambda c: setattr(c.controller, "policy", config("g", rungs=RUNGS, stage="shadow")),
    "the rung is taken away": lambda c: setattr(c.controller, "policy", config("g", stage="soft")),
}  # fmt: skip


def test_a_running_probe_is_ended_by_a_round_that_decides_nothing(monkeypatch: pytest.MonkeyPatch):
    cluster = idle_cluster()
    cluster.scored(n7=0.08)
    cluster.round()

    def fails(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("scheduler.controller.controller.decide", fails)
    assert "broken" in str(cluster.later().errors)
    assert cluster.verification.dropped == list(cluster.verification.probes)
    assert cluster.progress().nodes == {}


@pytest.mark.parametrize("stop", STOPS)
def test_a_running_probe_is_ended_when_its_ground_is_gone(stop: str):
    cluster = idle_cluster()
    cluster.scored(n7=0.08)
    cluster.round()
    STOPS[stop](cluster)
    cluster.later()
    assert cluster.verification.dropped == list(cluster.verification.probes)
    assert cluster.progress().nodes == {}


@pytest.mark.parametrize(
    "others",
    [{"rungs": ("publish", "avoid", "checkpoint", "swap", "drain")}, {"stage": "shadow"}, {}],
    ids=["rung", "stage", "default"],
)
def test_nothing_is_probed_unless_the_rung_is_named_and_earned(others: dict[str, Any]):
    cluster = idle_cluster(**others) if others else EmptyingCluster(policy=config("g", stage="soft", free=True))
    for name in IDLE:
        cluster.change(name, jobs=())
    cluster.scored(n7=0.5)
    cluster.round()
    assert probed(cluster) == []


IN_BETWEEN = {
    **{name: STOPS[name] for name in ("kill", "release all", "a person cordons it")},
    "a job": lambda c: c.workloads.running.update(late=workload("late", "n7", uid="late")),
    "a removed marker": lambda c: c.change("n7", marker_removed=True),
    "an uncordon": lambda c: c.change("n7", uncordoned=True),
    "a reboot": lambda c: c.change("n7", unwritable="a reboot"),
    "a failure": lambda c: c.change("n7", down=True),
    "the end of its score": lambda c: c.clock.move(timedelta(seconds=5)),
}


@pytest.mark.parametrize("what", IN_BETWEEN)
def test_what_happens_after_the_decision_keeps_the_probe_from_beginning(what: str):
    cluster = idle_cluster()
    read = cluster.scheduler.revalidate

    def then_happens(name: str):
        reading = read(name)
        cluster.scheduler.revalidate = read
        IN_BETWEEN[what](cluster)
        return reading

    cluster.scheduler.revalidate = then_happens
    cluster.scored(n7=0.08, duration=timedelta(seconds=5))
    cluster.round()
    assert probed(cluster) == []


def gang(cluster: EmptyingCluster, **others: Any) -> None:
    """Node n1 runs a job that can write a checkpoint, and wrote its last an hour ago."""
    job = JobView("w1", 64, cluster.clock.now() - 9 * HOUR, cluster.clock.now() - HOUR, can_checkpoint=True)
    cluster.change("n1", jobs=(replace(job, **others),))
    cluster.runs("w1-uid", job=replace(job, **others))


def test_a_job_is_asked_once_for_a_checkpoint_where_its_work_exceeds_the_cost_over_the_risk_and_is_not_moved():
    cluster = idle_cluster(cost_benefit=CostBenefitConfig())
    gang(cluster)
    cluster.scored(n1=0.99)  # an hour of 24 ahead: one in six
    report = cluster.round()
    assert ("checkpoint", "waiting", "w1") in work(report)
    cluster.acknowledge("w1-uid")
    cluster.later()
    assert ("n1", "acknowledged", "the checkpoint is written") in findings(cluster)
    for _ in range(3):
        cluster.clock.move(HOUR)
        cluster.scored(n1=0.99)
        cluster.round()
    calls = cluster.ledger._read("SELECT verb FROM calls WHERE verb = 'checkpoint'")
    assert len(calls) == 1
    assert cluster.evicted() == []
    assert cluster.progress().nodes == {}


@pytest.mark.parametrize(
    ("risk", "of_job", "of_node"),
    [
        (0.3, {}, {}),  # too little work at this risk
        (0.99, {"can_checkpoint": False}, {}),
        (0.99, {"checkpointed_at": None, "started_at": None}, {}),
        *((0.99, {}, state) for state in ({"opt_out": "label"}, {"owner": "NVSentinel"}, {"cordoned_by": "ann"})),
    ],
)
def test_no_checkpoint_is_asked_for_without_ground_or_on_a_node_that_is_not_ours(risk, of_job, of_node):
    cluster = idle_cluster()
    gang(cluster, **of_job)
    cluster.change("n1", **of_node)
    cluster.scored(n1=risk)
    cluster.round()
    assert cluster.workloads.asked == {}


@pytest.mark.parametrize("answers", [False, True], ids=["never", "between the last round and its deadline"])
def test_a_job_is_left_alone_and_whether_it_answered_is_reported_once(answers: bool):
    cluster = idle_cluster()
    gang(cluster)
    cluster.scored(n1=0.99)
    cluster.round()
    if answers:
        cluster.acknowledge("w1-uid")
    for minutes in (30, 3, 3):
        cluster.later(minutes)
    kinds = [kind for node, kind, _ in findings(cluster) if node == "n1"]
    assert kinds == ["acknowledged" if answers else "unanswered"]
    assert cluster.evicted() == []


@pytest.mark.parametrize(("fails", "counts"), [(True, {"right": 1}), (False, {"wrong": 1})])
def test_a_pass_that_a_failure_followed_is_counted_and_is_no_alert(fails: bool, counts: dict[str, int]):
    cluster = idle_cluster()
    cluster.scored(n7=0.08)
    cluster.round()
    cluster.verification.results["n7"] = DiagnosticResult("passed")
    cluster.later()
    at = cluster.clock.now() + HOUR
    known = {"n7-1": [OutcomeEvent("incident", at)]} if fails else {}
    facts = cluster.controller.facts
    cluster.controller.facts = replace(facts, history=lambda _: NodeHistories(known, {"n7-1": "n7"}))
    cluster.controller.__post_init__()
    cluster.clock.move(4 * timedelta(days=1))
    cluster.scored()
    report = cluster.round()
    assert report.probe_passes == counts
    assert report.plan.stages["c/g"].stage == "soft"
