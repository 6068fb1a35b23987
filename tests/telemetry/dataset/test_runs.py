"""Buckets cut into runs by time, and digests of days."""

from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.errors import InputError
from telemetry.dataset.channels import CATALOGUE
from telemetry.dataset.files import FolderFiles, sha256_of
from telemetry.dataset.layout import DAY_MS, MAX_RUN_DAYS, RUN_ROWS, Runs, choose_runs, sort_samples
from telemetry.dataset.parquet import day_digests, footer, read_day_digests, read_part, write_part
from telemetry.dataset.schema import RUNS_SCHEMA_VERSION, SCHEMA_VERSION, samples_schema
from telemetry.dataset.store import Dataset
from telemetry.dataset.writer import DatasetWriter
from tests.telemetry.helpers import STEP, tree

CHANNELS = {name: CATALOGUE[name] for name in ("gpu_temp_c", "energy_mj", "clocks_event_reasons", "xid_last")}
BEGIN = datetime(2026, 3, 1, tzinfo=UTC)
BEGIN_MS = int(BEGIN.timestamp() * 1000)
SPAN = (BEGIN, BEGIN + timedelta(days=9))
HOURS = 9 * 24

rows_strategy = st.lists(
    st.tuples(
        st.integers(0, HOURS),
        st.sampled_from(["g1", "g2", "g3", "g10"]),
        st.one_of(st.none(), st.floats(-10, 130, width=32)),
        st.one_of(st.none(), st.integers(0, 2**62)),
    ),
    max_size=60,
    unique_by=lambda row: row[:2],
)


def table_of(rows: list[tuple[int, str, float | None, int | None]]) -> pa.Table:
    return pa.table(
        {
            "timestamp": pa.array([BEGIN_MS + row[0] * 3_600_000 for row in rows], pa.timestamp("ms", tz="UTC")),
            "node": pa.array(["a"] * len(rows), pa.string()),
            "gpu": pa.array([row[1] for row in rows], pa.string()),
            "gpu_temp_c": pa.array([row[2] for row in rows], pa.float32()),
            "clocks_event_reasons": pa.array([row[3] for row in rows], pa.uint64()),
        }
    )


def write(path: Path, table: pa.Table, days: int | None) -> Dataset:
    events = pd.DataFrame(
        {"timestamp": pd.Series([], dtype="datetime64[ms, UTC]"), "node": [], "type": [], "known_at": []}
    )
    installations = pd.DataFrame({"gpu": ["g1"], "node": ["a"], "installed_at": pd.Timestamp("2026-01-01", tz="UTC")})
    with DatasetWriter(path, step=STEP, channels=CHANNELS, buckets=4, runs=Runs(days)) as writer:
        writer.write_samples(1, table)
        return writer.finish(events=events, inventory=installations, span=SPAN)


@given(day=st.integers(-20_000, 60_000), length=st.sampled_from([1, 2, 8, 64]))
def test_the_name_of_a_run_says_its_first_day_and_is_read_back(day: int, length: int):
    runs = Runs(length)
    run = int(runs.of(np.array([day * DAY_MS + 5]))[0])
    span = runs.span(run)
    assert span[0] <= datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=day) < span[1]
    assert (span[0].date() - date(1970, 1, 1)).days % length == 0
    assert runs.file_name(run) == f"part-{span[0]:%Y%m%d}.parquet"
    assert runs.of_file(runs.file_name(run)) == run


def test_lengths_are_powers_of_two():
    for days in (0, 3, 12, -1):
        with pytest.raises(ValueError, match="power of two"):
            Runs(days)
    with pytest.raises(ValueError, match="begins no run"):
        Runs(8).of_file("part-19700102.parquet")


@pytest.mark.parametrize(
    ("rows_a_day", "days", "expected"),
    [
        (2000 * 144 / 16, None, 8),  # 2,000 GPUs at 10 min in 16 buckets
        (2000 * 144 / 16, 15, None),  # it would be less than two runs, and does not grow
        (RUN_ROWS, None, 1),
        (RUN_ROWS / MAX_RUN_DAYS, None, MAX_RUN_DAYS),
        (RUN_ROWS / MAX_RUN_DAYS - 1, None, None),
        (0.0, None, None),
    ],
)
def test_a_run_is_as_short_as_its_rows_allow(rows_a_day: float, days: float | None, expected: int | None):
    assert choose_runs(rows_a_day, days).days == expected


