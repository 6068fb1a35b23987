"""Blocks of samples: a few nodes' samples as the arrays that the kernels read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit

from features.layout import ChannelLayout

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

Pair = tuple[str, str]
"""A node and a unit in it (the node itself where a dataset has no GPUs): whose samples a row may use."""

BLOCK_SAMPLES = 100_000
"""Samples in a block unless one node alone has more: some 20 MB of values at 24 channels, which a cache can hold."""


@dataclass(frozen=True, slots=True)
class RowSpans:
    """Rows as the kernels see them.

    Parameters
    ----------
    begins, ends : int64 arrays, shape (r,)
        Range of the unit's samples in the block; empty where it has none.
    borders : int64 array, shape (r,)
        Newest usable sample time of the row (decision time minus reporting delay), milliseconds since 1970.
    """

    begins: IntArray
    ends: IntArray
    borders: IntArray


@dataclass(frozen=True, slots=True)
class SampleBlock:
    """Samples of some nodes, ascending in time within each pair of node and unit.

    Parameters
    ----------
    times : int64 array, shape (n,)
        Milliseconds since 1970.
    values : float64 array, shape (len(layout.numbers), n), C order
        One series after the other, as Arrow's columns are; NaN where a value is missing.
    flags : uint64 array, shape (len(layout.masks), n)
        Bitmasks, 0 where unknown.
    flags_known : bool array, same shape
        Whether the bitmask was reported.
    spans : mapping of Pair to (int, int)
        Range of each pair's samples.
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
    table: pa.Table, layout: ChannelLayout, *, unit: str, block_samples: int = BLOCK_SAMPLES
) -> Iterator[SampleBlock]:
    """Cut a table of samples into blocks; all units of a node are in the same block.

    A GPU that has moved has samples under two nodes; they are two pairs, and a row uses those of its present node.

    Parameters
    ----------
    table : pyarrow.Table
        Samples with ``timestamp``, ``node``, ``gpu`` (unless the unit is the node) and channels; any order. A channel
        of the layout that the table lacks is unknown everywhere.
    layout : ChannelLayout
        Channels to take.
    unit : {"gpu", "node"}
        What a unit is.
    block_samples : int
        Aim for the samples in a block.

    Yields
    ------
    SampleBlock
        In order of node name.
    """
    if table.num_rows == 0:
        return
    runs = _runs(table, unit)
    if runs is None:
        order = _sorting(table, unit)
        table = table.take(order)
        runs = _runs(table, unit)
        assert runs is not None
    by_node: dict[str, list[tuple[Pair, int, int]]] = {}
    for pair, begin, end in sorted(runs):
        by_node.setdefault(pair[0], []).append((pair, begin, end))
    pending: list[tuple[Pair, int, int]] = []
    size = 0
    for node_runs in by_node.values():
        node_size = sum(end - begin for _, begin, end in node_runs)
        if pending and size + node_size > block_samples:
            yield _block(table, layout, pending)
            pending, size = [], 0
        pending += node_runs
        size += node_size
    yield _block(table, layout, pending)


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


def epoch_ms(column: pa.ChunkedArray) -> IntArray:
    """Return a timestamp column as milliseconds since 1970."""
    if pa.types.is_timestamp(column.type) and column.type.unit != "ms":
        column = column.cast(pa.timestamp("ms", tz=column.type.tz), safe=False)
    # A copy, because Arrow's memory is read-only, and the kernels would be compiled once more for read-only arrays.
    return np.array(column.cast(pa.int64()).to_numpy(), dtype=np.int64)


def _codes(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int64], list[str]]:
    if not pa.types.is_dictionary(column.type):
        column = pc.dictionary_encode(column)
    unified = column.unify_dictionaries()
    if not unified.num_chunks:
        return np.zeros(0, dtype=np.int64), []
    codes = np.concatenate([chunk.indices.to_numpy() for chunk in unified.chunks])
    return codes.astype(np.int64), unified.chunk(0).dictionary.to_pylist()


