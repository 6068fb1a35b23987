"""Diagnostics as Jobs: started once, believed only where they say of this node and run what they found."""

import json
import os
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from foundation.errors import InputError
from scheduler.kubernetes.diagnostic_job import KubernetesVerification, name_of, read_manifest
from scheduler.kubernetes.workloads import KubernetesWorkloads
from scheduler.ports.workloads import Fence
from tests.scheduler.kubernetes.api_world import Raw, World
from tests.scheduler.kubernetes.objects import T0, Hand, add, pod

SHIPPED = Path(__file__).parents[3] / "deploy" / "kubernetes" / "diagnostic-job.yaml"
FENCE = Fence("me", T0 + timedelta(seconds=30))
KEY = "verify-n1-0001"
JOB = f"/apis/batch/v1/namespaces/predrain/jobs/{name_of(KEY)}"
PASSED = {"result": "passed", "node": "n1", "key": KEY}


@pytest.fixture
def verification(hand: Hand) -> KubernetesVerification:
    return KubernetesVerification(hand.scheduler, read_manifest(SHIPPED))


def ended(world: World, condition: str, *messages: object, node: str = "n1") -> None:
    """The Job ended, and its containers left these messages."""
    at = "2026-11-21T12:30:00Z"
    condition_ = {"type": condition, "status": "True", "lastTransitionTime": at, "message": f"it is {condition}"}
    world.edit(JOB, lambda raw: raw.update(status={"conditions": [condition_]}))
    target = pod("diag", node)
    target["metadata"] |= {"namespace": "predrain", "labels": {"predrain.io/diagnostic": name_of(KEY)}}
    target["status"] = {
        "phase": "Succeeded",
        "containerStatuses": [
            {"state": {"terminated": {"message": message if isinstance(message, str) else json.dumps(message)}}}
            for message in messages
        ],
    }
    add(world, target)


