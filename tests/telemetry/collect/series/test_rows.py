"""From text formats to samples of series, XID counts and rows, against plain slow versions."""

import math
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.collect.series.batch import (
    CONFLICT,
    INEXACT,
    INFINITE,
    NOT_WHOLE,
    OUT_OF_RANGE,
    SENTINEL,
    assemble,
    observed_spans,
)
from telemetry.collect.series.exposition import BAD_LINE, LineReader, is_openmetrics, parse_line
from telemetry.collect.series.identity import Series, XidCount
from telemetry.collect.series.xid_counts import FORGOTTEN_AFTER_MS, XidCounts
from telemetry.dataset.channels import Kind

KINDS: dict[str, Kind] = {
    "gpu_temp_c": "gauge",
    "energy_mj": "counter",
    "clocks_event_reasons": "flags",
    "xid_last": "enum",
}


def one(channel: str = "gpu_temp_c", gpu: str = "g", node: str = "n", **more: Any) -> Series:
    return Series(channel, KINDS[channel], gpu, node, **more)


def rows(
    samples: list[tuple[Series, int, float]], problems: Counter[str] | None = None
) -> tuple[pa.Table, list[dict[str, Any]]]:
    series = list(dict.fromkeys(entry for entry, _, _ in samples))
    table = assemble(
        series,
        np.array([series.index(entry) for entry, _, _ in samples], np.int32),
        np.array([ms for _, ms, _ in samples], np.int64),
        np.array([value for _, _, value in samples], np.float64),
        problems=Counter() if problems is None else problems,
    )
    made_rows = table.to_pylist()
    for row in made_rows:
        row["timestamp"] = round(row["timestamp"].timestamp() * 1000)
    return table, made_rows


def slow(samples: list[tuple[Series, int, float]]) -> tuple[dict[tuple[Any, ...], dict[str, float]], int]:
    """One value a cell by the documented rules; cells by (gpu, time, instance, node)."""
    cells: dict[tuple[Any, ...], list[tuple[Series, float]]] = {}
    for series, at, value in samples:
        if not math.isnan(value) and value < 2**62:
            key = (series.gpu, at, series.mig_instance or "", series.node, series.channel)
            cells.setdefault(key, []).append((series, value * series.scale))
    result: dict[tuple[Any, ...], dict[str, float]] = {}
    conflicts = 0
    for key, given_values in cells.items():
        least = min(series.rank for series, _ in given_values)
        best = [(series.part, value) for series, value in given_values if series.rank == least]
        if any(part is None for part, _ in best):
            best = [(part, value) for part, value in best if part is None]
        chosen: dict[str | None, float] = {}
        for part, value in sorted(best, key=lambda item: -item[1]):
            conflicts += chosen.setdefault(part, value) != value
        result.setdefault(key[:4], {})[key[4]] = sum(chosen.values())
    return result, conflicts


SERIES = st.builds(
    one,
    channel=st.sampled_from(["gpu_temp_c", "energy_mj", "xid_last"]),
    gpu=st.sampled_from(["a", "b"]),
    node=st.sampled_from(["n", "m"]),
    mig_instance=st.sampled_from([None, "1"]),
    part=st.sampled_from([None, None, "0", "1"]),
    rank=st.sampled_from([0, 1]),
    scale=st.sampled_from([1.0, 2.0]),
    inventory=st.sampled_from([(), (("slot", "1"),)]),
)
VALUES = st.one_of(st.integers(0, 5).map(float), st.just(math.nan), st.just(9223372036854775794.0))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(SERIES, st.sampled_from([1000, 1001, 2**45]), VALUES), max_size=40))
def test_rows_are_those_of_the_slow_version(samples: list[tuple[Series, int, float]]) -> None:
    problems: Counter[str] = Counter()
    _, made_rows = rows(samples, problems)
    expected, conflicts = slow(samples)
    made = {
        (row["gpu"], row["timestamp"], row["mig_instance"] or "", row["node"]): {
            name: row[name] for name in KINDS if row.get(name) is not None
        }
        for row in made_rows
    }
    assert len(made) == len(made_rows)
    assert made == expected
    assert problems[CONFLICT] == conflicts
    assert problems[SENTINEL] == sum(value > 2**62 for _, _, value in samples)
    order = [(row["gpu"], row["timestamp"]) for row in made_rows]
    assert order == sorted(order)


