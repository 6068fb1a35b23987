"""Conversions of scalars and columns: times as int64 milliseconds since 1970 UTC, and strings with nulls."""

from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from foundation.errors import InputError
from foundation.instants import to_ms

NEVER = 2**62
"""Sentinel for a null time, in milliseconds: the event has not happened."""

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


def milliseconds(values: Any, column: str = "timestamp") -> Int64Array:
    """Convert aware times to int64 Unix milliseconds, null to :data:`NEVER`; raise ``InputError`` for others."""
    series = pd.Series(values)
    if not isinstance(series.dtype, pd.DatetimeTZDtype):
        if len(series) == 0 or series.isna().all():
            return np.full(len(series), NEVER, dtype=np.int64)
        raise InputError(
            f"{series.dtype} instead of times with a time zone",
            f"column {column}",
            "Give the column as datetime64[ms, UTC].",
        )
    missing = series.isna().to_numpy()
    out = series.dt.as_unit("ms").astype("int64").to_numpy().copy()
    out[missing] = NEVER
    return out.astype(np.int64, copy=False)


def text(values: Any) -> NDArray[np.object_]:
    """Convert a string column to an object array, null to None."""
    series = pd.Series(values).astype(object)
    if not series.hasnans:
        return np.asarray(series.to_numpy(), dtype=object)
    return np.asarray(series.where(series.notna(), None).to_numpy(), dtype=object)


def is_null(values: NDArray[np.object_]) -> BoolArray:
    """Mask of nulls in a column from :func:`text`."""
    return np.asarray(pd.isna(values), dtype=bool)


def instants(ms: Int64Array) -> pd.DatetimeIndex:
    """Invert :func:`milliseconds`: return ``datetime64[ms, UTC]``, :data:`NEVER` as NaT."""
    values = np.asarray(ms, dtype=np.int64).view("datetime64[ms]").copy()
    values[np.asarray(ms) >= NEVER] = np.datetime64("NaT", "ms")
    return pd.DatetimeIndex(values).tz_localize("UTC")


def instant_ms(value: datetime | None) -> int:
    """Convert an aware datetime to milliseconds since the epoch, None to :data:`NEVER`."""
    if value is None:
        return NEVER
    if value.tzinfo is None:
        raise InputError(f"{value.isoformat()} has no time zone", "a time given to features", "Give an aware time.")
    return to_ms(value)


def duration_ms(value: timedelta) -> int:
    """Return a duration in whole milliseconds, rounded down."""
    return value // timedelta(milliseconds=1)


def name_codes(names: pd.Series) -> tuple[Int64Array, pd.Index]:
    """Return each row's position among the sorted distinct names (-1 for null), and the names; keeps categories."""
    if not isinstance(names.dtype, pd.CategoricalDtype):
        codes, distinct = pd.factorize(names.astype("str"), sort=True)
        return codes.astype(np.int64, copy=False), distinct
    codes = names.cat.codes.to_numpy()
    used = np.flatnonzero(np.bincount(codes[codes >= 0], minlength=len(names.cat.categories)))
    position, distinct = pd.factorize(names.cat.categories[used].astype("str"), sort=True)
    # null has code -1, which indexes the last entry
    place = np.full(len(names.cat.categories) + 1, -1, dtype=np.int64)
    place[used] = position
    return place[codes], distinct
