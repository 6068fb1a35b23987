"""Numbers that stand for "no value": blanks of DCGM, all ones of AMD SMI, extremes of integers."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from telemetry.values.tables import read_table

_ROWS: Final = read_table("sentinels.csv")
_ALWAYS: Final = [(float(row["low"]), float(row["high"])) for row in _ROWS if row["applies"] == "always"]
_OUTSIDE: Final = [(float(row["low"]), float(row["high"])) for row in _ROWS if row["applies"] == "outside"]
_LOWEST: Final = min(low for low, _ in _ALWAYS)
_OF_64_BITS: Final = [(low, high) for low, high in _ALWAYS if low > 2.0**32]

WIDE_UNITS: Final = frozenset({"B/s", "mJ", "ns"})
"""Units whose ordinary values pass through the blanks of 32 bits: 2,147,483,648 B/s is a busy PCIe link."""


def is_sentinel(values: npt.ArrayLike, *, unit: str = "") -> npt.NDArray[np.bool_]:
    """Mark numbers that mean "not supported"; NaN and infinity are none. ``unit``: of the channel."""
    numbers = np.asarray(values).astype(np.float64, copy=False)
    # Nearly every column of real telemetry ends here.
    if not numbers.size or bool(np.nanmax(numbers, initial=-np.inf) < _LOWEST):
        return np.zeros(numbers.shape, np.bool_)
    return _within(numbers, _OF_64_BITS if unit in WIDE_UNITS else _ALWAYS)


def is_sentinel_outside(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Mark numbers that mean "no value" where the channel cannot have them, such as -1 of a counter."""
    return _within(numbers, _OUTSIDE)


def _within(numbers: npt.NDArray[np.float64], ranges: list[tuple[float, float]]) -> npt.NDArray[np.bool_]:
    mask = np.zeros(numbers.shape, np.bool_)
    for low, high in ranges:
        mask |= (numbers >= low) & (numbers <= high)
    return mask
