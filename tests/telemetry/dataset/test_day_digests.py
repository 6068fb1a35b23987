"""Digests of days: the same day has the same one in whatever file, another value or sample another one."""

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.dataset.channels import CATALOGUE
from telemetry.dataset.layout import (
    day_digests,
    footer,
    read_day_digests,
    read_part,
    sort_samples,
    write_part,
)
from telemetry.dataset.runs import DAY_MS
from telemetry.dataset.schema import samples_schema

CHANNELS = {name: CATALOGUE[name] for name in ("gpu_temp_c", "energy_mj", "clocks_event_reasons", "xid_last")}
SCHEMA = samples_schema(CHANNELS)

rows_strategy = st.lists(
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


def table_of(rows) -> pa.Table:
    columns = [
        pa.array([20_000 * DAY_MS + row[0] * 18_000_000 for row in rows], pa.int64()).cast(SCHEMA.field(0).type),
        *(pa.array([row[1][at] for row in rows]).dictionary_encode().cast(SCHEMA.field(1).type) for at in (0, 1)),
        *(pa.array([row[2 + at] for row in rows], SCHEMA.field(3 + at).type) for at in range(4)),
    ]
    return sort_samples(pa.table(columns, schema=SCHEMA), "gpu")[0]


def day_of(row) -> int:
    return 20_000 + row[0] * 18_000_000 // DAY_MS


@settings(max_examples=100, deadline=None)
@given(rows=rows_strategy, data=st.data())
def test_whatever_is_different_in_a_day_shows_in_its_digest_alone(rows, data):
    before = day_digests(table_of(rows))
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
    after = day_digests(table_of(changed)) if changed else {}
    assert {day for day in {*before, *after} if before.get(day) != after.get(day)} == {day_of(row)}


def test_a_file_says_them_and_its_table_does_not(tmp_path):
    table = table_of([(hour, ("n1", "g1"), 1.0, None, 2, 3) for hour in range(20)])
    write_part(tmp_path / "part.parquet", [table], footer(table))
    assert read_day_digests(tmp_path / "part.parquet") == day_digests(table)
    (read,), _ = read_part(tmp_path / "part.parquet", table.column_names)
    assert read.schema.metadata is None
    assert read.equals(table)
    pq.write_table(table, tmp_path / "old.parquet")  # as an older version wrote it
    assert read_day_digests(tmp_path / "old.parquet") is None
