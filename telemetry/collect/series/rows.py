"""From samples of series, one number each, to rows of a GPU's channels at one time."""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from telemetry.collect.series.identity import Series
from telemetry.dataset.channels import Kind, is_sentinel
from telemetry.dataset.schema import CHANNEL_TYPES, INSTANT

CONFLICT: Final = "two different values at one time"
INEXACT: Final = "too large to be exact"
NOT_WHOLE: Final = "not a whole number"
OUTSIDE: Final = "outside what its type holds"
SENTINEL: Final = "a value that means not supported"
"""What can be wrong with a value: the keys of the problems that :func:`assemble` counts."""

_EXACT: Final = 2.0**53
_INT32: Final = 2.0**31
_COMPOSITE_LIMIT: Final = 2**62


def assemble(
    series: Sequence[Series],
    index: npt.NDArray[np.int32],
    ms: npt.NDArray[np.int64],
    values: npt.NDArray[np.float64],
    *,
    problems: MutableMapping[str, int] | None = None,
) -> pa.Table:
    """Turn samples of series into rows of channels; NaN (as stale markers are) and sentinels are no values.

    ``index`` and ``ms`` are the series and the time (since 1970, UTC) of each of ``values``; shape (n,). Values that
    could not be used are counted into ``problems``, by reason.
    Returns: the layout of landed samples, with the channels that have a value in the order of ``series``: one row for
    each (gpu, node, mig_instance, timestamp) that has a value, sorted by (gpu, timestamp).

    Where a channel of a GPU has several samples at one time: of several metrics the lowest rank counts; the whole
    counts rather than its parts; parts are summed; equal values of the same thing count once, and of different ones
    the first given counts and the others are problems.
    """
    found: Counter[str] = Counter()
    which = np.asarray(index, np.int64)
    ms = np.asarray(ms, np.int64)
    values = np.asarray(values, np.float64)
    unsupported = is_sentinel(values)
    found[SENTINEL] += int(unsupported.sum())
    usable = ~(np.isnan(values) | unsupported)
    if not usable.all():
        which, ms, values = which[usable], ms[usable], values[usable]
    places = _Places(series)
    row, keys = _rows(places, which, ms)
    columns: dict[str, tuple[Kind, npt.NDArray[np.float64], npt.NDArray[np.bool_]]] = {}
    if len(which):
        scale = np.array([each.scale for each in series])
        values = values if bool((scale == 1.0).all()) else values * scale[which]
        channel = places.channel[which]
        order = np.argsort(channel, kind="stable")
        bounds = np.searchsorted(channel[order], np.arange(len(places.channels) + 1))
        for number, (name, kind) in enumerate(places.channels):
            chosen = order[bounds[number] : bounds[number + 1]]
            if len(chosen) == 0:
                continue
            cell, cell_values = _one_each(row[chosen], which[chosen], values[chosen], places, found)
            column = np.zeros(len(keys[0]))
            valid = np.zeros(len(keys[0]), np.bool_)
            column[cell], valid[cell] = cell_values, True
            _keep_exact(kind, column, valid, found)
            columns[name] = (kind, column, valid)
    if problems is not None:
        for reason, count in found.items():
            if count:
                problems[reason] = problems.get(reason, 0) + count
    return _table(places, keys, columns)


class _Places:
    """Numbers for what the series name: GPUs, rows of one GPU (node and MIG instance), channels, parts."""

    def __init__(self, series: Sequence[Series]) -> None:
        self.gpus = sorted({each.gpu for each in series})
        gpu_number = {name: number for number, name in enumerate(self.gpus)}
        # What one GPU may have at one time: usually one row; with MIG, one more for each instance.
        variants: dict[tuple[int, str, str], int] = {}
        for key in sorted({(gpu_number[each.gpu], each.mig_instance or "", each.node) for each in series}):
            variants[key] = len(variants)
        self.rows = list(variants)
        self.row_gpu = np.array([key[0] for key in self.rows], np.int64)
        first = np.searchsorted(self.row_gpu, self.row_gpu) if self.rows else np.empty(0, np.int64)
        self.row_turn = np.arange(len(self.rows)) - first
        self.row = np.array(
            [variants[(gpu_number[each.gpu], each.mig_instance or "", each.node)] for each in series], np.int64
        )
        kinds = {each.channel: each.kind for each in series}
        self.channels = list(kinds.items())
        numbers = {name: number for number, name in enumerate(kinds)}
        self.channel = np.array([numbers[each.channel] for each in series], np.int32)
        parts = {name: number for number, name in enumerate(sorted({each.part for each in series if each.part}))}
        self.part = np.array([parts[each.part] if each.part else -1 for each in series], np.int64)
        self.rank = np.array([each.rank for each in series], np.int64)


