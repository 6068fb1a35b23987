"""How much an online state holds."""

from __future__ import annotations

from dataclasses import dataclass

from telemetry.block import Block


@dataclass(frozen=True, slots=True)
class StateSize:
    """How much is held.

    ``pairs``: pairs of node and unit that have sent a sample.
    ``rows``, ``frames``: samples in the window, and the frames they stand in.
    ``waiting``: raw rows whose step is not over.
    """

    pairs: int
    rows: int
    frames: int
    waiting: int
    bytes: int


def bytes_of(block: Block) -> int:
    """Give the bytes of a block's arrays."""
    own = block.unit.nbytes + block.node.nbytes + block.ms.nbytes + block.order.nbytes + block.mig.nbytes
    return own + block.count.nbytes + sum(each.values.nbytes + each.valid.nbytes for each in block.series.values())
