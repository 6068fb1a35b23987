"""Float32 numbers as unsigned integers of the same order, so that a split is one comparison of integers.

A positive float's bits rise with it, a negative one's fall: flipping the sign bit of the one and all bits of the other
gives integers in the order of the numbers. The two zeros share a key, infinities have theirs, and NaN is 0, below all.

Integers for two reasons. A missing value can be sent either way without a second test: ``key - 1`` wraps 0 round to the
largest integer, so a node compares ``key - shift`` with ``limit - shift``, and its shift (0 or 1) says whether NaN is
the smallest value or the largest. And where a library has switched the processor's handling of denormal numbers off,
"x < 0" as "x <= -1.4e-45" would go wrong in floats; integers do not notice.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

Keys = np.ndarray[Any, np.dtype[np.uint32]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

MISSING: Final = 0
"""Key of NaN."""

ALWAYS_LEFT: Final = 0xFFFFFFFF
"""A limit that no key is above."""

ZERO_BAND: Final = np.float32(1e-35)
"""LightGBM's zero: it takes every value within this of 0 for 0 (``kZeroThreshold`` in its meta.h)."""

_SIGN: Final = 0x80000000
_INFINITE: Final = 0x7F800000


def keys_of(values: np.ndarray) -> Keys:
    """Give the keys of numbers.

    ``values``: any numbers; NaN allowed.
    Returns: same shape: ordered as the numbers are, 0 for NaN.
    """
    bits = np.asarray(values, np.float32).view(np.uint32)
    negative = bits >= _SIGN
    keys = np.where(negative, ~bits, bits | np.uint32(_SIGN))
    keys[bits == _SIGN] = _SIGN  # -0.0 is 0.0
    keys[(bits & np.uint32(_SIGN - 1)) > _INFINITE] = MISSING
    return keys.astype(np.uint32)


def limits_at_most(thresholds: Floats) -> Keys:
    """Give the largest key of a float32 x with ``x <= threshold``.

    ``thresholds``: not NaN.
    Returns: a float32 x is at most the threshold exactly if its key is at most this.
    """
    wide = np.asarray(thresholds, np.float64)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    keys = keys_of(narrow)
    keys[narrow.astype(np.float64) > wide] -= np.uint32(1)
    return keys


def limits_below(thresholds: np.ndarray) -> Keys:
    """Give the largest key of a float32 x with ``x < threshold``, for float32 thresholds that are not NaN."""
    return keys_of(thresholds) - np.uint32(1)


ZERO_LOW: Final = int(keys_of(np.array([-ZERO_BAND]))[0])
"""Key of the lowest number that LightGBM takes for 0."""

ZERO_HIGH: Final = int(keys_of(np.array([ZERO_BAND]))[0])
"""Key of the highest number that LightGBM takes for 0."""
