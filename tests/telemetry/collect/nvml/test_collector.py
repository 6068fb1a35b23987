"""What the collector lands, and that neither a restart nor a full disk loses or doubles it."""

import errno
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from predrain.command import app
from telemetry.collect.buffer import DROPPED
from telemetry.collect.nvml import collector as module
from telemetry.collect.nvml.collector import NvmlCollector, writer_of
from telemetry.dataset.channels import CATALOGUE
from telemetry.landing.folder import Landing
from tests.telemetry.collect.nvml.memory_nvml import MemoryNode

START = datetime(2026, 3, 1, tzinfo=UTC)


class Place:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.node = MemoryNode()

    def collector(self, boot: str = "boot-1") -> NvmlCollector:
        clock = self.node.clock
        return NvmlCollector(
            Landing(self.root, writer=writer_of("node7")),
            "node7",
            CATALOGUE,
            self.node.spawn,
            clock=clock,
            interval=timedelta(seconds=30),
            monotonic=clock.monotonic,
            sleep=clock.pass_,
            boot=boot,
        )

    def run(self, turns: int, boot: str = "boot-1", pause_s: float = 30.0) -> None:
        collector = self.collector(boot)
        for _ in range(turns):
            collector.turn()
            self.node.clock.pass_(pause_s)
        collector.close()

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return [row for path in sorted((self.root / kind).glob("*.parquet")) for row in pq.read_table(path).to_pylist()]

    def codes(self) -> list[str]:
        return sorted(event["code"] for event in self.rows("events"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "fleet.live")


def test_turns_keep_the_interval_samples_land_once_a_minute_and_the_rest_when_stopped(place: Place) -> None:
    stopped = threading.Event()
    collector = place.collector()
    turn = collector.turn
    began: list[float] = []

    def timed() -> None:
        began.append(place.node.clock.s)
        turn()
        if len(began) == 2:
            place.node.clock.pass_(100)  # ticks that are missed are not made up for
        if len(began) == 3:
            place.node.nvml.events = [(place.node.nvml.gpus[0], 31, 3)]
        if len(began) == 5:
            stopped.set()

    collector.turn = timed
    collector.run(stopped)
    assert began == [0.0, 30.0, 150.0, 180.0, 210.0]
    assert len(place.rows("samples")) == 10
    assert len(list((place.root / "samples").glob("*.parquet"))) == 3
    (event,) = place.rows("events")
    assert (event["type"], event["code"], event["gpu"], event["detail"]) == ("xid", "31", "GPU-0", "GPU instance 3")


def test_the_inventory_lands_when_it_changes_and_once_an_hour(place: Place) -> None:
    for _ in range(2):  # a restart is no change
        place.run(10, pause_s=60)
    assert len(place.rows("inventory")) == 2
    place.node.clock.pass_(3600)
    place.run(1)
    assert len(place.rows("inventory")) == 4
    row = place.rows("inventory")[0]
    assert row["seen_at"] == START
    assert (row["gpu"], row["node"], row["slot"], row["pci_bus_id"]) == ("GPU-0", "node7", "0", "00000000:01:00")
    assert (row["serial"], row["model"], row["driver"]) == ("serial-0", "Memory GPU", "580.95.05")
    place.node.nvml.version = "590.10"  # the compaction makes the event of it
    place.run(1)
    assert [row["driver"] for row in place.rows("inventory")[4:]] == ["590.10", "590.10"]


def test_a_loss_is_reported_once_in_a_boot_and_again_after_a_reboot(place: Place) -> None:
    place.run(1)
    place.node.nvml.gpus[0].lost = 15
    for boot, expected in (("boot-1", 1), ("boot-1", 1), ("boot-2", 2)):
        place.run(1, boot)
        assert place.codes() == ["gpu_lost"] * expected


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
            place.node.nvml.events = [(place.node.nvml.gpus[0], 79, None)]
            collector._reader.listen(1)
            collector.write()
            collector.turn()
            collector.write()  # nothing is new
        assert place.codes() == []
    assert sum("writing: the disk is full" in record.message for record in caplog.records) == 1
    place.node.clock.pass_(30)
    collector.turn()
    assert place.codes() == ["79", "79", "79"]
    collector.close()
    assert len(place.rows("samples")) == 10


def test_rows_that_cannot_land_are_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROWS", 5)
    monkeypatch.setattr(module, "WRITE_EVERY_S", 1e9)
    collector = place.collector()
    for _ in range(4):
        collector.turn()
    collector.close()
    samples = collector.accounting.tables["samples"]
    assert len(place.rows("samples")) == samples.used == 5
    assert (samples.read, samples.left_out) == (8, {DROPPED: 3})


def test_once_lands_one_reading_of_each_gpu(place: Place) -> None:
    place.node.nvml.gpus[0].profile = {1: 50.0}
    place.collector().once()
    rows = place.rows("samples")
    assert [(row["gpu"], row["gr_engine_active_ratio"]) for row in rows] == [("GPU-0", 0.5), ("GPU-1", None)]


def test_every_reading_is_accounted_for(place: Place) -> None:
    collector = place.collector()
    collector.turn()
    place.node.nvml.gpus[0].lost = 15
    collector.turn()
    collector.close()
    readings, samples, events, values = (
        collector.accounting.tables[name] for name in ("GPU readings", "samples", "events", "sample values")
    )
    assert (readings.read, readings.used, readings.left_out) == (4, 3, {"gpu_is_lost": 1})
    assert (samples.read, samples.used, events.used) == (3, 3, 1)
    assert values.read == values.used > 0


@pytest.mark.parametrize("node", ["node7", "a b", "ä", "x" * 300, "node_7"])
def test_any_node_has_a_writer_of_its_own(node: str, tmp_path: Path) -> None:
    writer = writer_of(node)
    Landing(tmp_path, writer=writer)
    assert len(writer) <= 100
    assert writer_of(node + "-") != writer


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--dataset", "a", "--spool", "b"], "give one of --dataset and --spool"),
        (["--spool", "b", "--bearer-token-file", "t"], "is only used with --push"),
        (["--spool", "b", "--interval", "0s"], "--interval"),
        (["--spool", "b", "--spool-limit", "much"], "'much' is not a size"),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(
    options: list[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    result = CliRunner().invoke(app, ["collect", "nvml", *options])
    assert result.exit_code == 2
    assert problem in result.output
