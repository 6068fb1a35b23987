"""Which evictions end the work of a pod for good: retries and policies of Jobs, JobSets, Volcano, MPI, PyTorch."""

import pytest

from foundation.kubernetes.client import KubernetesClient
from scheduler.kubernetes.api import ApiServer, CachedReads
from scheduler.kubernetes.restarts import RestartCheck
from tests.policy.decide_world import HOUR, T0
from tests.processes import ROOT
from tests.scheduler.kubernetes.api_world import Raw


@pytest.fixture
def restarts(cluster: KubernetesClient) -> RestartCheck:
    return RestartCheck(CachedReads(ApiServer(cluster)), lambda: T0)


def codes(operator: str, *values: int) -> Raw:
    return {"action": "FailJob", "onExitCodes": {"operator": operator, "values": list(values)}}


def on(reason: str) -> Raw:
    return {"action": "FailJobSet", "onJobFailureReasons": [reason]}


ANY_RESTART = {"action": "RestartJobSetAndIgnoreMaxRestarts"}
IGNORED = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}


@pytest.mark.parametrize(
    ("job", "lost"),
    [
        ({"backoffLimit": 0}, True),
        ({"backoffLimit": 0, "podFailurePolicy": {"rules": [IGNORED]}}, False),
        ({"backoffLimit": 0, "podFailurePolicy": {"rules": [{**IGNORED, "action": "FailJob"}]}}, True),
        ({"backoffLimit": 9, "podFailurePolicy": {"rules": [{**IGNORED, "action": "FailJob"}]}}, True),
        ({"backoffLimit": 9, "podFailurePolicy": {"rules": [{**IGNORED, "action": "FailIndex"}, IGNORED]}}, True),
        ({"backoffLimit": 0, "podFailurePolicy": {"rules": [IGNORED, {**IGNORED, "action": "FailJob"}]}}, False),
        ({"backoffLimit": 9, "podFailurePolicy": {"rules": [{**IGNORED, "action": "Count"}]}}, False),
        ({"podFailurePolicy": {"rules": [codes("In", 1, 143), IGNORED]}}, True),
        ({"podFailurePolicy": {"rules": [codes("In", 1, 42), IGNORED]}}, False),
        ({"podFailurePolicy": {"rules": [codes("NotIn", 3), IGNORED]}}, True),
        ({"podFailurePolicy": {"rules": [codes("NotIn", 137, 143), IGNORED]}}, False),
        ({"backoffLimit": 2}, False),
        ({"backoffLimit": 2, "failed": 2}, True),
        ({}, False),
        ({"failed": 6}, True),
        ({"backoffLimitPerIndex": 1}, False),
        ({"backoffLimitPerIndex": 1, "failures": "1"}, True),
        ({"backoffLimit": 0, "owner": "AppWrapper"}, False),
        ({"backoffLimit": 0, "owner": "JobSet", "restarts": (3, 0)}, False),
        ({"backoffLimit": 0, "owner": "JobSet", "restarts": (3, 3)}, True),
        ({"backoffLimit": 0, "owner": "JobSet", "restarts": (None, None)}, True),
        ({"backoffLimit": 0, "owner": "JobSet"}, True),  # it cannot be read
        ({"backoffLimit": 1, "owner": "JobSet"}, False),
        ({"backoffLimit": 0, "owner": "JobSet", "restarts": (3, 3), "counted": 1}, False),
        ({"backoffLimit": 0, "owner": "JobSet", "restarts": (3, 0), "rules": [{"action": "FailJobSet"}]}, True),
        ({"backoffLimit": 0, "owner": "JobSet", "restarts": (0, 0), "rules": [ANY_RESTART]}, False),
        ({"backoffLimit": 0, "owner": "JobSet", "restarts": (3, 0), "rules": [on("PodFailurePolicy")]}, False),
        ({"podFailurePolicy": {"rules": [codes("In", 143)]}, "owner": "JobSet", "restarts": (3, 0),
          "rules": [on("PodFailurePolicy")]}, True),
        ({"backoffLimit": 0, "owner": "JobSet", "restarts": (3, 0),
          "rules": [{"action": "FailJobSet", "targetReplicatedJobs": ["leader"]}]}, False),
        ({"backoffLimit": 0, "owner": "JobSet", "restarts": (0, 0),
          "rules": [{**ANY_RESTART, "onJobFailureMessagePatterns": ["maintenance"]}]}, True),
        ({"backoffLimit": 0, "owner": "CronJob"}, True),
        ({"backoffLimit": 0, "owner": "MPIJob"}, True),
        ({"backoffLimit": 0, "owner": "RayJob"}, True),
        ({"backoffLimit": "many"}, True),
        ({"activeDeadlineSeconds": 4 * 3600}, True),  # of which 1 h is left, and it has run for 2 h
        ({"activeDeadlineSeconds": 4 * 3600, "podFailurePolicy": {"rules": [IGNORED]}}, True),
        ({"activeDeadlineSeconds": 4 * 3600, "owner": "JobSet", "restarts": (3, 0)}, False),
        ({"activeDeadlineSeconds": 6 * 3600}, False),
        # restarted for the deadline, which is not why it would fail first
        ({"activeDeadlineSeconds": 4 * 3600, "backoffLimit": 0, "owner": "JobSet", "restarts": (0, 0), "rules": [
            {"action": "RestartJobSetAndIgnoreMaxRestarts", "onJobFailureReasons": ["DeadlineExceeded"]}]}, True),
    ],
)  # fmt: skip
def test_a_job_that_would_fail_for_good_by_an_eviction_keeps_its_pod(restarts, world, job, lost):
    job = dict(job)
    status = {"failed": job.pop("failed", None), "startTime": (T0 - 3 * HOUR).isoformat()}
    above = [{"kind": job.pop("owner"), "name": "x", "controller": True}] if "owner" in job else []
    failures, counts = job.pop("failures", None), job.pop("restarts", None)
    rules, counted = job.pop("rules", []), job.pop("counted", None)
    if counts is not None:
        whole = {"metadata": {"name": "x"}, "spec": {"failurePolicy": {"maxRestarts": counts[0], "rules": rules}}}
        towards = {} if counted is None else {"restartsCountTowardsMax": counted}
        whole = {**whole, "status": {"restarts": counts[1], **towards}}
        world.put("/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets/x", whole)
    part = {"jobset.sigs.k8s.io/replicatedjob-name": "workers"}
    metadata = {"name": "train", "ownerReferences": above, "labels": part}
    for name in ("train", "train-launcher"):
        raw = {"metadata": metadata, "spec": job, "status": status}
        world.put(f"/apis/batch/v1/namespaces/team/jobs/{name}", raw)
    notes = {} if failures is None else {"batch.kubernetes.io/job-index-failure-count": failures}
    mine = {"metadata": {"name": "a", "namespace": "team", "annotations": notes}}
    owner = {"kind": "Job", "apiVersion": "batch/v1", "name": "train"}
    since = T0 - 2 * HOUR
    assert (restarts.permanent_failure(mine, owner, since) is not None) is lost
    assert lost or restarts.permanent_failure(mine, owner) is None
    launched = {**owner, "apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob"}
    assert (restarts.permanent_failure(mine, launched, since) is not None) is lost, "its launcher fails with a worker"


