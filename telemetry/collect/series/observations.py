"""What series tell of the inventory: which GPU was seen where, and when."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from telemetry.collect.series.identity import Series
from telemetry.landing.tables import LANDED_INVENTORY

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def observed_at(series: Sequence[Series], seen_at: datetime) -> pa.Table:
    """Return what series that all were seen at one time tell of the inventory.

    ``series``: in the order of their age: of two values of one field the later series' counts.
    Returns: rows of ``LANDED_INVENTORY``, one for each (gpu, node), in that order.
    """
    merged: dict[tuple[str, str], dict[str, str]] = {}
    for each in series:
        merged.setdefault((each.gpu, each.node), {}).update(each.inventory)
    ms = int((seen_at - _EPOCH) / timedelta(milliseconds=1))
    return _table([(gpu, node, fields, ms) for (gpu, node), fields in sorted(merged.items())])


def observed_spans(series: Sequence[Series], index: npt.NDArray[np.int32], ms: npt.NDArray[np.int64]) -> pa.Table:
    """Return the first and the last sight of each GPU in samples, and of each change of what the labels tell of it.

    ``index``: the series of each sample; shape (n,).
    ``ms``: time of each sample in milliseconds since 1970, UTC; shape (n,).
    Returns: rows of ``LANDED_INVENTORY``, one or two for each distinct (gpu, node, inventory), sorted by time: so many
    as are needed to tell from when to when a GPU stood somewhere with, for instance, one driver.
    """
    if len(index) == 0:
        return LANDED_INVENTORY.empty_table()
    first = np.full(len(series), np.iinfo(np.int64).max)
    last = np.full(len(series), np.iinfo(np.int64).min)
    np.minimum.at(first, index, ms)
    np.maximum.at(last, index, ms)
    spans: dict[tuple[str, str, tuple[tuple[str, str], ...]], tuple[int, int]] = {}
    for number in np.flatnonzero(first <= last).tolist():
        each = series[number]
        key = (each.gpu, each.node, each.inventory)
        low, high = spans.get(key, (int(first[number]), int(last[number])))
        spans[key] = (min(low, int(first[number])), max(high, int(last[number])))
    spans = _without_narrower(spans)
    rows = [
        (gpu, node, dict(inventory), at) for (gpu, node, inventory), span in spans.items() for at in sorted(set(span))
    ]
    return _table(sorted(rows, key=lambda row: (row[3], row[0], row[1])))


def _without_narrower(
    spans: dict[tuple[str, str, tuple[tuple[str, str], ...]], tuple[int, int]],
) -> dict[tuple[str, str, tuple[tuple[str, str], ...]], tuple[int, int]]:
    """Merge what tells less (NVLink rows have few labels) into what tells the same and more at the same time."""
    by_place: dict[tuple[str, str], list[tuple[tuple[str, str], ...]]] = {}
    for gpu, node, inventory in spans:
        by_place.setdefault((gpu, node), []).append(inventory)
    kept: dict[tuple[str, str, tuple[tuple[str, str], ...]], tuple[int, int]] = {}
    for place, told in by_place.items():
        for inventory in told:
            low, high = spans[(*place, inventory)]
            wider = any(
                other != inventory
                and set(inventory) < set(other)
                and spans[(*place, other)][0] <= low
                and high <= spans[(*place, other)][1]
                for other in told
            )
            if not wider:
                kept[(*place, inventory)] = (low, high)
    return kept


def _table(rows: Sequence[tuple[str, str, dict[str, str], int]]) -> pa.Table:
    columns: dict[str, list[object]] = {name: [] for name in LANDED_INVENTORY.names}
    for gpu, node, fields, at in rows:
        for name in LANDED_INVENTORY.names:
            columns[name].append(fields.get(name))
        columns["gpu"][-1], columns["node"][-1], columns["seen_at"][-1] = gpu, node, at
    arrays = [
        pa.array(columns[field.name], pa.int64()).cast(field.type)
        if field.name == "seen_at"
        else pa.array(columns[field.name], field.type)
        for field in LANDED_INVENTORY
    ]
    return pa.Table.from_arrays(arrays, schema=LANDED_INVENTORY)
