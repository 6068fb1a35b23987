"""Pieces of samples as they were read, a run or a row group each, and the copying of their stretches into blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
"""A node and a unit in it (the node itself where a dataset has no GPUs): whose samples a row may use."""

_MOST_PIECES = 64
# Of one table: cut into more chunks than this, it is made one first, for each costs calls for each block and column.


class Stretch(NamedTuple):
    """Rows of one pair that follow each other in a piece: ``rows`` of them from ``begin`` on."""

    piece: int
    begin: int
    rows: int


@dataclass(frozen=True, slots=True)
class _Column:
    """A column's values and their validity bits, from bit ``offset`` on; no bits where all are valid."""

    held: npt.NDArray[Any]
    bits: ByteArray
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A table in one chunk, as arrays that share its memory.

    ``times``: milliseconds since 1970.
    ``pairs``: in order of the rows.
    ``begins``: where the rows of each pair begin, and where the last ones end; shape (len(pairs) + 1,).
    """

    number: int
    times: IntArray
    numbers: Mapping[str, _Column]
    masks: Mapping[str, _Column]
    pairs: list[Pair]
    begins: IntArray

    def since(self, time: int | None = None) -> list[tuple[Pair, Stretch]]:
        """Return the stretch of each pair, without samples before an instant, in milliseconds since 1970, if any."""
        begins, ends = self.begins[:-1], self.begins[1:]
        if time is not None:
            begins = _first_since(self.times, self.begins, time)
        rows = (ends - begins).tolist()
        return [
            (pair, Stretch(self.number, begin, count))
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
        """Copy stretches into a block.

        ``layout``: of the block: the one that the piece was made for, or some of its channels.
        ``rows``: where each stretch begins here, where it begins in the block, and how many rows it has; shape (n, 3).
        ``times``, ``values``, ``flags``, ``known``: of the block, see :class:`features.windows.blocks.SampleBlock`.
        """
        _copy(self.times, rows, times)
        for name, series in zip(layout.numbers, values, strict=True):
            column = self.numbers.get(name)
            if column is None:
                _fill(series, rows, np.nan)
            else:
                _widen(column.held, column.bits, column.offset, rows, series)
        for name, series, there in zip(layout.masks, flags, known, strict=True):
            column = self.masks.get(name)
            if column is None:
                _fill(series, rows, np.uint64(0))
                _fill(there, rows, False)
            else:
                _masks(column.held, column.bits, column.offset, rows, series, there)


def pieces_of(tables: Sequence[pa.Table], layout: ChannelLayout, unit: str) -> list[Piece]:
    """Lay tables out as pieces in which the samples of each pair ascend in time, from piece to piece as well.

    ``tables``: see :func:`features.windows.blocks.blocks_of`. Tables that are not in such an order are sorted into one.
    """
    tables = [table for table in tables if table.num_rows]
    pieces = _in_order(tables, layout, unit)
    if pieces is None:
        table = tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="default")
        codes, _, _ = pair_codes(table, unit)
        order = np.lexsort((epoch_ms(table.column("timestamp")), codes))
        pieces = _in_order([table.take(order)], layout, unit)
        assert pieces is not None
    return pieces


def _in_order(tables: Sequence[pa.Table], layout: ChannelLayout, unit: str) -> list[Piece] | None:
    found: list[Piece] = []
    newest: dict[Pair, int] = {}
    for table in tables:
        chunks = max(column.num_chunks for column in table.columns)
        whole = table.combine_chunks() if chunks > _MOST_PIECES else table
        for batch in whole.to_batches():
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
            there = set(part.column_names)
            numbers = {name: _number(part.column(name)) for name in layout.numbers if name in there}
            masks = {name: _column(part.column(name).cast(pa.uint64())) for name in layout.masks if name in there}
            found.append(Piece(len(found), times, numbers, masks, pairs, begins))
    return found


def _divided(part: pa.Table, times: IntArray, unit: str) -> tuple[list[Pair], IntArray] | None:
    """Return the pairs and where the rows of each begin, or None if a pair's are apart or its times fall."""
    node, nodes = _indices(part.column("node"))
    code, units = (node, nodes) if unit == "node" else _indices(part.column("gpu"))
    begins, ascend = _begins(node, code, times)
    first = begins[:-1]
    pairs = [(nodes[one], units[two]) for one, two in zip(node[first].tolist(), code[first].tolist(), strict=True)]
    return (pairs, begins) if ascend and len(set(pairs)) == len(pairs) else None


def epoch_ms(column: pa.ChunkedArray) -> IntArray:
    """Return a timestamp column as milliseconds since 1970."""
    if pa.types.is_timestamp(column.type) and column.type.unit != "ms":
        column = column.cast(pa.timestamp("ms", tz=column.type.tz), safe=False)
    # A copy, because Arrow's memory is read-only, and the kernels would be compiled once more for read-only arrays.
    return np.array(column.cast(pa.int64()).to_numpy(), dtype=np.int64)


def _indices(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int32], list[str]]:
    """Return a column of names as positions in a list of them."""
    if not pa.types.is_dictionary(column.type):
        column = pc.dictionary_encode(column)
    unified = column.unify_dictionaries()
    if not unified.num_chunks:
        return np.zeros(0, dtype=np.int32), []
    parts = [chunk.indices.to_numpy() for chunk in unified.chunks]
    return np.concatenate(parts).astype(np.int32, copy=False), unified.chunk(0).dictionary.to_pylist()


def _codes(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int64], list[str]]:
    indices, names = _indices(column)
    return indices.astype(np.int64), names


