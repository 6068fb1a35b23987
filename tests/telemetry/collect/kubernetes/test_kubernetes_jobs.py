"""Pods that hold GPUs as rows of jobs."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.collect.kubernetes.api import Refused
from telemetry.collect.kubernetes.jobs import ClaimLookup, JobTracker, PodRun, gpus_of, pod_run
from telemetry.collect.kubernetes.rules import default_rules
from telemetry.milliseconds import to_ms
from tests.telemetry.collect.kubernetes.memory_api import MemoryApi
from tests.telemetry.collect.kubernetes.objects import NOW, ended, pod, saved_and_read

RULES = default_rules()
ELEVEN = to_ms(datetime(2026, 3, 1, 11, tzinfo=UTC))
HALF_PAST = "2026-03-01T11:30:00Z"
MINUTE = 60_000


def run_of(item: dict[str, Any]) -> PodRun:
    run = pod_run(item, RULES)
    assert run is not None
    return run


def test_a_pod_that_runs_has_no_end() -> None:
    book = JobTracker()
    book.update(run_of(pod(gpus=4, owner=("llama", "u9"), annotations={"predrain.io/checkpointed-at": HALF_PAST})))
    assert book.changed_rows() == [
        {
            "job": "train/llama/u9",
            "node": "n1",
            "gpu": None,
            "started_at": ELEVEN,
            "ended_at": None,
            "gpus": 4,
            "checkpointed_at": ELEVEN + 30 * MINUTE,
            "outcome": None,
        }
    ]
    assert book.changed_rows() == []


@pytest.mark.parametrize(
    ("phase", "status", "outcome", "minutes"),
    [
        ("Succeeded", ended(HALF_PAST), "Succeeded", 30),
        ("Failed", ended(HALF_PAST, "Error"), "Failed", 30),
        ("Failed", ended(HALF_PAST, "OOMKilled"), "OOMKilled", 30),
        ("Failed", {"reason": "Evicted"}, "Evicted", 0),
        (
            "Failed",
            {
                "conditions": [
                    {
                        "type": "DisruptionTarget",
                        "status": "True",
                        "reason": "DeletionByTaintManager",
                        "lastTransitionTime": HALF_PAST,
                    }
                ]
            },
            "DeletionByTaintManager",
            30,
        ),
    ],
)
def test_how_a_pod_ended(phase: str, status: dict[str, Any], outcome: str, minutes: int) -> None:
    run = run_of(pod(phase=phase, status=status))
    assert (run.outcome, run.ended_ms) == (outcome, ELEVEN + minutes * MINUTE)


def test_what_is_no_job_on_gpus_is_left_out() -> None:
    assert pod_run(pod(gpus=0), RULES) is None
    assert pod_run(pod(node_name=None), RULES) is None
    assert pod_run(pod(started=None), RULES) is None


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


def test_pods_of_one_job_that_begin_together_share_a_row() -> None:
    book = JobTracker()
    for name in ("w0", "w1"):
        book.update(run_of(pod(name, gpus=2, owner=("j", "u"))))
    (row,) = book.changed_rows()
    assert row["gpus"] == 4
    book.update(run_of(pod("w0", gpus=2, owner=("j", "u"), phase="Succeeded", status=ended(HALF_PAST))))
    assert book.changed_rows() == []  # the row goes on with the other
    book.update(
        run_of(pod("w1", gpus=2, owner=("j", "u"), phase="Failed", status=ended("2026-03-01T11:40:00Z", "Error")))
    )
    (row,) = book.changed_rows()
    assert (row["ended_at"], row["outcome"]) == (ELEVEN + 40 * MINUTE, "Failed")


def test_a_pod_that_is_removed_ends_then_unless_it_had_ended() -> None:
    book = JobTracker()
    book.update(run_of(pod("a")))
    book.update(run_of(pod("b", phase="Succeeded", status=ended(HALF_PAST))))
    assert len(book.changed_rows()) == 2
    book.remove("uid-a", NOW)
    book.remove("uid-b", NOW)
    book.remove("uid-never-seen", NOW)
    (row,) = book.changed_rows()
    assert (row["job"], row["ended_at"], row["outcome"]) == ("train/a/uid-a", to_ms(NOW), "Deleted")
    assert book.runs() == []
    assert book.changed_rows() == []


def test_a_finished_pod_keeps_its_end_when_its_containers_are_cleared() -> None:
    book = JobTracker()
    book.update(run_of(pod(phase="Succeeded", status=ended(HALF_PAST))))
    before = book.changed_rows()
    book.update(run_of(pod(phase="Succeeded")))
    assert book.changed_rows() == []
    assert before[0]["ended_at"] == ELEVEN + 30 * MINUTE


def test_what_vanished_while_nobody_looked_ended_some_time_before() -> None:
    book = JobTracker()
    book.update(run_of(pod("a")))
    book.update(run_of(pod("b")))
    book.changed_rows()
    again = JobTracker(saved_and_read(list[PodRun], book.runs()))
    assert again.changed_rows() == []  # it was landed by the earlier run
    again.keep_only(["uid-b"], NOW)
    (row,) = again.changed_rows()
    assert (row["job"], row["outcome"], row["ended_at"]) == ("train/a/uid-a", "Unknown", to_ms(NOW))


def test_namespaces_that_are_not_wanted_wait() -> None:
    book = JobTracker()
    book.update(run_of(pod("a", namespace="x")))
    assert book.changed_rows(lambda namespace: namespace == "y") == []
    assert len(book.changed_rows()) == 1


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["run", "end", "lose", "save"])), max_size=20), st.booleans()
)
def test_the_last_landed_rows_are_the_truth(steps: list[tuple[int, str]], shared: bool) -> None:
    book = JobTracker()
    landed: dict[tuple[str, int], dict[str, Any]] = {}
    alive: dict[int, str] = {}
    truth: dict[int, str] = {}
    clock = NOW
    for number, step in steps:
        clock += timedelta(seconds=1)
        name = f"p{number}"
        owner = ("job", "u") if shared else None
        if step == "save":
            for row in book.changed_rows():
                landed[(row["job"], row["started_at"])] = row
            book = JobTracker(saved_and_read(list[PodRun], book.runs()))
        elif step == "run" and number not in truth:
            book.update(run_of(pod(name, owner=owner)))
            alive[number] = truth[number] = "run"
        elif step == "end" and alive.get(number) == "run":
            book.update(run_of(pod(name, owner=owner, phase="Succeeded", status=ended(HALF_PAST))))
            alive[number] = truth[number] = "end"
        elif step == "lose" and number in alive:
            book.remove(f"uid-{name}", clock)
            if alive.pop(number) == "run":
                truth[number] = "lost"
    for row in book.changed_rows():
        landed[(row["job"], row["started_at"])] = row
    if shared:
        # A row may be begun anew by pods that come when all others are gone and forgotten: only ask while some live.
        if truth and "run" in truth.values():
            assert landed[("train/job/u", ELEVEN)]["ended_at"] is None
        return
    assert {row["job"]: row["outcome"] for row in landed.values()} == {
        f"train/p{number}/uid-p{number}": {"run": None, "end": "Succeeded", "lost": "Deleted"}[state]
        for number, state in truth.items()
    }


def claim(*devices: tuple[str, str], driver: str = "gpu.nvidia.com") -> dict[str, Any]:
    results = [{"driver": driver, "pool": pool, "device": device} for pool, device in devices]
    return {"metadata": {"name": "c1"}, "status": {"allocation": {"devices": {"results": results}}}}


def test_gpus_of_a_resource_claim() -> None:
    assert gpus_of(claim(("n1", "gpu-0"), ("n1", "gpu-1")), RULES) == 2
    assert gpus_of(claim(("n1", "gpu-0-mig-1g.10gb-19-1"), ("n1", "gpu-0-mig-1g.10gb-19-2")), RULES) == 1
    assert gpus_of(claim(("n1", "nic-0"), driver="nic.example.com"), RULES) == 0
    assert gpus_of({"metadata": {}}, RULES) == 0


def test_a_pod_with_claims_counts_the_gpus_that_they_hold() -> None:
    api = MemoryApi()
    api.put("/apis/resource.k8s.io/v1beta1/namespaces/train/resourceclaims", claim(("n1", "gpu-0"), ("n1", "gpu-1")))
    item = pod(gpus=0)
    item["spec"]["resourceClaims"] = [{"name": "gpus", "resourceClaimTemplateName": "t"}]
    item["status"]["resourceClaimStatuses"] = [{"name": "gpus", "resourceClaimName": "c1"}]
    book = JobTracker(gpus_of_claim=ClaimLookup(api, RULES).gpus)
    book.update(run_of(item))
    assert [row["gpus"] for row in book.changed_rows()] == [2]
    item["status"] |= ended(HALF_PAST) | {"phase": "Succeeded"}
    asked = len(api.asked)
    book.update(run_of(item))
    assert [(row["gpus"], row["outcome"]) for row in book.changed_rows()] == [(2, "Succeeded")]
    assert len(api.asked) == asked


def test_claims_that_may_not_be_read_are_asked_for_seldom(caplog: pytest.LogCaptureFixture) -> None:
    api = MemoryApi()
    now_s = 0.0
    book = ClaimLookup(api, RULES, monotonic_s=lambda: now_s)
    api.failures = [Refused(403, "forbidden")]
    assert book.gpus("train", "c1") == 0
    assert book.gpus("train", "c2") == 0
    assert len(api.asked) == 1
    assert "forbidden" in caplog.text
    now_s = 700.0
    assert book.gpus("train", "c1") == 0  # not found under any version
    assert len(api.asked) == 4
