"""The controller against a real control plane: from a risk to an empty node and back, past people, races and cuts."""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from foundation.kubernetes.credentials import connect
from policy.breaker import BreakerConfig
from policy.budget import BudgetConfig
from policy.config import PolicyConfig
from policy.ladder.probes import ProbeConfig
from policy.node_tier.hysteresis import HysteresisConfig
from policy.stages import StagesConfig
from policy.tiers import TierThresholds
from scheduler.controller.controller import Controller
from scheduler.controller.facts import VerifiedFacts
from scheduler.controller.settings import ControllerSettings
from scheduler.evacuation.engine import Evacuation
from scheduler.evacuation.settings import EvacuationSettings, VerificationSettings
from scheduler.kubernetes.diagnostic_job import KubernetesVerification, read_manifest
from scheduler.kubernetes.scheduler import KubernetesScheduler
from scheduler.kubernetes.settings import KubernetesSettings
from scheduler.kubernetes.workloads import KubernetesWorkloads
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.clock import SystemClock
from scheduler.ports.report import RoundReport
from scheduler.ports.risks import MemoryFacts, MemoryRisks
from scheduler.ports.workloads import CheckpointAsk, Fence
from tests.scheduler.cluster import risks_of
from tests.system.kubernetes_cluster import (
    DIAGNOSTIC,
    PODS,
    TEAM,
    KubernetesCluster,
    condition,
    effects,
    kubernetes_cluster_in,
    passed,
)
from tests.waiting import wait

pytestmark = pytest.mark.system

NODES = ["n0", "n1", "n2", "n3"]
LEASE = timedelta(minutes=2)
POLICY = PolicyConfig(
    TierThresholds(0.1, 0.3, 0.6),
    hysteresis=HysteresisConfig(rise_after=1, fall_after=1),
    stages=StagesConfig(pinned={"kubernetes/none": "hard"}),
    budget=BudgetConfig((), ()),
    breaker=BreakerConfig(max_risky=1.0, jump=100.0),
)
LABEL = "gke.google.com/recommended-to-run-large-training-workload"
SETTINGS = KubernetesSettings(avoid_label=f"{LABEL}=False")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesCluster]:
    with kubernetes_cluster_in(tmp_path_factory.mktemp("kubernetes"), NODES) as running:
        yield running


@pytest.fixture(autouse=True)
def tidy(cluster: KubernetesCluster) -> Iterator[None]:
    yield
    cluster.clear()


class Replica:
    """A controller with a connection, a lease and a ledger of its own."""

    def __init__(
        self,
        cluster: KubernetesCluster,
        name: str,
        user: str = "actuator",
        *,
        diagnostic: bool = False,
        cordon: bool = False,
        lease: timedelta = LEASE,
        policy: PolicyConfig = POLICY,
        risks: Any = None,
    ) -> None:
        self.cluster = cluster
        clock, self.ledger = SystemClock(), SqliteLedger(None)
        self.scheduler = KubernetesScheduler(
            connect(cluster.server.kubeconfig(user)), clock, replace(SETTINGS, cordon=cordon), horizon=policy.horizon
        )
        workloads = KubernetesWorkloads(self.scheduler)
        self.settings = EvacuationSettings(
            enabled=True, retry_initial_delay=timedelta(seconds=0.1), retry_max_delay=timedelta(seconds=1),
            verification=VerificationSettings(method="scheduler" if diagnostic else "none"),
        )  # fmt: skip
        verification = KubernetesVerification(self.scheduler, read_manifest(DIAGNOSTIC)) if diagnostic else None
        evacuation = Evacuation(self.scheduler, workloads, clock, self.settings, {}, verification)
        self.risks = risks or MemoryRisks()
        facts = VerifiedFacts(MemoryFacts(), evacuation.results)
        self.controller = Controller(
            self.scheduler, self.risks, facts, self.ledger, clock, policy, ControllerSettings(lease=lease),
            holder=name, code="1.0", evacuation=evacuation,
        )  # fmt: skip
        if risks is None:
            self.scored()

    def scored(self, **risks: float) -> None:
        """A new decision time."""
        self.risks.risks = risks_of(dict.fromkeys(NODES, 0.01) | risks, datetime.now(UTC))

    def round(self) -> RoundReport:
        return self.controller.round()


