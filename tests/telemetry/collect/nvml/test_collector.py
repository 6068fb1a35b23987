"""What one GPU's reading holds, and what the collector stages of it whatever fails."""

import errno
import json
import math
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.collect.nvml import collector as module
from telemetry.collect.nvml.child import ASK_AGAIN_S, Gpu
from telemetry.collect.nvml.collector import NvmlCollector, writer_of
from telemetry.collect.nvml.library import CALLS, FIELDS, LINK_COUNTERS, PROFILE, NvmlFault
from telemetry.collect.outbox import DROPPED
from telemetry.dataset.channels import CATALOGUE
from telemetry.doctor.diagnosis import absent_on
from telemetry.staging.folder import StagingFolder
from tests.telemetry.collect.nvml.memory_nvml import MemoryGpu, MemoryNode, MemoryNvml

START = datetime(2026, 3, 1, tzinfo=UTC)


class Place:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.node = MemoryNode()

    def collector(self, boot: str = "boot-1") -> NvmlCollector:
        clock = self.node.clock
        return NvmlCollector(
            StagingFolder(self.root, writer=writer_of("node7")),
            "node7",
            CATALOGUE,
            self.node.spawn,
            clock=clock,
            interval=timedelta(seconds=30),
            monotonic=clock.monotonic,
            sleep=clock.sleep,
            boot=boot,
        )

    def run(self, turns: int, boot: str = "boot-1", pause_s: float = 30.0) -> None:
        collector = self.collector(boot)
        for _ in range(turns):
            collector.read_gpus()
            self.node.clock.sleep(pause_s)
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
    turn = collector.read_gpus
    began: list[float] = []

    def timed() -> None:
        began.append(place.node.clock.seconds)
        turn()
        if len(began) == 2:
            place.node.clock.sleep(100)  # ticks that are missed are not made up for
        if len(began) == 3:
            place.node.nvml.events = [(place.node.nvml.gpus[0], 31, 3)]
        if len(began) == 5:
            stopped.set()

    collector.read_gpus = timed
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
    place.node.clock.sleep(3600)
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


def test_a_full_disk_is_waited_for(place, monkeypatch, caplog):
    collector = place.collector()
    collector.read_gpus()
    with monkeypatch.context() as full:

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr("telemetry.staging.folder.pq.write_table", refuse)
        for _ in range(3):
            place.node.clock.sleep(30)
            place.node.nvml.events = [(place.node.nvml.gpus[0], 79, None)]
            collector._reader.listen(1)
            collector.write()
            collector.read_gpus()
            collector.write()  # nothing is new
        assert place.codes() == []
    assert sum("writing: the disk is full" in record.message for record in caplog.records) == 1
    place.node.clock.sleep(30)
    collector.read_gpus()
    assert place.codes() == ["79", "79", "79"]
    collector.close()
    assert len(place.rows("samples")) == 10


def test_rows_that_cannot_land_are_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROWS", 5)
    monkeypatch.setattr(module, "WRITE_EVERY_S", 1e9)
    collector = place.collector()
    for _ in range(4):
        collector.read_gpus()
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
    collector.read_gpus()
    place.node.nvml.gpus[0].lost = 15
    collector.read_gpus()
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
    StagingFolder(tmp_path, writer=writer)
    assert len(writer) <= 100
    assert writer_of(node + "-") != writer


DATA = Path(__file__).parents[3] / "data" / "nvml"


class Bench:
    def __init__(self, **parts: object) -> None:
        self.gpu = MemoryGpu("GPU-0", **parts)
        self.now_s = 0.0
        self.reader = Gpu(MemoryNvml([self.gpu]), 0, lambda: self.now_s)

    def values(self) -> dict[str, float]:
        self.gpu.asked.clear()
        return self.reader.read()[0]


def test_every_channel_of_the_catalogue_with_an_nvml_source_is_read() -> None:
    known = {name for name, channel in CATALOGUE.items() if channel.nvml is not None}
    read = {channel for channel, *_ in (*FIELDS, *LINK_COUNTERS, *PROFILE)}
    read |= {channel for call in CALLS for channel in call.channels}
    # XIDs come as events; a gauge of the last one would report each of them twice.
    assert known - {"xid_last"} == read


@pytest.mark.parametrize("blank", [4294967295.0, 2.0**64 - 1, 2.0**63 - 1, math.nan])
def test_a_blank_is_no_value(blank: float) -> None:
    assert Bench(fields={83: blank}, calls={"fan": (blank,)}).values() == {}


