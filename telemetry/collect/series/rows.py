"""From samples of series, one number each, to rows of a GPU's channels at one time."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from telemetry.collect.series.identity import Series
from telemetry.dataset.channels import CATALOGUE
from telemetry.dataset.schema import CHANNEL_TYPES, INSTANT
from telemetry.values.numbers import WIDE_UNITS, is_sentinel

CONFLICT: Final = "two different values at one time"
INEXACT: Final = "too large to be exact"
INFINITE: Final = "not a finite number"
NOT_WHOLE: Final = "not a whole number"
OUTSIDE: Final = "outside what its type holds"
NO_NUMBER: Final = "not a number"
OTHER_SERIES: Final = "another series has the value"
SENTINEL: Final = "a value that means not supported"
"""What can be wrong with a value: the keys of the problems that :func:`assemble` counts."""

_EXACT: Final = 2.0**53
_INT32: Final = 2.0**31
_WHOLE: Final = -1


def assemble(
    series: Sequence[Series],
    index: npt.NDArray[np.int32],
    ms: npt.NDArray[np.int64],
    values: npt.NDArray[np.float64],
    *,
    problems: Counter[str],
) -> pa.Table:
    """Turn samples of series into rows of channels; NaN (as stale markers are) and sentinels are no values.

    ``index`` and ``ms`` are the series and the time (since 1970, UTC) of each of ``values``; shape (n,). Values that
    could not be used are counted into ``problems``, by reason.
    Returns: the layout of landed samples, with the channels that have a value in the order of ``series``: one row for
    each (gpu, node, mig_instance, timestamp) that has a value, sorted by (gpu, timestamp).

    Where a channel of a GPU has several samples at one time: of several metrics the lowest rank counts; the whole
    counts rather than its parts; parts are summed; equal values of the same thing count once, and of different ones
    the first given counts and the others are problems.
    """
    reasons: Counter[str] = Counter()
    index, ms, values = np.asarray(index), np.asarray(ms, np.int64), np.asarray(values, np.float64)
    usable = _usable(series, index, values, reasons)
    index, ms, values = index[usable], ms[usable], values[usable]

    def by_sample(fact: Callable[[Series], float], kind: type = np.int32) -> npt.NDArray[Any]:
        return np.array([fact(entry) for entry in series], kind)[index]

    # What one GPU may have at one time is usually one row; with MIG, one more for each instance.
    places = sorted({(entry.gpu, entry.mig_instance or "", entry.node) for entry in series})
    place_numbers = {place: number for number, place in enumerate(places)}
    gpu_numbers = {gpu: number for number, (gpu, _, _) in enumerate(places)}
    channels = {entry.channel: entry.kind for entry in series}
    channel_numbers = {name: number for number, name in enumerate(channels)}
    part_numbers = {part: number for number, part in enumerate(sorted({entry.part for entry in series if entry.part}))}
    place = by_sample(lambda entry: place_numbers[entry.gpu, entry.mig_instance or "", entry.node])
    channel = by_sample(lambda entry: channel_numbers[entry.channel])
    part = by_sample(lambda entry: part_numbers[entry.part] if entry.part else _WHOLE)
    rank = by_sample(lambda entry: entry.rank)
    values = values * by_sample(lambda entry: entry.scale, np.float64)
    # Stable: samples of the same thing stay in the order given.
    order = np.lexsort((part, rank, channel, place, ms, by_sample(lambda entry: gpu_numbers[entry.gpu])))
    part, rank, channel, place, ms, values = _at(order, part, rank, channel, place, ms, values)

    is_row_start = _changes(place, ms)
    row_place, row_ms = place[is_row_start], ms[is_row_start]
    row = np.cumsum(is_row_start) - 1
    # A cell begins with its lowest rank, and there with the whole if it is given.
    is_cell_start = is_row_start | _changes(channel)
    cell = np.cumsum(is_cell_start) - 1
    wanted = (rank == rank[is_cell_start][cell]) & ((part == _WHOLE) | (part[is_cell_start][cell] != _WHOLE))
    reasons[OTHER_SERIES] += int((~wanted).sum())
    row, channel, part, cell, values = _at(wanted, row, channel, part, cell, values)
    is_first = _changes(cell, part)
    reasons[CONFLICT] += int((values != values[is_first][np.cumsum(is_first) - 1]).sum())
    row, channel, cell, values = _at(is_first, row, channel, cell, values)
    start = np.flatnonzero(_changes(cell))
    if len(start):
        row, channel, values = row[start], channel[start], np.add.reduceat(values, start)

    exact = _exact(list(channels.values()), channel, values, reasons)
    used, row = np.unique(row[exact], return_inverse=True)
    channel, values = channel[exact], values[exact]
    taken = pa.array(row_place[used])
    arrays: dict[str, pa.Array] = {"timestamp": pa.array(row_ms[used]).cast(INSTANT)}
    for name, texts in (
        ("node", [node for _, _, node in places]),
        ("gpu", [gpu for gpu, _, _ in places]),
        ("mig_instance", [instance or None for _, instance, _ in places]),
    ):
        arrays[name] = pa.array(texts, pa.string()).take(taken)
    for number, (name, kind) in enumerate(channels.items()):
        mine = channel == number
        if mine.any():
            column, is_missing = np.zeros(len(used)), np.ones(len(used), np.bool_)
            column[row[mine]], is_missing[row[mine]] = values[mine], False
            target = CHANNEL_TYPES[kind]
            with np.errstate(over="ignore"):  # a gauge beyond float32 becomes infinite, which is quarantined
                arrays[name] = pa.array(column.astype(target.to_pandas_dtype()), type=target, mask=is_missing)
    problems.update(+reasons)
    return pa.table(arrays)


def _usable(
    series: Sequence[Series], index: npt.NDArray[np.int32], values: npt.NDArray[np.float64], reasons: Counter[str]
) -> npt.NDArray[np.bool_]:
    """Mark finite values; the others are counted."""
    wide = np.array([_is_wide(entry.channel) for entry in series], np.bool_)[index]
    unsupported = np.where(wide, is_sentinel(values, unit="B/s"), is_sentinel(values))
    usable = ~unsupported & np.isfinite(values)
    for reason, mask in (
        (SENTINEL, unsupported),
        (INFINITE, np.isinf(values) & ~unsupported),
        (NO_NUMBER, np.isnan(values) & ~unsupported),
    ):
        reasons[reason] += int(mask.sum())
    return usable


@cache
def _is_wide(channel: str) -> bool:
    base = CATALOGUE.get(re.sub(r"_(?:min|max|rise)$", "", channel))
    return base is not None and base.unit in WIDE_UNITS


def _at(where: npt.NDArray[Any], *columns: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Take the same entries of each column."""
    return [column[where] for column in columns]


def _changes(*columns: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Mark where one of sorted columns differs from the entry before."""
    changed = np.ones(len(columns[0]), np.bool_)
    changed[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return changed


def _exact(
    kinds: list[str], channel: npt.NDArray[Any], values: npt.NDArray[np.float64], reasons: Counter[str]
) -> npt.NDArray[np.bool_]:
    """Mark what the columns hold as it is: those of flags and enums are integers."""
    is_flags = np.array([kind == "flags" for kind in kinds], np.bool_)[channel]
    is_enum = np.array([kind == "enum" for kind in kinds], np.bool_)[channel]
    is_integer = is_flags | is_enum
    whole = np.isfinite(values) & (values == np.floor(values))
    inside = np.where(is_flags, values >= 0.0, (values >= -_INT32) & (values < _INT32))
    exact = np.abs(values) < _EXACT
    for reason, mask in ((NOT_WHOLE, ~whole), (OUTSIDE, whole & ~inside), (INEXACT, whole & inside & ~exact)):
        reasons[reason] += int((is_integer & mask).sum())
    return ~is_integer | (whole & inside & exact)
