"""Kubernetes events that become events of the dataset."""

from datetime import UTC, datetime
from typing import Any

import pytest

from telemetry.collect.kubernetes.events import NoticeReader, NoticeTracker
from telemetry.collect.kubernetes.rules import KubernetesRules, default_rules
from tests.telemetry.collect.kubernetes.objects import EARLIER, NOW, event

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
    repeated = NoticeReader(RULES)(event("GpuLost", "lost", count=4, last=NOON))
    assert repeated is not None
    (again,) = tracker.update(repeated, NOW)
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
