"""Kernel logs: from files, from the journal, and line by line."""

import bz2
import gzip
import json
import lzma
import os
import shutil
import stat
import time
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foundation.errors import InputError
from foundation.instants import to_ms
from telemetry.collect.kernel_log import known_at
from telemetry.dataset.event import Event
from telemetry.kernel_log import log_files
from telemetry.kernel_log.catalogue import shipped
from telemetry.kernel_log.journal import MAX_ENTRY_BYTES, Journal
from telemetry.kernel_log.log_files import LogFile, LogFiles, LogPosition
from telemetry.kernel_log.reader import KernelLogReader, LogLine
from telemetry.kernel_log.stamps import LogContext as LogClock
from telemetry.kernel_log.stamps import date_lines, parse_header
from tests.clock import NOW, Clock


def write(path: Path, *lines: str, end: str = "\n") -> None:
    with path.open("a") as stream:
        stream.write("".join(f"{line}\n" for line in lines[:-1]) + (lines[-1] + end if lines else ""))


def age(path: Path, seconds: float) -> None:
    os.utime(path, (NOW.timestamp() - seconds, NOW.timestamp() - seconds))


def everything(file: LogFile, *, final: bool = False) -> list[str]:
    return [line.decode() for lines in iter(lambda: file.read(final=final), []) for line in lines]


def restarted(file: LogFile) -> LogFile:
    return LogFile(file.path, None if file.place is None else LogPosition(**json.loads(json.dumps(asdict(file.place)))))


def _zstd(content: bytes) -> bytes:
    return bytes(pa.compress(content, "zstd", asbytes=True))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "syslog"


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("how", ["rename", "copytruncate", "gz", "xz", "bz2", "zst", "dated", "half compressed"])
def test_a_rotation_loses_and_repeats_nothing(log: Path, how: str, restart: bool):
    write(log, "one", "two")
    file = LogFile(log)
    assert everything(file) == ["one", "two"]
    write(log, "three")
    write(log.with_name("syslog2"), "another log's")
    old = log.with_name("syslog-20260301" if how == "dated" else "syslog.1")
    if how == "copytruncate":
        shutil.copy(log, old)
        log.write_text("")
    else:
        log.rename(old)
        packed = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress, "zst": _zstd}.get(how)
        if packed is not None:
            old.with_name(f"{old.name}.{how}").write_bytes(packed(old.read_bytes()))
            old.unlink()
        if how == "half compressed":
            old.with_name("syslog.1.gz").write_bytes(gzip.compress(old.read_bytes()))
    write(log, "four")
    if restart:
        file = restarted(file)
    assert everything(file) == ["three", "four"]
    assert everything(restarted(file)) == []


def test_a_lost_log_is_logged_and_the_new_one_read(log: Path, caplog: pytest.LogCaptureFixture):
    write(log, "one")
    file = LogFile(log)
    everything(file)
    log.unlink()
    assert everything(file) == []
    write(log, "other")
    assert everything(file) == ["other"]
    assert "was replaced" in caplog.text


