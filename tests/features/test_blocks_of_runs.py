"""Samples in several runs give the blocks, and so the matrix, that the same samples give in one."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from features.windows.blocks import SampleBlock, blocks_of
from features.windows.layout import ChannelLayout
from telemetry.dataset.channels import CATALOGUE
from telemetry.dataset.layout import DAY_MS, Runs, instants_ms, merge_runs, sort_samples, split_by
from telemetry.dataset.schema import samples_schema

CHANNELS = {name: CATALOGUE[name] for name in ("gpu_temp_c", "energy_mj", "clocks_event_reasons", "xid_last")}
LAYOUT = ChannelLayout.of(CHANNELS)
NUMBER = st.one_of(st.none(), st.floats(-10, 130, width=32), st.just(float("inf")))

rows_strategy = st.lists(
    st.tuples(
        st.integers(0, 40),  # steps of five hours
        st.sampled_from([("n2", "g1"), ("n1", "g2"), ("n1", "g3"), ("n3", "g10"), ("n1", "g10")]),
        NUMBER,
        st.one_of(st.none(), st.integers(0, 2**53)),
        st.one_of(st.none(), st.integers(0, 2**62)),
        st.one_of(st.none(), st.integers(0, 99)),
    ),
    min_size=1,
    max_size=60,
    unique_by=lambda row: (row[0], row[1][1]),
)


def table_of(rows) -> pa.Table:
    schema = samples_schema(CHANNELS)
    columns = [
        pa.array([20_000 * DAY_MS + row[0] * 18_000_000 for row in rows], pa.int64()).cast(schema.field(0).type),
        pa.array([row[1][0] for row in rows]).dictionary_encode().cast(schema.field(1).type),
        pa.array([row[1][1] for row in rows]).dictionary_encode().cast(schema.field(2).type),
        *(pa.array([row[2 + i] for row in rows], schema.field(3 + i).type) for i in range(4)),
    ]
    return sort_samples(pa.table(columns, schema=schema), "gpu")[0]


def assert_equal(blocks: list[SampleBlock], expected: list[SampleBlock]) -> None:
    assert len(blocks) == len(expected)
    for one, other in zip(blocks, expected, strict=True):
        assert dict(one.spans) == dict(other.spans)
        assert one.values.tobytes() == other.values.tobytes()
        for name in ("times", "flags", "flags_known"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@settings(max_examples=150, deadline=None)
@given(
    rows=rows_strategy,
    days=st.sampled_from([1, 2, 4]),
    size=st.sampled_from([1, 10, 100_000]),
    unit=st.sampled_from(["gpu", "node"]),
    data=st.data(),
)
def test_blocks_of_runs_are_those_of_one_table(rows, days, size, unit, data):
    if unit == "node":
        rows = list({(row[0], row[1][0]): row for row in rows}.values())
    one_table = sort_samples(table_of(rows), unit)[0]
    runs = list(split_by(one_table, Runs(days).of(instants_ms(one_table))).values())
    expected = list(blocks_of(one_table, LAYOUT, unit=unit, block_samples=size))
    assert_equal(list(blocks_of(runs, LAYOUT, unit=unit, block_samples=size)), expected)
    assert merge_runs(runs, unit).equals(one_table.unify_dictionaries())
    # In whatever chunks and order they come, the samples of a pair are put in order of time.
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3))), len(rows)]
    chunked = pa.concat_tables([one_table.slice(low, high - low) for low, high in pairwise(cuts)])
    assert_equal(list(blocks_of(chunked, LAYOUT, unit=unit, block_samples=size)), expected)
    assert_equal(list(blocks_of(runs[::-1], LAYOUT, unit=unit, block_samples=size)), expected)
    shuffled = one_table.take(data.draw(st.permutations(range(len(rows)))))
    assert_equal(list(blocks_of(shuffled, LAYOUT, unit=unit, block_samples=size)), expected)


@settings(max_examples=100, deadline=None)
@given(
    rows=rows_strategy,
    days=st.sampled_from([1, 4]),
    size=st.sampled_from([1, 100_000]),
    since=st.integers(-1, 41),
    unit=st.sampled_from(["gpu", "node"]),
)
def test_older_samples_are_left_out(rows, days, size, since, unit):
    if unit == "node":
        rows = list({(row[0], row[1][0]): row for row in rows}.values())
    one_table = sort_samples(table_of(rows), unit)[0]
    begin = 20_000 * DAY_MS + since * 18_000_000
    younger = one_table.filter(pa.array(one_table.column("timestamp").cast(pa.int64()).to_numpy() >= begin))
    runs = list(split_by(one_table, Runs(days).of(instants_ms(one_table))).values())
    expected = list(blocks_of(younger, LAYOUT, unit=unit, block_samples=size))
    assert_equal(list(blocks_of(runs, LAYOUT, unit=unit, since=begin, block_samples=size)), expected)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 90), begin=st.integers(0, 20), missing=st.sampled_from(["none", "all", "some"]), data=st.data()
)
def test_a_block_holds_what_the_samples_say_whichever_are_missing(count, begin, missing, data):
    def column(values: st.SearchStrategy) -> list:
        known = st.none() if missing == "all" else values if missing == "none" else st.one_of(st.none(), values)
        return data.draw(st.lists(known, min_size=begin + count, max_size=begin + count))

    temperatures, masks = column(st.floats(-10, 130, width=32) | st.just(float("-inf"))), column(st.integers(0, 2**62))
    rows = [(i, ("n", "g"), temperatures[i], 1, masks[i], None) for i in range(begin + count)]
    (block,) = blocks_of(table_of(rows).slice(begin), LAYOUT, unit="gpu")  # bits of a slice begin within a byte
    gauge, mask = LAYOUT.numbers.index("gpu_temp_c"), LAYOUT.masks.index("clocks_event_reasons")
    finite = [None if value is None or np.isinf(value) else value for value in temperatures[begin:]]
    np.testing.assert_array_equal(block.values[gauge], np.array(finite, dtype=np.float64))
    assert block.flags[mask].tolist() == [value or 0 for value in masks[begin:]]
    assert block.flags_known[mask].tolist() == [value is not None for value in masks[begin:]]
