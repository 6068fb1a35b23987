"""Frozen samples and dead fields, by each rule, against a plain slow version; and the same however a history is cut."""

import operator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from telemetry.importing.samples.block import Block, ChannelValues
from telemetry.importing.samples.instrument_rules import RULES
from telemetry.importing.samples.instruments import InstrumentFindings, Instruments, without_dead_values

MINUTE = 60_000
Row = dict[str, Any]


def block(rows: list[Row], *, old: int = 0) -> Block:
    """A block of rows with ``unit``, ``minute`` and channels; the first ``old`` rows are of an existing dataset."""
    names = sorted({name for row in rows for name in row} - {"unit", "minute"})
    n = len(rows)
    series = {
        name: ChannelValues(
            np.array([row.get(name, 0.0) for row in rows], np.float64),
            np.array([name in row for row in rows], np.bool_),
        )
        for name in names
    }
    return Block(
        unit=np.array([row.get("unit", 0) for row in rows], np.int32),
        node=np.zeros(n, np.int32),
        ms=np.array([round(row["minute"] * MINUTE) for row in rows], np.int64),
        order=np.where(np.arange(n) < old, -1, np.arange(n)).astype(np.int64),
        mig=np.zeros(n, np.bool_),
        count=np.ones(n, np.int32),
        series=series,
    )


def check(rows: list[Row]) -> tuple[list[int], list[int]]:
    findings = Instruments(["g0", "g1"]).check(block(rows))
    return np.flatnonzero(findings.frozen).tolist(), findings.onsets.tolist()


def working(minute: int, **more: float) -> Row:
    return {"minute": minute, "power_w": 300.0 + minute % 7, "gpu_temp_c": 60.0, "gpu_util_pct": 97.0, **more}


FIELDS = {"energy_mj": 1000.0, "fb_used_mib": 40_000.0, "pcie_replay_total": 0.0}
LAST = {"power_w": 310.0, "gpu_temp_c": 33.0, "gpu_util_pct": 0.0}
IDLE = {"power_w": 60.1, "gpu_temp_c": 30.0, "gpu_util_pct": 0.0}


def test_a_page_without_device_fields_that_repeats_is_frozen_from_its_third_sample() -> None:
    rows = [working(m, **FIELDS, n=m) for m in (0, 10)] + [{"minute": m, **LAST} for m in range(20, 80, 10)]
    assert check(rows) == ([4, 5, 6, 7], [4])


def test_the_last_good_sample_may_be_the_one_that_is_repeated() -> None:
    good = {"minute": 10, **LAST, **FIELDS}
    rows = [working(0, **FIELDS), good, *({"minute": m, **LAST} for m in range(20, 70, 10))]
    assert check(rows) == ([4, 5, 6], [4])


def test_a_gpu_under_load_that_repeats_power_temperature_and_load_is_frozen() -> None:
    same = {"power_w": 443.0, "gpu_temp_c": 39.0, "mem_temp_c": 50.0, "gpu_util_pct": 97.0}
    rows = [{"minute": m, **same} for m in range(0, 90, 10)]
    assert check(rows) == ([5, 6, 7, 8], [5])


def test_an_idle_gpu_on_a_page_that_stands_is_frozen_and_on_one_that_moves_is_not() -> None:
    assert check([{"minute": m, **IDLE, "page_age_s": 60.0 * m} for m in range(0, 60, 10)]) == ([3, 4, 5], [3])
    assert check([{"minute": m, **IDLE, "page_age_s": 30.0} for m in range(0, 600, 10)]) == ([], [])


def test_what_the_freeze_does_not_concern_stays_in_its_rows() -> None:
    rows = [working(0, **FIELDS), *({"minute": m, **LAST, "xid_last": 79.0} for m in range(10, 80, 10))]
    whole = block(rows)
    findings = Instruments(["g0"]).check(whole)
    cleared = without_dead_values(whole, findings)
    assert findings.frozen.any()
    assert cleared.series["xid_last"].valid.tolist() == whole.series["xid_last"].valid.tolist()
    assert not cleared.series["power_w"].valid[findings.frozen].any()


def test_an_energy_counter_that_stands_while_power_is_drawn_is_frozen() -> None:
    assert check([{"minute": m, **IDLE, "energy_mj": 5.0} for m in range(30)])[1] == [10]


@pytest.mark.parametrize(
    "rows",
    [
        # idle for a day: power and temperature repeat, and the energy counter goes on
        [{"minute": m, **IDLE, "energy_mj": float(m)} for m in range(0, 1440, 10)],
        # idle, and nothing else is exported
        [{"minute": m, **IDLE} for m in range(0, 1440, 10)],
        # a virtual GPU without sensors
        [{"minute": m, **dict.fromkeys(IDLE, 0.0), "gpu_util_pct": 97.0, "energy_mj": 5.0} for m in range(0, 300, 10)],
        # an exporter without device fields from the beginning
        [{"minute": m, "power_w": 300.0 + m % 20, "gpu_temp_c": 30.0, "gpu_util_pct": 90.0} for m in range(0, 300, 10)],
        # load from minute to minute, which the counter confirms
        [
            {"minute": m, "power_w": 400.0, "gpu_temp_c": 60.0, "gpu_util_pct": 90.0 + m % 4 / 2, "energy_mj": m * 24.0}
            for m in range(100)
        ],
        # one field is no longer exported by a new configuration, the others are
        [
            {"minute": m, **IDLE, "energy_mj": m * 9.0, **({"fb_used_mib": 5.0} if m < 50 else {})}
            for m in range(0, 300, 10)
        ],
    ],
)
def test_what_a_working_gpu_shows_is_not_frozen(rows: list[Row]) -> None:
    assert check(rows) == ([], [])