def outcome(report: RoundReport) -> list[tuple[str, str, str]]:
    return [(step.action.verb, step.action.node, step.outcome) for step in report.steps]


def until(replica: Replica, so: Any, within_s: float = 120.0) -> None:
    """Do rounds until something is so."""
    deadline = time.monotonic() + within_s
    while not so():
        assert time.monotonic() < deadline, replica.round()
        report = replica.round()
        assert not report.errors, report.errors
        time.sleep(0.1)


def test_from_a_risk_to_an_empty_node_and_back(cluster: KubernetesCluster) -> None:
    cluster.deploy("train", 3, 8, {"predrain.io/checkpoint": "annotation"})
    pods = cluster.running("train", 3)
    cluster.budget("train", 3)
    sick = pods[0]["spec"]["nodeName"]
    (spare,) = set(NODES) - {pod["spec"]["nodeName"] for pod in pods}
    cluster.change(sick, taints=[TEAM])
    one = Replica(cluster, "one", diagnostic=True)
    one.scored(**{sick: 0.45})
    assert outcome(one.round()) == [("avoid", sick, "done"), ("publish", sick, "already")]
    assert (effects(cluster.node(sick)), condition(cluster.node(sick))) == (["PreferNoSchedule"], "False")
    one.scored(**{sick: 0.9})
    assert outcome(one.round()) == [("swap", sick, "done"), ("drain", sick, "done"), ("publish", sick, "already")]
    node = cluster.node(sick)
    assert effects(node) == ["PreferNoSchedule", "NoSchedule"]
    assert (condition(node), node["metadata"]["labels"]["predrain.io/risk-tier"]) == ("True", "high")
    assert node["spec"]["taints"][0] == TEAM

    victim = f"{PODS}/{pods[0]['metadata']['name']}"
    one.round()
    asked = cluster.server.request("GET", victim)[1]["metadata"]["annotations"]["predrain.io/checkpoint-requested"]
    assert cluster.on(sick) == [pods[0]["metadata"]["name"]], "nothing moves before its checkpoint is written"
    done = {"metadata": {"annotations": {"predrain.io/checkpoint-acknowledged": json.loads(asked)["key"]}}}
    cluster.server.request("PATCH", victim, done)
    work = wait(lambda: [step for step in one.round().work if step.outcome == "blocked"])
    assert "disruption budget" in work[0].message
    node = cluster.node(sick)
    assert effects(node) == ["PreferNoSchedule", "NoSchedule"], "a node behind a budget stays tainted"
    assert "deletionTimestamp" not in cluster.server.request("GET", victim)[1]["metadata"], "and nothing is forced"

    cluster.drop_budget("train")
    until(one, lambda: not cluster.on(sick))
    moved = {pod["spec"]["nodeName"] for pod in cluster.running("train", 3)}
    assert moved == set(NODES) - {sick}
    assert spare in moved

    # its risk is as high as it was: the diagnostic that passed is what frees it
    cluster.kubelets.ends = passed
    until(one, lambda: not effects(cluster.node(sick)))
    node = cluster.node(sick)
    assert node["spec"]["taints"] == [TEAM]
    kept = {**node["metadata"].get("labels", {}), **node["metadata"].get("annotations", {})}
    assert not [key for key in kept if key.startswith("predrain.io/")]
    assert condition(node) == "Unknown", "what was scored before the diagnostic says nothing any more"
    assert outcome(one.round()) == []


