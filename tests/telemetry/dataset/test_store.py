import json
import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foundation.errors import InputError
from telemetry.dataset.channels import CATALOGUE, Channel
from telemetry.dataset.layout import node_hash
from telemetry.dataset.store import Dataset
from telemetry.dataset.writer import DatasetWriter
from tests.killed import exit_code_of
from tests.telemetry.helpers import STEP

CHANNELS = {name: CATALOGUE[name] for name in ("gpu_temp_c", "energy_mj", "clocks_event_reasons", "xid_last")}
SPAN = (datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 3, 2, tzinfo=UTC))
NO_EVENTS = pd.DataFrame(
    {"timestamp": pd.Series([], dtype="datetime64[ms, UTC]"), "node": [], "type": [], "known_at": []}
)


def installations(nodes: list[str]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "gpu": [f"gpu-{node}" for node in nodes],
            "node": nodes,
            "installed_at": pd.Timestamp("2026-01-01", tz="UTC"),
            "power_supply": [f"psu-{node}" for node in nodes],
        }
    )


def sample_table(rows: list[tuple[int, str, str]], values: dict[str, list[object]] | None = None) -> pa.Table:
    table = pa.table(
        {
            "timestamp": pa.array([minute * 60_000 for minute, *_ in rows], pa.timestamp("ms", tz="UTC")),
            "node": [node for _, node, _ in rows],
            "gpu": [gpu for *_, gpu in rows],
        }
    )
    for name, column in (values or {}).items():
        table = table.append_column(name, pa.array(column))
    return table


def write(path: Path, tables: list[tuple[int, pa.Table]], *, buckets: int = 4, unit: str = "gpu") -> Dataset:
    with DatasetWriter(path, step=STEP, channels=CHANNELS, buckets=buckets, unit=unit) as writer:
        for bucket, table in tables:
            writer.write_samples(bucket, table)
        return writer.finish(events=NO_EVENTS, inventory=installations(["a", "b"]), span=SPAN)


def test_the_hash_of_a_node_never_changes():
    # A dataset written on one machine is read on another, and by later versions.
    assert node_hash("node-17") == 17611275075045182794


def test_tables_come_back(tmp_path: Path):
    when = pd.Timestamp("2026-03-01 10:00", tz="UTC")
    events = pd.DataFrame(
        {"timestamp": [when], "node": ["a"], "gpu": [None], "type": ["drain"], "known_at": [when + STEP], "code": ["x"]}
    )
    jobs = pd.DataFrame({"job": ["7"], "node": ["a"], "started_at": [when], "gpus": [8]})
    own = Channel("flaps_total", "counter", "flaps", 0.0, None, "declared in params")
    channels = {**CHANNELS, own.name: own}
    with DatasetWriter(tmp_path / "d", step=timedelta(seconds=90), channels=channels) as writer:
        made = writer.finish(
            events=events, inventory=installations(["b", "a"]), jobs=jobs, span=SPAN, quarantine={"bad": 2}
        )
    dataset = Dataset.open(tmp_path / "d")
    assert dataset.digest == made.digest
    assert dataset.meta.span == SPAN
    assert dataset.meta.quarantine == {"bad": 2}
    assert (dataset.meta.step, dataset.meta.channels) == (timedelta(seconds=90), channels)
    assert dataset.buckets() == []
    assert dataset.read_bucket(0).num_rows == 0
    event = dataset.events().iloc[0]
    assert (event["timestamp"], event["node"], event["code"], event["known_at"]) == (when, "a", "x", when + STEP)
    assert pd.isna(event["gpu"])
    assert str(dataset.events()["timestamp"].dtype) == "datetime64[ms, UTC]"
    assert dataset.inventory()["node"].tolist() == ["a", "b"]
    assert dataset.inventory()["power_supply"].tolist() == ["psu-a", "psu-b"]
    found_jobs = dataset.jobs()
    assert found_jobs["gpus"].tolist() == [8]


def test_nodes_without_gpus(tmp_path: Path):
    table = sample_table([(10, "b", "x"), (0, "a", "x"), (0, "b", "x")], {"gpu_temp_c": [1.0, 2.0, 3.0]})
    table = table.set_column(2, "gpu", pa.nulls(3, pa.string()))
    dataset = write(tmp_path / "d", [(0, table)], unit="node")
    assert dataset.meta.unit == "node"
    assert dataset.read_bucket(0, ["node", "gpu_temp_c"]).to_pydict() == {
        "node": ["a", "b", "b"],
        "gpu_temp_c": [2.0, 3.0, 1.0],
    }


def test_the_several_files_of_a_bucket_that_an_older_version_wrote_are_read_as_one(tmp_path: Path):
    rows = sample_table([(0, "a", "g1"), (10, "a", "g1"), (0, "a", "g2")])
    whole = write(tmp_path / "d", [(0, rows)]).read_bucket(0)
    (path,) = (tmp_path / "d").rglob("part-*")
    pq.write_table(whole[:2], path)
    pq.write_table(whole[2:], path.with_name("part-00001.parquet"))
    meta = json.loads((tmp_path / "d" / "dataset.json").read_text())
    del meta["files"], meta["run_days"]
    (tmp_path / "d" / "dataset.json").write_text(json.dumps(meta))
    older = Dataset.open(tmp_path / "d")
    assert older.read_bucket(0).equals(whole)
    assert [file.path[-10:] for file in older.sample_files()] == ["00.parquet", "01.parquet"]


