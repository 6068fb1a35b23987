"""Blocks of samples: arrays for the kernels with the samples of a few nodes, copied from Arrow chunks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from numba import njit

from features.windows.layout import ChannelLayout

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]

Pair = tuple[str, str]
"""A node and a unit on it (the node itself in a dataset without GPUs), whose samples a row may use."""

BLOCK_SAMPLES = 100_000
"""Maximum samples per block, unless a single node has more: some 20 MB of values at 24 channels, which fit a cache."""


@dataclass(frozen=True, slots=True)
class RowSpans:
    """Rows as seen by the kernels.

    ``begins``, ``ends``: range of the unit's samples in the block, possibly empty; shape (r,).
    ``borders``: newest usable sample time of the row (decision time minus reporting delay), milliseconds since 1970;
    shape (r,).
    ``cut``: whether ``begins`` may exclude older samples of the unit.
    """

    begins: IntArray
    ends: IntArray
    borders: IntArray
    cut: bool = False


@dataclass(frozen=True, slots=True)
class SampleBlock:
    """Samples of some nodes, ascending in time within each (node, unit) pair.

    ``times``: milliseconds since 1970; shape (n,).
    ``values``: series-major, like Arrow columns; NaN where a value is missing; shape (len(layout.numbers), n).
    ``flags``: bitmasks, 0 where unknown; shape (len(layout.masks), n).
    ``spans``: range of each pair's samples.
    """

    times: IntArray
    values: FloatArray
    flags: npt.NDArray[np.uint64]
    flags_known: npt.NDArray[np.bool_]
    spans: Mapping[Pair, tuple[int, int]]

    @classmethod
    def empty(cls, layout: ChannelLayout) -> "SampleBlock":
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
        """Return the sample range of each pair; empty for a pair without samples."""
        spans = np.array([self.spans.get(pair, (0, 0)) for pair in pairs], dtype=np.int64).reshape(-1, 2)
        return np.ascontiguousarray(spans[:, 0]), np.ascontiguousarray(spans[:, 1])


def blocks_of(
    samples: pa.Table | Sequence[pa.Table],
    layout: ChannelLayout,
    *,
    unit: str,
    since: int | None = None,
    block_samples: int = BLOCK_SAMPLES,
) -> Iterator[SampleBlock]:
    """Split samples into blocks; all units of a node are in the same block.

    A GPU that moved has samples under two nodes: these are two pairs, and a row uses those of its current node.

    ``samples``: ``timestamp``, ``node``, ``gpu`` (unless the unit is the node) and channels; any order. Consecutive
    tables in time, each sorted by pair and time (:meth:`Dataset.read_runs`), are not copied first. Channels missing
    from a table are unknown in all of its rows.
    ``since``: samples before this instant (milliseconds since 1970) are skipped.
    Yields: in order of node name.
    """
    chunks = _chunks_of([samples] if isinstance(samples, pa.Table) else samples, layout, unit)
    by_node: dict[str, dict[Pair, list[_RowRange]]] = {}
    for chunk in chunks:
        for pair, rows in chunk.since(since):
            by_node.setdefault(pair[0], {}).setdefault(pair, []).append(rows)
    pending: list[tuple[Pair, list[_RowRange]]] = []
    size = 0
    for node in sorted(by_node):
        of_node = sorted(by_node[node].items(), key=lambda item: item[0])
        node_size = sum(rows.rows for _, ranges in of_node for rows in ranges)
        if pending and size + node_size > block_samples:
            yield _block(chunks, layout, pending)
            pending, size = [], 0
        pending += of_node
        size += node_size
    if pending:
        yield _block(chunks, layout, pending)


def key_columns(unit: str) -> tuple[str, ...]:
    """Return the key columns by which samples are split into blocks."""
    return ("timestamp", "node") if unit == "node" else ("timestamp", "node", "gpu")


def _block(
    chunks: "Sequence[_Chunk]", layout: ChannelLayout, chosen: "Sequence[tuple[Pair, list[_RowRange]]]"
) -> SampleBlock:
    spans: dict[Pair, tuple[int, int]] = {}
    copies: dict[int, list[tuple[int, int, int]]] = {}
    row = 0
    for pair, ranges in chosen:
        begin = row
        for rows in ranges:
            copies.setdefault(rows.chunk, []).append((rows.begin, row, rows.rows))
            row += rows.rows
        spans[pair] = (begin, row)
    times = np.empty(row, dtype=np.int64)
    values = np.empty((len(layout.numbers), row), dtype=np.float64)
    flags = np.empty((len(layout.masks), row), dtype=np.uint64)
    known = np.empty((len(layout.masks), row), dtype=np.bool_)
    for number, copied in copies.items():
        chunks[number].copy(layout, np.array(copied, dtype=np.int64), times, values, flags, known)
    return SampleBlock(times, values, flags, known, spans)


_MAX_CHUNKS = 64
# Per table: with more chunks, combine them first, because each one costs calls per block and column.


class _RowRange(NamedTuple):
    """Contiguous rows of one pair in a chunk."""

    chunk: int
    begin: int
    rows: int


class _Column(NamedTuple):
    """Values of a column and their validity bits, starting at bit ``offset``; no bits if all are valid."""

    values: npt.NDArray[Any]
    bits: ByteArray
    offset: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A table in one chunk, as arrays that share its memory.

    ``times``: milliseconds since 1970.
    ``pairs``: in order of the rows.
    ``begins``: first row of each pair, then the end of the last one; shape (len(pairs) + 1,).
    """

    number: int
    times: IntArray
    numbers: Mapping[str, _Column]
    masks: Mapping[str, _Column]
    pairs: list[Pair]
    begins: IntArray

    def since(self, time: int | None = None) -> list[tuple[Pair, _RowRange]]:
        """Return the row range of each pair, without samples before ``time`` (ms) if given."""
        begins, ends = self.begins[:-1], self.begins[1:]
        if time is not None:
            begins = _first_since(self.times, self.begins, time)
        rows = (ends - begins).tolist()
        return [
            (pair, _RowRange(self.number, begin, count))
            for pair, begin, count in zip(self.pairs, begins.tolist(), rows, strict=True)
            if count
        ]

    def copy(
        self,
        layout: ChannelLayout,
        rows: IntArray,
        times: IntArray,
        values: FloatArray,
        flags: npt.NDArray[np.uint64],
        known: npt.NDArray[np.bool_],
    ) -> None:
        """Copy ranges of rows into a block's arrays.

        ``rows``: start of each range here, its start in the block, and its number of rows; shape (n, 3).
        """
        _copy(self.times, rows, times)
        for name, series in zip(layout.numbers, values, strict=True):
            column = self.numbers.get(name)
            if column is None:
                _fill(series, rows, np.nan)
            else:
                _widen(column.values, column.bits, column.offset, rows, series)
        for name, series, is_known in zip(layout.masks, flags, known, strict=True):
            column = self.masks.get(name)
            if column is None:
                _fill(series, rows, np.uint64(0))
                _fill(is_known, rows, False)
            else:
                _masks(column.values, column.bits, column.offset, rows, series, is_known)