def test_a_cordon_of_ours_is_known_by_who_wrote_it_and_a_persons_stays(cluster: KubernetesCluster) -> None:
    replica = Replica(cluster, "p1", cordon=True)
    replica.scored(n1=0.9)
    assert [note for note in replica.round().notes if "does not report field managers" in note], "as this server begins"
    assert "unschedulable" not in cluster.node("n1")["spec"]
    replica.scored(n1=0.01)
    replica.round()
    for name in ("n1", "n2"):  # from the first apply on it tells; servers from 1.22 on always do
        cluster.tracked(name)
    replica.scored(n1=0.9, n2=0.9)
    replica.round()
    for name in ("n1", "n2"):
        assert cluster.node(name)["spec"]["unschedulable"] is True
        reading = replica.scheduler.revalidate(name)
        assert (reading.view.cordoned_by, reading.view.marker_removed) == (None, False)
    assert replica.round().steps == [], "it is our own, and stands"
    cluster.change("n2", unschedulable=None)
    cluster.change("n2", unschedulable=True)  # a person's own, while our annotation is still there
    replica.scored()
    replica.round()
    assert "unschedulable" not in cluster.node("n1")["spec"]
    theirs = cluster.node("n2")
    assert theirs["spec"]["unschedulable"] is True
    assert effects(theirs) == []
    assert [key for key in theirs["metadata"].get("annotations", {}) if key.startswith("predrain.io/")] == []


def test_another_replica_goes_on_where_the_leader_was_killed(cluster: KubernetesCluster) -> None:
    cluster.deploy("train", 1, 8)
    (pod,) = cluster.running("train", 1)
    cluster.budget("train", 1)
    sick = pod["spec"]["nodeName"]
    one, two = (Replica(cluster, name, lease=timedelta(seconds=15)) for name in ("one", "two"))
    for replica in (one, two):
        replica.scored(**{sick: 0.9})
    report = one.round()
    assert ("drain", sick, "done") in outcome(report)
    assert not two.round().active
    wait(lambda: two.round().active)  # one was killed, and gives nothing back
    cluster.drop_budget("train")
    until(two, lambda: not cluster.on(sick))
    assert not one.round().active
    assert one.controller.scheduler.leadership.blocked("one", datetime.max.replace(tzinfo=UTC)) is not None


def test_a_racing_writer_loses_nothing_and_neither_do_we(cluster: KubernetesCluster) -> None:
    stop, written = threading.Event(), [0]

    def race() -> None:
        while not stop.is_set():
            node = cluster.node("n0")
            taints = [taint for taint in node["spec"].get("taints", []) if taint["key"] != "other.example/turn"]
            turn = {"key": "other.example/turn", "value": str(written[0] + 1), "effect": "PreferNoSchedule"}
            node["spec"]["taints"] = [*taints, turn]
            # as tools do that write whole nodes by version
            status, _ = cluster.server.request("PUT", "/api/v1/nodes/n0", node, check=False)
            written[0] += status == 200
            time.sleep(0.01)

    racer = threading.Thread(target=race)
    one = Replica(cluster, "one")
    racer.start()
    try:
        one.scored(n0=0.9)
        wait(lambda: written[0] > 3)
        until_marked = time.monotonic() + 120
        while not effects(cluster.node("n0")) and time.monotonic() < until_marked:
            one.round()
        marked = effects(cluster.node("n0"))
        one.scored()
        until_free = time.monotonic() + 120
        while effects(cluster.node("n0")) and time.monotonic() < until_free:
            one.round()
    finally:
        stop.set()
        racer.join(10)
    assert marked == ["NoSchedule"]
    assert [(taint["key"], taint["value"]) for taint in cluster.node("n0")["spec"]["taints"]] == [
        ("other.example/turn", str(written[0]))
    ]


def test_a_publisher_publishes_and_can_do_no_more(cluster: KubernetesCluster) -> None:
    one = Replica(cluster, "one", "publisher")
    one.scored(n0=0.9)
    steps = {(step.action.verb, step.outcome) for step in one.round().steps}
    assert ("publish", "done") in steps
    assert ("swap", "failed") in steps
    node = cluster.node("n0")
    assert (effects(node), condition(node), node["metadata"]["labels"][LABEL]) == ([], "True", "False")
    pods = cluster.server.request("GET", PODS, user="publisher", check=False)[0]
    assert pods == 200
    for method, path in (("DELETE", f"{PODS}/x"), ("POST", f"{PODS}/x/eviction"), ("PATCH", "/api/v1/nodes/n0"),
                         ("GET", "/api/v1/namespaces/predrain/secrets")):  # fmt: skip
        assert cluster.server.request(method, path, {}, user="publisher", check=False)[0] == 403
    for method, path in (("DELETE", f"{PODS}/x"), ("GET", "/api/v1/secrets"), ("DELETE", "/api/v1/nodes/n0")):
        assert cluster.server.request(method, path, {}, user="actuator", check=False)[0] == 403