def test_what_is_not_supported_is_asked_again_after_an_hour_only() -> None:
    bench = Bench(calls={"temperature": (40.0,)})
    bench.values()
    assert "fan" in bench.gpu.asked
    bench.gpu.calls["fan"] = (30.0,)
    bench.now_s = ASK_AGAIN_S - 1
    assert "fan_speed_pct" not in bench.values()
    assert bench.gpu.asked == ["temperature"]
    bench.now_s = ASK_AGAIN_S + 1
    assert bench.values()["fan_speed_pct"] == 30.0


def test_what_fails_for_a_moment_is_counted_asked_again_at_once_and_not_elsewhere() -> None:
    failing = {"fan": NvmlFault(999), "power": NvmlFault(999), "pstate": NvmlFault(10), "energy": (7.0,)}
    bench = Bench(fields={83: NvmlFault(999)}, calls=failing)
    assert bench.reader.read() == ({}, {"unknown": 3, "timeout": 1})
    bench.gpu.calls["fan"] = (30.0,)
    assert bench.values() == {"fan_speed_pct": 30.0}


def test_a_call_is_asked_for_what_the_fields_do_not_have() -> None:
    bench = Bench(fields={142: 1.0, 143: 2.0}, calls={"remapped_rows": (9.0, 9.0, 1.0, 0.0), "energy": (7.0,)})
    assert bench.values() == {
        "row_remap_correctable_total": 1.0,
        "row_remap_uncorrectable_total": 2.0,
        "row_remap_pending": 1.0,
        "row_remap_failure": 0.0,
        "energy_mj": 7.0,
    }


def test_an_older_driver_is_asked_in_its_own_words() -> None:
    bench = Bench(calls={"clocks_throttle_reasons": (128.0,), "memory": (2.0**20, 2.0**21), "temperature_v1": (40.0,)})
    expected = {"clocks_event_reasons": 128.0, "fb_used_mib": 1.0, "fb_free_mib": 2.0, "gpu_temp_c": 40.0}
    assert bench.values() == expected
    assert bench.values() == expected
    assert "clocks_event_reasons" not in bench.gpu.asked


def test_links_are_summed_where_the_driver_has_no_sum_and_one_that_goes_down_keeps_its_errors() -> None:
    bench = Bench(fields={38: 1.0}, links={(0, 0): 10.0, (1, 0): 5.0, (0, 2): 99.0})
    assert bench.values() == {"nvlink_replay_total": 15.0, "nvlink_crc_flit_total": 1.0}
    del bench.gpu.links[1, 0]
    bench.gpu.links[0, 0] = 11.0
    assert bench.values()["nvlink_replay_total"] == 16.0


@given(
    st.dictionaries(st.sampled_from([call.name for call in CALLS]), st.sampled_from([1, 2, 3, 4, 9, 13, 15, 18, 999]))
)
def test_whatever_fails_the_rest_is_read_or_the_fault_is_one_to_act_on(failures: dict[str, int]) -> None:
    calls: dict[str, tuple[float, ...] | NvmlFault] = {call.name: (1.0,) * len(call.channels) for call in CALLS}
    calls |= {name: NvmlFault(code) for name, code in failures.items()}
    bench = Bench(calls=calls)
    try:
        values = bench.values()
    except NvmlFault as fault:
        assert fault.code in {1, 9, 15, 18} & set(failures.values())  # noqa: PT017 - raised only for some inputs
        return
    sources = {channel: [call.name for call in CALLS if channel in call.channels] for channel in CATALOGUE}
    assert set(values) >= {channel for channel, names in sources.items() if names and not set(names) & set(failures)}
    assert not set(values) & {channel for channel, names in sources.items() if set(names) <= set(failures)}


def test_a_real_h200_gives_every_channel_that_its_board_can_have() -> None:
    """What one H200 answered under load (driver 580.159.04, one GPU of a virtual machine: no NVLink)."""
    recorded = json.loads((DATA / "h200.json").read_text())
    answers = recorded["load"]
    bench = Bench(
        fields={int(number): value for number, value in answers["fields"].items()},
        calls={name: tuple(values) for name, values in answers["calls"].items()},
        profile={int(number): value for number, value in answers["profile"].items()},
    )
    bench.values()  # profiling channels are means since the reading before
    values = bench.values()
    could = {name for name, channel in CATALOGUE.items() if channel.nvml and not absent_on(recorded["model"], name)}
    assert set(values) == {name for name in could if not name.startswith("nvlink_")} - {"xid_last"}
    told = {name: values[name] for name in ("power_w", "energy_mj", "power_violation_ns", "clocks_event_reasons")}
    assert told == {
        "power_w": 691.615,
        "energy_mj": 13694182,
        "power_violation_ns": 14888419000,
        "clocks_event_reasons": 4,
    }
    assert values["tensor_active_ratio"] == pytest.approx(0.6636, abs=1e-4)
    assert values["fb_used_mib"] + values["fb_free_mib"] + values["fb_reserved_mib"] == pytest.approx(143_771, abs=1)