def _chunks_of(tables: Sequence[pa.Table], layout: ChannelLayout, unit: str) -> list[_Chunk]:
    """Convert tables to chunks with ascending times per pair, within and across chunks."""
    tables = [table for table in tables if table.num_rows]
    chunks = _in_order(tables, layout, unit)
    if chunks is None:
        table = tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="default")
        codes, _, _ = pair_codes(table, unit)
        order = np.lexsort((epoch_ms(table.column("timestamp")), codes))
        chunks = _in_order([table.take(order)], layout, unit)
        assert chunks is not None
    return chunks


def _in_order(tables: Sequence[pa.Table], layout: ChannelLayout, unit: str) -> list[_Chunk] | None:
    chunks: list[_Chunk] = []
    newest: dict[Pair, int] = {}
    for table in tables:
        cut = max(column.num_chunks for column in table.columns)
        combined = table.combine_chunks() if cut > _MAX_CHUNKS else table
        for batch in combined.to_batches():
            if not batch.num_rows:
                continue
            part = pa.Table.from_batches([batch])
            times = epoch_ms(part.column("timestamp"))
            divided = _divided(part, times, unit)
            if divided is None:
                return None
            pairs, begins = divided
            firsts, lasts = times[begins[:-1]].tolist(), times[begins[1:] - 1].tolist()
            if any(newest.get(pair, first) > first for pair, first in zip(pairs, firsts, strict=True)):
                return None
            newest.update(zip(pairs, lasts, strict=True))
            present = set(part.column_names)
            numbers = {name: _number(part.column(name)) for name in layout.numbers if name in present}
            masks = {name: _column(part.column(name).cast(pa.uint64())) for name in layout.masks if name in present}
            chunks.append(_Chunk(len(chunks), times, numbers, masks, pairs, begins))
    return chunks


