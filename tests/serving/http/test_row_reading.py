"""Feature rows: the quick ways of reading them give what the plain ones give, and refuse what those refuse."""

import copy
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.champion.model import FeatureRows
from serving.http.bodies import may_hold_booleans
from serving.http.rows import rows_of_arrow, rows_of_table
from telemetry.collect.remote_write.problems import Refused

NAMES = ("a", "b", "c")
cells = st.one_of(
    st.none(),
    st.floats(allow_nan=False, width=32),
    st.floats(allow_nan=False),
    st.integers(),
    st.booleans(),
    st.just("1.5"),
    st.just([1.0]),
)
plain_cells = st.one_of(st.none(), st.floats(-1e30, 1e30), st.integers(-(2**53), 2**53))


def read(data: list[list[Any]], *, booleans: bool) -> FeatureRows | tuple[int, str]:
    try:
        return rows_of_table(["c", "unit", "a"], copy.deepcopy(data), NAMES, 10, "rows", booleans=booleans)
    except Refused as refused:
        return refused.status, str(refused)


@given(st.lists(st.tuples(plain_cells | cells, st.just("g"), plain_cells), min_size=1, max_size=4))
def test_rows_without_booleans_are_read_as_slowly_read_ones_are(rows: list[tuple[Any, str, Any]]) -> None:
    data = [list(row) for row in rows]
    slow = read(data, booleans=True)
    if any(isinstance(cell, bool) for row in data for cell in row):
        assert isinstance(slow, tuple)
        return
    quick = read(data, booleans=False)
    if isinstance(slow, tuple) or isinstance(quick, tuple):
        assert quick == slow
        return
    np.testing.assert_array_equal(quick.values, slow.values)
    assert quick.units == slow.units
    expected = [[math.nan if cell is None else float(cell) for cell in (row[2], None, row[0])] for row in data]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(quick.values, np.array(expected).astype(np.float32))


def test_a_text_that_names_no_boolean_holds_none() -> None:
    assert may_hold_booleans(b"[1, true]")
    assert may_hold_booleans(b"[false]")
    assert not may_hold_booleans(b'{"rows": [{"a": 1.0, "b": null}]}')


@pytest.mark.parametrize("rows_a_batch", [None, 2])
def test_an_arrow_table_of_mixed_numbers_is_read_as_its_columns_are(rows_a_batch: int | None) -> None:
    table = pa.table(
        {
            "b": pa.array([1, 2, None, 4, 5], pa.int64()),
            "a": pa.array([1.5, None, math.nan, 4, 5], pa.float32()),
            "half": pa.array(np.arange(5), pa.float16()),
            "none": pa.nulls(5),
            "large": pa.array([2**63 + 5] * 5, pa.uint64()),
            "unit": list("vwxyz"),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_a_batch)
    columns = ("none", "a", "absent", "b", "half", "large")
    found = rows_of_arrow(bytes(sink.getvalue()), columns, 10, 2**20)
    assert found.units == list("vwxyz")
    for at, name in enumerate(columns):
        given_ = table.column(name).to_pylist() if name in table.column_names else [None] * 5
        expected = np.array([math.nan if value is None else float(value) for value in given_], dtype=np.float32)
        np.testing.assert_array_equal(found.values[:, at], expected, err_msg=name)
