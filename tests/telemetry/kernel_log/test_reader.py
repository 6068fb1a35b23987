import json
from datetime import timedelta
from functools import partial

import pytest

from foundation.instants import to_ms
from telemetry.collect.kernel_log import known_at
from telemetry.dataset.event import Event
from telemetry.kernel_log.catalogue import shipped
from telemetry.kernel_log.reader import TABLE, UNCLEAR, UNDATED, KernelLogReader, LogLine
from tests.telemetry.collect.builders import NOW

UUID = "GPU-34bf77d1-c686-6821-79a8-32d326c5039c"
XID = "NVRM: Xid (PCI:0000:10:00): 79, pid=1, name=x, GPU has fallen off the bus."


def line(message: str, *, seconds: float = 0.0, **more: object) -> LogLine:
    return LogLine(message, NOW + timedelta(seconds=seconds), **more)


def reader(**more: object) -> KernelLogReader:
    return KernelLogReader(shipped(), **{"node": "n1"} | more)


def events(*lines: LogLine) -> list[Event]:
    return list(reader().read(lines))


@pytest.mark.parametrize(
    ("history", "after_minutes", "known_after_minutes"), [(True, 60, 10), (True, 1, 1), (False, 60, 60), (False, -1, 0)]
)
def test_history_is_known_when_an_import_would_say_so_and_nothing_before_it_happened(
    history: bool, after_minutes: int, known_after_minutes: int
):
    heard = partial(known_at, NOW + timedelta(minutes=after_minutes), timedelta(minutes=10))
    (event,) = reader().read([line(XID, history=history)], heard)
    assert event.row()["known_at"] == to_ms(NOW + timedelta(minutes=known_after_minutes))


@pytest.mark.parametrize(
    ("module", "version", "detail"),
    [
        ("x86_64 Kernel Module  550.144.03  Mon Dec 30 17:44:08 2024", "550.144.03", None),
        ("Open Kernel Module for x86_64  580.105.08  Release Build  (dvs@u)", "580.105.08", "open kernel module"),
    ],
)
def test_a_driver_load(module: str, version: str, detail: str | None):
    (event,) = events(line(f"NVRM: loading NVIDIA UNIX {module}"))
    assert (event.type, event.code, event.detail, event.pci_bus_id) == ("driver", version, detail, None)


def test_a_new_boot_id_is_a_boot_and_the_first_one_is_not():
    first = reader()
    assert list(first.read([line("hello", boot_id="a"), line("hello", boot_id="a")])) == []
    (boot,) = first.read([line("hello", seconds=1, boot_id="b"), line("hello", boot_id="b")])
    assert (boot.type, boot.code, boot.detail) == ("other", "boot", "boot id b")
    again = reader(state=json.loads(json.dumps(first.state())))
    assert list(again.read([line("hello", boot_id="b")])) == []
    assert len(list(again.read([line("hello", boot_id="c")]))) == 1


BANNER = "Linux version 6.1.0-13-amd64 (debian@x) (gcc) #1 SMP"


def test_the_kernels_first_message_is_a_boot():
    (boot,) = events(line(BANNER))
    assert (boot.code, boot.detail) == ("boot", "Linux 6.1.0-13-amd64")


def test_a_boot_that_its_id_reports_is_not_reported_again_by_the_banner():
    found = events(line(BANNER, boot_id="a"), line(BANNER, seconds=9, boot_id="b"), line(XID, seconds=9, boot_id="b"))
    assert [(event.code, event.detail) for event in found[:2]] == [
        ("boot", "Linux 6.1.0-13-amd64"), ("boot", "boot id b"),
    ]  # fmt: skip
    assert [event.code for event in found[2:]] == ["79"]


def test_a_uuid_reported_before_is_remembered_until_the_next_boot():
    introduction = line(f"NVRM: GPU at PCI:0000:10:00: {UUID}")
    first, second = events(introduction, line(XID), line("Linux version 6.1.0 (x)"), line(XID))[::2]
    assert (first.gpu, second.gpu) == (UUID, None)


def test_what_makes_no_event_is_counted():
    unnamed = reader(node=None)
    lines = [
        line("NVRM: Xid (invalid): x", host="a"),
        line("NVRM: Xid (invalid): y", host="a"),
        LogLine(XID, None, "a"),
    ]
    assert list(unnamed.read(lines)) == []
    account = unnamed.accounting.tables[TABLE]
    assert account.left_out == {UNCLEAR: 2, UNDATED: 1}
    assert (account.read, account.unaccounted) == (3, 0)
