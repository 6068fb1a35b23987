"""Columns of times as int64 milliseconds since 1970 UTC, and columns of text with nulls."""

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from foundation.errors import InputError

NEVER = 2**62
"""Milliseconds since the epoch of something that has not happened (a null time)."""

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


def milliseconds(values: Any, column: str = "timestamp") -> Int64Array:
    """Read times as int64 milliseconds since the epoch, null as :data:`NEVER`.

    Raises ``InputError`` if the values are not times with a time zone.
    """
    series = pd.Series(values)
    if not isinstance(series.dtype, pd.DatetimeTZDtype):
        if len(series) == 0 or series.isna().all():
            return np.full(len(series), NEVER, dtype=np.int64)
        raise InputError(
            f"{series.dtype} where times with a time zone are needed",
            f"column {column}",
            "Give the column as datetime64[ms, UTC].",
        )
    missing = series.isna().to_numpy()
    out = series.dt.as_unit("ms").astype("int64").to_numpy().copy()
    out[missing] = NEVER
    return out.astype(np.int64, copy=False)


def text(values: Any) -> NDArray[np.object_]:
    """Read a string column as objects, null as None."""
    series = pd.Series(values).astype(object)
    if not series.hasnans:
        return np.asarray(series.to_numpy(), dtype=object)
    return np.asarray(series.where(series.notna(), None).to_numpy(), dtype=object)


def absent(values: NDArray[np.object_]) -> BoolArray:
    """Where a column read by :func:`text` is null."""
    return np.asarray(pd.isna(values), dtype=bool)
