"""Bootstrap by unit: whole GPUs are drawn with replacement, because the rows of one GPU are not independent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from models.metrics import Floats

LEVEL = 0.95
"""Coverage of every interval that an evaluation reports."""

_TOO_FEW = 20
"""Fewer finite replicates than this give no interval (a statistic that is mostly undefined has none worth reading)."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds of a percentile bootstrap interval; NaN where there is none.

    Attributes
    ----------
    low, high : float
        The bounds at :data:`LEVEL`.
    """

    low: float
    high: float


def resample_units(units: int, replicates: int, seed: int) -> Floats:
    """Draw bootstrap samples of units.

    Parameters
    ----------
    units : int
        Number of units in the evaluation.
    replicates : int
        Number of samples; 0 gives an empty array.
    seed : int
        Seed; the same arguments give the same draws.

    Returns
    -------
    ndarray of float64, shape (replicates, units)
        How often each unit was drawn; every row sums to ``units``.
    """
    if units == 0 or replicates == 0:
        return np.zeros((replicates, units))
    rng = np.random.default_rng([seed, units])
    out = np.empty((replicates, units))
    for replicate in range(replicates):
        out[replicate] = np.bincount(rng.integers(0, units, units), minlength=units)
    return out


def interval(values: Floats, level: float = LEVEL) -> Interval:
    """Percentile interval of bootstrap replicates.

    Parameters
    ----------
    values : ndarray, shape (replicates,)
        The statistic in each replicate; NaN where it is undefined.
    level : float
        Coverage.

    Returns
    -------
    Interval
        NaN bounds where fewer than twenty replicates, or fewer than half of them, are finite.
    """
    finite = values[np.isfinite(values)]
    if finite.size < max(_TOO_FEW, values.size / 2):
        return Interval(np.nan, np.nan)
    low, high = np.quantile(finite, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))
