import json
import stat
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from foundation.errors import InputError
from telemetry.kernel_log.journal import MAX_ENTRY_BYTES, Journal
from telemetry.kernel_log.reader import LogLine
from tests.telemetry.collect.builders import NOW

XID = "NVRM: Xid (PCI:0000:10:00): 79, pid=1"


def entry(number: int, message: str = XID, *, boot: str = "b1") -> str:
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
        assert len(source._rest) <= MAX_ENTRY_BYTES
    assert [line.when for line in lines] == [NOW, NOW + timedelta(microseconds=2)]
    assert "a journal entry cannot be read" in caplog.text


def test_no_journalctl(tmp_path: Path):
    with pytest.raises(InputError, match="journalctl cannot be started: No such file or directory"):
        Journal({}, follow=False, command=[str(tmp_path / "none")]).read(0.0)