def _divided(part: pa.Table, times: IntArray, unit: str) -> tuple[list[Pair], IntArray] | None:
    """Return the pairs and the first row of each; None if a pair's rows are not contiguous and ascending."""
    node, nodes = _indices(part.column("node"))
    code, units = (node, nodes) if unit == "node" else _indices(part.column("gpu"))
    begins, ascend = _begins(node, code, times)
    first = begins[:-1]
    pairs = [
        (nodes[node_code], units[unit_code])
        for node_code, unit_code in zip(node[first].tolist(), code[first].tolist(), strict=True)
    ]
    return (pairs, begins) if ascend and len(set(pairs)) == len(pairs) else None


def epoch_ms(column: pa.ChunkedArray) -> IntArray:
    """Convert a timestamp column to milliseconds since 1970."""
    if pa.types.is_timestamp(column.type) and column.type.unit != "ms":
        column = column.cast(pa.timestamp("ms", tz=column.type.tz), safe=False)
    # A copy: Arrow's memory is read-only, and numba would compile the kernels again for read-only arrays.
    return np.array(column.cast(pa.int64()).to_numpy(), dtype=np.int64)


def _indices(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int32], list[str]]:
    """Dictionary-encode a column of names: indices and distinct names."""
    if not pa.types.is_dictionary(column.type):
        column = pc.dictionary_encode(column)
    unified = column.unify_dictionaries()
    if not unified.num_chunks:
        return np.zeros(0, dtype=np.int32), []
    parts = [chunk.indices.to_numpy() for chunk in unified.chunks]
    return np.concatenate(parts).astype(np.int32, copy=False), unified.chunk(0).dictionary.to_pylist()


def pair_codes(table: pa.Table, unit: str) -> tuple[npt.NDArray[np.int64], list[str], list[str]]:
    """Return a code for each sample's pair (unit code times nodes plus node code), the nodes and the units."""
    indices, nodes = _indices(table.column("node"))
    node_codes = indices.astype(np.int64)
    if unit == "node":
        return node_codes, nodes, nodes
    unit_codes, units = _indices(table.column("gpu"))
    return unit_codes.astype(np.int64) * len(nodes) + node_codes, nodes, units


def _number(column: pa.ChunkedArray) -> _Column:
    return _column(column if column.type in (pa.float32(), pa.float64()) else column.cast(pa.float64()))


def _column(column: pa.ChunkedArray) -> _Column:
    chunk = column.chunk(0)
    validity, content = chunk.buffers()
    values = np.frombuffer(content, dtype=chunk.type.to_pandas_dtype())[chunk.offset : chunk.offset + len(chunk)]
    # Arrow's readers keep validity bits even without nulls. An array over empty bytes is read-only like Arrow's memory,
    # so one compiled kernel serves both.
    bits = np.frombuffer(validity if chunk.null_count else b"", dtype=np.uint8)
    return _Column(values, bits, chunk.offset)