Keys = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def _rows(places: _Places, index: npt.NDArray[Any], ms: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], Keys]:
    """Return each sample's row, and the rows' places (numbers in ``places.rows``) and times."""
    if len(index) == 0:
        empty = np.empty(0, np.int64)
        return empty, (empty, empty)
    place = places.row[index]
    low = int(ms.min())
    span = int(ms.max()) - low + 1
    width = int(places.row_turn.max()) + 1
    if len(places.gpus) * span * width >= _COMPOSITE_LIMIT:  # times that lie absurdly far apart: number them
        instants, offset = np.unique(ms, return_inverse=True)
        span = len(instants)
    else:
        instants, offset = None, ms - low
    key = (places.row_gpu[place] * span + offset) * width + places.row_turn[place]
    unique, row = np.unique(key, return_inverse=True)
    gpu_time, turn = np.divmod(unique, width)
    gpu, offset = np.divmod(gpu_time, span)
    first_row = np.searchsorted(places.row_gpu, np.arange(len(places.gpus)))
    return row, (first_row[gpu] + turn, offset + low if instants is None else instants[offset])


def _one_each(
    row: npt.NDArray[np.int64],
    index: npt.NDArray[np.int64],
    values: npt.NDArray[np.float64],
    places: _Places,
    found: Counter[str],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return one value a row of one channel's samples."""
    if len(row) < 2 or bool((row[1:] > row[:-1]).all()) or int(np.bincount(row).max()) == 1:
        return row, values
    rank, part = places.rank[index], places.part[index]
    order = np.lexsort((part, rank, row))  # stable: samples of the same thing stay in the order given
    row, rank, part, values = row[order], rank[order], part[order], values[order]
    start = np.flatnonzero(np.concatenate(([True], row[1:] != row[:-1])))
    size = np.diff(np.append(start, len(row)))
    # After the sort a row begins with its lowest rank, and there with the whole (-1) if it is given.
    best = rank == np.repeat(rank[start], size)
    whole = np.repeat(part[start] == -1, size)
    wanted = best & (~whole | (part == -1))
    row, part, values = row[wanted], part[wanted], values[wanted]
    again = np.concatenate(([False], (row[1:] == row[:-1]) & (part[1:] == part[:-1])))
    if again.any():
        begin = np.flatnonzero(~again)
        kept = np.repeat(values[begin], np.diff(np.append(begin, len(values))))
        found[CONFLICT] += int((again & (values != kept)).sum())
        row, values = row[begin], values[begin]
    start = np.flatnonzero(np.concatenate(([True], row[1:] != row[:-1])))
    return row[start], np.add.reduceat(values, start)


def _keep_exact(kind: Kind, column: npt.NDArray[np.float64], valid: npt.NDArray[np.bool_], found: Counter[str]) -> None:
    """Take out what a column of integers cannot hold as it is."""
    if kind not in ("flags", "enum"):
        return
    whole = np.isfinite(column) & (column == np.floor(column))
    found[NOT_WHOLE] += int((valid & ~whole).sum())
    low, high = (0.0, np.inf) if kind == "flags" else (-_INT32, _INT32)
    inside = (column >= low) & (column < high)
    found[OUTSIDE] += int((valid & whole & ~inside).sum())
    exact = np.abs(column) < _EXACT
    found[INEXACT] += int((valid & whole & inside & ~exact).sum())
    bad = ~(whole & inside & exact)
    valid[bad], column[bad] = False, 0.0


def _table(
    places: _Places,
    keys: Keys,
    columns: dict[str, tuple[Kind, npt.NDArray[np.float64], npt.NDArray[np.bool_]]],
) -> pa.Table:
    place, ms = keys
    has_value = np.zeros(len(place), np.bool_)
    for _, _, valid in columns.values():
        has_value |= valid
    whole = bool(has_value.all())
    if not whole:
        place, ms = place[has_value], ms[has_value]
    nodes = pa.array([node for _, _, node in places.rows], pa.string())
    gpus = pa.array([places.gpus[gpu] for gpu, _, _ in places.rows], pa.string())
    instances = pa.array([instance or None for _, instance, _ in places.rows], pa.string())
    taken = pa.array(place)
    arrays: dict[str, pa.Array] = {
        "timestamp": pa.array(ms).cast(INSTANT),
        "node": nodes.take(taken),
        "gpu": gpus.take(taken),
        "mig_instance": instances.take(taken),
    }
    for name, (kind, column, valid) in columns.items():
        if not valid.any():
            continue
        chosen, present = (column, valid) if whole else (column[has_value], valid[has_value])
        target = CHANNEL_TYPES[kind]
        with np.errstate(over="ignore"):  # a gauge beyond float32 becomes infinite, which the fold quarantines
            typed = chosen.astype(target.to_pandas_dtype())
        arrays[name] = pa.array(typed, type=target, mask=~present)
    return pa.table(arrays)
