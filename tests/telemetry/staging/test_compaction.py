import os
from pathlib import Path

import pandas as pd
import pytest
from filelock import FileLock

import telemetry.dataset.writer
import telemetry.staging.compaction
import telemetry.staging.folder
from foundation.errors import InputError
from telemetry.dataset.store import Dataset
from telemetry.importing.ingest import ImportResult
from telemetry.staging.compaction import compact
from telemetry.staging.folder import staging_of
from tests.killed import die_at, exit_code_of
from tests.telemetry.helpers import DAY, all_samples, gpu, inventory_frame, run_import, write_csv
from tests.telemetry.staging_world import (
    NOW,
    compact_settings,
    compacted,
    event,
    raw,
    samples_of,
    stage_events,
    stage_frame,
    stage_rows,
    staging,
    state_of,
    table_of,
)


def test_folding_piece_by_piece_equals_one_import(tmp_path: Path):
    frame = raw(times=70)
    run_import(tmp_path, samples=frame.astype({"timestamp": str}), out="whole")
    whole = all_samples(ImportResult(Dataset.open(tmp_path / "whole"), {}, {}))
    inventory = write_csv(tmp_path / "hosts.csv", inventory_frame())
    pieces = frame.groupby(frame["timestamp"].dt.floor("210s"))
    for _, piece in pieces:
        stage_frame(tmp_path, piece)
        compacted(tmp_path, inventory=inventory)
    pd.testing.assert_frame_equal(samples_of(tmp_path), whole)
    assert staging(tmp_path).waiting() == []


def test_the_inventory_is_learned_from_what_is_seen(tmp_path: Path):
    stage_frame(tmp_path, raw())
    seen = inventory_frame().drop(columns="installed_at").assign(seen_at=DAY, driver="580.1")
    staging(tmp_path).stage("inventory", table_of(seen))
    compacted(tmp_path)
    inventory = Dataset.open(tmp_path / "dataset").inventory()
    assert inventory["gpu"].tolist() == [gpu(number) for number in range(4)]
    assert inventory["model"].tolist() == ["H100"] * 4
    assert inventory["driver"].tolist() == ["580.1"] * 4
    assert (inventory["installed_at"] == DAY).all()
    assert inventory["removed_at"].isna().all()


def test_a_gpu_that_moves_and_one_that_is_replaced_end_their_stays(tmp_path: Path):
    later = DAY + pd.Timedelta("12h")
    first = raw(gpus=2, times=10)
    second = raw(gpus=1, times=10, start=later).assign(node="node-9")
    third = raw(gpus=1, times=10, start=later).assign(gpu=gpu(7))
    address = inventory_frame(1)["pci_bus_id"][0]
    seen = [
        {"gpu": gpu(0), "node": "node-0", "pci_bus_id": address, "seen_at": DAY.to_pydatetime()},
        {"gpu": gpu(7), "node": "node-0", "pci_bus_id": address, "seen_at": later.to_pydatetime()},
    ]
    for frame in (first, second, third):
        stage_frame(tmp_path, frame)
    stage_rows(tmp_path, "inventory", *seen)
    compacted(tmp_path)
    installations = Dataset.open(tmp_path / "dataset").inventory().set_index(["gpu", "node"])
    assert installations.loc[(gpu(0), "node-0"), "removed_at"] == later
    assert installations.loc[(gpu(0), "node-9"), "installed_at"] == later
    assert installations.loc[(gpu(7), "node-0"), "installed_at"] == later
    assert pd.isna(installations.loc[(gpu(1), "node-0"), "removed_at"])


def test_a_node_watched_before_its_gpus_does_not_make_them_newcomers(tmp_path: Path):
    before = (DAY - pd.Timedelta(days=9)).to_pydatetime()
    stage_rows(tmp_path, "inventory", {"node": "node-0", "rack": "r7", "seen_at": before})
    stage_frame(tmp_path, raw(gpus=2))
    compacted(tmp_path)
    installations = Dataset.open(tmp_path / "dataset").inventory()
    assert installations["rack"].tolist() == ["r7", "r7"]
    assert (installations["installed_at"] <= DAY).all()


def test_a_fleet_without_gpus_is_one_of_nodes(tmp_path: Path):
    frame = raw(gpus=4, times=12, every="10min")
    stage_frame(tmp_path, frame[frame["gpu"].isin([gpu(0), gpu(2)])].drop(columns=["gpu", "xid_last"]))
    compacted(tmp_path)
    dataset = Dataset.open(tmp_path / "dataset")
    assert dataset.meta.unit == "node"
    assert dataset.inventory()["node"].tolist() == ["node-0", "node-1"]
    assert dataset.meta.counts["samples"] == 24