def apart(rows: list[Row], order: int) -> list[Row]:
    """The same with a stamp for each channel, seconds apart."""
    names = sorted({name for row in rows for name in row} - {"unit", "minute"})[::order]
    return [
        {"minute": row["minute"] + place / 60, name: row[name]}
        for row in rows
        for place, name in enumerate(names)
        if name in row
    ]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("cut", [None, 60, 61, 62, 63])
def test_channels_with_a_stamp_of_their_own_freeze_as_those_of_one_page(order: int, cut: int | None) -> None:
    good = [working(m, **FIELDS) for m in range(0, 100, 10)]
    rows = apart([*good, *({"minute": m, **LAST} for m in range(100, 200, 10)), working(200, **FIELDS)], order)
    frozen = []
    state = None
    for part in [rows] if cut is None else [rows[:cut], rows[cut:]]:
        instruments = Instruments(["g0"], state)
        findings = instruments.check(block(part))
        frozen += [row for row, is_frozen in zip(part, findings.frozen, strict=True) if is_frozen]
        state = instruments.table()
    minutes = {int(row["minute"]) for row in frozen}
    assert {140, 150, 160, 170, 180, 190} <= minutes <= {120, 130, 140, 150, 160, 170, 180, 190, 200}


@pytest.mark.parametrize("order", [1, -1])
def test_a_working_gpu_whose_channels_have_a_stamp_of_their_own_is_not_frozen(order: int) -> None:
    idle = [{"minute": m, "power_w": 60.1, "gpu_temp_c": 30.0, "energy_mj": m * 9.0} for m in range(0, 900, 10)]
    assert check(apart(idle, order)) == ([], [])
    busy = [working(m, gr_engine_active_ratio=0.0 if m < 1100 else 0.9) for m in range(0, 1200, 30)]
    rows = apart(busy, order)
    dead = Instruments(["g0"]).check(block(rows)).dead["gr_engine_active_ratio"]
    minutes = [int(rows[row]["minute"]) for row in np.flatnonzero(dead)]
    assert (min(minutes) - 360 in (0, 30), max(minutes)) == (True, 1080), "a dead field is noticed as well"


def test_a_gpu_that_comes_back_is_read_again_and_may_freeze_again() -> None:
    frozen = [{"minute": m, **LAST} for m in range(20, 60, 10)]
    back = [working(m, **FIELDS) for m in (60, 70)]
    again = [{"minute": m, **LAST} for m in range(80, 120, 10)]
    rows = [working(0, **FIELDS), working(10, **FIELDS), *frozen, *back, *again]
    assert check(rows) == ([4, 5, 10, 11], [4, 10])


@pytest.mark.parametrize("name", ["gr_engine_active_ratio", "power_w", "gpu_temp_c"])
def test_a_field_that_is_zero_while_busy_is_dead_until_it_moves(name: str) -> None:
    minutes = range(0, 1200, 30)
    rows = [working(m, dram_active_ratio=0.2) | {name: 0.0 if m < 1100 else 0.9} for m in minutes]
    findings = Instruments(["g0"]).check(block(rows))
    dead = np.flatnonzero(findings.dead[name])
    assert [minutes[row] for row in dead] == [m for m in minutes if 360 <= m < 1100]
    assert not findings.dead["dram_active_ratio"].any()


def test_a_field_of_an_idle_gpu_may_be_zero_for_ever() -> None:
    rows = [{**working(m, gr_engine_active_ratio=0.0), "gpu_util_pct": 0.0} for m in range(0, 3000, 30)]
    assert not Instruments(["g0"]).check(block(rows)).dead["gr_engine_active_ratio"].any()