@njit(cache=True, nogil=True)
def _begins(nodes: npt.NDArray[np.int32], units: npt.NDArray[np.int32], times: IntArray) -> tuple[IntArray, bool]:
    """Return the first row of each pair, then the end of the last; and whether times ascend within pairs."""
    begins = np.empty(times.size + 1, dtype=np.int64)
    count, ascend = 0, True
    for i in range(times.size):
        if i == 0 or nodes[i] != nodes[i - 1] or units[i] != units[i - 1]:
            begins[count] = i
            count += 1
        else:
            ascend &= times[i] >= times[i - 1]
    begins[count] = times.size
    return begins[: count + 1].copy(), ascend


@njit(cache=True, nogil=True)
def _first_since(times: IntArray, begins: IntArray, time: int) -> IntArray:
    """Return each pair's first sample at or after a time; the end of its rows if there is none."""
    firsts = np.empty(begins.size - 1, dtype=np.int64)
    for k in range(firsts.size):
        firsts[k] = begins[k] + np.searchsorted(times[begins[k] : begins[k + 1]], time)
    return firsts


@njit(cache=True, nogil=True)
def _copy(source: IntArray, rows: IntArray, out: IntArray) -> None:
    for k in range(rows.shape[0]):
        begin, target, count = rows[k, 0], rows[k, 1], rows[k, 2]
        out[target : target + count] = source[begin : begin + count]


@njit(cache=True, nogil=True)
def _fill(out: npt.NDArray[Any], rows: IntArray, value: Any) -> None:
    for k in range(rows.shape[0]):
        target, count = rows[k, 1], rows[k, 2]
        out[target : target + count] = value


@njit(cache=True, nogil=True)
def _widen(source: npt.NDArray[np.floating], bits: ByteArray, offset: int, rows: IntArray, out: FloatArray) -> None:
    """Copy ranges as float64; NaN where a value is missing or not finite."""
    for k in range(rows.shape[0]):
        begin, target, count = rows[k, 0], rows[k, 1], rows[k, 2]
        values, copied = source[begin : begin + count], out[target : target + count]
        for i in range(count):
            value = np.float64(values[i])
            # 0 unless it is not finite; np.isfinite would prevent vectorization
            copied[i] = value if value - value == 0 else np.nan
        if bits.size > 0:  # in a second pass, because checking bits in the loop would prevent vectorization
            _forget(bits, offset + begin, copied)


@njit(cache=True, nogil=True)
def _forget(bits: ByteArray, begin: int, values: FloatArray) -> None:
    """Set values to NaN where their validity bits, starting at ``begin``, are unset."""
    number, end = begin, begin + values.size
    while number < end:
        if number & 7 == 0 and number + 8 <= end and bits[number >> 3] == 255:
            number += 8
        else:
            if not _bit(bits, number):
                values[number - begin] = np.nan
            number += 1


@njit(cache=True, nogil=True)
def _masks(
    source: npt.NDArray[np.uint64],
    bits: ByteArray,
    offset: int,
    rows: IntArray,
    out: npt.NDArray[np.uint64],
    is_known: npt.NDArray[np.bool_],
) -> None:
    """Copy ranges of bitmasks; 0 where missing."""
    for k in range(rows.shape[0]):
        begin, target, count = rows[k, 0], rows[k, 1], rows[k, 2]
        if bits.size == 0:
            is_known[target : target + count] = True
            out[target : target + count] = source[begin : begin + count]
        else:
            for i in range(count):
                known = _bit(bits, offset + begin + i)
                is_known[target + i] = known
                out[target + i] = source[begin + i] if known else np.uint64(0)


@njit(cache=True, nogil=True)
def _bit(bits: ByteArray, number: int) -> bool:
    return (bits[number >> 3] >> (number & 7)) & 1 == 1
