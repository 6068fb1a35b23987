"""Samples of one value a row: the same as wide ones, or a refusal."""

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.http.long_samples import is_long, wide_samples
from telemetry.channels import CATALOGUE
from telemetry.receiving.problems import Refused
from tests.serving.batch_world import HOLLOW, World, make_world
from tests.serving.http.test_telemetry_route import ARROW, END, Clock, cut, late_samples, serving, stream_of

INSTANT = pa.timestamp("ms", "UTC")


def long_table(rows: list[tuple[int, str, str, str, float | None]], **more: Any) -> pa.Table:
    names = ("timestamp", "node", "gpu", "channel", "value")
    types = (INSTANT, pa.string(), pa.string(), pa.string(), pa.float64())
    columns = {
        name: pa.array([row[at] for row in rows], kind)
        for at, (name, kind) in enumerate(zip(names, types, strict=True))
    }
    return pa.table(columns | more)


def wide(table: pa.Table, **limits: int) -> pa.Table:
    return wide_samples(stream_of(table), CATALOGUE, **({"row_limit": 100, "byte_limit": 2**20} | limits))


rows_given = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["n1", "n2"]),
        st.sampled_from(["a", "b"]),
        st.sampled_from(["gpu_temp_c", "power_w"]),
        st.none() | st.floats(0, 100),
    ),
    min_size=1,
    max_size=12,
)


@given(rows_given)
def test_every_value_stands_at_its_instant_and_channel_and_the_last_counts(
    rows: list[tuple[int, str, str, str, float | None]],
) -> None:
    expected: dict[tuple[int, str, str], dict[str, float | None]] = {}
    for ms, node, gpu, channel, value in rows:
        expected.setdefault((ms, node, gpu), {})[channel] = value
    found = wide(long_table(rows))
    told = sorted({row[3] for row in rows})
    assert sorted(found.column_names) == sorted(["timestamp", "node", "gpu", *told])
    keys = zip(
        found.column("timestamp").cast("int64").to_pylist(),
        found.column("node").to_pylist(),
        found.column("gpu").to_pylist(),
        strict=True,
    )
    for at, (key, values) in enumerate(zip(keys, expected.items(), strict=True)):
        assert key == values[0]
        assert {name: found.column(name)[at].as_py() for name in told} == {name: values[1].get(name) for name in told}


ROW = (0, "n1", "a", "gpu_temp_c", 60.0)


@pytest.mark.parametrize(
    ("table", "status", "words"),
    [
        (long_table([ROW, (0, "n1", "a", "gpu_temp", 1.0)]), 422, "channel 'gpu_temp' is not known: did you mean"),
        (long_table([ROW]).append_column("sample_count", pa.array([1])), 422, "column 'sample_count' is not known"),
        (long_table([ROW]).append_column("node", pa.array(["x"])), 422, "a column occurs twice"),
        (long_table([]), 422, "the table holds no row"),
        (long_table([ROW], channel=pa.nulls(1)), 422, "channel 'None' is not known"),
        (long_table([ROW], channel=pa.array([7])), 422, "channel 'None' is not known"),
        (long_table([ROW], value=pa.array(["60"])), 422, "value has the type string: send numbers"),
        (long_table([(at, "n1", "a", "gpu_temp_c", 1.0) for at in range(101)]), 413, "101 instants of units"),
        (long_table([ROW] * 3201), 413, "the body holds more than 3200 rows"),
        (long_table([ROW], value=pa.array([[1.0]])), 400, "has the type list<item: double>"),
    ],
)
def test_long_tables_that_do_not_fit_are_refused(table: pa.Table, status: int, words: str) -> None:
    with pytest.raises(Refused) as refused:
        wide(table)
    assert refused.value.status == status
    assert words in str(refused.value)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_damage_to_a_long_stream_makes_a_fault(data: st.DataObject) -> None:
    whole = bytearray(stream_of(long_table([ROW, (1, "n1", "a", "power_w", None)])))
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    body = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    if is_long(body):  # as the route asks
        with suppress(Refused):
            wide_samples(body, CATALOGUE, row_limit=100, byte_limit=2**20)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("long"))


def test_long_samples_make_the_same_state_as_wide_ones(tmp_path: Path, world: World) -> None:
    samples, border = late_samples(world)
    samples = samples.filter(pc.not_equal(samples.column("gpu"), HOLLOW))  # a row without a value has no long form
    channels = [name for name in samples.column_names if name not in ("timestamp", "node", "gpu")]
    parts = []
    for name in channels:
        column = samples.column(name).cast(pa.float64())
        kept = np.flatnonzero(~np.isnan(column.fill_null(math.nan).to_numpy()))
        mine = samples.select(["timestamp", "node", "gpu"]).take(pa.array(kept))
        parts.append(
            mine.append_column("channel", pa.array([name] * len(kept))).append_column(
                "value", column.take(pa.array(kept))
            )
        )
    table = pa.concat_tables(parts)
    values = []
    for number, (query, body) in enumerate((("samples", stream_of(samples)), ("samples", stream_of(table)))):
        with serving(
            tmp_path / str(number), world, Clock(END), dataset=cut(world, tmp_path / f"cut{number}", border)
        ) as service:
            status, answer, _ = service.client().send("POST", f"/v1/telemetry?kind={query}", body, ARROW)
            assert (status, answer["samples"]["unknown"]) == (200, 0), answer
            state = service.service.online.upkeep.state  # type: ignore[union-attr]
            values.append(state.rows(END).values)
            hostile = stream_of(long_table([(0, "n1", "a", "nonsense", 1.0)]))
            assert service.client().send("POST", "/v1/telemetry?kind=samples", hostile, ARROW)[0] == 422
    np.testing.assert_allclose(values[1], values[0], rtol=1e-6, atol=1e-9, equal_nan=True)
