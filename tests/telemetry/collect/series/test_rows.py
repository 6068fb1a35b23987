"""From samples of series to rows, against a plain slow version."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.collect.series.batch import observed_spans
from telemetry.collect.series.identity import Series
from telemetry.collect.series.rows import CONFLICT, INEXACT, INFINITE, NOT_WHOLE, OUTSIDE, SENTINEL, assemble
from telemetry.dataset.channels import CATALOGUE, Kind
from telemetry.landing.tables import lay_out

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
        for part, value in best:
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


def test_rows_have_the_layout_in_which_samples_land() -> None:
    table, made_rows = rows([(one(), 1000, 41.25), (one("clocks_event_reasons"), 1000, 5), (one("xid_last"), 1000, 79)])
    assert lay_out("samples", table, CATALOGUE).to_pylist() == table.to_pylist()
    assert lay_out("samples", table, CATALOGUE).schema.names == table.schema.names
    assert made_rows == [
        {
            "timestamp": 1000,
            "node": "n",
            "gpu": "g",
            "mig_instance": None,
            "gpu_temp_c": 41.25,
            "clocks_event_reasons": 5,
            "xid_last": 79,
        }
    ]
    assert [str(table.schema.field(name).type) for name in ("gpu_temp_c", "clocks_event_reasons", "xid_last")] == [
        "float",
        "uint64",
        "int32",
    ]


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
    assert problems == {INEXACT: 1, NOT_WHOLE: 1, OUTSIDE: 2, INFINITE: 3}


def test_values_are_scaled_after_sentinels_are_left_out() -> None:
    scaled = one(scale=0.5)
    _, made_rows = rows([(scaled, 1, 80.0), (scaled, 2, 9223372036854775794.0), (scaled, 3, 82.0)])
    assert [(row["timestamp"], row["gpu_temp_c"]) for row in made_rows] == [(1, 40.0), (3, 41.0)]


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
