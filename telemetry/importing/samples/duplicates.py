"""Several rows of one unit at one time: the same said twice, parts of one sample, or a contradiction."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from telemetry.importing.samples.block import Block, Series

_ROUNDS = 64
# A source that contradicts itself more often about one instant is broken: its further rows are not compared in turn.


def merge_duplicates(block: Block) -> tuple[Block, int, npt.NDArray[np.int64]]:
    """Make one row of each (unit, time); ``block`` is sorted by (unit, ms, order).

    The first row of a key (the existing dataset's, then by file and row) is kept. A later one that reports a channel
    which is still missing fills it in, so that one file a metric works. One that reports another value for a channel
    conflicts and is set aside as a whole. Parts of a GPU (MIG) do not conflict: the parent gets the highest value of
    gauges, counters and enums and all flags, unless the whole GPU's own row gives the channel.

    Returns: the rows, the number of rows that only repeated others, and the orders of those in conflict.
    """
    conflicting = [np.empty(0, np.int64)]
    start, group = _keys(block)
    if len(start) == len(block):
        return block, 0, conflicting[0]
    block = block.take(np.lexsort((block.mig, group)))  # the GPU's own rows before its parts'
    while True:
        first = {name: _first_own(series, block.mig, start) for name, series in block.series.items()}
        conflict = np.zeros(len(block), dtype=bool)
        for name, series in block.series.items():
            differs = series.values != series.values[np.minimum(first[name], len(block) - 1)][group]
            conflict |= series.valid & ~block.mig & differs
        rows = np.flatnonzero(conflict)
        if len(rows) == 0:
            break
        if len(conflicting) < _ROUNDS:  # of a key, the first row in conflict: those after it are not yet judged
            rows = rows[np.unique(group[rows], return_index=True)[1]]
        conflicting.append(block.order[rows])
        block = block.take(np.setdiff1d(np.arange(len(block)), rows))
        start, group = _keys(block)
    merged = block.take(start)
    merged.count = np.maximum.reduceat(block.count, start)
    repeats = np.ones(len(block), dtype=bool)
    repeats[start] = False
    for name, series in block.series.items():
        has_own = first[name] < len(block)
        repeats[first[name][has_own]] = False
        repeats &= ~(series.valid & ~has_own[group])
        own = series.values[np.minimum(first[name], len(block) - 1)]
        values = np.where(has_own, own, _highest(series, start)) if block.mig.any() else own
        valid = np.logical_or.reduceat(series.valid, start)
        merged.series[name] = Series(np.where(valid, values, np.zeros(1, values.dtype)), valid)
    return merged, int(repeats.sum()), np.concatenate(conflicting)


def _keys(block: Block) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the first row of each key, and the number of each row's key."""
    fresh = np.ones(len(block), dtype=bool)
    fresh[1:] = (block.unit[1:] != block.unit[:-1]) | (block.ms[1:] != block.ms[:-1])
    return np.flatnonzero(fresh), np.cumsum(fresh) - 1


def _first_own(series: Series, mig: npt.NDArray[np.bool_], start: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return of each key the first row in which the whole GPU reports the channel; the number of rows where none."""
    rows = np.arange(len(mig))
    return np.minimum.reduceat(np.where(series.valid & ~mig, rows, len(mig)), start)


def _highest(series: Series, start: npt.NDArray[np.int64]) -> npt.NDArray[np.generic]:
    if np.issubdtype(series.values.dtype, np.unsignedinteger):
        return np.bitwise_or.reduceat(np.where(series.valid, series.values, np.uint64(0)), start)
    return np.maximum.reduceat(np.where(series.valid, series.values, series.values.min()), start)