def test_counters_and_bits_are_exact_and_what_cannot_be_is_counted() -> None:
    problems: Counter[str] = Counter()
    samples = [
        (one("energy_mj"), 1, 2.0**53 - 1),
        (one("clocks_event_reasons"), 1, 2.0**53 - 1),
        (one("clocks_event_reasons"), 2, 2.0**60),
        (one("clocks_event_reasons"), 3, 0.5),
        (one("clocks_event_reasons"), 4, -1.0),
        (one("xid_last"), 5, 2.0**33),
        (one("xid_last"), 6, math.inf),
        (one("xid_last"), 7, -5.0),
        (one("gpu_temp_c"), 8, math.inf),
        (one("energy_mj"), 9, -math.inf),
    ]
    _, made_rows = rows(samples, problems)
    assert [row["timestamp"] for row in made_rows] == [1, 7]
    assert made_rows[0]["energy_mj"] == made_rows[0]["clocks_event_reasons"] == 2**53 - 1
    assert made_rows[1]["xid_last"] == -5
    assert problems == {INEXACT: 1, NOT_WHOLE: 1, OUT_OF_RANGE: 2, INFINITE: 3}


def test_observations_are_the_first_and_the_last_of_a_driver() -> None:
    old, new, link = (one(inventory=given) for given in ((("driver", "1"), ("slot", "0")), (("driver", "2"),), ()))
    series = [old, new, link]
    table = observed_spans(series, np.array([0, 0, 1, 1, 2], np.int32), np.array([1, 5, 6, 6, 6], np.int64))
    seen = [(round(row["seen_at"].timestamp() * 1000), row["driver"]) for row in table.to_pylist()]
    assert seen == [(1, "1"), (5, "1"), (6, "2")]


def test_a_busy_link_passes_through_the_blanks_of_32_bits_and_a_counter_of_errors_does_not() -> None:
    samples = [
        (Series("pcie_rx_bytes_s", "gauge", "g", "n"), 1, 2.0**31),
        (Series("ecc_dbe_volatile_total", "counter", "g", "n"), 2, 2.0**32 - 1),
    ]
    _, made_rows = rows(samples)
    assert [(row["timestamp"], row["pcie_rx_bytes_s"]) for row in made_rows] == [(1, 2.0**31)]


MINUTE = 60_000
counts = st.dictionaries(st.integers(0, 90), st.integers(0, 3), max_size=25)
SeriesSamples = list[tuple[int, str, str]]


def slowly(series: list[dict[int, int]], watched_minutes: set[int]) -> SeriesSamples:
    """Every sample looked at, one after the other."""
    rises: SeriesSamples = []
    for number, samples in enumerate(series):
        last: tuple[int, int] | None = None
        for minute, count in sorted(samples.items()):
            before: int | None = None
            if last is not None and (minute - last[0]) * MINUTE <= FORGOTTEN_AFTER_MS:
                before = last[1]
            elif any(0 < (minute - other) * MINUTE <= FORGOTTEN_AFTER_MS for other in watched_minutes):
                before = 0
            elif last is not None:
                before = last[1]
            if before is not None and count > before:
                rises.append((minute * MINUTE, f"GPU-{number % 2}", str(31 + number)))
            last = (minute, count)
    return sorted(rises)


def follow(series: list[dict[int, int]], watched: set[int], cuts: list[int], *, saved: bool) -> SeriesSamples:
    follower = XidCounts(timedelta(minutes=10))
    rises: SeriesSamples = []
    for after, until in zip([-1, *cuts], [*cuts, 200], strict=True):
        names, index, ms, values = [], [], [], []
        for number, samples in enumerate(series):
            names.append(XidCount(f"GPU-{number % 2}", "n1", 31 + number))
            for minute, count in samples.items():
                if after < minute <= until:
                    index.append(number)
                    ms.append(minute * MINUTE)
                    values.append(count)
        seen = [minute for minute in watched if after < minute <= until]
        spans = {f"GPU-{n}": (min(seen) * MINUTE, max(seen) * MINUTE) for n in (0, 1)} if seen else {}
        table = follower.follow(
            names, np.array(index, np.int32), np.array(ms, np.int64), np.array(values, np.float64), watched=spans
        ).to_pylist()
        rises += [(int(row["timestamp"].timestamp() * 1000), row["gpu"], row["code"]) for row in table]
        if saved:
            follower = XidCounts(timedelta(minutes=10), follower.as_state())
    return sorted(rises)


@given(st.lists(counts, min_size=1, max_size=3), st.lists(st.integers(0, 95), max_size=4), st.booleans())
def test_events_are_those_of_looking_at_every_sample(series, cuts, saved):
    watched = set(range(96))  # a GPU that is always there
    assert follow(series, watched, sorted(set(cuts)), saved=saved) == slowly(series, watched)


