"""The signed logarithm of features, centred, scaled and clipped: see :class:`models.prepared.SignedLogScaler`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_TILE = 1 << 19
"""Values worked on at a time, so that what lies between two steps stays in the cache."""


def signed_log(values: np.ndarray) -> np.ndarray:
    """Give the logarithm of one plus the size of each value, with the value's sign; NaN stays."""
    out = np.empty_like(values, order="C")
    for rows in _tiles(values):
        size = np.abs(values[rows], out=out[rows])
        np.log1p(size, out=size)
        size *= np.sign(values[rows])
    return out


def scaled(values: np.ndarray, center: np.ndarray, scale: np.ndarray, clip: float) -> np.ndarray:
    """Give rows as a classifier that takes no NaN is given them.

    ``values``: Features; NaN: unknown; shape (n_rows, n_features).
    ``center``, ``scale``: median and spread of each feature's signed logarithm; shape (n_features,).
    Returns: within ``[-clip, clip]``, 0 for NaN.
    """
    return scale_logs(signed_log(values), center, scale, clip)


def scale_logs(logs: np.ndarray, center: np.ndarray, scale: np.ndarray, clip: float) -> np.ndarray:
    """Do the rest of :func:`scaled` in place, where the logarithms are known already."""
    center, scale = center.astype(logs.dtype), scale.astype(logs.dtype)
    for rows in _tiles(logs):
        spread = logs[rows]
        spread -= center
        spread /= scale
        np.clip(spread, -clip, clip, out=spread)
        np.nan_to_num(spread, nan=0.0, copy=False)
    return logs


def _tiles(values: np.ndarray) -> Iterator[slice]:
    step = max(1, _TILE // max(1, values.shape[-1]))
    return (slice(begin, begin + step) for begin in range(0, len(values), step))
