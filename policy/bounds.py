"""Lower confidence bounds of precision for clustered alerts (by node or common cause)."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from policy.episodes import Bools, Ints


@dataclass(frozen=True, slots=True)
class PrecisionBound:
    """A precision with its lower confidence bound.

    ``alerts``, ``hits``: alerts with a known outcome, and true positives among them.
    ``clusters``: distinct nodes, or causes that several nodes share, behind the alerts.
    ``effective``: effective sample size; at most ``clusters``.
    ``precision``: ``hits / alerts``; NaN without alerts.
    ``lower``: one-sided lower confidence bound; 0 without alerts.
    """

    alerts: int
    hits: int
    clusters: int
    effective: float
    precision: float
    lower: float


NO_ALERTS = PrecisionBound(0, 0, 0, 0.0, math.nan, 0.0)


def binomial_lower(hits: float, trials: float, confidence: float) -> float:
    """Return the one-sided lower bound of a share by Clopper and Pearson (1934); 0 without hits.

    ``hits``, ``trials``: need not be integers: ``trials`` may be an effective sample size.
    ``confidence``: between 0 and 1; with 0.9, the bound exceeds the true share in at most one of ten samples.
    """
    if trials <= 0 or hits <= 0:
        return 0.0
    alpha = 1 - confidence
    if hits >= trials:
        return float(alpha ** (1 / trials))
    from scipy.special import betaincinv  # the import takes a third of a second, and most rounds do not need it

    # P(at least `hits` of `trials` | p) = I_p(hits, trials - hits + 1)
    return float(betaincinv(hits, trials - hits + 1, alpha))


def precision_bound(hit: Bools, cluster: Ints, confidence: float) -> PrecisionBound:
    """Bound the precision of alerts from their outcomes and clusters; both of shape (alerts,)."""
    _, group = np.unique(cluster, return_inverse=True)
    return bound_of_sizes(np.bincount(group), np.bincount(group, weights=hit), confidence)


def bound_of_sizes(size: npt.NDArray[Any], right: npt.NDArray[Any], confidence: float) -> PrecisionBound:
    """Bound the precision of alerts with arbitrary dependence within clusters.

    ``size``, ``right``: alerts of each cluster, and true positives among them; shape (clusters,).

    The effective sample size is the minimum of three: the number of alerts; that number over the observed design effect
    of a cluster sample (Korn and Graubard, Survey Methodology 24, 1998); and Kish's ``(sum n)^2 / sum n^2``, which
    assumes full dependence within clusters and never exceeds the number of clusters. The last one keeps the bound
    conservative in a sample without false positives.
    """
    clusters, alerts, hits = len(size), float(size.sum()), float(right.sum())
    if clusters == 0:
        return NO_ALERTS
    precision = hits / alerts
    effective = min(alerts, alerts**2 / float((size.astype(np.float64) ** 2).sum()))
    if clusters > 1 and 0 < precision < 1:
        spread = float(((right - precision * size) ** 2).sum())
        variance = clusters / (clusters - 1) * spread / alerts**2
        if variance > 0:
            effective = min(effective, precision * (1 - precision) / variance)
    effective = max(effective, 1.0)
    lower = binomial_lower(precision * effective, effective, confidence)
    return PrecisionBound(int(alerts), int(hits), clusters, effective, precision, lower)