def test_a_log_of_many_chunks_and_an_endless_line(log: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log_files, "_CHUNK", 64)
    lines = [f"{number:020d} of many lines" for number in range(100)]
    write(log, *lines)
    file = LogFile(log)
    assert everything(file) == lines
    write(log, "x" * 500, "next")
    assert everything(restarted(file))[-1] == "next"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.sampled_from(["write", "half", "read", "rename", "copytruncate", "compress", "restart"]), max_size=25
    )
)
def test_any_order_of_writes_rotations_and_restarts(tmp_path_factory: pytest.TempPathFactory, steps: list[str]):
    folder = tmp_path_factory.mktemp("logs")
    log = folder / "kern.log"
    log.touch()
    file, written, read, half = LogFile(log), [], [], False
    everything(file)  # what is rotated before the first look is not read
    for number, step in enumerate(steps):
        rotated = sorted(folder.glob("kern.log.*[0-9]"), key=lambda path: path.stat().st_mtime)
        for index, path in enumerate(rotated):
            age(path, 1000 - index)
        if step in ("write", "half"):
            with log.open("a") as stream:
                text = f"line {number} of a log"
                stream.write(text if step == "half" else f"{text}\n")
            written.append((written.pop() if half else "") + text)
            half = step == "half"
        elif step == "read":
            read += everything(file)
        elif step == "rename" and log.stat().st_size:
            log.rename(folder / f"kern.log.{number}")
            log.touch()
            half = False
        elif step == "copytruncate" and log.stat().st_size and not half:
            read += everything(file)  # a log is known by its inode only until a whole line was read
            shutil.copy(log, folder / f"kern.log.{number}")
            log.write_text("")
            half = False
        elif step == "compress" and rotated:
            last = rotated[-1]
            if file.place is None or file.place.head_bytes:
                last.with_name(last.name + ".gz").write_bytes(gzip.compress(last.read_bytes()))
                shutil.copystat(last, last.with_name(last.name + ".gz"))
                last.unlink()
        elif step == "restart":
            file = restarted(file)
        read += everything(file) if step in ("rename", "copytruncate", "compress") else []
    read += everything(file, final=True)
    assert read == written


@pytest.mark.parametrize(
    ("stamp", "zone", "now", "expected"),
    [
        ("Dec 31 23:59:00", "UTC", "2026-01-01T00:01:00Z", "2025-12-31T23:59:00Z"),
        ("Jan  1 00:00:30", "UTC", "2025-12-31T23:59:50Z", "2026-01-01T00:00:30Z"),
        ("Feb 29 10:00:00", "UTC", "2026-03-01T00:00:00Z", "2024-02-29T10:00:00Z"),
        ("Mar  1 10:00:00", "UTC", "2026-03-01T12:00:00Z", "2026-03-01T10:00:00Z"),
        ("Oct 25 02:50:00", "Europe/Berlin", "2026-10-25T00:50:01Z", "2026-10-25T00:50:00Z"),
        ("Oct 25 02:50:00", "Europe/Berlin", "2026-10-25T01:50:01Z", "2026-10-25T01:50:00Z"),
    ],
)
def test_a_year_that_is_not_written_and_an_hour_that_comes_twice(stamp: str, zone: str, now: str, expected: str):
    stamps = parse_header(f"{stamp} host kernel: ").stamps
    clock = LogClock(ZoneInfo(zone), datetime.fromisoformat(now))
    assert [line.when for line in date_lines([stamps], clock)] == [datetime.fromisoformat(expected)]


XID = "kernel: NVRM: Xid (PCI:0000:10:00): 79, pid=1"


def test_files_follow_and_go_on_after_a_restart(tmp_path: Path):
    first, second = tmp_path / "a.log", tmp_path / "b.log"
    write(first, f"Mar  1 10:00:00 h1 {XID}", "Mar  1 10:00:01 h1 sshd: hello")
    source = LogFiles([first, second], {}, clock=Clock(), zone=UTC)
    got = source.read(0.0)
    assert [(line.host, line.when, line.history) for line in got.lines] == [("h1", NOW - timedelta(hours=2), True)]
    write(second, f"2026-03-01T12:00:00+00:00 h2 {XID}")
    write(first, f"Mar  1 11:00:00 h1 {XID}")
    again = LogFiles([first, second], json.loads(json.dumps(got.position)), clock=Clock(), zone=UTC)
    assert [(line.host, line.history) for line in again.read(0.0).lines] == [("h1", False), ("h2", True)]
    write(second, f"2026-03-01T12:00:01+00:00 h2 {XID}")
    assert [(line.host, line.history) for line in again.read(5.0).lines] == [("h2", False)]


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(InputError, match=r"the log file does not exist.*Check the path"):
        LogFiles([tmp_path / "none.log"], {}, clock=Clock(), once=True)
    assert LogFiles([tmp_path / "none.log"], {}, clock=Clock()).read(0.0).lines == []


