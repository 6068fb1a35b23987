"""A unit's channels over the last days, in intervals; runs in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from telemetry.dataset.channel import ROLLUP_SUFFIXES, Channel
from telemetry.dataset.store import Dataset

DAYS: Final = timedelta(days=5)
"""How much is shown."""

INTERVALS: Final = 120
"""Of an hour each, as many as a small plot has places for."""

Floats = NDArray[np.float64]


def channels_of(dataset: Dataset, node: str, unit: str) -> dict[str, Any]:
    """Read a unit's channels.

    ``node``, ``unit``: a GPU on a node, or a node twice where the unit is the node.
    Returns: JSON-able: ``start``, ``end`` (null: no samples), ``series`` and ``constant``, each a list of the fields of
    :class:`serving.pages.dataset_reader.ChannelSeries`. Counters are told by their rise an interval, resets left out.
    """
    meta = dataset.meta
    until = meta.span[1]
    since = until - DAYS
    channels = [channel for channel in meta.channels.values() if not _is_rollup(channel.name, meta.channels)]
    where = (pc.field("node") == node) & (pc.field("timestamp") > since)
    if meta.unit == "gpu":
        where &= pc.field("gpu") == unit
    values: dict[str, list[Floats]] = {channel.name: [] for channel in channels}
    moments: list[NDArray[np.int64]] = []
    columns = ["timestamp", "node", *(["gpu"] if meta.unit == "gpu" else []), *values]
    for path in dataset.parts(dataset.bucket_of(node), since=since):
        # Files are sorted by unit, so that whole row groups are passed over by their statistics.
        table = pq.read_table(path, columns=columns, filters=where)
        moments.append(table.column("timestamp").cast("int64").to_numpy())
        for name, parts in values.items():
            parts.append(table.column(name).cast("float64", safe=False).to_numpy())
    times = np.concatenate(moments) if moments else np.empty(0, np.int64)
    if not times.size:
        return {"start": None, "end": None, "series": [], "constant": []}
    order = np.argsort(times, kind="stable")
    joined = {name: np.concatenate(parts)[order] for name, parts in values.items()}
    return summarize_channels(meta.channels, times[order], joined, since)


def summarize_channels(
    channels: Mapping[str, Channel], times: NDArray[np.int64], values: Mapping[str, Floats], since: datetime
) -> dict[str, Any]:
    """Bring a unit's samples to intervals.

    ``times``: milliseconds since 1970 (UTC), ascending; one at least; shape (n,).
    ``values``: by channel; NaN: no value; shape (n,).
    Returns: as :func:`channels_of`.
    """
    start_ms = int(since.timestamp() * 1000)
    interval = np.clip((times - start_ms) * INTERVALS // (int(DAYS.total_seconds()) * 1000), 0, INTERVALS - 1)
    series: list[dict[str, Any]] = []
    constant: list[dict[str, Any]] = []
    for channel in channels.values():
        summary = None if _is_rollup(channel.name, channels) else _summarize(channel, values[channel.name], interval)
        if summary is not None:
            (constant if summary.pop("still") else series).append(summary)
    return {
        "start": datetime.fromtimestamp(start_ms / 1000, UTC).isoformat(),
        "end": datetime.fromtimestamp(int(times[-1]) / 1000, UTC).isoformat(),
        "series": series,
        "constant": constant,
    }


def _is_rollup(name: str, channels: Mapping[str, Channel]) -> bool:
    return any(
        name.endswith(suffix) and name.removesuffix(suffix) in channels
        for suffixes in ROLLUP_SUFFIXES.values()
        for suffix in suffixes
    )


def _summarize(channel: Channel, values: Floats, interval: NDArray[np.int64]) -> dict[str, Any] | None:
    present = np.flatnonzero(~np.isnan(values))
    if not present.size:
        return None
    values, interval = values[present], interval[present]
    still = bool((values == values[0]).all())
    last = float(values[-1])
    count = np.bincount(interval, minlength=INTERVALS)
    if channel.kind == "counter":
        rises = np.maximum(np.diff(values, prepend=values[0]), 0.0)  # of a reset nothing is known but that it was one
        total = np.bincount(interval, rises, minlength=INTERVALS)
        low = mean = high = np.where(count > 0, total, np.nan)
    else:
        low, high = np.full(INTERVALS, np.inf), np.full(INTERVALS, -np.inf)
        np.minimum.at(low, interval, values)
        np.maximum.at(high, interval, values)
        with np.errstate(invalid="ignore"):
            mean = np.bincount(interval, values, minlength=INTERVALS) / count
    return {
        "name": channel.name,
        "unit": channel.unit,
        "words": channel.help,
        "kind": channel.kind,
        "min": _plain(low, count),
        "mean": _plain(mean, count),
        "max": _plain(high, count),
        "last": last,
        "still": still,
    }


def _plain(values: Floats, count: NDArray[np.int64]) -> list[float | None]:
    return [
        float(f"{value:.6g}") if there else None for value, there in zip(values.tolist(), count.tolist(), strict=True)
    ]