@pytest.mark.parametrize(
    ("line", "openmetrics", "sample"),
    [
        ("x 1", False, ("x", {}, 1.0, None)),
        ('x{a="b c",d="}"} NaN 1700000000123', False, ("x", {"a": "b c", "d": "}"}, "nan", 1700000000123)),
        ('x{a="b"} 1 1700000000.5', True, ("x", {"a": "b"}, 1.0, 1700000000500)),
        (r'x{a="q\"\\\n"} +Inf', False, ("x", {"a": 'q"\\\n'}, "inf", None)),
        ('{"a.b",c="d"} 5', False, ("a.b", {"c": "d"}, 5.0, None)),
        ('x_total{a="b"} 3 # {trace="} 1"} 0.5 1700000000.5', True, ("x_total", {"a": "b"}, 3.0, None)),
        ('x{a="b # {c}"} 1', True, ("x", {"a": "b # {c}"}, 1.0, None)),
    ],
)
def test_lines_are_read(line: str, openmetrics: bool, sample: tuple[object, ...]) -> None:
    read_sample = parse_line(line, openmetrics=openmetrics)
    value = read_sample.value if isinstance(sample[2], float) else str(read_sample.value)
    assert (read_sample.name, read_sample.labels, value, read_sample.timestamp_ms) == sample


@pytest.mark.parametrize("line", ["", "  ", "# HELP x text", "# EOF"])
def test_comments_and_blanks_are_no_samples(line: str) -> None:
    assert parse_line(line) is None


@pytest.mark.parametrize(
    "line", ["x", 'x{a="b', "x abc", "1x 3", 'x{a="1",a="2"} 3', "x 1_000", 'x{a="b"} 1 2 3', "<html> 1", "x 1 nan"]
)
def test_what_is_no_line_of_the_format(line: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_line(line)


def test_the_format_is_known_by_the_end_mark() -> None:
    assert is_openmetrics("x 1\n# EOF\n")
    assert is_openmetrics("x 1\n# EOF")
    assert not is_openmetrics("x 1\n# EOF is not here\n")
    assert not is_openmetrics("x 1\n")


def read(parser: LineReader[tuple[str, str]], page: str) -> tuple[list[object], Counter[str]]:
    problems: Counter[str] = Counter()
    rows = list(parser.read(page.split("\n"), openmetrics=False, problems=problems))
    return rows, problems


def test_a_faulty_line_does_not_cost_the_others_and_a_known_series_is_identified_once() -> None:
    asked = []

    def identify(name: str, labels: dict[str, str]) -> tuple[str, str]:
        asked.append(name)
        return name, labels.get("gpu", "")

    parser = LineReader(identify)
    page = 'x{gpu="0"} 1\nx{gpu="1" 2\ny{gpu="0"} 3 1772323200017\nx{gpu="2"} 4 # {t="a"} 5\n'
    first = [(("x", "0"), 1.0, None), (("y", "0"), 3.0, 1_772_323_200_017), (("x", "2"), 4.0, None)]
    assert read(parser, page) == (first, Counter({BAD_LINE: 1}))
    again, _ = read(parser, page.replace("1\n", "8\n", 1))
    assert again == [(("x", "0"), 8.0, None), *first[1:]]
    assert asked.count("x") == 3  # once, and the line with an exemplar each time


def test_what_is_remembered_is_bounded_in_bytes() -> None:
    parser = LineReader(lambda name, labels: (name, labels["gpu"]), max_bytes=2000)
    for number in range(200):
        rows, _ = read(parser, f'x{{gpu="{number}",pod="{"p" * 500}"}} {number}')
        assert rows == [(("x", str(number)), float(number), None)]
    assert sum(map(len, parser._known)) <= 2000


HEADS = st.sampled_from(['x{a="b"}', 'x{a="c",pod="x y 1 2"}', 'x{a="b c",pod="} 1 1772323200"}', 'x{a="b', "x"])
SHOWN = st.floats().map(repr) | st.sampled_from(
    ["NaN", "+Inf", "1_0", "0x10", "infinity", "1e3", "1E-3", "+5", "", "x", ".5", "5.", str(-(10**20))]
)
TIMES = st.integers(0, 10**6).map(lambda us: f"1772323200.{us:06d}") | st.sampled_from(
    ["", "1772323200", "1772323200.5e0", "1_772323200", "NaN", "12 # {} 1", '1772323200 # {a="b"} 2 3']
)
COMMENTS = st.sampled_from(["# TYPE a gauge", "# EOF", "  ", "\t"])


@given(st.lists(st.tuples(HEADS, SHOWN, TIMES).map(" ".join) | COMMENTS, max_size=8))
def test_lines_of_known_series_are_read_as_single_lines(lines: list[str]) -> None:
    lines = [*lines, *lines]  # the second time from what is remembered
    expected = []
    for line in lines:
        with suppress(ValueError):
            sample = parse_line(line, openmetrics=True)
            if sample is not None and sample.timestamp_ms in (None, *range(1_772_323_200_000, 1_772_323_201_001)):
                expected.append(((sample.name, sample.labels), sample.value, sample.timestamp_ms))
    reader = LineReader(lambda name, labels: (name, labels))
    assert str(list(reader.read(lines, openmetrics=True, problems=Counter()))) == str(expected)