@settings(max_examples=40, deadline=None)
@given(rows=rows_strategy, days=st.sampled_from([1, 2, 4, 8]), data=st.data())
def test_the_order_of_rows_leaves_no_trace(rows, days, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    sorted_rows = write(folder / "sorted", table_of(rows), days)
    shuffled = write(folder / "shuffled", table_of(data.draw(st.permutations(rows))), days)
    assert shuffled.digest == sorted_rows.digest
    assert shuffled.meta.files == sorted_rows.meta.files


@settings(max_examples=60, deadline=None)
@given(
    rows=rows_strategy,
    days=st.sampled_from([None, 1, 2, 4, 8]),
    older=st.booleans(),
    since=st.none() | st.integers(-5, HOURS + 5),
    until=st.none() | st.integers(-5, HOURS + 5),
    columns=st.sampled_from([None, ["gpu_temp_c"], ["gpu", "timestamp"], ["timestamp"], ["node", "gpu", "gpu_temp_c"]]),
)
def test_what_is_read_is_what_a_plain_list_says(rows, days, older, since, until, columns, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        if older:  # as version 2 wrote it: the file of a run is one row group
            patched.setattr(Runs, "groups", Runs(None))
        dataset = write(tmp_path_factory.mktemp("runs") / "d", table_of(rows), days)
    limits = {
        name: None if hour is None else BEGIN + timedelta(hours=hour)
        for name, hour in (("since", since), ("until", until))
    }
    expected = sorted(
        (row for row in rows if (since is None or row[0] >= since) and (until is None or row[0] < until)),
        key=lambda row: (row[1], row[0]),
    )
    of = {
        "timestamp": lambda row: BEGIN + timedelta(hours=row[0]),
        "node": lambda row: "a",
        "gpu": lambda row: row[1],
        "gpu_temp_c": lambda row: row[2],
        "clocks_event_reasons": lambda row: row[3],
    }
    samples = dataset.read_bucket(1, columns, **limits)
    names = columns or samples.column_names
    assert samples.column_names == names
    for name in names:
        assert samples.column(name).to_pylist() == [of.get(name, lambda row: None)(row) for row in expected]
    tables = dataset.read_runs(1, ["timestamp", "gpu"], **limits)
    if tables:
        assert all(table.num_rows for table in tables)
        plain = pa.schema([("timestamp", tables[0].schema.field("timestamp").type), ("gpu", pa.string())])
        ordered = pa.concat_tables([table.cast(plain) for table in tables]).sort_by(
            [("gpu", "ascending"), ("timestamp", "ascending")]
        )
        assert ordered.column("timestamp").to_pylist() == [of["timestamp"](row) for row in expected]
        lasts = [max(table.column("timestamp").to_pylist()) for table in tables]
        firsts = [min(table.column("timestamp").to_pylist()) for table in tables]
        assert all(last < first for last, first in zip(lasts, firsts[1:], strict=False))


def test_runs_outside_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dataset = write(tmp_path / "d", table_of([(hour, "g1", 1.0, 1) for hour in range(HOURS)]), 1)
    opened = []
    opens = FolderFiles.opened
    monkeypatch.setattr(
        FolderFiles, "opened", lambda files, name: opened.append(name.rpartition("/")[2]) or opens(files, name)
    )
    samples = dataset.read_bucket(1, since=BEGIN + timedelta(days=7, hours=3), until=BEGIN + timedelta(days=8, hours=1))
    assert samples.num_rows == 22
    assert opened == ["part-20260308.parquet", "part-20260309.parquet"]


def test_row_groups_outside_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [(hour, gpu, 1.0, 1) for hour in range(HOURS) for gpu in ("g1", "g2")]
    dataset = write(tmp_path / "d", table_of(rows), 8)
    read = []
    reads = pq.ParquetFile.read_row_groups
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_groups",
        lambda file, groups, columns: read.append((groups, columns)) or reads(file, groups, columns=columns),
    )
    # whole row groups: nothing is looked at but what was asked for
    (table,) = dataset.read_runs(1, ["gpu"], since=BEGIN + timedelta(days=3), until=BEGIN + timedelta(days=5))
    assert table.num_rows == 2 * 48
    assert read == [([2], ["gpu"])]
    read.clear()
    assert dataset.read_bucket(1, ["gpu"], since=BEGIN + timedelta(days=6, hours=12)).num_rows == 2 * 60
    assert read == [([3], ["gpu", "timestamp"]), ([0], ["gpu"])]


def test_each_file_is_listed_with_its_time_and_its_bytes(tmp_path: Path):
    dataset = write(tmp_path / "d", table_of([(0, "g1", 1.0, 1), (100, "g2", 2.0, None)]), 4)
    first, second = dataset.sample_files()
    assert (first.bucket, first.path) == (1, "telemetry/bucket=01/part-20260228.parquet")
    assert first.span == (datetime(2026, 2, 28, tzinfo=UTC), datetime(2026, 3, 4, tzinfo=UTC))
    assert second.span[0] == first.span[1]
    for file in (first, second):
        assert file.sha256 == sha256_of(dataset.path / file.path)
    one = write(tmp_path / "one", table_of([(0, "g1", 1.0, 1)]), None)
    assert [(file.run, file.span) for file in one.sample_files()] == [(0, SPAN)]


def test_only_a_dataset_that_is_cut_is_refused_by_versions_that_know_no_runs(tmp_path: Path):
    rows = table_of([(0, "g1", 1.0, 1)])
    assert write(tmp_path / "one", rows, None).meta.schema_version == SCHEMA_VERSION == 1
    assert write(tmp_path / "cut", rows, 1).meta.schema_version == RUNS_SCHEMA_VERSION == 3


def test_a_run_that_is_lost_is_reported(tmp_path: Path):
    dataset = write(tmp_path / "d", table_of([(0, "g1", 1.0, 1), (100, "g2", 2.0, None)]), 1)
    (dataset.path / dataset.sample_files()[1].path).unlink()
    assert dataset.read_bucket(1, until=BEGIN + timedelta(days=1)).num_rows == 1
    with pytest.raises(InputError, match=r"bucket 1 has lost part-20260305\.parquet.*damaged or was replaced"):
        dataset.read_bucket(1)


def test_adopted_runs_are_the_same_files_and_are_never_written_into(tmp_path: Path):
    rows = [(hour, "g1", float(hour), 1) for hour in range(0, HOURS, 12)]
    old = write(tmp_path / "old", table_of(rows), 4)
    before = tree(tmp_path)
    first, *_, last = old.runs_of(1)
    kept = [run for run in old.runs_of(1) if run != last]
    with DatasetWriter(tmp_path / "new", step=STEP, channels=CHANNELS, buckets=4, runs=Runs(4)) as writer:
        writer.adopt(old, 1, kept)
        writer.write_samples(1, old.read_run(1, last))
        with pytest.raises(ValueError, match="part-20260228"):
            writer.write_samples(1, old.read_run(1, first))
        new = writer.finish(events=old.events(), inventory=old.inventory(), span=SPAN)
    assert new.meta.files == old.meta.files
    for run in kept:
        assert new.parts_of_run(1, run)[0].stat().st_ino == old.parts_of_run(1, run)[0].stat().st_ino
    assert new.parts_of_run(1, last)[0].stat().st_ino != old.parts_of_run(1, last)[0].stat().st_ino
    assert {name: content for name, content in tree(tmp_path).items() if name.startswith("old/")} == before


SCHEMA = samples_schema(CHANNELS)

day_rows = st.lists(
    st.tuples(
        st.integers(0, 40),  # steps of five hours
        st.sampled_from([("n2", "g1"), ("n1", "g2"), ("n1", "g3"), ("n3", "g10")]),
        st.none() | st.floats(-10, 130, width=32),
        st.none() | st.integers(0, 2**53 - 1),
        st.none() | st.integers(0, 2**62),
        st.none() | st.integers(0, 99),
    ),
    min_size=1,
    max_size=40,
    unique_by=lambda row: (row[0], row[1][1]),
)


def day_table(rows) -> pa.Table:
    columns = [
        pa.array([20_000 * DAY_MS + row[0] * 18_000_000 for row in rows], pa.int64()).cast(SCHEMA.field(0).type),
        *(pa.array([row[1][at] for row in rows]).dictionary_encode().cast(SCHEMA.field(1).type) for at in (0, 1)),
        *(pa.array([row[2 + at] for row in rows], SCHEMA.field(3 + at).type) for at in range(4)),
    ]
    return sort_samples(pa.table(columns, schema=SCHEMA), "gpu")[0]


def day_of(row) -> int:
    return 20_000 + row[0] * 18_000_000 // DAY_MS


@settings(max_examples=100, deadline=None)
@given(rows=day_rows, data=st.data())
def test_whatever_is_different_in_a_day_shows_in_its_digest_alone(rows, data):
    before = day_digests(day_table(rows))
    at = data.draw(st.integers(0, len(rows) - 1))
    row = rows[at]
    kind = data.draw(st.sampled_from(["gone", "moved", "gauge", "counter", "mask", "enum"]))
    other = {
        "moved": (row[0], ("n9", row[1][1]), *row[2:]),
        "gauge": (*row[:2], 131.0 if row[2] is None else None, *row[3:]),
        "counter": (*row[:3], 0 if row[3] is None else row[3] + 1, *row[4:]),
        "mask": (*row[:4], 0 if row[4] is None else None, row[5]),
        "enum": (*row[:5], None if row[5] == 0 else 0),
    }.get(kind)
    changed = [*rows[:at], *([] if other is None else [other]), *rows[at + 1 :]]
    after = day_digests(day_table(changed)) if changed else {}
    assert {day for day in {*before, *after} if before.get(day) != after.get(day)} == {day_of(row)}


def test_a_file_says_them_and_its_table_does_not(tmp_path):
    table = day_table([(hour, ("n1", "g1"), 1.0, None, 2, 3) for hour in range(20)])
    write_part(tmp_path / "part.parquet", [table], footer(table))
    assert read_day_digests(tmp_path / "part.parquet") == day_digests(table)
    (read,), _ = read_part(tmp_path / "part.parquet", table.column_names)
    assert read.schema.metadata is None
    assert read.equals(table)
    pq.write_table(table, tmp_path / "old.parquet")  # as an older version wrote it
    assert read_day_digests(tmp_path / "old.parquet") is None