def test_a_changed_driver_is_an_event_once(tmp_path: Path):
    for day, driver in enumerate(["1", "1", "2", "2"]):
        when = DAY + pd.Timedelta(days=day)
        stage_frame(tmp_path, raw(gpus=1, times=5, start=when))
        row = {"gpu": gpu(0), "node": "node-0", "driver": driver, "seen_at": when.to_pydatetime()}
        stage_rows(tmp_path, "inventory", row)
        compacted(tmp_path)
    dataset = Dataset.open(tmp_path / "dataset")
    events = dataset.events()
    assert events["type"].tolist() == ["driver"]
    assert events["code"].tolist() == ["2"]
    assert events["timestamp"].tolist() == [DAY + pd.Timedelta(days=2)]
    assert dataset.inventory()["driver"].tolist() == ["1"]


def test_what_the_operator_says_holds_against_what_was_seen(tmp_path: Path):
    inventory = write_csv(tmp_path / "hosts.csv", inventory_frame().assign(rack="r1", firmware="7"))
    stage_frame(tmp_path, raw(gpus=6))
    compacted(tmp_path, inventory=inventory)
    stage_frame(tmp_path, raw(gpus=6, start=DAY + pd.Timedelta("1h")))
    compacted(tmp_path)
    installations = Dataset.open(tmp_path / "dataset").inventory().set_index("gpu")
    assert len(installations) == 6
    assert installations.loc[gpu(0), "installed_at"] == pd.Timestamp("2026-01-01", tz="UTC")
    assert installations.loc[gpu(0), "rack"] == "r1"
    assert installations.loc[gpu(5), "installed_at"] == DAY


def test_an_operator_need_not_say_since_when_a_gpu_is_there(tmp_path: Path):
    hosts = inventory_frame().drop(columns=["installed_at"]).assign(rack="r1")
    stage_frame(tmp_path, raw())
    compacted(tmp_path, inventory=write_csv(tmp_path / "hosts.csv", hosts))
    stage_frame(tmp_path, raw(start=DAY + pd.Timedelta("1h")))
    compacted(tmp_path)
    installations = Dataset.open(tmp_path / "dataset").inventory()
    assert set(installations["installed_at"]) == {DAY}
    assert set(installations["rack"]) == {"r1"}


def test_a_damaged_file_is_put_aside(tmp_path: Path):
    stage_frame(tmp_path, raw())
    damaged = stage_frame(tmp_path, raw(start=DAY + pd.Timedelta("1h")))
    damaged.write_bytes(damaged.read_bytes()[:-40])
    result = compacted(tmp_path)
    assert (result.refused, result.compacted["samples"]) == (1, 1)
    assert (staging_of(tmp_path / "dataset") / "refused/samples" / damaged.name).exists()


@pytest.mark.parametrize(
    ("first", "last", "outcome"),
    [(None, "COMPLETED", "completed"), ("completed", "completed", "completed"), (None, None, "unknown")],
)
def test_jobs_land_and_are_updated(tmp_path: Path, first: str | None, last: str | None, outcome: str):
    stage_frame(tmp_path, raw())
    job = {"job": "default/7", "node": "node-0", "started_at": DAY.to_pydatetime(), "gpus": 8}
    stage_rows(tmp_path, "jobs", {**job, "outcome": first})
    compacted(tmp_path)
    stage_rows(tmp_path, "jobs", {**job, "ended_at": (DAY + pd.Timedelta("1h")).to_pydatetime(), "outcome": last})
    compacted(tmp_path)
    jobs = Dataset.open(tmp_path / "dataset").jobs()
    assert jobs["outcome"].fillna("unknown").tolist() == [outcome]


def test_old_samples_go_and_old_staged_files_too(tmp_path: Path):
    for day in range(6):
        path = stage_frame(tmp_path, raw(gpus=1, times=12, every="10min", start=DAY + pd.Timedelta(days=day)))
        compacted_at = DAY + pd.Timedelta(days=day, hours=3)
        os.utime(path, (compacted_at.timestamp(), compacted_at.timestamp()))
        compacted(tmp_path, now=compacted_at.to_pydatetime(), retention={"raw": "2d", "samples": "3d"})
    samples = samples_of(tmp_path)
    assert samples["timestamp"].min() >= DAY + pd.Timedelta(days=2)
    assert samples["timestamp"].max() >= DAY + pd.Timedelta(days=5)
    assert Dataset.open(tmp_path / "dataset").meta.span[0] >= (DAY + pd.Timedelta(days=1)).to_pydatetime()
    copies = staging_of(tmp_path / "dataset") / "compacted/samples"
    assert len(list(copies.glob("*.parquet"))) == 3
    stage_frame(tmp_path, raw())
    compacted(tmp_path, retention={"raw": "0s"})  # none shall be copies
    assert not list(copies.glob("*.parquet"))


