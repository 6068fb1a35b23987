"""Blocks of samples: a few nodes' samples as the arrays that the kernels read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from features.windows.layout import ChannelLayout
from features.windows.pieces import (
    Pair,
    Piece,
    Stretch,
    pieces_of,
)

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

BLOCK_SAMPLES = 100_000
"""Samples in a block unless one node alone has more: some 20 MB of values at 24 channels, which a cache can hold."""


@dataclass(frozen=True, slots=True)
class RowSpans:
    """Rows as the kernels see them.

    ``begins``, ``ends``: range of the unit's samples in the block; empty where it has none; shape (r,).
    ``borders``: newest usable sample time of the row (decision time minus reporting delay), milliseconds since 1970;
    shape (r,).
    """

    begins: IntArray
    ends: IntArray
    borders: IntArray


@dataclass(frozen=True, slots=True)
class SampleBlock:
    """Samples of some nodes, ascending in time within each pair of node and unit.

    ``times``: milliseconds since 1970; shape (n,).
    ``values``: one series after the other, as Arrow's columns are; NaN where a value is missing; shape
    (len(layout.numbers), n).
    ``flags``: Bitmasks, 0 where unknown; shape (len(layout.masks), n).
    ``spans``: range of each pair's samples.
    """

    times: IntArray
    values: FloatArray
    flags: npt.NDArray[np.uint64]
    flags_known: npt.NDArray[np.bool_]
    spans: Mapping[Pair, tuple[int, int]]

    @classmethod
    def empty(cls, layout: ChannelLayout) -> SampleBlock:
        """Make a block without samples."""
        shape = (len(layout.masks), 0)
        return cls(
            times=np.zeros(0, dtype=np.int64),
            values=np.zeros((len(layout.numbers), 0)),
            flags=np.zeros(shape, dtype=np.uint64),
            flags_known=np.zeros(shape, dtype=np.bool_),
            spans={},
        )

    def ranges(self, pairs: Sequence[Pair]) -> tuple[IntArray, IntArray]:
        """Return where the samples of each pair begin and end; an empty range for a pair without samples."""
        found = [self.spans.get(pair, (0, 0)) for pair in pairs]
        return (
            np.array([span[0] for span in found], dtype=np.int64),
            np.array([span[1] for span in found], dtype=np.int64),
        )


def blocks_of(
    samples: pa.Table | Sequence[pa.Table], layout: ChannelLayout, *, unit: str, block_samples: int = BLOCK_SAMPLES
) -> Iterator[SampleBlock]:
    """Cut samples into blocks; all units of a node are in the same block.

    A GPU that has moved has samples under two nodes; they are two pairs, and a row uses those of its present node.

    ``samples``: samples with ``timestamp``, ``node``, ``gpu`` (unless the unit is the node) and channels; any order. A
    channel of the layout that a table lacks is unknown in all of its rows. Tables that follow each other in time and
    are each sorted by pair and time (:meth:`Dataset.read_runs`) go into the blocks without a copy in
    between.
    ``unit``: what a unit is.
    Yields: in order of node name.
    """
    tables = [samples] if isinstance(samples, pa.Table) else list(samples)
    yield from cut_blocks(pieces_of(tables, layout, unit), layout, block_samples=block_samples)


def cut_blocks(
    pieces: Sequence[Piece], layout: ChannelLayout, *, since: int | None = None, block_samples: int = BLOCK_SAMPLES
) -> Iterator[SampleBlock]:
    """Cut pieces of samples into blocks, as :func:`blocks_of` does; the same ones may be cut in several ways.

    ``pieces``: from :func:`features.windows.pieces.pieces_of`.
    ``layout``: channels to take: those that the pieces were made for, or some of them.
    ``since``: samples before this instant (milliseconds since 1970) are left out.
    Yields: in order of node name.
    """
    by_node: dict[str, dict[Pair, list[Stretch]]] = {}
    for piece in pieces:
        for pair, stretch in piece.since(since):
            by_node.setdefault(pair[0], {}).setdefault(pair, []).append(stretch)
    pending: list[tuple[Pair, list[Stretch]]] = []
    size = 0
    for node in sorted(by_node):
        own = sorted(by_node[node].items(), key=lambda item: item[0])
        node_size = sum(stretch.rows for _, stretches in own for stretch in stretches)
        if pending and size + node_size > block_samples:
            yield _block(pieces, layout, pending)
            pending, size = [], 0
        pending += own
        size += node_size
    if pending:
        yield _block(pieces, layout, pending)


def table_of(frame: pd.DataFrame) -> pa.Table:
    """Return a frame as a table, without its index."""
    return pa.table({str(name): array_of(frame[name]) for name in frame.columns})


def array_of(column: pd.Series) -> pa.Array:
    """Return a column as an array; instants in UTC milliseconds."""
    if isinstance(column.dtype, pd.DatetimeTZDtype):  # Arrow's own conversion drops the zone, and pandas 3 warns of it
        instants = column.dt.tz_convert("UTC").dt.tz_localize(None).to_numpy()
        return pa.array(instants).cast(pa.timestamp("ms"), safe=False).cast(pa.timestamp("ms", tz="UTC"))
    return pa.array(column, from_pandas=True)


def key_columns(unit: str) -> tuple[str, ...]:
    """Name the key columns of samples that blocks are cut by."""
    return ("timestamp", "node") if unit == "node" else ("timestamp", "node", "gpu")


def _block(pieces: Sequence[Piece], layout: ChannelLayout, chosen: Sequence[tuple[Pair, list[Stretch]]]) -> SampleBlock:
    spans: dict[Pair, tuple[int, int]] = {}
    copies: dict[int, list[tuple[int, int, int]]] = {}
    at = 0
    for pair, stretches in chosen:
        begin = at
        for stretch in stretches:
            copies.setdefault(stretch.piece, []).append((stretch.begin, at, stretch.rows))
            at += stretch.rows
        spans[pair] = (begin, at)
    times = np.empty(at, dtype=np.int64)
    values = np.empty((len(layout.numbers), at), dtype=np.float64)
    flags = np.empty((len(layout.masks), at), dtype=np.uint64)
    known = np.empty((len(layout.masks), at), dtype=np.bool_)
    for number, rows in copies.items():
        pieces[number].copy(layout, np.array(rows, dtype=np.int64), times, values, flags, known)
    return SampleBlock(times, values, flags, known, spans)
