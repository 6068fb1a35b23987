import os
import threading
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foundation.errors import InputError
from telemetry.staging import folder
from telemetry.staging.folder import NAMES_KEPT_S, StagingFolder, staging_of
from tests.killed import die_at, exit_code_of

WHEN = datetime(2026, 3, 1, tzinfo=UTC)


def samples(value: float = 40.0, gpu: str = "GPU-1") -> pa.Table:
    return pa.table({"timestamp": [WHEN], "node": ["n1"], "gpu": [gpu], "gpu_temp_c": [value]})


def test_what_lands_has_the_schema_of_its_kind(tmp_path: Path):
    staging = StagingFolder(tmp_path, writer="test")
    flags = 2**63 + 1  # above the precision of floats
    path = staging.stage("samples", samples().append_column("clocks_event_reasons", pa.array([flags], pa.uint64())))
    table = pq.read_table(path)
    assert table.column("clocks_event_reasons").to_pylist() == [flags]
    assert table.schema.names == ["timestamp", "node", "gpu", "mig_instance", "gpu_temp_c", "clocks_event_reasons"]
    assert table.schema.field("timestamp").type == pa.timestamp("ms", tz="UTC")
    assert table.schema.field("gpu_temp_c").type == pa.float32()
    assert staging.waiting() == [path]
    assert staging.waiting("events") == []


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"timestamp": [WHEN], "node": ["n"], "x": [1]}), "cannot be staged with the columns .'x'"),
        (pa.table({"timestamp": [WHEN], "gpu_temp_c": [1.0]}), "cannot be staged without the columns .'node'"),
        (pa.table({"timestamp": [None], "node": ["n"], "gpu_temp_c": [1.0]}), "1 nulls in 'timestamp'"),
        (pa.table({"timestamp": [WHEN], "node": ["n"], "xid_last": [2**40]}), "column 'xid_last'"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(table: pa.Table, message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        StagingFolder(tmp_path, writer="test").stage("samples", table)
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_name_lands_once_also_after_its_file_was_compacted(tmp_path: Path):
    staging = StagingFolder(tmp_path, writer="test")
    path = staging.stage("samples", samples(), name="chunk-1")
    assert staging.stage("samples", samples(41), name="chunk-1") is None
    assert staging.stage("events", pa.table(event()), name="chunk-1") is not None
    staging.remember_compacted([path], now_s=1000.0)
    path.unlink()
    for other in (staging, StagingFolder(tmp_path, writer="other")):
        assert other.is_staged("samples", "chunk-1")
        assert other.stage("samples", samples(42), name="chunk-1") is None
    staging.remember_compacted([], now_s=1001.0 + NAMES_KEPT_S)
    assert not staging.is_staged("samples", "chunk-1")


def event() -> dict[str, list[object]]:
    return {"timestamp": [WHEN], "node": ["n1"], "type": ["xid"], "code": ["79"], "known_at": [WHEN]}


def test_of_many_writers_of_one_name_one_lands(tmp_path: Path):
    start = threading.Barrier(6)
    staged: list[object] = []

    def write(number: int) -> None:
        staging = StagingFolder(tmp_path, writer=f"w{number}")
        start.wait()
        staged.append(staging.stage("samples", samples(float(number)), name="same"))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(path is not None for path in staged) == 1
    assert len(StagingFolder(tmp_path, writer="t").waiting()) == 1


def land_killed_at(path: Path, at: int) -> None:
    """Stage a file, and die before the call of that number among those that write it; 9 if it died, 7 if not."""
    places = ((folder.pq, "write_table"), (folder, "fsync_path"), (folder.os, "link"))
    die_at(at, places)
    StagingFolder(path, writer="killed").stage("samples", samples(), name="mine")
    os._exit(7)


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_killed_writer_leaves_a_whole_file_or_none(call: int, tmp_path: Path):
    assert exit_code_of(land_killed_at, tmp_path, call) == 9
    staging = StagingFolder(tmp_path, writer="test")
    staging.stage("samples", samples(), name="mine")
    assert [pq.read_table(path).num_rows for path in staging.waiting()] == [1]


def test_a_full_disk_lands_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_given: object, **_named: object) -> None:
        raise OSError(28, "No space left on device")

    staging = StagingFolder(tmp_path, writer="test")
    with monkeypatch.context() as patched:
        patched.setattr("telemetry.staging.folder.pq.write_table", full)
        with pytest.raises(InputError, match="the disk is full"):
            staging.stage("samples", samples(), name="mine")
    assert staging.waiting() == []
    assert staging.stage("samples", samples(), name="mine") is not None


def test_the_staging_folder_is_a_sibling_of_what_a_link_points_to(tmp_path: Path):
    (tmp_path / "fleet").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "fleet")
    assert staging_of(tmp_path / "link") == tmp_path / "fleet.live"


def test_a_name_with_a_path_in_it_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="cannot name a staged file"):
        StagingFolder(tmp_path, writer="test").stage("samples", samples(), name="../x")
    with pytest.raises(ValueError, match="cannot name a collector"):
        StagingFolder(tmp_path, writer="a b")
