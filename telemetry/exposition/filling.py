"""From the numbers of a page to rows, for a page whose series are known: what a series is, is worked out once.

``assemble`` says what the rows are; this does the same for samples of one time, and keeps
flags exact that a float64 cannot hold.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from telemetry.channel import Kind
from telemetry.channels import is_sentinel
from telemetry.collect.series.identity import Series
from telemetry.collect.series.rows import CONFLICT, INEXACT, NOT_WHOLE, OUTSIDE, SENTINEL
from telemetry.schema import CHANNEL_TYPES, INSTANT

_EXACT: Final = 2.0**53
_INT32: Final = 2.0**31
_KEYS: Final = (("timestamp", INSTANT), ("node", pa.string()), ("gpu", pa.string()), ("mig_instance", pa.string()))

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Filling:
    """The rows and columns that the series of a page fill.

    ``series``: what each sample of the page is, in the order of the samples.
    """

    def __init__(self, series: Sequence[Series]) -> None:
        places = sorted({(each.gpu, each.mig_instance or "", each.node) for each in series})
        row_of = {place: row for row, place in enumerate(places)}
        self._kinds: dict[str, Kind] = {each.channel: each.kind for each in series}
        column_of = {name: column for column, name in enumerate(self._kinds)}
        self._rows = len(places)
        self._keys = (
            pa.array([node for _, _, node in places], pa.string()),
            pa.array([gpu for gpu, _, _ in places], pa.string()),
            pa.array([instance or None for _, instance, _ in places], pa.string()),
        )
        self._rows_of: dict[str, list[int]] = defaultdict(list)
        for row, (gpu, _, _) in enumerate(places):
            self._rows_of[gpu].append(row)
        cells: dict[int, list[int]] = defaultdict(list)
        for number, each in enumerate(series):
            cells[column_of[each.channel] * self._rows + row_of[each.gpu, each.mig_instance or "", each.node]].append(
                number
            )
        # Most cells have one series, or the parts of a sum; what the others hold depends on what has a value.
        easy = {cell: numbers for cell, numbers in cells.items() if _is_sum([series[each] for each in numbers])}
        self._easy = np.array([number for numbers in easy.values() for number in numbers], np.int64)
        self._easy_cell = np.array([cell for cell, numbers in easy.items() for _ in numbers], np.int64)
        self._has_sums = len(easy) != len(self._easy)
        self._hard = {
            cell: sorted(
                ((series[each].rank, series[each].part or "", each) for each in numbers),
            )
            for cell, numbers in cells.items()
            if cell not in easy
        }
        self._flags = np.array([number for number, each in enumerate(series) if each.kind == "flags"], np.int64)
        self._cell_of = {number: cell for cell, numbers in cells.items() for number in numbers}
        scale = np.array([each.scale for each in series], np.float64)
        self._scale = None if bool((scale == 1.0).all()) else scale
        self._schema = pa.schema([*_KEYS, *((name, CHANNEL_TYPES[kind]) for name, kind in self._kinds.items())])

    def fill(
        self, values: Floats, texts: Sequence[bytes], ms: int, found: Counter[str]
    ) -> tuple[pa.Table, dict[str, int]]:
        """Make the rows of one time.

        ``values``: the numbers; NaN where there is none; shape (n,).
        ``ms``: their time, in milliseconds since 1970, UTC.
        ``found``: values that could not be used are counted into it, by reason.
        Returns ``rows``: as of ``assemble``.
        Returns ``channels``: of each GPU that has a row, how many channels have a value on any of its rows.
        """
        unsupported = is_sentinel(values)
        usable = ~(np.isnan(values) | unsupported)
        if bool(unsupported.any()):
            found[SENTINEL] += int(unsupported.sum())
        numbers = np.where(usable, values, 0.0)
        if self._scale is not None:
            numbers *= self._scale
        total, valid = self._cells(numbers, usable, found)
        integers = self._large_flags(numbers, total, texts)
        shape = (len(self._kinds), self._rows)
        columns, present = total.reshape(shape), valid.reshape(shape)
        for column, kind in enumerate(self._kinds.values()):
            if kind in ("flags", "enum"):
                known = [cell - column * self._rows for cell in integers if cell // self._rows == column]
                _keep_whole(kind, columns[column], present[column], known, found)
        counts = {gpu: int(present[:, rows].any(axis=1).sum()) for gpu, rows in self._rows_of.items()}
        return self._table(columns, present, ms, integers), {gpu: count for gpu, count in counts.items() if count}

    def _cells(self, numbers: Floats, usable: Bools, found: Counter[str]) -> tuple[Floats, Bools]:
        size = len(self._kinds) * self._rows
        total, valid = np.zeros(size), np.zeros(size, np.bool_)
        chosen, has_value = numbers[self._easy], usable[self._easy]
        if self._has_sums:
            np.add.at(total, self._easy_cell, chosen)
            valid[self._easy_cell[has_value]] = True
        else:
            total[self._easy_cell], valid[self._easy_cell] = chosen, has_value
        for cell, members in self._hard.items():
            value = _decide(members, numbers, usable, found)
            if value is not None:
                total[cell], valid[cell] = value, True
        return total, valid

    def _large_flags(self, numbers: Floats, total: Floats, texts: Sequence[bytes]) -> dict[int, int]:
        """Return the flags of each cell where a float64 may have rounded them, read from the page's text."""
        if len(self._flags) == 0 or not bool((numbers[self._flags] >= _EXACT).any()):
            return {}
        integers = {}
        for number in self._flags[numbers[self._flags] >= _EXACT].tolist():
            cell = self._cell_of[number]
            if texts[number].isdigit() and total[cell] == numbers[number] == float(texts[number]):
                integers[cell] = int(texts[number])
        return integers

    def _table(self, columns: Floats, present: Bools, ms: int, integers: dict[int, int]) -> pa.Table:
        kept = np.flatnonzero(present.any(axis=0))
        told = set(np.flatnonzero(present.any(axis=1)).tolist())
        is_full = bool(present.all())
        rows = len(kept)
        stamps = pa.Array.from_buffers(INSTANT, rows, [None, pa.py_buffer(np.full(rows, ms, np.int64))])
        keys = self._keys if rows == self._rows else tuple(key.take(pa.array(kept)) for key in self._keys)
        arrays, names = [stamps, *keys], []
        with np.errstate(over="ignore"):  # a gauge beyond float32 becomes infinite, which the fold quarantines
            gauges = columns.astype(np.float32)
        for column, (name, kind) in enumerate(self._kinds.items()):
            if column not in told:
                continue
            names.append(name)
            target = CHANNEL_TYPES[kind]
            typed = gauges[column] if kind == "gauge" else columns[column].astype(target.to_pandas_dtype())
            for cell, value in integers.items():
                if cell // self._rows == column:
                    typed[cell % self._rows] = value
            if is_full:
                arrays.append(pa.Array.from_buffers(target, rows, [None, pa.py_buffer(typed)]))
            else:
                arrays.append(pa.array(typed[kept], type=target, mask=~present[column, kept]))
        if len(names) == len(self._kinds):
            return pa.Table.from_arrays(arrays, schema=self._schema)
        return pa.Table.from_arrays(arrays, names=[*(name for name, _ in _KEYS), *names])