def test_pods_are_followed_by_a_watch_which_a_cut_does_not_end(cluster: KubernetesCluster) -> None:
    client, listed = connect(cluster.server.kubeconfig("actuator")), [0]
    list_all = client.list_all

    def counted(path: str, *given: Any) -> Any:
        listed[0] += path == "/api/v1/pods"
        return list_all(path, *given)

    client.list_all = counted
    scheduler = KubernetesScheduler(client, SystemClock(), SETTINGS, follows=True)

    def gpus() -> int:
        return sum(job.gpus for node in scheduler.read_fleet().nodes for job in node.view.jobs)

    def heard() -> bool:
        before = listed[0]
        scheduler.read_fleet()
        return listed[0] == before

    assert (gpus(), listed) == (0, [1])
    cluster.deploy("train", 1, 8)
    wait(lambda: gpus() == 8)
    assert listed == [1], "a pod that starts is seen without a listing"
    cluster.server.kill_api()
    cluster.server.start_api()
    cluster.server.request("DELETE", "/apis/apps/v1/namespaces/default/deployments/train")
    wait(lambda: gpus() == 0)
    wait(heard)
    before = listed[0]
    cluster.deploy("again", 1, 8)
    wait(lambda: gpus() == 8)
    assert listed[0] == before, "the watch was healed"
    scheduler.drop_lease("one")
    assert not heard(), "whoever gave the lease back follows nothing"
    scheduler.drop_lease("one")


def test_an_eviction_or_request_never_meets_a_pod_that_came_later(cluster: KubernetesCluster) -> None:
    cluster.deploy("train", 1, 8)
    (pod,) = cluster.running("train", 1)
    one = Replica(cluster, "one")
    end = one.scheduler.hold_lease("one", LEASE)
    assert end is not None
    pods = KubernetesWorkloads(one.scheduler)
    (workload,) = pods.on_node(pod["spec"]["nodeName"])
    before = replace(workload, uid="00000000-0000-0000-0000-000000000000")
    assert pods.evict(before, Fence("one", end)).kind == "conflict"
    ask = CheckpointAsk("a" * 32, datetime.now(UTC), "x")
    assert pods.ask_checkpoint(before, ask, Fence("one", end)).kind == "conflict"
    body = {"metadata": {"uid": before.uid, "annotations": {"x": "y"}}}
    path = f"{PODS}/{pod['metadata']['name']}"
    assert cluster.server.request("PATCH", path, body, check=False)[0] in (409, 422), "the server itself refuses it"
    assert pods.ask_checkpoint(workload, ask, Fence("one", end)).kind == "done"
    assert pods.evict(workload, Fence("one", end)).kind == "done"


def test_a_job_preempts_a_probe_within_the_delay_that_probes_are_weighed_with(cluster: KubernetesCluster) -> None:
    one, manifest = Replica(cluster, "one"), read_manifest(DIAGNOSTIC)
    manifest["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 3600
    probes = KubernetesVerification(one.scheduler, manifest)
    end = one.scheduler.hold_lease("one", LEASE)
    assert end is not None
    assert probes.start("n1", ("GPU-a",), "a" * 32, Fence("one", end), None, probe=True).kind == "done"
    wait(lambda: "its pod is Running" in probes.result("n1", "a" * 32).message)
    began = time.monotonic()
    here = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [here]}}
    cluster.pod("job", 8, affinity={"nodeAffinity": required})
    wait(lambda: "n1" in [pod["spec"]["nodeName"] for pod in cluster.pods()])
    waited_s = time.monotonic() - began
    assert waited_s < ProbeConfig().preemption.total_seconds(), f"the job waited {waited_s:.1f} s"
    wait(lambda: "its pod is Running" not in probes.result("n1", "a" * 32).message)
    assert probes.result("n1", "a" * 32).kind in ("running", "inconclusive"), "a preempted probe has no result"