def pair_codes(table: pa.Table, unit: str) -> tuple[npt.NDArray[np.int64], list[str], list[str]]:
    """Return a code for each sample's pair (unit code times nodes plus node code), the nodes and the units."""
    node_codes, nodes = _codes(table.column("node"))
    if unit == "node":
        return node_codes, nodes, nodes
    unit_codes, units = _codes(table.column("gpu"))
    return unit_codes * len(nodes) + node_codes, nodes, units


def _runs(table: pa.Table, unit: str) -> list[tuple[Pair, int, int]] | None:
    """Return the run of each pair, or None if a pair has two runs or its times fall."""
    codes, nodes, units = pair_codes(table, unit)
    times = epoch_ms(table.column("timestamp"))
    starts = np.flatnonzero(np.concatenate(([True], codes[1:] != codes[:-1])))
    same = codes[1:] == codes[:-1]
    if bool((same & (times[1:] < times[:-1])).any()) or np.unique(codes[starts]).size != starts.size:
        return None
    stops = np.append(starts[1:], codes.size)
    found = []
    for begin, end in zip(starts.tolist(), stops.tolist(), strict=True):
        code = int(codes[begin])
        pair = (nodes[code], nodes[code]) if unit == "node" else (nodes[code % len(nodes)], units[code // len(nodes)])
        found.append((pair, begin, end))
    return found


def _sorting(table: pa.Table, unit: str) -> IntArray:
    codes, _, _ = pair_codes(table, unit)
    return np.lexsort((epoch_ms(table.column("timestamp")), codes))


def _block(table: pa.Table, layout: ChannelLayout, runs: Sequence[tuple[Pair, int, int]]) -> SampleBlock:
    spans: dict[Pair, tuple[int, int]] = {}
    stretches: list[tuple[int, int]] = []
    at = 0
    for pair, begin, end in runs:
        spans[pair] = (at, at + end - begin)
        at += end - begin
        if stretches and stretches[-1][1] == begin:
            stretches[-1] = (stretches[-1][0], end)
        else:
            stretches.append((begin, end))
    pieces = [table.slice(begin, end - begin) for begin, end in stretches]
    part = pieces[0] if len(pieces) == 1 else pa.concat_tables(pieces)
    present = set(part.column_names)
    values = np.empty((len(layout.numbers), at), dtype=np.float64)
    for series, name in zip(values, layout.numbers, strict=True):
        if name in present:
            _take(part.column(name), series)
        else:
            series[:] = np.nan
    flags = np.zeros((len(layout.masks), at), dtype=np.uint64)
    known = np.zeros((len(layout.masks), at), dtype=np.bool_)
    for j, name in enumerate(layout.masks):
        if name in present:
            column = part.column(name)
            known[j] = column.is_valid().to_numpy()
            flags[j] = pc.fill_null(column.cast(pa.uint64()), pa.scalar(0, pa.uint64())).to_numpy()
    return SampleBlock(epoch_ms(part.column("timestamp")), values, flags, known, spans)


def _take(column: pa.ChunkedArray, series: FloatArray) -> None:
    """Write a column into ``series``, NaN where it is null or not finite."""
    if column.type not in (pa.float32(), pa.float64()):
        column = column.cast(pa.float64())
    at = 0
    for chunk in column.chunks:
        validity, content = chunk.buffers()
        held = np.frombuffer(content, dtype=chunk.type.to_pandas_dtype())[chunk.offset : chunk.offset + len(chunk)]
        bits = np.zeros(0, dtype=np.uint8) if validity is None else np.frombuffer(validity, dtype=np.uint8)
        _spread(held, bits, chunk.offset, series[at : at + len(chunk)])
        at += len(chunk)


@njit(cache=True, nogil=True)
def _spread(held: npt.NDArray[np.floating], validity: npt.NDArray[np.uint8], offset: int, out: FloatArray) -> None:
    """Widen values; ``validity`` has a bit for each, from bit ``offset`` on, or is empty where all are valid."""
    if validity.size == 0:
        for i in range(out.size):
            value = np.float64(held[i])
            out[i] = value if np.isfinite(value) else np.nan
    else:
        for i in range(out.size):
            value = np.float64(held[i])
            known = (validity[(offset + i) >> 3] >> ((offset + i) & 7)) & 1
            out[i] = value if known and np.isfinite(value) else np.nan
