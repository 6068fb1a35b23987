"""Rows of a matrix against their plain reading: the oracles of the tests, on the very dataset that is timed.

Of every feature group that the matrix has, all columns of a few rows: ``peers`` and ``onset``, which compare with the
fleet, at one decision time (:mod:`benchmarks.plain_fleet`), the other groups at several. Not checked: rows off the
grid, which the tests hold against the live path. For generated fleets, where nobody moves or leaves.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

import numpy as np
import pandas as pd

from benchmarks.plain_fleet import compared
from features.matrix.matrix import FeatureMatrix
from features.times import duration_ms, instant_ms
from features.vocabulary import FeatureColumn
from telemetry.dataset.store import Dataset
from tests.features import gaps_oracle, history_oracle, oracle, window_oracle

ROWS = 8
"""Rows that are read slowly, of two nodes."""

TOLERANCE = 1e-4
"""Largest relative difference, near zero against a thousandth of one."""

FLEET = ("peers", "onset")
"""Groups that need the whole fleet's samples."""

_DIFFERENCES = {"delta": "mean", "rise_delta": "rise"}
_MINUTE = 60_000


def check_rows(dataset: Dataset, matrix: FeatureMatrix) -> None:
    """End the run unless some rows are those of plain Python; else say how many of which groups were looked at.

    The rows are of GPUs of two nodes of one bucket, those with the most failures, spread over the decision times.
    """
    nodes = matrix.rows["node"].astype(str)
    events = dataset.events()
    failures = events.loc[events["type"] == "failure", "node"].astype(str).value_counts()
    ordered = sorted(nodes.unique(), key=lambda node: -failures.get(node, 0))
    bucket = dataset.bucket_of(ordered[0])
    near = [node for node in ordered if dataset.bucket_of(node) == bucket][:2]
    mine = np.flatnonzero(nodes.isin(near) & ~matrix.rows["augmented"])
    chosen = mine[np.linspace(0, len(mine) - 1, ROWS).astype(int)]
    alone = [each for each in matrix.columns if each.group not in FLEET]
    plain = _Nodes(dataset, matrix, bucket, near)
    for at, found in zip(chosen, matrix.values(chosen, [each.name for each in alone]), strict=True):
        row = matrix.rows.iloc[at]
        expected, sizes = plain.values(str(row["node"]), str(row["gpu"]), row["decision_time"], alone)
        _compare(row, alone, found, expected, sizes)
    told = [f"{ROWS} rows of {_groups(alone)}"]
    joint = [each for each in matrix.columns if each.group in FLEET]
    if joint:
        t = matrix.rows["decision_time"].iloc[chosen[ROWS // 2]]
        then = np.flatnonzero(nodes.isin(near) & ~matrix.rows["augmented"] & (matrix.rows["decision_time"] == t))
        values = compared(dataset, matrix, t, near)
        for at, found in zip(then, matrix.values(then, [each.name for each in joint]), strict=True):
            row = matrix.rows.iloc[at]
            expected, sizes = values[str(row["gpu"])]
            _compare(row, joint, found, expected, sizes)
        told.append(f"{len(then)} rows of {_groups(joint)} at {t:%Y-%m-%d %H:%M}")
    print(f"equal to their plain reading: {', and '.join(told)}")


def _groups(columns: Sequence[FeatureColumn]) -> str:
    return ", ".join(dict.fromkeys(each.group for each in columns))


def _compare(
    row: pd.Series,
    columns: Sequence[FeatureColumn],
    found: np.ndarray,
    expected: dict[str, float],
    sizes: dict[str, float],
) -> None:
    """End the run where a value is another; ``sizes`` are what near zero means for a column, 1 unless it is there."""
    for column, value in zip(columns, found, strict=True):
        plain, near_zero = expected[column.name], TOLERANCE * 1e-3 * sizes.get(column.name, 1.0)
        if not np.isclose(value, plain, rtol=TOLERANCE, atol=near_zero, equal_nan=True):
            sys.exit(
                f"{column.name} of {row['gpu']} at {row['decision_time']} is {value}, plain reading says {plain}: "
                "nothing is told"
            )


class _Nodes:
    """Some nodes of one bucket, with all that their rows are made of but the rest of the fleet."""

    def __init__(self, dataset: Dataset, matrix: FeatureMatrix, bucket: int, nodes: Sequence[str]) -> None:
        self.matrix = matrix
        self.channels = list(dataset.meta.channels)
        frame = dataset.read_bucket(bucket).to_pandas()
        frame = frame[frame["node"].astype(str).isin(nodes)]
        self.samples = {str(gpu): part for gpu, part in frame.groupby(frame["gpu"].astype(str))}
        inventory, events = dataset.inventory(), dataset.events()
        self.inventory = inventory[inventory["node"].astype(str).isin(nodes)]
        events = events[events["node"].astype(str).isin(nodes)]
        self.facts = history_oracle.facts_of(events, self.inventory, matrix.config.labels)
        self.held = oracle.records(self.inventory)
        windows = tuple(duration_ms(each) // _MINUTE for each in matrix.config.features.windows)
        gauges = [name for name, channel in dataset.meta.channels.items() if channel.kind == "gauge"]
        step, delay = matrix.config.step, matrix.config.features.delay
        self.asked = gaps_oracle.Asked(
            windows, duration_ms(step) // _MINUTE, duration_ms(delay) // _MINUTE, self.channels, gauges
        )

    def values(
        self, node: str, gpu: str, t: datetime, columns: Sequence[FeatureColumn]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Give the values of columns by name, and how large what a difference is of is, where that is more than one."""
        border = instant_ms(t - self.matrix.config.features.delay)
        # windows of telemetry end at the double of the largest; other groups look back further
        reach = 2 * duration_ms(self.matrix.config.features.windows[-1])
        seen = self._seen(gpu, border, reach)
        stay = self.inventory[self.inventory["gpu"].astype(str) == gpu].iloc[0]
        since = instant_ms(stay["installed_at"]) / _MINUTE
        minutes = [{**each, "minute": each["time"] / _MINUTE} for each in seen]
        found = gaps_oracle.plain(minutes, border / _MINUTE, since, self.asked)
        sizes: dict[str, float] = {}
        for column in columns:
            if column.group == "telemetry":
                found[column.name] = window_oracle.statistic(column, seen, border, reach, window_oracle.BITS)
                # a difference is as exact as what it is of, which float32 holds to 6e-8
                whole = _DIFFERENCES.get(column.statistic)
                if whole is not None and np.isfinite(found[column.name]):
                    minuend = replace(column, statistic=whole)
                    of = window_oracle.statistic(minuend, seen, border, reach, window_oracle.BITS)
                    sizes[column.name] = max(1.0, abs(of))
            elif column.group == "history":
                found[column.name] = history_oracle.plain_value(column, t, gpu, node, self.facts, self.held)
            elif column.group == "static":
                found[column.name] = _static(column, stay, t)
            elif column.statistic == "fresh":
                units = self.inventory.loc[self.inventory["node"].astype(str) == node, "gpu"].astype(str)
                lately = self.asked.windows[0] * _MINUTE
                found[column.name] = float(np.mean([bool(self._seen(unit, border, lately)) for unit in units]))
        return found, sizes

    def _seen(self, gpu: str, border: int, reach: int) -> list[dict[str, float | None]]:
        own = self.samples[gpu]
        times = own["timestamp"].dt.as_unit("ms").astype("int64")
        own, times = (each[(times > border - reach) & (times <= border)] for each in (own, times))
        return [
            {"time": time, **{name: _known(value) for name, value in said.items()}}
            for time, said in zip(times.tolist(), own[self.channels].to_dict("records"), strict=True)
        ]


def _static(column: FeatureColumn, stay: pd.Series, t: datetime) -> float:
    if column.statistic == "days":
        return (t - stay["installed_at"]) / timedelta(days=1)
    value = stay[str(column.channel)]
    return float(column.categories.index(value) if column.statistic == "code" else value)


def _known(value: object) -> float | None:
    return None if pd.isna(value) else float(value)  # type: ignore[arg-type, call-overload]
