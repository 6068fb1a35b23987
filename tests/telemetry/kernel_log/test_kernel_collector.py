import contextlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import InputError
from telemetry.accounting import Account
from telemetry.collect import outbox
from telemetry.collect.kernel_log import collect_kernel_log
from telemetry.collect.outbox import Outbox
from telemetry.dataset.event import Event
from telemetry.kernel_log.reader import TABLE, LogLine
from telemetry.staging.folder import StagingFolder
from tests.clock import NOW, Clock
from tests.telemetry.collect.builders import ScriptedSource, staged, staging


def xid(number: int) -> LogLine:
    return LogLine(f"NVRM: Xid (PCI:0000:{number:02x}:00): 79, x", NOW + timedelta(seconds=number), None, "b1")


def collect(where: StagingFolder, reads: list[list[LogLine]], *, node: str | None = "n1") -> Account:
    with Outbox(where, "kernel-log") as outbox:
        return collect_kernel_log(
            outbox,
            lambda position: ScriptedSource(reads, position),
            node=node,
            fixed=False,
            clock=Clock(NOW + timedelta(hours=1)),
            stop=lambda _seconds: False,
            once=True,
        ).tables[TABLE]


def test_events_land_with_their_address(tmp_path: Path):
    where = staging(tmp_path)
    counts = collect(where, [[xid(1), LogLine("usb 1-1: hello", NOW)], [], [xid(2)]])
    rows = staged(where)
    assert [row["pci_bus_id"] for row in rows] == ["00000000:01:00", "00000000:02:00"]
    assert {(row["node"], row["type"], row["code"], row["source"]) for row in rows} == {
        ("n1", "xid", "79", "kernel_log:journal")
    }
    assert (counts.read, counts.used, counts.unaccounted) == (3, 2, 0)
    assert collect(where, [[xid(1)], [], [xid(2)], [xid(3)]]).used == 1
    assert len(staged(where)) == 3


class Killed(BaseException):
    """What a SIGKILL leaves: nothing after it runs."""


@pytest.mark.parametrize("at", range(12))
def test_a_kill_at_any_write_loses_and_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int):
    where = staging(tmp_path)
    reads = [[xid(1)], [xid(2), xid(3)], [xid(4)]]
    writes = 0

    def killing(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes == at:
                raise Killed
            result = real(*args, **kwargs)
            writes += 1
            if writes == at:
                raise Killed
            return result

        return call

    with monkeypatch.context() as patch:
        patch.setattr(outbox, "write_bytes", killing(outbox.write_bytes))
        patch.setattr(StagingFolder, "stage", killing(StagingFolder.stage))
        with contextlib.suppress(Killed):
            collect(where, reads)
    collect(where, reads)
    assert [row["pci_bus_id"] for row in staged(where)] == [f"00000000:{number:02x}:00" for number in (1, 2, 3, 4)]


def test_a_line_without_a_host_is_refused_before_it_counts_as_read(tmp_path: Path):
    where = staging(tmp_path)
    with pytest.raises(InputError, match=r"does not name its node.*--node NAME"):
        collect(where, [[xid(1)]], node=None)
    assert collect(where, [[xid(1)]]).used == 1


def test_two_collectors_of_one_kind_and_a_damaged_state_are_refused(tmp_path: Path):
    where = staging(tmp_path)
    with Outbox(where, "kernel-log"):
        with pytest.raises(InputError, match="another collector 'kernel-log' is running on this dataset"):
            Outbox(where, "kernel-log")
        Outbox(where, "other").close()
    where.state("kernel-log.json").write_text('{"version": 1}')
    with pytest.raises(InputError, match="the collector's state cannot be read"):
        Outbox(where, "kernel-log")
    where.state("kernel-log.json").unlink()
    Outbox(where, "kernel-log").close()


def test_rows_that_could_not_land_are_not_lost_by_the_next_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    where = staging(tmp_path)
    one, two = ([Event(NOW, node, "other", "test", NOW, "boot")] for node in ("n1", "n2"))
    with Outbox(where, "x") as outbox:
        with monkeypatch.context() as patch:
            patch.setattr(
                StagingFolder, "stage", lambda *_args, **_more: (_ for _ in ()).throw(InputError("full", "", ""))
            )
            outbox.commit({"at": 1}, events=one)
            with pytest.raises(InputError):
                outbox.commit({"at": 2}, events=two)
        outbox.commit({"at": 2}, events=two)
    assert [row["node"] for row in staged(where)] == ["n1", "n2"]
