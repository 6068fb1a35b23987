"""Packing loses nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.online.packing import pack
from telemetry.block import Series

KINDS = {
    np.float32: st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(-300, 300).map(float)
    ),
    np.float64: st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 2**52).map(float)),
    np.int32: st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(0, 5)),
    np.uint64: st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**40])),
    np.int64: st.integers(1_700_000_000_000, 1_700_000_900_000),
}


def back(series: Series, starts: list[int]) -> Series:
    rows = np.arange(len(series.values), dtype=np.int64)
    runs = (np.searchsorted(starts, rows, side="right") - 1).astype(np.int64)
    return pack(series, np.array(starts, dtype=np.int64)).unpack(rows, runs, series.values.dtype)


@pytest.mark.parametrize("dtype", KINDS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_value_comes_back_as_it_was(dtype, data):
    values = data.draw(st.lists(KINDS[dtype], min_size=1, max_size=30))
    valid = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    starts = sorted({0, *data.draw(st.lists(st.integers(0, len(values) - 1), max_size=4))})
    series = Series(np.array(values, dtype=dtype), valid)
    found = back(series, starts)
    np.testing.assert_array_equal(found.valid, valid)
    np.testing.assert_array_equal(found.values[valid], series.values[valid])
    assert found.values.dtype == dtype
    assert not found.values[~valid].any()


def test_one_more_on_seventeen_million_is_not_lost_and_costs_a_byte():
    values = np.array([2.0**24, 2.0**24 + 1, 2.0**24 + 2, 3.0, 4.0, 9e15 / 2])
    packed = pack(Series(values, np.ones(6, dtype=bool)), np.array([0, 3, 5]))
    assert packed.codes.dtype == np.uint8
    np.testing.assert_array_equal(back(Series(values, np.ones(6, dtype=bool)), [0, 3, 5]).values, values)


def test_a_channel_that_never_moves_takes_no_room():
    packed = pack(Series(np.zeros(100_000), np.ones(100_000, dtype=bool)), np.array([0]))
    assert packed.nbytes < 64


def test_times_on_the_step_are_counted_in_steps():
    times = 1_700_000_400_000 + 600_000 * np.arange(80, dtype=np.int64)
    packed = pack(Series(times, np.ones(80, dtype=bool)), np.array([0]), unit_scale=600_000)
    assert packed.codes.dtype == np.uint8
    rows = np.arange(80)
    np.testing.assert_array_equal(packed.unpack(rows, np.zeros(80, dtype=np.int64), times.dtype).values, times)