def test_once_takes_a_last_line_that_is_not_continued(tmp_path: Path):
    log = tmp_path / "a.log"
    write(log, f"Mar  1 10:00:00 h1 {XID}", end="")
    age(log, 10)
    assert LogFiles([log], {}, clock=Clock(), zone=UTC, once=True).read(0.0).lines == []
    age(log, 3600)
    assert len(LogFiles([log], {}, clock=Clock(), zone=UTC, once=True).read(0.0).lines) == 1


UUID = "GPU-34bf77d1-c686-6821-79a8-32d326c5039c"
XID_LINE = "NVRM: Xid (PCI:0000:10:00): 79, pid=1, name=x, GPU has fallen off the bus."


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
    (event,) = reader().read([line(XID_LINE, history=history)], heard)
    assert event.row()["known_at"] == to_ms(NOW + timedelta(minutes=known_after_minutes))


def test_the_load_of_an_open_driver_says_so():
    (event,) = events(
        line("NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.105.08  Release Build  (dvs@u)")
    )
    assert (event.type, event.code, event.detail) == ("driver", "580.105.08", "open kernel module")


def test_a_new_boot_id_is_a_boot_and_the_first_one_is_not():
    first = reader()
    assert list(first.read([line("hello", boot_id="a"), line("hello", boot_id="a")])) == []
    (boot,) = first.read([line("hello", seconds=1, boot_id="b"), line("hello", boot_id="b")])
    assert (boot.type, boot.code, boot.detail) == ("other", "boot", "boot id b")
    again = reader(state=json.loads(json.dumps(first.state())))
    assert list(again.read([line("hello", boot_id="b")])) == []
    assert len(list(again.read([line("hello", boot_id="c")]))) == 1


BANNER = "Linux version 6.1.0-13-amd64 (debian@x) (gcc) #1 SMP"


def test_a_boot_that_its_id_reports_is_not_reported_again_by_the_banner():
    found = events(
        line(BANNER, boot_id="a"), line(BANNER, seconds=9, boot_id="b"), line(XID_LINE, seconds=9, boot_id="b")
    )
    assert [(event.code, event.detail) for event in found[:2]] == [
        ("boot", "Linux 6.1.0-13-amd64"), ("boot", "boot id b"),
    ]  # fmt: skip
    assert [event.code for event in found[2:]] == ["79"]


def test_a_uuid_reported_before_is_remembered_until_the_next_boot():
    introduction = line(f"NVRM: GPU at PCI:0000:10:00: {UUID}")
    first, second = events(introduction, line(XID_LINE), line("Linux version 6.1.0 (x)"), line(XID_LINE))[::2]
    assert (first.gpu, second.gpu) == (UUID, None)


def entry(number: int, message: str = XID.removeprefix("kernel: "), *, boot: str = "b1") -> str:
    us = int(NOW.timestamp() * 1e6) + number
    content = {"__CURSOR": f"s=1;i={number}", "__REALTIME_TIMESTAMP": str(us), "_HOSTNAME": "h1", "_BOOT_ID": boot}
    return json.dumps(content | {"MESSAGE": message})