@pytest.mark.parametrize("cut", [0, 3, 5, 8])
@pytest.mark.parametrize("order", [1, -1, 0])
def test_a_lasting_counter_that_drops_to_zero_is_not_read_for_a_day(cut: int, order: int) -> None:
    counts = [0, 5, 0, 0, 5, 6, *[0] * 50, 1]
    rows = [working(60 * hour, ecc_dbe_aggregate_total=float(count)) for hour, count in enumerate(counts)]
    rows = [row | {"unit": unit} for unit in (0, 1) for row in (apart(rows, order) if order else rows)]
    dead = []
    state = None
    for is_early in (True, False):
        part = [row for row in rows if (row["minute"] < 60 * cut) == is_early]
        instruments = Instruments(["g0", "g1"], state)
        marks = instruments.check(block(part)).dead.get("ecc_dbe_aggregate_total", [])
        dead += [(row["unit"], row["minute"] // 60) for row, is_dead in zip(part, marks, strict=False) if is_dead]
        state = instruments.table()
    assert sorted(dead) == [(unit, hour) for unit in (0, 1) for hour in (2, 3, *range(6, 29))]


def slow(rows: list[Row]) -> list[bool]:
    """One GPU's frozen rows, row by row, as ``instruments.yaml`` says it."""
    marks, repetition = [], []
    most_before = 0
    is_frozen = False
    for row in rows:
        power = any(row.get(name, 0) > 0 for name in RULES.power)
        warm = any(row.get(name, 0) > 0 for name in RULES.temperature)
        if not (power and warm):
            marks.append(False)
            continue

        def fields(row: Row) -> int:
            return sum(name in row for name in RULES.device_fields.channels)

        key = (*(row.get(name) for name in RULES.fluctuating), fields(row) > 0)
        if repetition and repetition[0][0] == key:
            repetition.append((key, row))
        else:
            most_before = max((fields(old) for _, old in repetition), default=0)
            repetition, is_frozen = [(key, row)], False
        minutes = row["minute"] - repetition[0][1]["minute"]

        def still(name: str, repetition: list[Any] = repetition) -> bool:
            first = repetition[0][1].get(name)
            return first is not None and first > 0 and all(old.get(name) == first for _, old in repetition)

        holds = {
            "vanished": most_before >= RULES.device_fields.fewest and fields(row) == 0,
            "energy": still(RULES.energy),
            "load": still(RULES.load),
            "page": row.get("page_age_s", 0) >= 1800,
        }
        for name, is_so in holds.items():
            least = getattr(RULES.frozen, name)
            is_frozen |= is_so and len(repetition) >= least.samples and minutes >= least.minutes
        marks.append(is_frozen)
    return marks


CHANNELS = {
    "power_w": st.sampled_from([0.0, 300.0, 300.0, 300.0, 301.0]),
    "gpu_temp_c": st.sampled_from([60.0, 60.0, 60.0, 61.0]),
    "gpu_util_pct": st.sampled_from([0.0, 97.0, 97.0]),
    "energy_mj": st.sampled_from([5.0, 5.0, 6.0]),
    "fb_used_mib": st.just(7.0),
    "page_age_s": st.sampled_from([30.0, 1800.0, 3600.0]),
    "gr_engine_active_ratio": st.sampled_from([0.0, 0.0, 0.0, 0.0, 0.5]),
}
HISTORY = st.lists(
    st.tuples(
        st.integers(1, 25),
        st.fixed_dictionaries({}, optional=CHANNELS),
        st.integers(1, 5),
    ),
    max_size=12,
)


def rows_of(history: list[tuple[int, Row, int]]) -> list[Row]:
    rows: list[Row] = []
    minute = 0
    for pause, values, times in history:
        for _ in range(times):
            minute += pause
            rows.append({"minute": minute, **values})
    return rows


def has_stamps_of_its_own(rows: list[Row]) -> bool:
    has_power = ["power_w" in row for row in rows]
    has_temperature = ["gpu_temp_c" in row for row in rows]
    return any(has_power) and any(has_temperature) and not any(map(operator.and_, has_power, has_temperature))


@settings(max_examples=150, deadline=None)
@given(HISTORY, st.lists(st.integers(0, 60), max_size=3))
def test_rows_are_judged_as_by_the_slow_version_and_the_same_however_they_are_cut(history, cuts):
    rows = rows_of(history)
    padded: Row = dict.fromkeys(CHANNELS, 1.0)
    # Another unit beside it, with every channel, so that each piece has all columns.
    other = [{"unit": 1, "minute": row["minute"], **padded} for row in rows]
    assert np.flatnonzero(Instruments(["g0", "g1"]).check(block([*rows, *other])).frozen[: len(rows)]).tolist() == [
        place for place, mark in enumerate(slow(rows)) if mark
    ]
    whole = Instruments(["g0", "g1"])
    expected = whole.check(block([*rows, *other]))
    pieces, state = [], None
    edges = sorted({0, len(rows), *(cut % (len(rows) + 1) for cut in cuts)})
    # Rows that never report power and temperature together are divided into pages, which a cut may part.
    assume(not any(has_stamps_of_its_own(rows[low:high]) for low, high in [(0, len(rows)), *pairwise(edges)]))
    for low, high in pairwise(edges):
        instruments = Instruments(["g0", "g1"], state)
        pieces.append((high - low, instruments.check(block([*rows[low:high], *other[low:high]]))))
        state = instruments.table()

    def first_unit(parts: list[tuple[int, InstrumentFindings]], name: str | None) -> list[bool]:
        return [mark for size, part in parts for mark in (part.frozen if name is None else part.dead[name])[:size]]

    assert first_unit(pieces, None) == first_unit([(len(rows), expected)], None)
    name = "gr_engine_active_ratio"
    assert not rows or first_unit(pieces, name) == first_unit([(len(rows), expected)], name)
    if state is not None:
        assert state.equals(whole.table())
