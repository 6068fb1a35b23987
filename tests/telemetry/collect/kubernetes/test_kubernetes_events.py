"""Kubernetes events, and what NVSentinel writes, become events of the dataset."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pandas as pd
import pytest

from telemetry.collect.kubernetes.collector import NoticeReader, NoticeTracker
from telemetry.collect.kubernetes.nodes import ObservedKubernetesNode, node_changes, view_of
from telemetry.collect.kubernetes.rules import KubernetesRules, default_rules
from telemetry.dataset.event import Event
from telemetry.dataset.schema import EVENTS, INVENTORY, conform, ms_of
from telemetry.importing.event_runs import dedupe_events
from telemetry.importing.events import place_events
from telemetry.importing.inventory import InstallationIndex
from telemetry.kernel_log.reader import LogLine
from tests.clock import Clock
from tests.telemetry.collect.builders import kernel_events
from tests.telemetry.collect.kubernetes.objects import EARLIER, NOW, event, node, saved_and_read, taint

ELEVEN = datetime(2026, 3, 1, 11, tzinfo=UTC)
NOON = "2026-03-01T12:00:00Z"
RULES = default_rules()


def seen(tracker: NoticeTracker, item: dict[str, Any], rules: KubernetesRules = RULES) -> list[tuple[Any, ...]]:
    notice = NoticeReader(rules)(item)
    events = [] if notice is None else tracker.update(notice, NOW)
    return [(made.type, made.code, made.node, made.timestamp, made.gpu, made.pci_bus_id) for made in events]


XID = "kernel: NVRM: Xid (PCI:0000:3B:00): 79, pid=1, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (event("Whatever", XID), [("xid", "79", "n1", ELEVEN, None, "00000000:3b:00")]),
        (event("NvidiaXID79Error", "bad"), [("xid", "79", "n1", ELEVEN, None, None)]),
        *((event(reason), []) for reason in ("NodeNotReady", "Rebooted", "NodeHasSufficientMemory", "FailedMount")),
        (event("GpuLost", about=("Pod", "p")), []),
        (event("GPUFailurePredicted"), []),
        (event("GPUFailurePredictionWithdrawn"), []),
    ],
)
def test_what_an_event_becomes(item: dict[str, Any], expected: list[tuple[Any, ...]]) -> None:
    assert seen(NoticeTracker(), item) == expected


def test_a_repeated_event_counts_for_each_rise_of_its_count() -> None:
    tracker = NoticeTracker()
    assert len(seen(tracker, event("GpuLost"))) == 1
    assert seen(tracker, event("GpuLost")) == []
    (again,) = tracker.update(NoticeReader(RULES)(event("GpuLost", "lost", count=4, last=NOON)), NOW)
    assert (again.timestamp, again.detail) == (NOW, "GpuLost: lost (3 times)")
    restored = NoticeTracker(tracker.known)
    assert seen(restored, event("GpuLost", count=4, last=NOON)) == []


def test_times_of_the_newer_api_and_of_none() -> None:
    micro = event("GpuLost", first=None, last=None, eventTime="2026-03-01T11:00:00.123456Z")
    assert seen(NoticeTracker(), micro)[0][3] == ELEVEN.replace(microsecond=123000)
    series = event("GpuLost", first=None, last=None, series={"count": 3, "lastObservedTime": NOON})
    assert seen(NoticeTracker(), series)[-1][3] == NOW
    assert seen(NoticeTracker(), event("GpuLost", first=None, last=None))[0][3] == ELEVEN  # its creation


def test_rules_may_name_pods_and_take_the_gpu_from_the_message() -> None:
    uuid = "GPU-11111111-2222-3333-4444-555555555555"
    rule = {"reason": "Admission.*", "kind": "Pod", "message": r"device (?P<gpu>GPU-\S+)", "type": "failure"}
    rules = KubernetesRules.model_validate({"rules": [rule | {"code": "DBE"}]})
    item = event("AdmissionError", f"device {uuid} is broken", about=("Pod", "p1"), last=EARLIER)
    assert seen(NoticeTracker(), item, rules) == [("failure", "DBE", "n9", ELEVEN, uuid, None)]
    assert rules.event_kinds() == ["Pod"]


GPU = "GPU-b5f21324-f1f9-f1a4-1a37-1166234f6e4f"
KERNEL_79 = "NVRM: Xid (PCI:0000:ef:00): 79, pid=0, name=<unknown>, GPU has fallen off the bus."
KERNEL_149 = "NVRM: Xid (PCI:0000:1a:00): 149, NETIR_LINK_EVT Fatal   XC0 i0 Link 02 (0x004505c6 0x00000000)"
XID_79 = f"ErrorCode:79 PCI:0000:ef:00 GPU_UUID:{GPU} MESSAGE={KERNEL_79} Recommended Action=RESTART_BM;"
XID_149 = f"ErrorCode:149 PCI:0000:1a:00 kernel: [16450076.435595] {KERNEL_149} Recommended Action=CONTACT_SUPPORT;"
AGAIN_79 = XID_79.replace("pid=0", "pid=7")
NEWER, NEWEST = "2026-03-01T11:20:00Z", "2026-03-01T11:40:00Z"
HEALTHY = "No Health Failures"


def with_condition(kind: str, message: str, last: str = EARLIER, since: str = EARLIER) -> dict[str, Any]:
    status = "False" if message == HEALTHY else "True"
    reason = f"{kind}IsHealthy" if message == HEALTHY else f"{kind}IsNotHealthy"
    stamps = {"lastTransitionTime": since, "lastHeartbeatTime": last}
    return node(conditions=[{"type": kind, "status": status, "reason": reason, "message": message, **stamps}])


def looked_at(*looks: dict[str, Any]) -> list[Event]:
    view, events = None, []
    for look in looks:
        after = saved_and_read(ObservedKubernetesNode, view_of(look, default_rules()))
        view, events = after, node_changes(view, after, NOW)
    return events


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


def test_each_xid_of_the_condition_is_that_of_its_gpu_at_its_time() -> None:
    first = with_condition("SysLogsXIDError", XID_79)
    (lost,) = looked_at(node(), first)
    assert (lost.type, lost.code, lost.pci_bus_id, lost.timestamp) == ("xid", "79", "00000000:ef:00", at(EARLIER))
    (link,) = looked_at(node(), first, with_condition("SysLogsXIDError", XID_79 + XID_149, NEWER))
    assert (link.type, link.code, link.pci_bus_id, link.timestamp) == ("xid", "149", "00000000:1a:00", at(NEWER))
    assert link.detail == "NETIR_LINK_EVT Fatal link 02"


def test_an_xid_repeated_in_the_condition_is_another_event_and_a_mere_report_is_none() -> None:
    first = with_condition("SysLogsXIDError", XID_79)
    (again,) = looked_at(first, with_condition("SysLogsXIDError", XID_79 + AGAIN_79, NEWER))
    assert (again.type, again.code, again.timestamp) == ("xid", "79", at(NEWER))
    assert looked_at(first, with_condition("SysLogsXIDError", XID_79, NEWER)) == []


def test_a_condition_that_was_healthy_between_two_looks_reports_its_xid_again() -> None:
    later = with_condition("SysLogsXIDError", XID_79, NEWEST, since=NEWEST)
    (again,) = looked_at(with_condition("SysLogsXIDError", XID_79), later)
    assert (again.code, again.timestamp) == ("79", at(NEWEST))


def test_a_healthy_condition_is_no_repair() -> None:
    events = looked_at(with_condition("SysLogsXIDError", XID_79), with_condition("SysLogsXIDError", HEALTHY, NEWER))
    assert [(event.type, event.code) for event in events] == [("other", "SysLogsXIDError_ended")]


def test_an_xid_that_names_no_gpu_is_one_of_the_node() -> None:
    (event,) = looked_at(with_condition("SysLogsXIDError", "ErrorCode:79 XID error occurred Recommended Action=NONE;"))
    assert (event.type, event.code, event.gpu, event.pci_bus_id) == ("xid", "79", None, None)


def test_a_gpu_off_the_bus_has_the_kernel_logs_code() -> None:
    text = "ErrorCode:GPU_FALLEN_OFF_BUS PCI:0000:ef:00.0 PCI_ID:10de:2901 NVRM: … Recommended Action=RESTART_BM;"
    (lost,) = looked_at(with_condition("SysLogsGPUFallenOff", text))
    assert (lost.type, lost.code, lost.pci_bus_id) == ("failure", "fallen_off_the_bus", "00000000:ef:00")


@pytest.mark.parametrize("kind", ["GpuMemWatch", "SysLogsSXIDError", "NVSwitchFatalError"])
def test_its_own_verdicts_are_no_failures(kind: str) -> None:
    (event,) = looked_at(
        with_condition(kind, f"ErrorCode:20034 PCI:0000:ef:00 GPU_UUID:{GPU} bad Recommended Action=X;")
    )
    assert (event.type, event.code, event.pci_bus_id) == ("other", kind, None)


def test_a_quarantine_is_a_drain() -> None:
    fields = {"f:spec": {"f:unschedulable": {}}}
    cordoned = node(
        cordoned=True,
        managed=[{"manager": "fault-quarantine", "time": EARLIER, "fieldsV1": fields}],
        taints=[taint("nvidia.com/gpu-xid-error", value="true", added=EARLIER), taint("nvidia.com/gpu")],
    )
    assert [(event.type, event.code, event.detail) for event in looked_at(cordoned)] == [
        ("drain", "cordon", "by fault-quarantine"),
        ("drain", "nvidia.com/gpu-xid-error", "nvidia.com/gpu-xid-error=true:NoSchedule"),
    ]


def test_an_xid_that_it_takes_for_harmless_comes_in_too() -> None:
    message = f"ErrorCode:13 PCI:0000:ef:00 GPU_UUID:{GPU} {KERNEL_79.replace('79', '13')} Recommended Action=NONE;"
    (made,) = seen(NoticeTracker(), event("SysLogsXIDErrorIsNotHealthy", message, count=3))
    assert made == ("xid", "13", "n1", ELEVEN, None, "00000000:ef:00")


def test_the_kernel_logs_report_of_the_same_xid_is_one_event_with_it() -> None:
    logged = kernel_events("journal", LogLine(KERNEL_79, at(EARLIER)), node="n1", clock=Clock(NOW))
    rows = [made.row() for made in (*logged, *looked_at(with_condition("SysLogsXIDError", XID_79)))]
    events = pd.DataFrame(rows).assign(
        timestamp=lambda table: pd.to_datetime(table["timestamp"], unit="ms", utc=True),
        known_at=lambda table: pd.to_datetime(table["known_at"], unit="ms", utc=True),
    )
    place = {"gpu": GPU, "node": "n1", "pci_bus_id": "0000:ef:00.0", "installed_at": NOW - timedelta(days=9)}
    installations = InstallationIndex(conform(pd.DataFrame([place]), INVENTORY).to_pandas(), "gpu")
    text = {name: events[name].to_numpy(object, copy=True) for name in ("node", "gpu", "type", "pci_bus_id")}
    assert not place_events(text, ms_of(events["timestamp"]), installations).any()
    events["gpu"] = text["gpu"]
    (kept,) = dedupe_events(events[EVENTS.names], timedelta(seconds=60)).to_dict("records")
    assert (kept["type"], kept["code"], kept["gpu"]) == ("xid", "79", GPU)
