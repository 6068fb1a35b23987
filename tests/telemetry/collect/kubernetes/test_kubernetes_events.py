"""Kubernetes events that become ours."""

from datetime import UTC, datetime
from typing import Any

from telemetry.collect.kubernetes.events import NoticeTracker, notice_of
from telemetry.collect.kubernetes.rules import KubernetesRules, Rule, default_rules
from tests.telemetry.collect.kubernetes.objects import EARLIER, NOW, event

ELEVEN = datetime(2026, 3, 1, 11, tzinfo=UTC)
NOON = "2026-03-01T12:00:00Z"
RULES = default_rules()


def seen(book: NoticeTracker, item: dict[str, Any], rules: KubernetesRules = RULES) -> list[tuple[Any, ...]]:
    notice = notice_of(item, rules)
    events = [] if notice is None else book.update(notice, NOW)
    return [(each.type, each.code, each.node, each.timestamp, each.gpu, each.pci_bus_id) for each in events]


def test_a_kernel_message_in_an_event_is_an_xid_of_its_gpu() -> None:
    message = "kernel: NVRM: Xid (PCI:0000:3B:00): 79, pid=1, GPU has fallen off the bus."
    assert seen(NoticeTracker(), event("Whatever", message)) == [("xid", "79", "n1", ELEVEN, None, "00000000:3b:00")]


def test_an_xid_without_its_gpu_is_not_one_of_all_gpus() -> None:
    assert seen(NoticeTracker(), event("NvidiaXID79Error", "bad")) == [("other", "xid_79", "n1", ELEVEN, None, None)]


def test_what_is_not_about_gpus_is_left_out() -> None:
    for reason in ("NodeNotReady", "Rebooted", "Starting", "NodeHasSufficientMemory", "FailedMount"):
        assert seen(NoticeTracker(), event(reason)) == []
    assert seen(NoticeTracker(), event("GpuLost", about=("Pod", "p"))) == []


def test_a_repeated_event_is_told_for_each_rise_of_its_count() -> None:
    book = NoticeTracker()
    assert len(seen(book, event("GpuLost"))) == 1
    assert seen(book, event("GpuLost")) == []
    (again,) = seen(book, event("GpuLost", count=4, last=NOON))
    assert again[3] == NOW
    restored = NoticeTracker(book.reported)
    assert seen(restored, event("GpuLost", count=4, last=NOON)) == []


def test_an_event_first_seen_after_repeats_has_its_first_and_last_time() -> None:
    book = NoticeTracker()
    notice = notice_of(event("GpuLost", "lost", count=5, last=NOON), RULES)
    assert notice is not None
    first, last = book.update(notice, NOW)
    assert (first.timestamp, first.detail) == (ELEVEN, "GpuLost: lost")
    assert (last.timestamp, last.detail) == (NOW, "GpuLost: lost (4 times)")


def test_times_of_the_newer_api_and_of_none() -> None:
    micro = event("GpuLost", first=None, last=None, eventTime="2026-03-01T11:00:00.123456Z")
    assert seen(NoticeTracker(), micro)[0][3] == ELEVEN.replace(microsecond=123000)
    series = event("GpuLost", first=None, last=None, series={"count": 3, "lastObservedTime": NOON})
    assert seen(NoticeTracker(), series)[-1][3] == NOW
    assert seen(NoticeTracker(), event("GpuLost", first=None, last=None))[0][3] == ELEVEN  # its creation


def test_a_listing_forgets_what_the_server_forgot() -> None:
    book = NoticeTracker()
    for uid in ("a", "b"):
        seen(book, event("GpuLost", uid=uid))
    book.keep_only("Node", ["a"])
    assert book.reported == {"Node": {"a": 1}}
    notice = notice_of(event("GpuLost", uid="a"), RULES)
    assert notice is not None
    book.forget(notice)
    assert book.reported == {"Node": {}}


def test_rules_may_name_pods_and_take_the_gpu_from_the_message() -> None:
    uuid = "GPU-11111111-2222-3333-4444-555555555555"
    rule = Rule(reason="Admission.*", kind="Pod", message=r"device (?P<gpu>GPU-\S+)", type="failure", code="DBE")
    rules = KubernetesRules(rules=(rule,))
    item = event("AdmissionError", f"device {uuid} is broken", about=("Pod", "p1"), last=EARLIER)
    assert seen(NoticeTracker(), item, rules) == [("failure", "DBE", "n9", ELEVEN, uuid, None)]
    assert rules.event_kinds() == ["Pod"]