def test_a_reader_goes_on_reading_the_dataset_it_opened(tmp_path: Path):
    stage_frame(tmp_path, raw(times=20))
    compacted(tmp_path)
    reader = Dataset.open(tmp_path / "dataset")
    before = all_samples(ImportResult(reader, {}, {}))
    for turn in range(1, 3):
        stage_frame(tmp_path, raw(times=20, start=DAY + pd.Timedelta(hours=turn)))
        compacted(tmp_path)
    pd.testing.assert_frame_equal(all_samples(ImportResult(reader, {}, {})), before)
    assert len(samples_of(tmp_path)) > len(before)
    del reader
    stage_frame(tmp_path, raw(times=20, start=DAY + pd.Timedelta(hours=5)))
    compacted(tmp_path)
    assert [path.name for path in tmp_path.glob(".dataset*")] == []


def test_one_compaction_at_a_time(tmp_path: Path):
    stage_frame(tmp_path, raw())
    lock = staging(tmp_path).state("compact.lock")
    with FileLock(lock, fallback_to_soft=False), pytest.raises(InputError, match="another process is compacting"):
        compacted(tmp_path)
    assert compacted(tmp_path).compacted == {"samples": 1}


def test_another_step_is_refused(tmp_path: Path):
    stage_frame(tmp_path, raw())
    compacted(tmp_path)
    stage_frame(tmp_path, raw(start=DAY + pd.Timedelta("1h")))
    with pytest.raises(InputError, match="a step of 10m, but the new data have a step of 5m"):
        compacted(tmp_path, step="5m")


def fold_killed_at(folder: Path, at: int) -> None:
    """Fold, and die before the call of that number among those that change the disk; 9 if it died, 7 if not."""
    places = (
        (Path, "rename"),
        (Path, "replace"),
        (Path, "unlink"),
        (telemetry.dataset.writer, "write_part"),
        (telemetry.staging.compaction, "_retire"),
        (telemetry.staging.folder, "write_bytes"),
    )
    die_at(at, places)
    compact(folder / "dataset", settings=compact_settings(), now=NOW)
    os._exit(7)


def test_a_compaction_killed_anywhere_loses_nothing_and_counts_nothing_twice(tmp_path: Path):
    frame = raw(gpus=4, times=50)
    early, late = (
        frame[frame["timestamp"] < DAY + pd.Timedelta("13min")],
        frame[frame["timestamp"] >= DAY + pd.Timedelta("13min")],
    )
    # One GPU is seen only in the compaction that dies; an event of it has waited since the one before.
    early = early[early["gpu"] != gpu(3)]
    waits = event(DAY + pd.Timedelta("5min"), "48", gpu=gpu(3), node="node-1", source="kernel_log:kmsg")
    events = [event(DAY + pd.Timedelta(minutes=minute), "79", gpu=gpu(0)) for minute in (2, 9)]
    events.append(event(DAY + pd.Timedelta("7min"), "31", gpu="GPU-unseen", source="kernel_log:kmsg"))
    after = raw(gpus=1, times=4, start=DAY + pd.Timedelta("2h"))
    (tmp_path / "calm").mkdir()
    for piece in (early, late):
        stage_frame(tmp_path / "calm", piece)
        compacted(tmp_path / "calm")
    stage_events(tmp_path / "calm", events)
    compacted(tmp_path / "calm")
    whole = samples_of(tmp_path / "calm")
    killed = 0
    for call in range(1, 60, 3):
        folder = tmp_path / f"kill-{call}"
        folder.mkdir()
        stage_frame(folder, early)
        stage_events(folder, [waits])
        compacted(folder)
        stage_frame(folder, late)
        stage_events(folder, events)
        done = exit_code_of(fold_killed_at, folder, call)
        assert done in (7, 9)
        killed += done == 9
        compacted(folder)
        pd.testing.assert_frame_equal(samples_of(folder), whole)
        stage_frame(folder, after)
        result = compacted(folder)
        dataset = Dataset.open(folder / "dataset")
        assert dataset.events()["code"].tolist() == ["79", "48", "79"]
        assert dataset.events()["gpu"].tolist() == [gpu(0), gpu(3), gpu(0)]
        assert result.quarantined == {}
        assert len(dataset.inventory()) == 4
        assert staging(folder).waiting() == []
        assert pd.read_parquet(state_of(folder, "pending"))["code"].tolist() == ["31"]
        if done == 7:
            break
    assert killed >= 5
    assert done == 7
