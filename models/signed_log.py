"""The signed logarithm of features, centred, scaled and clipped: see :class:`models.prepared.SignedLogScaler`."""

from __future__ import annotations

import numpy as np


def signed_log(values: np.ndarray) -> np.ndarray:
    """Give the logarithm of one plus the size of each value, with the value's sign; NaN stays."""
    return np.sign(values) * np.log1p(np.abs(values))


def scaled(values: np.ndarray, center: np.ndarray, scale: np.ndarray, clip: float) -> np.ndarray:
    """Give rows as a classifier that takes no NaN is given them.

    Parameters
    ----------
    values : ndarray of float, shape (n_rows, n_features)
        Features; NaN: unknown.
    center, scale : ndarray of float64, shape (n_features,)
        Median and spread of each feature's signed logarithm.
    clip : float
        Scaled values beyond this are cut to it.

    Returns
    -------
    ndarray, shape and type of ``values``
        Within ``[-clip, clip]``, 0 for NaN.
    """
    spread = (signed_log(values) - center.astype(values.dtype)) / scale.astype(values.dtype)
    return np.nan_to_num(np.clip(spread, -clip, clip), nan=0.0, copy=False)
