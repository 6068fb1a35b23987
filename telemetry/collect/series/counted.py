"""Telling the samples of channels from those of the exporter's XID counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from telemetry.collect.series.identity import Series, XidCount

_Kind = TypeVar("_Kind", Series, XidCount)


@dataclass(frozen=True, slots=True)
class Told(Generic[_Kind]):
    """Samples of series of one sort.

    ``index``: the series of each sample; shape (n,).
    ``ms``: milliseconds since 1970, UTC; shape (n,).
    ``values``: shape (n,).
    """

    series: list[_Kind]
    index: npt.NDArray[np.int32]
    ms: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.index)


def split(
    entries: Sequence[Series | XidCount],
    index: npt.NDArray[np.int32],
    ms: npt.NDArray[np.int64],
    values: npt.NDArray[np.float64],
) -> tuple[Told[Series], Told[XidCount]]:
    """Split samples, and leave out the entries that have none.

    ``index``, ``ms``, ``values``: the entry, the time in milliseconds and the value of each sample; shape (n,).
    """
    used, place = np.unique(index, return_inverse=True)
    chosen = [entries[number] for number in used.tolist()]
    is_count = np.array([isinstance(each, XidCount) for each in chosen], np.bool_)
    number = np.where(is_count, np.cumsum(is_count), np.cumsum(~is_count)) - 1
    series = [each for each in chosen if isinstance(each, Series)]
    counts = [each for each in chosen if isinstance(each, XidCount)]
    index = number[place].astype(np.int32)
    if not counts:
        return Told(series, index, ms, values), Told(counts, index[:0], ms[:0], values[:0])
    of_count = is_count[place]
    return (
        Told(series, index[~of_count], ms[~of_count], values[~of_count]),
        Told(counts, index[of_count], ms[of_count], values[of_count]),
    )


def watched(told: Told[Series]) -> dict[str, tuple[int, int]]:
    """Return when each GPU was first and last seen, in milliseconds."""
    first = np.full(len(told.series), np.iinfo(np.int64).max)
    last = np.full(len(told.series), np.iinfo(np.int64).min)
    np.minimum.at(first, told.index, told.ms)
    np.maximum.at(last, told.index, told.ms)
    seen: dict[str, tuple[int, int]] = {}
    for each, low, high in zip(told.series, first.tolist(), last.tolist(), strict=True):
        held = seen.get(each.gpu, (low, high))
        seen[each.gpu] = (min(held[0], low), max(held[1], high))
    return seen
