"""The roll-up against a slow oracle that walks over the raw samples one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.dataset.channels import CATALOGUE, with_rollups
from telemetry.importing.samples.block import DTYPES, Block, ChannelValues
from telemetry.importing.samples.rollup import (
    add_rollup_columns,
    finer_units,
    reset_aware_rise,
    rises_after_insertion,
    roll_up,
)

BASE = {name: CATALOGUE[name] for name in ("power_w", "energy_mj", "clocks_event_reasons", "pstate")}
CHANNELS = with_rollups(BASE)
STEP = 600_000

rows_strategy = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(1, 40),
        st.one_of(st.none(), st.integers(0, 700)),
        st.one_of(st.none(), st.integers(0, 50)),
        st.one_of(st.none(), st.integers(0, 15)),
        st.one_of(st.none(), st.integers(0, 15)),
    ),
    max_size=60,
    unique_by=lambda row: row[:2],
)


def block_of(rows, channels=CHANNELS) -> Block:
    series = {}
    columns = {name: index for index, name in enumerate(BASE, start=2)}
    for name, channel in channels.items():
        values = [row[columns[name]] if name in columns else None for row in rows]
        valid = np.array([value is not None for value in values], dtype=bool)
        numbers = np.array([0 if value is None else value for value in values], DTYPES[channel.kind])
        series[name] = ChannelValues(numbers, valid)
    length = len(rows)
    return Block(
        unit=np.array([row[0] for row in rows], np.int32),
        node=np.zeros(length, np.int32),
        ms=np.array([row[1] * 100_000 for row in rows], np.int64),
        order=np.arange(length),
        mig=np.zeros(length, dtype=bool),
        count=np.ones(length, np.int32),
        series=series,
    )


def listed(series: ChannelValues) -> list[float | None]:
    return [
        value if valid else None for value, valid in zip(series.values.tolist(), series.valid.tolist(), strict=True)
    ]


def oracle(rows):
    cells: dict[tuple[int, int], list] = {}
    newest: dict[int, int] = {}
    for row in sorted(rows, key=lambda row: row[:2]):
        unit, minute, _, energy, *_ = row
        rise = None
        if energy is not None:
            if unit in newest:
                rise = energy - newest[unit] if energy >= newest[unit] else energy
            newest[unit] = energy
        end = -(-minute * 100_000 // STEP) * STEP
        cells.setdefault((unit, end), []).append((*row, rise))
    made = []
    for (unit, end), raw in cells.items():

        def reported(index, raw=raw):
            return [row[index] for row in raw if row[index] is not None]

        flags = 0
        for value in reported(4):
            flags |= value
        made.append(
            {
                "unit": unit,
                "ms": end,
                "count": len(raw),
                "power_w": np.mean(reported(2)) if reported(2) else None,
                "power_w_min": min(reported(2), default=None),
                "power_w_max": max(reported(2), default=None),
                "energy_mj": reported(3)[-1] if reported(3) else None,
                "energy_mj_rise": sum(reported(6)) if reported(6) else None,
                "clocks_event_reasons": flags if reported(4) else None,
                "pstate": reported(5)[-1] if reported(5) else None,
            }
        )
    return made


@settings(max_examples=200, deadline=None)
@given(rows=rows_strategy)
def test_rolling_up_equals_walking_over_the_raw_samples(rows):
    rows.sort(key=lambda row: row[:2])
    block = block_of(rows)
    add_rollup_columns(block, CHANNELS)
    rolled = roll_up(block, CHANNELS, np.ones(len(rows), dtype=bool), STEP)
    expected = oracle(rows)
    assert rolled.unit.tolist() == [row["unit"] for row in expected]
    assert rolled.ms.tolist() == [row["ms"] for row in expected]
    assert rolled.count.tolist() == [row["count"] for row in expected]
    for name in CHANNELS:
        for value, wanted in zip(listed(rolled.series[name]), [row[name] for row in expected], strict=True):
            assert (value is None) == (wanted is None), name
            assert value is None or value == pytest.approx(wanted, rel=1e-6), name


def rises_of(values: list[float], late: set[int], inner: dict[int, float] | None = None) -> list[float | None]:
    """Stored rises of the rows that are not late, once the late ones are there; ``inner`` replaces stored rises."""
    counter = np.array(values, np.float64)
    held = np.array([index not in late for index in range(len(values))])
    unit = np.zeros(len(values), np.int32)
    before = reset_aware_rise(counter, held, unit)
    for index, rise in (inner or {}).items():
        before.values[index], before.valid[index] = rise, True
    everything = ChannelValues(counter, np.ones(len(values), dtype=bool))
    stored = rises_after_insertion(everything, before, unit, held)
    fresh = reset_aware_rise(counter, everything.valid, unit)
    return listed(ChannelValues(np.where(before.valid, stored, fresh.values), before.valid | fresh.valid))


@given(
    values=st.lists(st.integers(0, 10**9), min_size=2, max_size=12).map(sorted),
    late=st.sets(st.integers(0, 11)),
)
def test_late_rows_of_a_counter_that_only_rises_leave_the_rises_as_if_all_had_come_at_once(values, late):
    everything = listed(reset_aware_rise(np.array(values), np.ones(len(values), dtype=bool), np.zeros(len(values))))
    rises = rises_of(values, late)
    assert rises[0] is None
    assert everything[0] is None
    assert rises[1:] == pytest.approx(everything[1:])


@given(
    values=st.lists(st.integers(0, 1000), min_size=2, max_size=12),
    late=st.sets(st.integers(0, 11)),
)
def test_no_rise_is_ever_negative(values, late):
    assert all(rise is None or rise >= 0 for rise in rises_of(values, late))


@pytest.mark.parametrize(
    ("values", "late", "inner", "rises"),
    [
        ([0, 100, 100], {1}, {}, [None, 100, 0]),
        ([100, 5, 10], {1}, {}, [None, 5, 5]),  # the reset shows in the late row
        ([100, 120, 10], {1}, {}, [None, 20, 10]),  # it came after the late row
        ([10, 2, 50], {1}, {}, [None, 2, 48]),  # the stored rise could not know of it
        ([10, 60, 50], {1}, {}, [None, 50, 50]),
        ([100, 110, 10], {1}, {2: 40}, [None, 10, 30]),  # it lies inside the stored step: 100 to 130, then 0 to 10
        ([3, 9], {0}, {1: 4}, [None, 6]),  # the unit's first step, from 5 to 9
    ],
)
def test_a_late_row_and_a_reset(values, late, inner, rises):
    assert rises_of(values, late, inner) == rises


@pytest.mark.parametrize(
    ("seconds", "finer"), [(30, True), (300, True), (539, True), (590, False), (600, False), (86400, False)]
)
def test_which_units_are_finer(seconds: int, finer: bool):
    ms = np.repeat(np.arange(10) * seconds * 1000, 3)  # repeated instants are no interval
    assert finer_units(np.zeros(30, np.int32), ms[::-1].copy(), STEP).tolist() == ([0] if finer else [])
