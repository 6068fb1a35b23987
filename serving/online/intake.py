"""Pushed samples: a table to a block of the bundle's channels, each row on its pair of node and unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from features.blocks import key_columns
from features.errors import InputError
from features.pieces import Pair, epoch_ms, pair_codes
from telemetry.block import DTYPES, Block, Series
from telemetry.channel import Channel
from telemetry.values import parse_values

WHERE = "pushed samples"


@dataclass(frozen=True, slots=True)
class Absorbed:
    """What became of pushed samples; every row is in exactly one of the counts but ``late`` and ``values_nulled``.

    ``stored``: rows that are held now, waiting for the end of their step or in the window.
    ``late``: of the rows stored or closed, those that came more than ``features.delay`` after their time.
    ``closed``: raw rows of a step that has been rolled up without them.
    ``too_old``: rows from before the look-back.
    ``ahead``: rows of a clock that cannot be right: from too far in the future.
    ``unknown``: rows of a GPU that the inventory does not have on that node, or that name none.
    ``values_nulled``: values that cannot be true: out of range, not a number, not an integer.
    """

    rows: int = 0
    stored: int = 0
    late: int = 0
    closed: int = 0
    too_old: int = 0
    ahead: int = 0
    unknown: int = 0
    values_nulled: int = 0

    def __add__(self, other: Absorbed) -> Absorbed:
        names = self.__slots__
        return Absorbed(*(getattr(self, name) + getattr(other, name) for name in names))


class PairBook:
    """Numbers for pairs of node and unit, given in the order of their first sample and never again to another."""

    def __init__(self) -> None:
        self._number: dict[Pair, int] = {}
        self.pairs: list[Pair] = []

    def __len__(self) -> int:
        return len(self.pairs)

    def get(self, pair: Pair) -> int:
        """Give the number of a pair; -1 where it has none."""
        return self._number.get(pair, -1)

    def number(self, pair: Pair) -> int:
        """Give the number of a pair, a new one at need."""
        found = self._number.setdefault(pair, len(self.pairs))
        if found == len(self.pairs):
            self.pairs.append(pair)
        return found


def check_columns(table: pa.Table, unit: str) -> None:
    """Refuse a table without the key columns, or with times that have no zone."""
    for name in key_columns(unit):
        if name not in table.column_names:
            raise InputError(f"the samples have no column {name!r}", WHERE, "Add it.")
    kind = table.schema.field("timestamp").type
    if not pa.types.is_timestamp(kind) or kind.tz is None:
        raise InputError(f"timestamps of type {kind} have no time zone", WHERE, "Give aware timestamps, such as UTC.")


def read_samples(
    table: pa.Table, channels: Mapping[str, Channel], unit: str, known: Mapping[Pair, int], book: PairBook
) -> tuple[Block, int, int]:
    """Read a table of samples.

    ``table``: ``timestamp`` (aware), ``node``, ``gpu`` (unless the unit is the node), ``mig_instance`` at will, and
    channels; any order. Other columns are passed over: a source may report more than the bundle looks at.
    Returns ``block``: rows in the order of the table, without those of unknown pairs; ``order`` is their place in it.
    Raises ``InputError`` if a key column is missing, times have no zone, or a channel's column is of a type that holds
    no numbers.
    """
    check_columns(table, unit)
    given = table.num_rows
    place = np.arange(given, dtype=np.int64)
    for name in key_columns(unit):
        if table.column(name).null_count:
            valid = pc.is_valid(table.column(name))
            place, table = place[valid.to_numpy()], table.filter(valid)
    number = _numbers(table, unit, known, book) if table.num_rows else np.zeros(0, np.int32)
    inside = number >= 0
    if not inside.all():
        place, table, number = place[inside], table.filter(pa.array(inside)), number[inside]
    series: dict[str, Series] = {}
    nulled = 0
    for channel in channels.values():
        if channel.name not in table.column_names:
            dtype = DTYPES[channel.kind]
            series[channel.name] = Series(np.zeros(len(number), dtype), np.zeros(len(number), dtype=np.bool_))
            continue
        column = table.column(channel.name)
        _check_type(column.type, channel.name)
        parsed = parse_values(column, channel, None, None)
        nulled += sum(int(rows.sum()) for rows in parsed.problems.values())
        values = np.where(parsed.valid, parsed.values, np.zeros(1, parsed.values.dtype))
        series[channel.name] = Series(values, parsed.valid)
    part = np.zeros(len(number), dtype=np.bool_)
    if unit == "gpu" and "mig_instance" in table.column_names:
        instance = table.column("mig_instance").cast(pa.string())
        part = np.asarray(pc.fill_null(pc.not_equal(instance, ""), False).to_numpy(), dtype=np.bool_)
    block = Block(
        unit=number,
        node=number,
        ms=epoch_ms(table.column("timestamp")),
        order=place,
        mig=part,
        count=_counts(table),
        series=series,
    )
    return block, given - len(number), nulled


def _numbers(table: pa.Table, unit: str, known: Mapping[Pair, int], book: PairBook) -> NDArray[np.int32]:
    codes, nodes, units = pair_codes(table, unit)
    distinct, where = np.unique(codes, return_inverse=True)
    found = np.empty(distinct.size, dtype=np.int32)
    for at, code in enumerate(distinct.tolist()):
        node = nodes[code % len(nodes)]
        pair = (node, node) if unit == "node" else (node, units[code // len(nodes)])
        number = book.get(pair)
        found[at] = number if number >= 0 else book.number(pair) if pair in known else -1
    return found[where]


def _counts(table: pa.Table) -> NDArray[np.int32]:
    if "sample_count" not in table.column_names or not pa.types.is_integer(table.schema.field("sample_count").type):
        return np.ones(table.num_rows, np.int32)
    counts = pc.fill_null(table.column("sample_count").cast(pa.int64()), 1).to_numpy()
    clipped: NDArray[np.int32] = np.clip(counts, 1, 2**31 - 1).astype(np.int32)
    return clipped


def _check_type(kind: pa.DataType, name: str) -> None:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_null(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
    ):
        raise InputError(f"the column {name!r} is of type {kind}", WHERE, "Give numbers.")
