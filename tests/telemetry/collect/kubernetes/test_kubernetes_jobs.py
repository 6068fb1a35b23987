"""Pods that hold GPUs as rows of jobs."""

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.instants import to_ms
from foundation.kubernetes.api import ApiRefused
from telemetry.collect.kubernetes.jobs import JobTracker, PodRun, gpus_of, pod_run
from telemetry.collect.kubernetes.rules import default_rules
from tests.telemetry.collect.kubernetes.memory_api import MemoryApi
from tests.telemetry.collect.kubernetes.objects import NOW, ended, pod, saved_and_read

RULES = default_rules()
ELEVEN = to_ms(datetime(2026, 3, 1, 11, tzinfo=UTC))
HALF_PAST = "2026-03-01T11:30:00Z"
MINUTE = 60_000
CLAIMS = "/apis/resource.k8s.io/v1beta1/namespaces/train/resourceclaims"


def run_of(item: dict[str, Any]) -> PodRun:
    return pod_run(item, RULES)


class Tracked(JobTracker):
    """A tracker, and the pods it is given."""

    def __init__(self, known: dict[str, PodRun] | None = None, api: MemoryApi | None = None) -> None:
        super().__init__(api or MemoryApi(), RULES, known)

    def see(self, *items: dict[str, Any]) -> list[dict[str, Any]]:
        for item in items:
            self.update(run_of(item), NOW)
        return self.changed_rows()

    def restarted(self) -> "Tracked":
        return Tracked(saved_and_read(dict[str, PodRun], self.known))


def test_a_pod_that_runs_has_no_end() -> None:
    item = pod(gpus=4, owner=("llama", "u9"), annotations={"predrain.io/checkpointed-at": HALF_PAST})
    tracker = Tracked()
    assert tracker.see(item) == [
        {
            "job": "train/llama/u9",
            "node": "n1",
            "started_at": ELEVEN,
            "ended_at": None,
            "gpus": 4,
            "checkpointed_at": ELEVEN + 30 * MINUTE,
            "outcome": None,
        }
    ]
    assert tracker.see(item) == []


DISRUPTED = {
    "type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "lastTransitionTime": HALF_PAST,
}  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "status", "outcome", "minutes"),
    [
        ("Succeeded", ended(HALF_PAST), "Succeeded", 30),
        ("Failed", ended(HALF_PAST, "Error"), "Failed", 30),
        ("Failed", ended(HALF_PAST, "OOMKilled"), "OOMKilled", 30),
        ("Failed", {"reason": "Evicted"}, "Evicted", 0),
        ("Failed", {"conditions": [DISRUPTED]}, "DeletionByTaintManager", 30),
    ],
)
def test_how_a_pod_ended(phase: str, status: dict[str, Any], outcome: str, minutes: int) -> None:
    run = run_of(pod(phase=phase, status=status))
    assert (run.outcome, run.ended_ms) == (outcome, ELEVEN + minutes * MINUTE)


@pytest.mark.parametrize("item", [pod(gpus=0), pod(node_name=None), pod(started=None)])
def test_what_is_no_job_on_gpus_is_left_out(item: dict[str, Any]) -> None:
    assert pod_run(item, RULES) is None


def test_requests_of_all_kinds_of_gpus() -> None:
    item = pod(gpus=0)
    item["spec"]["containers"] = [
        {"resources": {"limits": {"nvidia.com/gpu": "2"}, "requests": {"nvidia.com/gpu": "2"}}},
        {"resources": {"requests": {"amd.com/gpu": "1"}}},
        {"resources": {"limits": {"nvidia.com/mig-1g.10gb": "3"}}},
        {},
    ]
    assert run_of(item).gpus == 4
    item["spec"]["initContainers"] = [{"resources": {"limits": {"nvidia.com/gpu": "8"}}}]
    assert run_of(item).gpus == 9


def test_the_job_of_a_pod_is_the_outermost_whole() -> None:
    assert run_of(pod("p7")).job == "train/p7/uid-p7"
    child = pod(owner=("set-workers-0", "u"), labels={"jobset.sigs.k8s.io/jobset-name": "set"})
    assert run_of(child).job == "train/set"
    torch = pod(owner=("bert", "u"), labels={"training.kubeflow.org/job-name": "bert"})
    assert run_of(torch).job == "train/bert/u"