def test_a_job_is_started_once_on_its_node_past_our_taint(world: World, verification: KubernetesVerification) -> None:
    assert verification.start("n1", ["GPU-a", "GPU-b"], KEY, FENCE, "reset", probe=False).kind == "done"
    assert verification.start("n1", ["GPU-a", "GPU-b"], KEY, FENCE, None, probe=False).kind == "already"
    job = world.objects[JOB]
    template = job["spec"]["template"]["spec"]
    (term,) = template["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
    assert {"key": "predrain.io/at-risk", "operator": "Exists"} in template["tolerations"]
    assert {
        "key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoSchedule",
    } in template["tolerations"], "our own cordon would keep it off"  # fmt: skip
    assert (job["spec"]["backoffLimit"], template["restartPolicy"]) == (0, "Never")
    variables = {item["name"]: item["value"] for item in template["containers"][0]["env"]}
    assert variables == {
        "PREDRAIN_NODE": "n1", "PREDRAIN_KEY": KEY, "PREDRAIN_GPUS": "GPU-a,GPU-b", "PREDRAIN_REMEDY": "reset",
    }  # fmt: skip


def test_without_the_lease_none_is_started(world: World, verification: KubernetesVerification) -> None:
    assert verification.start("n1", [], KEY, Fence("other", FENCE.until), None, probe=False).kind == "refused"
    world.fail("POST", "jobs", 403, content={"message": "quota"})
    assert verification.start("n1", [], KEY, FENCE, None, probe=False).message == "HTTP 403: quota"
    assert JOB not in world.objects


@pytest.mark.parametrize(
    ("condition", "messages", "kind"),
    [
        ("Complete", [PASSED], "passed"),
        ("Failed", [{**PASSED, "result": "failed", "failed_units": ["GPU-a"], "message": "memory"}], "failed"),
        ("Complete", [{**PASSED, "result": "failed"}], "failed"),
        ("Failed", [PASSED], "inconclusive"),
        ("Complete", [], "inconclusive"),
        ("Complete", ["all good"], "inconclusive"),
        ("Complete", [{**PASSED, "result": "skipped"}], "inconclusive"),
        ("Complete", [{**PASSED, "node": "n2"}], "inconclusive"),
        ("Complete", [{**PASSED, "key": "yesterday"}], "inconclusive"),
        ("Complete", [PASSED, {**PASSED, "result": "failed"}], "inconclusive"),
    ],
)
def test_only_what_reports_of_this_node_and_run_is_believed(world, verification, condition, messages, kind):
    verification.start("n1", [], KEY, FENCE, None, probe=False)
    ended(world, condition, *messages)
    result = verification.result("n1", KEY)
    assert (result.kind, result.at) == (kind, datetime(2026, 11, 21, 12, 30, tzinfo=UTC))
    if condition == "Failed" and kind == "failed":
        assert (result.failed_units, result.message) == (("GPU-a",), "memory")


def test_our_own_diagnostic_is_no_job_and_nothing_that_has_to_go(world: World, hand: Hand) -> None:
    ours, pretended = pod("diag", "n1"), pod("job", "n2")
    for item in (ours, pretended):
        item["metadata"]["labels"] = {"predrain.io/diagnostic": "x"}
    ours["metadata"]["namespace"] = "predrain"
    add(world, ours, pretended)
    workloads = KubernetesWorkloads(hand.scheduler)
    (workload,) = workloads.on_node("n1")
    assert (workload.stays, workload.job) == ("it is predrain's diagnostic", None)
    (workload,) = workloads.on_node("n2")
    assert workload.stays is None, "in a namespace of users a label hides nothing"
    assert [len(node.view.jobs) for node in hand.scheduler.read_fleet().nodes] == [0, 1]


def test_a_manifest_that_is_no_job_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("kind: Pod")
    with pytest.raises(InputError, match="is not a batch/v1 Job with containers"):
        read_manifest(file)
    with pytest.raises(InputError, match="manifest of the diagnostic"):
        read_manifest(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("output", "code", "expected"),
    [
        ('{"status" : "Pass"}', 0, "passed"),
        ('{"status" : "Pass"}, {"status": "Fail"}', 0, "failed"),
        ('{"status" : "Fail"}', 226, "failed"),
        ('{"status" : "Pass"}, {"status": "Warn"}', 0, None),
        ('{"status" : "Pass"}', 1, None),
        ('{"status" : "Skip"}', 0, None),
        ("Error: unable to connect", 0, None),
    ],
)
def test_the_shipped_script_reports_what_the_diagnostic_says(tmp_path, output, code, expected):
    for name, script in (("dcgmi", f"#!/bin/sh\necho '{output}'\nexit {code}\n"), ("nv-hostengine", "#!/bin/sh\n")):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    container = yaml.safe_load(SHIPPED.read_text())["spec"]["template"]["spec"]["containers"][0]
    log = tmp_path / "termination-log"
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "TERMINATION_LOG": str(log), "PREDRAIN_NODE": "n1",
        "PREDRAIN_KEY": KEY,
    }  # fmt: skip
    subprocess.run([*container["command"], *container["args"]], env=environment, check=False, timeout=20,
                   capture_output=True)  # fmt: skip
    result: Raw | None = json.loads(log.read_text()) if log.exists() else None
    assert result == (None if expected is None else {**PASSED, "result": expected})


def test_a_probe_preempts_nothing_and_keeps_off_cordoned_nodes(world, verification):
    assert verification.start("n1", ["GPU-a"], KEY, FENCE, None, probe=True).kind == "done"
    spec = world.objects[JOB]["spec"]
    pod = spec["template"]["spec"]
    assert (pod["priorityClassName"], pod["preemptionPolicy"]) == ("predrain-probe", "Never")
    assert spec["activeDeadlineSeconds"] == 1800
    assert [toleration["key"] for toleration in pod["tolerations"]] == ["predrain.io/at-risk"]
