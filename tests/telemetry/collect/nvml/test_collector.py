"""What the collector lands, and that neither a restart nor a full disk loses or doubles it."""

import errno
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from telemetry import atomic
from telemetry.collect.nvml import collector as module
from telemetry.collect.nvml.collector import Collector, writer_of
from telemetry.collect.nvml.xid_watcher import Xid
from telemetry.dataset.channels import CATALOGUE
from telemetry.landing.folder import Landing
from tests.telemetry.collect.nvml.helpers import MemoryNode


class Killed(BaseException):
    """The process ends here."""


class Place:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.node = MemoryNode()
        self.returned = 0

    def collector(self, boot: str = "boot-1", interval_s: float = 30) -> Collector:
        return Collector(
            Landing(self.root, writer=writer_of("node7")),
            "node7",
            CATALOGUE,
            lambda known, troubles: self.node.reader(known=known, troubles=troubles),
            clock=self.node.clock,
            monotonic=self.node.clock.monotonic,
            interval=timedelta(seconds=interval_s),
            boot=boot,
        )

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return [row for path in sorted((self.root / kind).glob("*.parquet")) for row in pq.read_table(path).to_pylist()]

    def codes(self) -> list[str]:
        return sorted(event["code"] for event in self.rows("events"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "fleet.live")


class Stop(threading.Event):
    """An event whose waits pass the clock's time, and which is set after a number of them."""

    def __init__(self, node: MemoryNode, waits: int) -> None:
        super().__init__()
        self._node = node
        self._left = waits

    def wait(self, timeout: float | None = None) -> bool:
        self._node.clock.pass_(timeout or 0.0)
        self._left -= 1
        if self._left <= 0:
            self.set()
        return self.is_set()


def test_samples_land_once_a_minute_and_the_rest_when_stopped(place: Place) -> None:
    place.collector().run(Stop(place.node, 6))
    rows = place.rows("samples")
    assert len(rows) == 12
    assert sorted({row["timestamp"] for row in rows}) == [
        datetime(2026, 3, 1, tzinfo=UTC) + timedelta(seconds=30 * turn) for turn in range(6)
    ]
    assert len(list((place.root / "samples").glob("*.parquet"))) == 3


def test_missed_ticks_are_not_made_up_for(place: Place) -> None:
    collector = place.collector()
    turn = collector.turn
    began: list[float] = []

    def slow(**options: bool) -> None:
        began.append(place.node.clock.s)
        turn(**options)
        if len(began) == 2:
            place.node.clock.pass_(100)

    collector.turn = slow  # type: ignore[method-assign]  # one slow turn
    collector.run(Stop(place.node, 4))
    assert began == [0.0, 30.0, 150.0, 180.0]


def test_the_inventory_lands_when_it_changes_and_once_an_hour(place: Place) -> None:
    for _ in range(2):  # a restart is no change
        collector = place.collector()
        for _ in range(10):
            collector.turn()
            place.node.clock.pass_(60)
        collector.close()
    assert len(place.rows("inventory")) == 2
    place.node.clock.pass_(3600)
    collector = place.collector()
    collector.turn()
    collector.close()
    assert len(place.rows("inventory")) == 4
    row = place.rows("inventory")[0]
    assert row["seen_at"] == datetime(2026, 3, 1, tzinfo=UTC)
    assert (row["gpu"], row["node"], row["slot"], row["pci_bus_id"]) == ("GPU-0", "node7", "0", "00000000:01:00")
    assert (row["serial"], row["model"], row["driver"]) == ("serial-0", "Memory GPU", "580.95.05")


def test_a_new_driver_is_an_event_of_each_gpu_also_over_a_restart(place: Place) -> None:
    collector = place.collector()
    collector.turn()
    collector.close()
    assert place.codes() == []
    place.node.nvml.version = "590.10"
    for _ in range(2):
        collector = place.collector()
        collector.turn()
        collector.close()
    assert place.codes() == ["590.10", "590.10"]
    assert place.rows("events")[0] == {
        "timestamp": datetime(2026, 3, 1, tzinfo=UTC),
        "node": "node7",
        "gpu": "GPU-0",
        "type": "driver",
        "code": "590.10",
        "detail": "driver 580.95.05 before",
        "source": "nvml",
        "known_at": datetime(2026, 3, 1, tzinfo=UTC),
        "pci_bus_id": "00000000:01:00",
    }


def test_a_loss_is_told_once_in_a_boot_and_again_after_a_reboot(place: Place) -> None:
    for boot, expected in (("boot-1", 1), ("boot-1", 1), ("boot-2", 2)):
        collector = place.collector(boot)
        if not expected - 1:
            collector.turn()
        place.node.nvml.gpus[0].lost = 15
        place.node.clock.pass_(30)
        collector.turn()
        collector.close()
        assert place.codes() == ["gpu_lost"] * expected


def test_killed_at_any_write_a_loss_is_neither_lost_nor_told_twice(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = 0
    die_at = -1

    def counted(act: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes == die_at:
                raise Killed
            return act(*arguments, **options)

        return run

    monkeypatch.setattr("telemetry.collect.outbox.write_bytes", counted(atomic.write_bytes))
    monkeypatch.setattr(Landing, "stage", counted(Landing.stage))
    for point in range(1, 12):
        here = Place(place.root.with_name(f"at-{point}.live"))
        writes, die_at = 0, point
        collector = here.collector()
        try:
            collector.turn()
            here.node.nvml.gpus[0].lost = 15
            here.node.clock.pass_(30)
            collector.turn()
            collector.close()
        except Killed:
            collector._outbox.close()  # the kernel would have let go of the lock
        die_at = -1
        here.node.nvml.gpus[0].lost = 15
        here.node.clock.pass_(30)
        collector = here.collector()
        collector.turn()
        collector.close()
        assert here.codes() == ["gpu_lost"], point
        rows = here.rows("samples")
        assert len(rows) == len({(row["gpu"], row["timestamp"]) for row in rows})


def test_an_xid_lands_at_once(place: Place) -> None:
    collector = place.collector()
    at = datetime(2026, 3, 1, 12, tzinfo=UTC)
    collector.hear(Xid(at, "GPU-1", 79, None))
    collector.hear(Xid(at, "GPU-0", 31, 3))
    told = [
        (each["type"], each["code"], each["gpu"], each["detail"], each["timestamp"]) for each in place.rows("events")
    ]
    assert told == [("xid", "79", "GPU-1", None, at), ("xid", "31", "GPU-0", "GPU instance 3", at)]
    collector.close()


def test_a_full_disk_is_waited_for(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    collector = place.collector()
    collector.turn()
    with monkeypatch.context() as full:

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr("telemetry.landing.folder.pq.write_table", refuse)
        for _ in range(3):
            place.node.clock.pass_(30)
            collector.hear(Xid(place.node.clock(), "GPU-0", 79, None))
            collector.turn()
            collector.write_samples()
        assert place.codes() == []
    # Once for events and once for samples, not at each try.
    assert sum("writing waits" in record.message for record in caplog.records) == 2
    place.node.clock.pass_(30)
    collector.turn()
    assert place.codes() == ["79", "79", "79"]
    collector.close()
    assert len(place.rows("samples")) == 10


def test_rows_that_cannot_land_are_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROWS", 5)
    collector = place.collector()
    for _ in range(4):
        collector.turn()
        place.node.clock.pass_(30)
    collector.close()
    assert (len(place.rows("samples")), collector.counts.dropped_rows) == (5, 3)


def test_once_lands_one_reading_of_each_gpu(place: Place) -> None:
    place.node.nvml.gpus[0].profile = {1: 50.0}
    place.collector().once(place.node.clock.pass_)
    rows = place.rows("samples")
    assert [(row["gpu"], row["gr_engine_active_ratio"]) for row in rows] == [("GPU-0", 0.5), ("GPU-1", None)]


@pytest.mark.parametrize("node", ["node7", "a b", "ä", "x" * 300, "node_7"])
def test_any_node_has_a_writer_of_its_own(node: str, tmp_path: Path) -> None:
    writer = writer_of(node)
    Landing(tmp_path, writer=writer)
    assert len(writer) <= 100
    assert writer_of(node + "-") != writer
