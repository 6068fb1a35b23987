"""Conditions and events in the forms of the tools in use, through the collector to the staged events."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from telemetry.accounting import Accounting
from telemetry.collect.kubernetes.collector import KubernetesCollector
from telemetry.collect.kubernetes.nodes import view_of
from telemetry.collect.kubernetes.rules import default_rules
from tests.clock import Clock
from tests.telemetry.collect.builders import staged, staging
from tests.telemetry.collect.kubernetes.memory_api import EVENTS, NODES, MemoryApi
from tests.telemetry.collect.kubernetes.objects import EARLIER, event, node

GPU = "GPU-b5f21324-f1f9-f1a4-1a37-1166234f6e4f"
LATER = "2026-03-01T11:30:00Z"


def condition(kind: str, status: str, reason: str = "", message: str = "", since: str = EARLIER) -> dict[str, str]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": since,
        "lastHeartbeatTime": "2026-03-01T11:55:00Z",
    }


def collected(folder: Path, *looks: list[dict[str, str]]) -> tuple[list[dict[str, Any]], Accounting]:
    """Return the events of looks at a node with these conditions, after a first look at it without any."""
    api, where, clock = MemoryApi(), staging(folder), Clock()
    accounting = Accounting()
    for conditions in ([], *looks):
        api.put(NODES, node("n1", conditions=conditions))
        with closing(KubernetesCollector(api, where, default_rules(), clock=clock, cluster="east")) as collector:
            collector.once()
            accounting = collector.accounting()
        clock.move(minutes=1)
    return staged(where), accounting


@pytest.mark.parametrize(
    ("kind", "status", "reason", "message", "expected"),
    [
        ("XidCriticalError", "True", '{"79":true}', "boot id", [("xid", "79", None)]),
        ("XidCriticalError", "True", '{"48":true,"79":true,"31":false}', "",
         [("xid", "48", None), ("xid", "79", None)]),
        ("XIDErrors", "True", "XIDErrorsDetected", "XID errors detected: 79", [("xid", "79", None)]),
        ("IBLinkFlapping", "True", "IBLinkFlapping", "mlx5_0 flaps", [("other", "IBLinkFlapping", None)]),
        ("GPUMissing", "True", "GPUMissing", "expected 8, found 7", [("other", "gpu_missing", None)]),
        ("AcceleratedHardwareReady", "False", "NvidiaXID79Error", "detected XID-79", [("xid", "79", None)]),
        ("AcceleratedHardwareReady", "False", "NvidiaDoubleBitError", "detected 2 Nvidia Double Bit error(s)",
         [("other", "AcceleratedHardwareReady", None)]),
        ("XidErrorsProblem", "True", "XidErrors", f"Xid 94 on {GPU}", [("xid", "94", GPU)]),
        ("GcmSmiEccProblem", "True", "EccErrors", "volatile", [("other", "GcmSmiEccProblem", None)]),
        ("NPDSmiDisconnectedProblem", "True", "x", "7 of 8", [("other", "gpu_missing", None)]),
        ("GcmDcgmiDiagProblem", "True", "DiagFailed", "memory test", [("diagnostic", "fail", None)]),
        ("Xid74NVLinkError", "True", "x", "", [("xid", "74", None)]),
        ("NodeGpuXid", "True", "Xid=31,Xid=43", "", [("xid", "31", None), ("xid", "43", None)]),
        ("GpuRowRemap", "True", "RowRemap", "pending", [("other", "GpuRowRemap", None)]),
        ("FabricManagerDown", "True", "x", "", [("other", "FabricManagerDown", None)]),
        ("PendingPhaseState", "True", "production-powerreset", "", [("other", "PendingPhaseState", None)]),
        ("NVLinkStatusInactive", "True", "x", "GPU 3: link 5", [("other", "NVLinkStatusInactive", None)]),
        ("UnhealthyNvidiaDCGMServices", "True", "x", "", [("other", "UnhealthyNvidiaDCGMServices", None)]),
        ("AcceleratedHardwareReady", "True", "NvidiaAcceleratedHardwareIsReady", "", []),
        ("GpuXid", "False", "NoXid", "last seen: Xid 79", []),
        # names that no rule has
        ("AcmeGPUHealthy", "False", "x", "", [("other", "AcmeGPUHealthy", None)]),
        ("AcmeGPUHealthy", "True", "x", "", []),
        ("UncorrectableEccErrors", "True", "x", "", [("other", "UncorrectableEccErrors", None)]),
        *((kind, "True", "x", "", []) for kind in ("GPUPresent", "NVLinkActive", "NvlinkUp", "HasGPU", "GPUConnected")),
        *((kind, "False", "x", "", []) for kind in ("GPUErrorPresent", "GpuThrottlingActive", "GpuXidErrorsPresent")),
        ("GpuFaultActive", "True", "x", "", [("other", "GpuFaultActive", None)]),
        *((kind, "True", "x", "", [("other", kind, None)]) for kind in ("GpuLockUp", "GPUMaintenanceActive")),
        ("GpuDisconnected", "True", "x", "", [("other", "GpuDisconnected", None)]),
        ("NvidiaDriverInstalled", "False", "x", "", [("other", "NvidiaDriverInstalled", None)]),
        ("NvidiaDriverInstalled", "True", "x", "", []),
        ("acme.com/gpu.health", "False", "x", "", [("other", "acme.com/gpu.health", None)]),
        ("GPUUnhealthy", "True", "XID", "79", [("xid", "79", None)]),
        ("GPUUnhealthy", "True", "Lost", "3", [("other", "GPUUnhealthy", None)]),
        ("GPUUnhealthy", "True", "Diag", "dcgmi exited with code 3", [("other", "GPUUnhealthy", None)]),
        ("HasNvidiaErrors", "True", "Xid: 119, GSP", f"timeout of {GPU}", [("xid", "119", GPU)]),
        ("SBEThreshold", "True", "x", "", [("other", "SBEThreshold", None)]),
        ("PCIeDegraded", "True", "x", "", [("other", "PCIeDegraded", None)]),
        ("NVMeFailure", "True", "x", "", []),
        # what says nothing of GPUs, and what is not known
        ("MaxIdleTime", "True", "x", "", []),
        ("XIDErrors", "Unknown", "x", "79", []),
    ],
)  # fmt: skip
def test_what_a_condition_becomes(tmp_path, kind, status, reason, message, expected):
    events, _ = collected(tmp_path, [condition(kind, status, reason, message)])
    assert [(row["type"], row["code"], row["gpu"]) for row in events] == expected
    assert {row["timestamp"].isoformat() for row in events} <= {"2026-03-01T11:00:00+00:00"}


@pytest.mark.parametrize("kind", ["GcmXidErrorsProblem", "NPDSmiDisconnectedProblem", "NPDDcgmiDiagProblem"])
def test_an_event_with_another_code_names_its_condition(tmp_path: Path, kind: str) -> None:
    events, _ = collected(tmp_path, [condition(kind, "True", "Detected", "Xid 79")])
    assert [row["detail"].split(":")[0] for row in events] == [kind]


@pytest.mark.parametrize(
    ("key", "drains"),
    [
        ("node.coreweave.cloud/evict", True),
        ("qos.coreweave.cloud/interruptable", False),
        ("volcano.sh/offline-job-evicting", False),
    ],
)
def test_a_taint_is_a_drain_where_the_node_is_taken_out(key: str, drains: bool) -> None:
    view = view_of(node(taints=[{"key": key, "effect": "NoExecute"}]), default_rules())
    assert [marker.type for marker in view.markers.values()] == ["drain"] * drains


def test_a_condition_ends_when_it_is_healthy_and_not_when_it_is_unknown(tmp_path: Path) -> None:
    bad, lost = condition("GpuEcc", "True"), condition("GpuEcc", "Unknown", since=LATER)
    well = condition("GpuEcc", "False", since=LATER)
    events, _ = collected(tmp_path, [bad], [lost], [lost], [well])
    assert [(row["type"], row["code"]) for row in events] == [("other", "GpuEcc"), ("other", "GpuEcc_ended")]
    assert events[1]["timestamp"].isoformat() == "2026-03-01T11:30:00+00:00"


def test_conditions_without_a_rule_are_counted_by_name(tmp_path: Path) -> None:
    conditions = [condition("FrequentKubeletRestart", "True"), condition("DiskPressure", "False")]
    _, accounting = collected(tmp_path, [*conditions, condition("XIDErrors", "False")])
    account = accounting.tables["node conditions"]
    assert (account.read, account.used, account.unaccounted) == (4, 2, 0)
    assert account.left_out == {
        "condition without a rule: FrequentKubeletRestart": 1,
        "condition that a rule ignores: DiskPressure": 1,
    }


@pytest.mark.parametrize(
    ("reason", "message", "expected"),
    [
        ("NvidiaXID48Error", "x", [("xid", "48", None)]),
        ("XidDetected", f"codes: [119, 120] on {GPU}", [("xid", "119", GPU), ("xid", "120", GPU)]),
        ("DeviceUnhealthy", "NVRM: Xid (PCI:0000:3b:00): 79, GPU lost", [("xid", "79", None)]),
        ("NVLinkDown", "link 4", [("other", "NVLinkDown", None)]),
        ("EccUncorrectable", "bank 3", [("other", "EccUncorrectable", None)]),
        ("ImageGCFailed", "disk", []),
        ("NodeHasGPUFailure", GPU, [("other", "NodeHasGPUFailure", None)]),
        ("NodeHasInsufficientPID", "pids", []),
    ],
)
def test_what_an_event_of_a_node_becomes(tmp_path, reason, message, expected):
    api, where = MemoryApi(), staging(tmp_path)
    api.put(NODES, node("n1"))
    api.put(EVENTS, event(reason, message))
    with closing(KubernetesCollector(api, where, default_rules(), clock=Clock())) as collector:
        collector.once()
        account = collector.accounting().tables["Kubernetes events"]
    assert [(row["type"], row["code"], row["gpu"]) for row in staged(where)] == expected
    assert (account.read, account.unaccounted) == (1, 0)
    assert bool(account.left_out) is not bool(expected)