def program(folder: Path, body: str) -> list[str]:
    """A journalctl by hand; its arguments go to a file."""
    path = folder / "journalctl"
    path.write_text(f'#!/bin/sh\necho "$@" >> {folder}/arguments\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return [str(path)]


def arguments(folder: Path) -> list[str]:
    return (folder / "arguments").read_text().splitlines()


def read(source: Journal, count: int) -> list[LogLine]:
    lines: list[LogLine] = []
    deadline = time.monotonic() + 60
    while len(lines) < count:
        assert time.monotonic() < deadline, "the journal gave too little"
        lines += source.read(0.05).lines
    return lines


def test_entries_until_the_end(tmp_path: Path):
    (tmp_path / "entries").write_text("\n".join(entry(number) for number in range(3)) + "\n")
    source = Journal({}, follow=False, command=program(tmp_path, f"cat {tmp_path}/entries"))
    lines = read(source, 3)
    while not (got := source.read(0.05)).drained:
        pass
    assert [line.when for line in lines] == [NOW + timedelta(microseconds=number) for number in range(3)]
    assert {(line.host, line.boot_id, line.history) for line in lines} == {("h1", "b1", True)}
    assert got.position["cursor"] == "s=1;i=2"


@pytest.mark.parametrize(
    ("position", "since", "expected"),
    [
        ({}, None, "--boot"),
        ({}, NOW, f"--since=@{int(NOW.timestamp())}"),
        ({"cursor": "s=1;i=2", "realtime_us": 5}, NOW, "--after-cursor=s=1;i=2"),  # beyond the boot
    ],
)
def test_where_it_begins(tmp_path: Path, position: dict[str, object], since: datetime | None, expected: str):
    source = Journal(position, follow=False, since=since, command=program(tmp_path, "exit 0"))
    while not source.read(0.05).drained:
        pass
    fixed = "--quiet --no-pager --all --output=json --output-fields=MESSAGE,_HOSTNAME,_BOOT_ID"
    assert arguments(tmp_path) == [f"{fixed} {expected} _TRANSPORT=kernel"]


def test_one_that_ends_is_started_again_at_the_cursor(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "0").write_text(entry(1) + "\n" + entry(2)[:20])
    (tmp_path / "1").write_text(entry(2) + "\n")
    body = f"cat {tmp_path}/$(grep -c after-cursor {tmp_path}/arguments); echo killed >&2; exit 1"
    source = Journal({}, follow=True, command=program(tmp_path, body))
    assert [line.when for line in read(source, 2)] == [NOW + timedelta(microseconds=number) for number in (1, 2)]
    source.close()
    assert [text.split()[5] for text in arguments(tmp_path)] == ["--boot", "--after-cursor=s=1;i=1"]
    assert "journalctl ended: killed" in caplog.text


def test_one_that_never_works_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = Journal({}, follow=True, command=program(tmp_path, "echo denied >&2; exit 1"))
    with pytest.raises(InputError, match="journalctl ended: denied"):
        read(source, 1)
    assert len(arguments(tmp_path)) == 1
    (tmp_path / "one").write_text(entry(1) + "\n")
    monkeypatch.setattr("telemetry.kernel_log.journal.RESTARTS", 2)
    source = Journal({}, follow=True, command=program(tmp_path, f"cat {tmp_path}/one; rm {tmp_path}/one; exit 1"))
    read(source, 1)
    with pytest.raises(InputError, match="journalctl ended: "):
        read(source, 99)
    source.close()


def test_a_cursor_that_is_gone_falls_back_on_the_time(tmp_path: Path):
    us = int(NOW.timestamp() * 1e6) + 1
    refusal = 'case "$*" in *after-cursor*) echo "Failed to seek to cursor: Invalid argument" >&2; exit 1;; esac'
    body = f"{refusal}\ncat {tmp_path}/all"
    (tmp_path / "all").write_text("".join(entry(number) + "\n" for number in range(4)))
    source = Journal({"cursor": "gone", "realtime_us": us}, follow=False, command=program(tmp_path, body))
    assert [line.when for line in read(source, 2)] == [NOW + timedelta(microseconds=us) for us in (2, 3)]
    source.close()
    assert f"--since=@{us // 1_000_000}" in arguments(tmp_path)[-1]


def test_an_entry_beyond_any_use_is_passed_over_in_bounded_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    long = entry(1, "x" * (3 * MAX_ENTRY_BYTES))
    (tmp_path / "entries").write_text(f"{entry(0)}\n{long}\n{entry(2)}\n")
    source = Journal({}, follow=False, command=program(tmp_path, f"cat {tmp_path}/entries"))
    lines: list[LogLine] = []
    while not (got := source.read(1.0)).drained:
        lines += got.lines
        assert len(source._incomplete) <= MAX_ENTRY_BYTES
    assert [line.when for line in lines] == [NOW, NOW + timedelta(microseconds=2)]
    assert "a journal entry cannot be read" in caplog.text


def test_no_journalctl(tmp_path: Path):
    with pytest.raises(InputError, match="journalctl cannot be started: No such file or directory"):
        Journal({}, follow=False, command=[str(tmp_path / "none")]).read(0.0)