def _is_sum(series: Sequence[Series]) -> bool:
    """Whether a cell is one series, or different parts of the same metric."""
    if len(series) == 1:
        return True
    parts = {each.part or "" for each in series}
    return len(parts) == len(series) and "" not in parts and len({each.rank for each in series}) == 1


def _decide(
    members: Sequence[tuple[int, str, int]], numbers: Floats, usable: Bools, found: Counter[str]
) -> float | None:
    """Return the value of a cell with several candidates (rank, part, number), given in that order, or None."""
    having = [member for member in members if usable[member[2]]]
    if not having:
        return None
    best, first_part, _ = having[0]
    chosen: dict[str, float] = {}
    for rank, part, number in having:
        if rank != best or (first_part == "" and part != ""):
            continue
        value = float(numbers[number])
        if value != chosen.setdefault(part, value):
            found[CONFLICT] += 1
    return sum(chosen.values())


def _keep_whole(kind: Kind, column: Floats, valid: Bools, known: Sequence[int], found: Counter[str]) -> None:
    """Take out what a column of integers cannot hold as it is; ``known`` are rows whose integer is known exactly."""
    if not valid.any():
        return
    whole = np.isfinite(column) & (column == np.floor(column))
    low, high = (0.0, np.inf) if kind == "flags" else (-_INT32, _INT32)
    inside = (column >= low) & (column < high)
    exact = np.abs(column) < _EXACT
    exact[known] = True
    for reason, is_bad in ((NOT_WHOLE, ~whole), (OUTSIDE, whole & ~inside), (INEXACT, whole & inside & ~exact)):
        count = int((valid & is_bad).sum())
        if count:
            found[reason] += count
    bad = ~(whole & inside & exact)
    valid[bad], column[bad] = False, 0.0
