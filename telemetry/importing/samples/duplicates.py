"""Several rows of one unit at one time: the same said twice, parts of one sample, or a contradiction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from telemetry.importing.samples.block import Block, Series

_ROUNDS = 64
# Rows of one key are compared one after the other this many times; a source that says the same instant more often is
# broken, and its further rows are compared with the merged one without adding to it.


@dataclass(slots=True)
class Merged:
    """What came of the rows with equal keys.

    ``block``: one row a key.
    ``conflicting``: orders of rows that contradicted an earlier row of their key.
    """

    block: Block
    repeated: int
    conflicting: npt.NDArray[np.int64]


def merge_duplicates(block: Block) -> Merged:
    """Make one row of each (unit, time); ``block`` is sorted by (unit, ms, order).

    The first row of a key (the existing dataset's, then by file and row) is kept. A later one that reports a channel
    which is still missing fills it in, so that one file a metric works. One that reports another value for a channel
    conflicts and is set aside as a whole. Parts of a GPU (MIG) do not conflict: the parent gets the highest value of
    gauges, counters and enums and all flags, unless the whole GPU's own row gives the channel.
    """
    if len(block) == 0:
        return Merged(block, 0, np.empty(0, np.int64))
    fresh = np.ones(len(block), dtype=bool)
    fresh[1:] = (block.unit[1:] != block.unit[:-1]) | (block.ms[1:] != block.ms[:-1])
    if fresh.all():
        return Merged(block, 0, np.empty(0, np.int64))
    starts = np.flatnonzero(fresh)
    group = np.cumsum(fresh) - 1
    whole_first = np.lexsort((block.order, block.mig, group))  # the GPU's own rows before its parts'
    if block.mig.any():
        block = block.take(whole_first)
    rank = np.arange(len(block)) - starts[group]
    merged = block.take(starts)
    own = {name: each.valid & ~merged.mig for name, each in merged.series.items()}
    repeated, conflicting = 0, []
    for turn in range(1, int(rank.max()) + 1):
        rows = np.flatnonzero(rank == turn) if turn < _ROUNDS else np.flatnonzero(rank >= turn)
        into = group[rows]
        part = block.mig[rows]
        clash = np.zeros(len(rows), dtype=bool)
        news = np.zeros(len(rows), dtype=bool)
        for name, each in block.series.items():
            kept = merged.series[name]
            said = each.valid[rows]
            differs = said & kept.valid[into] & (each.values[rows] != kept.values[into])
            clash |= differs & ~part
            news |= (said & ~kept.valid[into]) | (differs & part & ~own[name][into])
        conflicting.append(block.order[rows[clash]])
        repeated += int((~clash & ~news).sum())
        if turn >= _ROUNDS:
            repeated += int((~clash & news).sum())
            break
        rows, into, part = rows[~clash], into[~clash], part[~clash]
        for name, each in block.series.items():
            _fill(merged.series[name], own[name], each, rows, into, part)
        merged.count[into] = np.maximum(merged.count[into], block.count[rows])
    return Merged(merged, repeated, np.concatenate(conflicting))


def _fill(
    kept: Series,
    own: npt.NDArray[np.bool_],
    given: Series,
    rows: npt.NDArray[np.int64],
    into: npt.NDArray[np.int64],
    part: npt.NDArray[np.bool_],
) -> None:
    said = given.valid[rows]
    empty = said & ~kept.valid[into]
    higher = said & kept.valid[into] & part & ~own[into]
    kept.values[into[empty]] = given.values[rows[empty]]
    if higher.any():
        old, new = kept.values[into[higher]], given.values[rows[higher]]
        is_flags = np.issubdtype(kept.values.dtype, np.unsignedinteger)
        kept.values[into[higher]] = np.bitwise_or(old, new) if is_flags else np.maximum(old, new)
    kept.valid[into[empty]] = True
    own[into[empty & ~part]] = True