def pair_codes(table: pa.Table, unit: str) -> tuple[npt.NDArray[np.int64], list[str], list[str]]:
    """Return a code for each sample's pair (unit code times nodes plus node code), the nodes and the units."""
    node_codes, nodes = _codes(table.column("node"))
    if unit == "node":
        return node_codes, nodes, nodes
    unit_codes, units = _codes(table.column("gpu"))
    return unit_codes * len(nodes) + node_codes, nodes, units


def _number(column: pa.ChunkedArray) -> _Column:
    return _column(column if column.type in (pa.float32(), pa.float64()) else column.cast(pa.float64()))


def _column(column: pa.ChunkedArray) -> _Column:
    chunk = column.chunk(0)
    validity, content = chunk.buffers()
    held = np.frombuffer(content, dtype=chunk.type.to_pandas_dtype())[chunk.offset : chunk.offset + len(chunk)]
    # Arrow's readers leave bits for a column that lacks nothing, too. An empty array is read-only, as Arrow's memory
    # is, so that one kernel is compiled for both.
    bits = np.frombuffer(validity if chunk.null_count else b"", dtype=np.uint8)
    return _Column(held, bits, chunk.offset)


@njit(cache=True, nogil=True)
def _begins(nodes: npt.NDArray[np.int32], units: npt.NDArray[np.int32], times: IntArray) -> tuple[IntArray, bool]:
    """Find where the rows of each pair begin, with the end of the last, and whether times never fall in between."""
    found = np.empty(times.size + 1, dtype=np.int64)
    count, ascend = 0, True
    for i in range(times.size):
        if i == 0 or nodes[i] != nodes[i - 1] or units[i] != units[i - 1]:
            found[count] = i
            count += 1
        else:
            ascend &= times[i] >= times[i - 1]
    found[count] = times.size
    return found[: count + 1].copy(), ascend


@njit(cache=True, nogil=True)
def _first_since(times: IntArray, begins: IntArray, time: int) -> IntArray:
    """Find the first sample of each pair that is not before an instant; where its rows end, if there is none."""
    found = np.empty(begins.size - 1, dtype=np.int64)
    for k in range(found.size):
        found[k] = begins[k] + np.searchsorted(times[begins[k] : begins[k + 1]], time)
    return found


@njit(cache=True, nogil=True)
def _copy(held: IntArray, rows: IntArray, out: IntArray) -> None:
    for k in range(rows.shape[0]):
        begin, at, count = rows[k, 0], rows[k, 1], rows[k, 2]
        out[at : at + count] = held[begin : begin + count]


@njit(cache=True, nogil=True)
def _fill(out: npt.NDArray[Any], rows: IntArray, value: Any) -> None:
    for k in range(rows.shape[0]):
        at, count = rows[k, 1], rows[k, 2]
        out[at : at + count] = value


@njit(cache=True, nogil=True)
def _widen(held: npt.NDArray[np.floating], bits: ByteArray, offset: int, rows: IntArray, out: FloatArray) -> None:
    """Copy stretches, widened to doubles; NaN where a value is missing or not finite."""
    for k in range(rows.shape[0]):
        begin, at, count = rows[k, 0], rows[k, 1], rows[k, 2]
        given, taken = held[begin : begin + count], out[at : at + count]
        for i in range(count):
            value = np.float64(given[i])
            # 0 unless it is not finite; np.isfinite would keep the compiler from doing several at once
            taken[i] = value if value - value == 0 else np.nan
        if bits.size > 0:  # behind the values, because a loop that asked for bits would do one value at a time
            _forget(bits, offset + begin, taken)


@njit(cache=True, nogil=True)
def _forget(bits: ByteArray, begin: int, taken: FloatArray) -> None:
    """Put NaN where the bits from ``begin`` on say that a value is missing."""
    number, end = begin, begin + taken.size
    while number < end:
        if number & 7 == 0 and number + 8 <= end and bits[number >> 3] == 255:
            number += 8
        else:
            if not _bit(bits, number):
                taken[number - begin] = np.nan
            number += 1


@njit(cache=True, nogil=True)
def _masks(
    held: npt.NDArray[np.uint64],
    bits: ByteArray,
    offset: int,
    rows: IntArray,
    out: npt.NDArray[np.uint64],
    there: npt.NDArray[np.bool_],
) -> None:
    """Copy stretches of bitmasks; 0 where one is missing."""
    for k in range(rows.shape[0]):
        begin, at, count = rows[k, 0], rows[k, 1], rows[k, 2]
        if not _known(bits, offset + begin, count)[1]:
            there[at : at + count] = True
            out[at : at + count] = held[begin : begin + count]
        else:
            for i in range(count):
                known = _bit(bits, offset + begin + i)
                there[at + i] = known
                out[at + i] = held[begin + i] if known else np.uint64(0)


@njit(cache=True, nogil=True)
def _bit(bits: ByteArray, number: int) -> bool:
    return (bits[number >> 3] >> (number & 7)) & 1 == 1


@njit(cache=True, nogil=True)
def _known(bits: ByteArray, begin: int, count: int) -> tuple[bool, bool]:
    """Tell whether any of some validity bits is set, and whether any is not; where there are no bits, all are set."""
    if bits.size == 0:
        return True, False
    known, unknown = False, False
    number, end = begin, begin + count
    while number < end:
        if number & 7 == 0 and number + 8 <= end:
            known |= bits[number >> 3] != 0
            unknown |= bits[number >> 3] != 255
            number += 8
        else:
            known |= _bit(bits, number)
            unknown |= not _bit(bits, number)
            number += 1
    return known, unknown
