"""Handling of many blocks of samples at once: one after the other, sorted, and without repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from telemetry.block import DTYPES, Block, Series
from telemetry.channel import Channel
from telemetry.duplicates import merge_duplicates

_SHIFT = 43  # a key is unit * 2**43 + milliseconds: as in telemetry.stays, to the year 2248


def keys_of(block: Block) -> NDArray[np.int64]:
    """Give one number a row that orders rows by unit and time."""
    return (block.unit.astype(np.int64) << _SHIFT) + block.ms


def empty_block(channels: Mapping[str, Channel]) -> Block:
    """Make a block without rows."""
    return blank_block(np.zeros(0, np.int32), np.zeros(0, np.int64), channels)


def blank_block(unit: NDArray[np.int32], ms: NDArray[np.int64], channels: Mapping[str, Channel]) -> Block:
    """Make rows without values."""
    n = len(ms)
    return Block(
        unit=unit,
        node=unit,
        ms=ms,
        order=np.zeros(n, np.int64),
        mig=np.zeros(n, dtype=np.bool_),
        count=np.ones(n, np.int32),
        series={
            name: Series(np.zeros(n, DTYPES[channel.kind]), np.zeros(n, dtype=np.bool_))
            for name, channel in channels.items()
        },
    )


def concat(blocks: Sequence[Block], channels: Mapping[str, Channel]) -> Block:
    """Put blocks of the same channels one after the other."""
    if not blocks:
        return empty_block(channels)
    if len(blocks) == 1:
        return blocks[0]
    return Block(
        unit=np.concatenate([block.unit for block in blocks]),
        node=np.concatenate([block.node for block in blocks]),
        ms=np.concatenate([block.ms for block in blocks]),
        order=np.concatenate([block.order for block in blocks]),
        mig=np.concatenate([block.mig for block in blocks]),
        count=np.concatenate([block.count for block in blocks]),
        series={
            name: Series(
                np.concatenate([block.series[name].values for block in blocks]),
                np.concatenate([block.series[name].valid for block in blocks]),
            )
            for name in channels
        },
    )


def settle(block: Block) -> tuple[Block, int]:
    """Sort rows by unit and time, and make one row of each.

    ``block``: in any order; of rows that say the same instant of a unit the one with the lowest ``order`` counts.

    The rule is that of the import (:func:`telemetry.duplicates.merge_duplicates`): what the chosen row does not report
    is filled in from the others unless they contradict it, so that a sample may come in parts, one metric a request.
    """
    keys = keys_of(block)
    apart = keys[1:] > keys[:-1]
    if bool(apart.all()):
        return block, 0
    order = np.argsort(keys, kind="stable")
    if bool((keys[order][1:] > keys[order][:-1]).all()):
        return block.take(order), 0
    before = len(block)
    # merge_duplicates fills in place: `take` has copied.
    merged = merge_duplicates(block.take(np.lexsort((block.order, keys)))).block
    return merged, before - len(merged)


def has_value(block: Block) -> NDArray[np.bool_]:
    """Tell which rows hold any value at all."""
    found = np.zeros(len(block), dtype=np.bool_)
    for each in block.series.values():
        found |= each.valid
        if found.all():
            break
    return found