def test_pods_of_one_job_that_begin_together_have_a_row_each() -> None:
    def worker(name: str, **how: Any) -> dict[str, Any]:
        return pod(name, gpus=2, owner=("j", "u"), **how)

    tracker = Tracked()
    rows = tracker.see(worker("w0"), worker("w1"))
    assert [(row["job"], row["started_at"], row["gpus"]) for row in rows] == [
        ("train/j/u", ELEVEN, 2),
        ("train/j/u", ELEVEN + 1, 2),
    ]
    again = tracker.restarted()
    (row,) = again.see(worker("w0"), worker("w1", phase="Succeeded", status=ended(HALF_PAST)))
    assert (row["started_at"], row["outcome"]) == (ELEVEN + 1, "Succeeded")
    assert again.see(worker("w1", phase="Succeeded")) == [], "its containers were cleared: it keeps its end"


def test_what_vanished_while_no_collector_ran_ended_some_time_before() -> None:
    tracker = Tracked()
    tracker.see(pod("a"), pod("b"))
    again = tracker.restarted()
    again.take("listed", [run_of(pod("b"))], NOW)
    (row,) = again.changed_rows()  # what the earlier process staged is not staged again
    assert (row["job"], row["outcome"], row["ended_at"]) == ("train/a/uid-a", "Unknown", to_ms(NOW))


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["run", "end", "lose", "save"])), max_size=20))
def test_the_last_staged_rows_are_the_truth(steps: list[tuple[int, str]]) -> None:
    tracker = Tracked()
    staged: dict[str, str | None] = {}
    alive: set[int] = set()
    truth: dict[int, str | None] = {}
    for number, step in [*steps, (0, "save")]:
        name = f"p{number}"
        if step == "save":
            staged |= {row["job"]: row["outcome"] for row in tracker.changed_rows()}
            tracker = tracker.restarted()
        elif step == "run" and number not in truth:
            tracker.update(run_of(pod(name)), NOW)
            alive.add(number)
            truth[number] = None
        elif step == "end" and number in alive and truth[number] is None:
            tracker.update(run_of(pod(name, phase="Succeeded", status=ended(HALF_PAST))), NOW)
            truth[number] = "Succeeded"
        elif step == "lose" and number in alive:
            tracker.remove(f"uid-{name}", NOW)
            alive.discard(number)
            truth[number] = truth[number] or "Deleted"
    assert staged == {f"train/p{number}/uid-p{number}": outcome for number, outcome in truth.items()}


def claim(*devices: str, driver: str = "gpu.nvidia.com") -> dict[str, Any]:
    results = [{"driver": driver, "pool": "n1", "device": device} for device in devices]
    return {"metadata": {"name": "c1"}, "status": {"allocation": {"devices": {"results": results}}}}


@pytest.mark.parametrize(
    ("made", "gpus"),
    [
        (claim("gpu-0", "gpu-1"), 2),
        (claim("gpu-0-mig-1g.10gb-19-1", "gpu-0-mig-1g.10gb-19-2"), 1),
        (claim("nic-0", driver="nic.example.com"), 0),
        ({"metadata": {}}, 0),
    ],
)
def test_gpus_of_a_resource_claim(made: dict[str, Any], gpus: int) -> None:
    assert gpus_of(made, RULES) == gpus


def with_claim(name: str = "p1", **status: Any) -> dict[str, Any]:
    item = pod(name, gpus=0)
    item["spec"]["resourceClaims"] = [{"name": "gpus", "resourceClaimTemplateName": "t"}]
    item["status"] |= {"resourceClaimStatuses": [{"name": "gpus", "resourceClaimName": "c1"}], **status}
    return item


def test_a_pod_with_claims_counts_the_gpus_that_they_hold() -> None:
    api = MemoryApi()
    api.put(CLAIMS, claim("gpu-0", "gpu-1"))
    tracker = Tracked(api=api)
    assert [row["gpus"] for row in tracker.see(with_claim())] == [2]
    asked = len(api.asked)
    rows = tracker.see(with_claim(phase="Succeeded", **ended(HALF_PAST)))
    assert [(row["gpus"], row["outcome"]) for row in rows] == [(2, "Succeeded")]
    assert len(api.asked) == asked


def test_claims_that_may_not_be_read_are_asked_for_once(caplog: pytest.LogCaptureFixture) -> None:
    api = MemoryApi()
    api.failures = [ApiRefused(403, "forbidden")]
    assert Tracked(api=api).see(with_claim("a"), with_claim("b")) == []
    assert len(api.asked) == 1
    assert "forbidden" in caplog.text
