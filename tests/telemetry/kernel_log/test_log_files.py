import bz2
import gzip
import json
import lzma
import os
import shutil
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foundation.errors import InputError
from telemetry.kernel_log import log_files
from telemetry.kernel_log.dating import LogContext as LogClock
from telemetry.kernel_log.dating import date_lines
from telemetry.kernel_log.log_files import LogFile, LogFiles, LogPosition
from telemetry.kernel_log.stamps import parse_header
from tests.telemetry.collect.builders import NOW, Clock


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
    assert date_lines([stamps], clock) == [datetime.fromisoformat(expected)]


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
