"""An Arrow table of numbers of any type is read as its columns are."""

import math

import numpy as np
import pyarrow as pa
import pytest

from serving.http.rows import rows_of_arrow


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