def event(name: str, action: str) -> Raw:
    return {"event": name, "action": action}


@pytest.mark.parametrize(
    ("spec", "lost"),
    [
        ({}, False),
        ({"policies": [event("PodEvicted", "RestartJob")]}, False),
        ({"policies": [event("PodEvicted", "RestartTask")], "retried": 1}, False),
        ({"policies": [event("PodEvicted", "RestartJob")], "retried": 2}, True),
        ({"policies": [event("PodEvicted", "RestartJob")], "maxRetry": 9, "retried": 2}, False),
        ({"policies": [event("TaskCompleted", "RestartJob")], "maxRetry": 1}, False),
        ({"maxRetry": 1}, False),
        ({"policies": [event("PodEvicted", "AbortJob")]}, True),
        ({"policies": [{"events": ["TaskCompleted", "*"], "action": "CompleteJob"}]}, True),
        ({"policies": [event("PodEvicted", "RestartJob"), event("PodFailed", "TerminateJob")]}, True),
        ({"tasks": [{"name": "worker", "policies": [event("PodEvicted", "TerminateJob")]}]}, True),
        ({"tasks": [{"name": "master", "policies": [event("PodEvicted", "TerminateJob")]}]}, False),
        ({"policies": 7}, True),
    ],
)
def test_a_volcano_job_that_ends_with_an_evicted_pod_keeps_it(restarts, world, spec, lost):
    content = {"metadata": {"name": "train"}, "spec": spec, "status": {"retryCount": spec.pop("retried", 0)}}
    world.put("/apis/batch.volcano.sh/v1alpha1/namespaces/team/jobs/train", content)
    mine = {"metadata": {"name": "a", "namespace": "team", "labels": {"volcano.sh/task-spec": "worker"}}}
    owner = {"kind": "Job", "apiVersion": "batch.volcano.sh/v1alpha1", "name": "train"}
    assert (restarts.permanent_failure(mine, owner) is not None) is lost
    assert "not found" in restarts.permanent_failure(mine, {**owner, "name": "gone"})


@pytest.mark.parametrize("kind", ["PyTorchJob", "MXJob"])
@pytest.mark.parametrize(("policy", "lost"), [({"backoffLimit": 0}, True), ({"backoffLimit": 1}, False), (None, False)])
def test_a_training_job_without_a_retry_keeps_its_pods(restarts, world, policy, lost, kind):
    resource = f"{kind.lower()}s"
    assert resource in (ROOT / "deploy/kubernetes/actuator-rbac.yaml").read_text()
    path = f"/apis/kubeflow.org/v1/namespaces/team/{resource}/train"
    world.put(path, {"metadata": {"name": "train"}, "spec": {"runPolicy": policy}})
    mine = {"metadata": {"name": "a", "namespace": "team"}, "spec": {"restartPolicy": "OnFailure"}}
    owner = {"kind": kind, "apiVersion": "kubeflow.org/v1", "name": "train"}
    assert (restarts.permanent_failure(mine, owner) is not None) is lost
    world.fail("GET", f"/{resource}/other", 403, content={"message": "forbidden"})
    why = restarts.permanent_failure(mine, {**owner, "name": "other"})
    assert f"lacks the right to get {resource}.kubeflow.org" in why


def test_a_job_that_cannot_be_read_keeps_its_pod_and_the_missing_right_is_named(restarts, world):
    mine = {"metadata": {"name": "a", "namespace": "team"}}
    owner = {"kind": "Job", "apiVersion": "batch/v1", "name": "train"}
    assert "not found" in restarts.permanent_failure(mine, owner)
    world.fail("GET", "/jobs/train", 403, content={"message": "forbidden"})
    assert "lacks the right to get jobs" in restarts.permanent_failure(mine, owner)
