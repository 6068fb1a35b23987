"""Values of one channel: the unit in the header of its column, their range and their type."""

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from telemetry.dataset.channels import Channel
from telemetry.importing.samples.block import DTYPES
from telemetry.values.names import EXACT_NAMES
from telemetry.values.numbers import Numbers, is_sentinel_outside, split_header

_LIMITS: Final[Mapping[str, tuple[float, float]]] = {"flags": (0.0, 2.0**53), "enum": (-(2.0**31), 2.0**31 - 1)}
# Ranges of integer kinds; float64 cannot represent larger flags exactly.


def unit_of_column(name: str) -> str | None:
    """Return the unit in a header (``memory.used [MiB]``), or the default unit of a known source column."""
    base, unit = split_header(name)
    return unit or (EXACT_NAMES[base].unit if base in EXACT_NAMES else None)


def parse_values(
    numbers: Numbers, channel: Channel, scale: float | None, offset: float | None
) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.bool_], dict[str, npt.NDArray[np.bool_]], int]:
    """Convert and validate the values of one channel.

    ``scale``, ``offset``: ``value * scale + offset`` is applied before the range check.
    Returns: values of the channel's type, the validity mask, masks of invalid values by reason, and the number of "not
    supported" values.
    """
    raw = values = numbers.values
    valid = ~np.isnan(values)
    if scale is not None or offset is not None:
        values = values * (1.0 if scale is None else scale) + (offset or 0.0)
    low, high = _LIMITS.get(channel.kind, (-np.inf, np.inf))
    broken = valid & np.isfinite(values) & (channel.kind in _LIMITS) & (values != np.floor(values))
    low = max(low, -np.inf if channel.low is None else channel.low)
    high = min(high, np.inf if channel.high is None else channel.high)
    out_of_range = valid & ~broken & ((values < low) | (values > high) | ~np.isfinite(values))
    if out_of_range.any():
        blank = out_of_range & is_sentinel_outside(np.where(out_of_range, raw, 0.0))
        valid &= ~blank
        out_of_range &= ~blank
    problems = {"not a number": numbers.unreadable, "not an integer": broken, "value out of range": out_of_range}
    valid &= ~broken & ~out_of_range
    sentinels = int((~valid & ~broken & ~out_of_range & (numbers.absent | ~np.isnan(raw))).sum())
    result = np.where(valid, values, 0.0).astype(DTYPES[channel.kind])
    return result, valid, {reason: rows for reason, rows in problems.items() if rows.any()}, sentinels
