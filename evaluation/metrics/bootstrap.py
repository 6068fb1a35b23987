"""Bootstrap by cluster: whole nodes are drawn with replacement, because rows and GPUs of one node are not independent.

A cause that several nodes share is a cluster too (:func:`policy.incidents.clusters`): drawn as one, with the decisions
that it made true on all of its nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evaluation.metrics.metrics import Floats

LEVEL = 0.95
"""Coverage of every interval that an evaluation reports."""

_TOO_FEW = 20
"""Fewer finite replicates than this give no interval (a statistic that is mostly undefined has none worth reading)."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds of a percentile bootstrap interval; NaN where there is none.

    ``low``, ``high``: the bounds at :data:`LEVEL`.
    """

    low: float
    high: float


def resample(clusters: int, replicates: int, seed: int) -> Floats:
    """Draw bootstrap samples of clusters.

    ``replicates``: number of samples; 0 gives an empty array.
    Returns: how often each cluster was drawn; every row sums to ``clusters``; shape (replicates, clusters).
    """
    if clusters == 0 or replicates == 0:
        return np.zeros((replicates, clusters))
    rng = np.random.default_rng([seed, clusters])
    out = np.empty((replicates, clusters))
    for replicate in range(replicates):
        out[replicate] = np.bincount(rng.integers(0, clusters, clusters), minlength=clusters)
    return out


def honest_interval(values: Floats, *, point: float, counts: Floats, level: float = LEVEL) -> Interval:
    """Interval of a share; exact where the share is 0 or 1.

    Resampling what holds no hit gives no hit: the percentile interval of such a share is [0, 0], which claims more than
    is known. There the bounds are Clopper and Pearson's (1934) for 0 or n of n, which with n clusters is 3.7 / n, the
    rule of three two-sided. The rows of a cluster are not independent, so n counts clusters, and as they differ in
    rows, it is their effective number ``(sum of rows)^2 / sum of squared rows`` (Kish 1965).

    ``values``: the share in each replicate; empty: no interval was asked for; shape (replicates,).
    ``point``: the share itself.
    ``counts``: rows of each cluster in the denominator of the share; shape (clusters,).
    Returns: as :func:`interval` where the share is neither 0 nor 1, or where nothing was resampled.
    """
    squares = float(np.square(counts).sum())
    if values.size == 0 or point not in (0.0, 1.0) or squares == 0:
        return interval(values, level)
    effective = float(counts.sum()) ** 2 / squares
    reach = 1 - ((1 - level) / 2) ** (1 / effective)
    return Interval(0.0, reach) if point == 0 else Interval(1 - reach, 1.0)


def interval(values: Floats, level: float = LEVEL) -> Interval:
    """Percentile interval of bootstrap replicates.

    ``values``: the statistic in each replicate; NaN where it is undefined; shape (replicates,).
    Returns: NaN bounds where fewer than twenty replicates, or fewer than half of them, are finite.
    """
    finite = values[np.isfinite(values)]
    if finite.size < max(_TOO_FEW, values.size / 2):
        return Interval(np.nan, np.nan)
    low, high = np.quantile(finite, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))