def test_nan_becomes_null(tmp_path: Path):
    table = sample_table([(0, "a", "g"), (1, "a", "g")], {"gpu_temp_c": np.array([np.nan, 4.0], np.float32)})
    assert write(tmp_path / "d", [(0, table)]).read_bucket(0)["gpu_temp_c"].to_pylist() == [None, 4.0]


@pytest.mark.parametrize(
    ("tables", "parts"),
    [
        ([sample_table([(0, "a", "g1"), (0, "a", "g1")])], ["two samples of one gpu", "'g1'", "1970-01-01T00:00"]),
        ([sample_table([(0, "a", "g1")], {"oops": [1]})], ["unknown columns ['oops']"]),
        ([sample_table([(0, "a", "g1")], {"xid_last": [1.5]})], ["'xid_last'", "int32"]),
        ([sample_table([(0, "a", None)])], ["samples without 'gpu'"]),
    ],
)
def test_tables_that_are_refused(tables: list[pa.Table], parts: list[str], tmp_path: Path):
    with pytest.raises(InputError) as caught:
        write(tmp_path / "d", [(0, table) for table in tables])
    for part in parts:
        assert part in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_dataset(tmp_path: Path):
    with pytest.raises(InputError, match=r"not a dataset.*no dataset\.json.*predrain import"):
        Dataset.open(tmp_path)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.txt").write_text("my only copy")
    with pytest.raises(InputError, match=r"exists and is not a dataset.*Choose another folder"):
        write(tmp_path / "d", [])
    assert (tmp_path / "d" / "thesis.txt").read_text() == "my only copy"


def test_damage_is_reported(tmp_path: Path):
    table = sample_table([(0, "a", "g1"), (10, "a", "g1")])
    dataset = write(tmp_path / "d", [(0, table)])
    with pytest.raises(InputError, match=r"no column 'nope'.*Its columns are"):
        dataset.read_bucket(0, ["nope"])
    part, events = next((tmp_path / "d").rglob("part-*")), tmp_path / "d" / "events.parquet"
    for path, read in ((part, lambda: dataset.read_bucket(0)), (events, dataset.events)):
        whole = path.read_bytes()
        for cut in (0, 3, len(whole) // 2, len(whole) - 10):
            path.write_bytes(whole[:cut])
            with pytest.raises(InputError, match=r"the file is damaged: .*import or collect its sources") as caught:
                read()
            assert caught.value.location == str(path)
        path.write_bytes(whole[:40] + bytes(len(whole) - 80) + whole[-40:])
        with pytest.raises(InputError, match=r"the file is damaged"):
            read()
        path.write_bytes(whole)
    whole = part.read_bytes()
    pq.write_table(pa.table({"something": [1]}), part)
    with pytest.raises(InputError, match=r"the file is damaged"):
        dataset.read_bucket(0)
    part.write_bytes(whole)
    part.unlink()
    with pytest.raises(InputError, match=r"bucket 0 holds 0 samples, dataset\.json says 2"):
        Dataset.open(tmp_path / "d").read_bucket(0)
    meta = tmp_path / "d" / "dataset.json"
    content = json.loads(meta.read_text())
    meta.write_text(json.dumps({**content, "schema_version": 99}))
    with pytest.raises(InputError, match="schema version 99, but this predrain reads 1 to 3"):
        Dataset.open(tmp_path / "d")
    meta.write_text("{")
    with pytest.raises(InputError, match=r"dataset\.json is damaged"):
        Dataset.open(tmp_path / "d")


def write_killed_at(at: str, path: Path) -> None:
    """Write a dataset over another, and die at a place; 9 if it died, 7 if not."""
    renames: list[object] = []
    rename, remove = Path.rename, shutil.rmtree

    def counted_rename(self: Path, target: Path) -> Path:
        if at == f"before rename {len(renames)}" and self.exists():
            os._exit(9)
        rename(self, target)
        renames.append(target)
        return target

    def watched_remove(place: Path, **options: bool) -> None:
        if at == "before removal" and ".reading-" in place.name:
            os._exit(9)
        remove(place, **options)

    Path.rename = counted_rename
    shutil.rmtree = watched_remove
    write(path, [(0, sample_table([(1, "a", "g1")]))])
    os._exit(7)


@pytest.mark.parametrize(
    ("at", "minutes"),
    [("before rename 0", 0), ("before rename 1", 0), ("before rename 2", 1), ("before removal", 1), ("never", 1)],
)
def test_a_killed_writer_leaves_the_old_dataset_or_the_new(at: str, minutes: int, tmp_path: Path):
    path = tmp_path / "d"
    write(path, [(0, sample_table([(0, "a", "g1")]))])
    assert exit_code_of(write_killed_at, at, path) == (7 if at == "never" else 9)
    dataset = Dataset.open(path)
    assert dataset.read_bucket(0)["timestamp"].cast(pa.int64()).to_pylist() == [minutes * 60_000]
    del dataset
    write(path, [(0, sample_table([(2, "a", "g1")]))])
    assert Dataset.open(path).read_bucket(0)["timestamp"].cast(pa.int64()).to_pylist() == [120_000]
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_at_once(tmp_path: Path):
    first = DatasetWriter(tmp_path / "d", step=STEP, channels=CHANNELS)
    with first, pytest.raises(InputError, match="another run is writing this folder"):
        DatasetWriter(tmp_path / "d", step=STEP, channels=CHANNELS)
    with DatasetWriter(tmp_path / "d", step=STEP, channels=CHANNELS):
        pass
    assert list(tmp_path.iterdir()) == []
