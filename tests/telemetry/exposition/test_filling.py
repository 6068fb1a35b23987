"""Filling a page's rows gives what assembling its samples gives, and flags as they were written."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.channel import Kind
from telemetry.collect.series.identity import Series
from telemetry.collect.series.rows import CONFLICT, INEXACT, NOT_WHOLE, OUTSIDE, SENTINEL, assemble
from telemetry.exposition.filling import Filling

KINDS: dict[str, Kind] = {"power_w": "gauge", "energy_mj": "counter", "reasons": "flags", "pstate": "enum"}
VALUES = (
    *(0.0, 1.0, 2.0, 2.5, -1.0, 4e38, float("nan"), float("inf"), 2.0**31, 2.0**53, 2.0**60),
    *(9223372036854775794.0, 2147483632.0, 2147483635.0, 140737488355328.0),
)


@st.composite
def series(draw: st.DrawFn) -> Series:
    channel = draw(st.sampled_from(list(KINDS)))
    return Series(
        channel,
        KINDS[channel],
        draw(st.sampled_from(["GPU-a", "GPU-b"])),
        draw(st.sampled_from(["n1", "n1", "n1", "n2"])),
        draw(st.sampled_from([None, None, "1"])),
        draw(st.sampled_from([None, None, "0", "1"])),
        draw(st.sampled_from([1.0, 1.0, 1.0, 0.5])),
        (),
        draw(st.sampled_from([0, 0, 1])),
    )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_rows_are_those_that_assembling_gives(data: st.DataObject) -> None:
    known = data.draw(st.lists(series(), max_size=8))
    filling = Filling(known)
    for _ in range(2):
        drawn = data.draw(st.lists(st.sampled_from(VALUES), min_size=len(known), max_size=len(known)))
        values = np.array(drawn, np.float64)
        problems: dict[str, int] = {}
        expected = assemble(
            known, np.arange(len(known), dtype=np.int32), np.full(len(known), 7), values, problems=problems
        )
        found: Counter[str] = Counter()
        table, channels = filling.fill(values, [repr(value).encode() for value in drawn], 7, found)
        assert table.schema == expected.schema
        assert table.to_pylist() == expected.to_pylist()
        assert found == problems
        for gpu in ("GPU-a", "GPU-b"):
            rows = [row for row in expected.to_pylist() if row["gpu"] == gpu]
            reported = {name for row in rows for name in KINDS if row.get(name) is not None}
            assert channels.get(gpu, 0) == len(reported)


def test_parts_are_summed_and_a_sentinel_among_them_counts_for_nothing() -> None:
    links = [Series("nvlink", "counter", "GPU-a", "n", None, str(link)) for link in range(3)]
    found: Counter[str] = Counter()
    table, _ = Filling(links).fill(np.array([5.0, 9223372036854775794.0, 2.0]), [b""] * 3, 0, found)
    assert table["nvlink"].to_pylist() == [7.0]
    assert found == {SENTINEL: 1}


def test_flags_that_a_float64_would_round_are_read_from_the_text() -> None:
    known = [Series("reasons", "flags", gpu, "n") for gpu in ("GPU-a", "GPU-b", "GPU-c")]
    texts = [b"9007199254740993", b"4611686018427387903", b"4"]
    found: Counter[str] = Counter()
    table, _ = Filling(known).fill(np.array([float(text) for text in texts]), texts, 0, found)
    # 2**62 - 1 becomes 2**62 as a float64, which is where the values begin that mean "not supported".
    assert table["reasons"].to_pylist() == [2**53 + 1, 4]
    assert found == {SENTINEL: 1}


def test_what_cannot_be_kept_is_counted_by_its_reason() -> None:
    known = [
        Series("reasons", "flags", "GPU-a", "n"),
        Series("reasons", "flags", "GPU-b", "n"),
        Series("pstate", "enum", "GPU-a", "n"),
        Series("pstate", "enum", "GPU-b", "n"),
        Series("power_w", "gauge", "GPU-a", "n"),
        Series("power_w", "gauge", "GPU-a", "n"),
    ]
    found: Counter[str] = Counter()
    texts = [b"1e17", b"-1", b"0.5", b"3", b"250", b"251"]
    table, _ = Filling(known).fill(np.array([float(text) for text in texts]), texts, 0, found)
    assert found == {INEXACT: 1, OUTSIDE: 1, NOT_WHOLE: 1, CONFLICT: 1}
    assert table.select(["gpu", "pstate", "power_w"]).to_pylist() == [
        {"gpu": "GPU-a", "pstate": None, "power_w": 250.0},
        {"gpu": "GPU-b", "pstate": 3, "power_w": None},
    ]


def test_a_page_without_series_of_ours_has_no_rows() -> None:
    table, channels = Filling([]).fill(np.empty(0), [], 0, Counter())
    assert (table.num_rows, channels) == (0, {})
    assert table.column_names == ["timestamp", "node", "gpu", "mig_instance"]
