"""Rows of a matrix against their plain reading: the oracle of the tests, on the very dataset that is timed."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pandas as pd

from features.matrix import FeatureMatrix
from features.service import duration_ms, instant_ms
from telemetry.store import Dataset
from tests.features import window_oracle

ROWS = 8
"""Rows that are read slowly: all windows of all gauges, counters and enumerations of each."""

TOLERANCE = 1e-4
"""Largest relative difference, near zero against a thousandth of one."""

_DIFFERENCES = {"delta": "mean", "rise_delta": "rise"}


def check_rows(dataset: Dataset, matrix: FeatureMatrix) -> None:
    """End the run unless the window features of some rows are those of plain Python, one sample after the other.

    The rows are of a few GPUs of one bucket, spread over the decision times.
    """
    columns = [each for each in matrix.columns if each.group == "telemetry" and each.statistic != "share"]
    nodes = matrix.rows["node"].astype(str)
    bucket = dataset.bucket_of(nodes.iloc[0])
    near = [node for node in nodes.unique() if dataset.bucket_of(node) == bucket][:2]
    mine = np.flatnonzero(nodes.isin(near) & ~matrix.rows["augmented"])
    chosen = mine[np.linspace(0, len(mine) - 1, ROWS).astype(int)]
    rows = matrix.rows.iloc[chosen]
    # windows of telemetry end at the double of the largest; other groups look back further
    reach, delay = 2 * duration_ms(matrix.config.features.windows[-1]), matrix.config.features.delay
    channels = [each for each in dataset.meta.channels if each in {str(column.channel) for column in columns}]
    samples = dataset.read_bucket(bucket, ["timestamp", "node", "gpu", *channels])
    frame = samples.to_pandas()
    frame = frame[frame["gpu"].astype(str).isin(set(rows["gpu"].astype(str)))]
    found = matrix.values(chosen, [each.name for each in columns])
    for row, told in zip(rows.itertuples(), found, strict=True):
        border = instant_ms(row.decision_time - delay)
        own = frame[frame["gpu"].astype(str) == str(row.gpu)]
        seen = [
            {"time": instant_ms(time.to_pydatetime()), **{name: _known(value) for name, value in said.items()}}
            for time, said in zip(own["timestamp"], own[channels].to_dict("records"), strict=True)
            if 0 <= border - instant_ms(time.to_pydatetime()) < reach
        ]
        for column, value in zip(columns, told, strict=True):
            expected = window_oracle.statistic(column, seen, border, reach, {})
            # a difference is as exact as what it is of, which float32 holds to 6e-8
            whole = _DIFFERENCES.get(column.statistic)
            size = 1.0
            if whole is not None and np.isfinite(expected):
                minuend = window_oracle.statistic(replace(column, statistic=whole), seen, border, reach, {})
                size = max(1.0, abs(minuend))
            same = np.isclose(value, expected, rtol=TOLERANCE, atol=TOLERANCE * 1e-3 * size, equal_nan=True)
            if not same:
                sys.exit(
                    f"{column.name} of {row.gpu} at {row.decision_time} is {value}, plain reading says {expected}: "
                    "nothing is told"
                )


def _known(value: object) -> float | None:
    return None if pd.isna(value) else float(value)  # type: ignore[arg-type, call-overload]
