"""Times as int64 milliseconds since 1970 UTC, and columns of text with nulls."""

from datetime import datetime, timedelta
from typing import Literal

import numpy as np
import pandas as pd

from foundation.errors import InputError
from foundation.instants import to_ms
from foundation.times import NEVER, BoolArray, Int64Array, absent, milliseconds, text

__all__ = [
    "NEVER",
    "BoolArray",
    "Int64Array",
    "UnitKind",
    "absent",
    "coded",
    "duration_ms",
    "instant_ms",
    "instants",
    "milliseconds",
    "text",
]

UnitKind = Literal["gpu", "node"]


def instants(ms: Int64Array) -> pd.DatetimeIndex:
    """Undo :func:`milliseconds`: give ``datetime64[ms, UTC]``, :data:`NEVER` as NaT."""
    values = np.asarray(ms, dtype=np.int64).view("datetime64[ms]").copy()
    values[np.asarray(ms) >= NEVER] = np.datetime64("NaT", "ms")
    return pd.DatetimeIndex(values).tz_localize("UTC")


def instant_ms(value: datetime | None) -> int:
    """Read one aware time as milliseconds since the epoch, None as :data:`NEVER`."""
    if value is None:
        return NEVER
    if value.tzinfo is None:
        raise InputError(f"{value.isoformat()} has no time zone", "a time given to features", "Give an aware time.")
    return to_ms(value)


def duration_ms(value: timedelta) -> int:
    """Give a duration in whole milliseconds."""
    return value // timedelta(milliseconds=1)


def coded(names: pd.Series) -> tuple[Int64Array, pd.Index]:
    """Give each row's position among the sorted distinct names, -1 for null; categories are not written out for it."""
    if not isinstance(names.dtype, pd.CategoricalDtype):
        codes, distinct = pd.factorize(names.astype("str"), sort=True)
        return codes.astype(np.int64, copy=False), distinct
    codes = names.cat.codes.to_numpy()
    used = np.flatnonzero(np.bincount(codes[codes >= 0], minlength=len(names.cat.categories)))
    position, distinct = pd.factorize(names.cat.categories[used].astype("str"), sort=True)
    # a missing name has code -1, which reads the last entry
    place = np.full(len(names.cat.categories) + 1, -1, dtype=np.int64)
    place[used] = position
    return place[codes], distinct
