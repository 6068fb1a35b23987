"""Lower bounds of a precision, for alerts of which those of one node or cause depend on each other."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from policy.episodes import Bools, Ints


@dataclass(frozen=True, slots=True)
class PrecisionBound:
    """A precision and how far below it the truth may lie.

    ``alerts``, ``hits``: alerts with a known outcome, and how many of them were right.
    ``clusters``: nodes, and causes that several nodes share, that the alerts come from.
    ``effective``: how many independent alerts they are worth; at most ``clusters``.
    ``precision``: ``hits / alerts``; NaN without alerts.
    ``lower``: One-sided lower confidence bound; 0 without alerts.
    """

    alerts: int
    hits: int
    clusters: int
    effective: float
    precision: float
    lower: float


NO_ALERTS = PrecisionBound(0, 0, 0, 0.0, math.nan, 0.0)


def binomial_lower(hits: float, trials: float, confidence: float) -> float:
    """Give the one-sided lower bound of Clopper and Pearson (1934) of a share.

    ``hits``, ``trials``: need not be whole: an effective sample size may represent ``trials``.
    ``confidence``: between 0 and 1; 0.9: the bound lies above the truth in at most one of ten samples.
    Returns: the bound; 0 without hits.
    """
    if trials <= 0 or hits <= 0:
        return 0.0
    alpha = 1 - confidence
    if hits >= trials:
        return float(alpha ** (1 / trials))
    from scipy.special import betaincinv  # takes a third of a second to import; most rounds do not need it

    # P(at least `hits` of `trials` | p) = I_p(hits, trials - hits + 1)
    return float(betaincinv(hits, trials - hits + 1, alpha))


def precision_bound(hit: Bools, cluster: Ints, confidence: float) -> PrecisionBound:
    """Bound the precision of alerts, each with whether it was right and its cluster; both of shape (alerts,)."""
    _, group = np.unique(cluster, return_inverse=True)
    return bound_of_sizes(np.bincount(group), np.bincount(group, weights=hit), confidence)


def bound_of_sizes(size: npt.NDArray[Any], right: npt.NDArray[Any], confidence: float) -> PrecisionBound:
    """Bound the precision of alerts of which those of one cluster may depend on each other in any way.

    ``size``, ``right``: alerts of each cluster, and how many of them were right; shape (clusters,).

    The effective number of alerts is the smallest of three: the alerts themselves; alerts over the design effect of a
    cluster sample (Korn and Graubard, Survey Methodology 24, 1998), which counts what was seen; and Kish's
    ``(sum n)^2 / sum n^2``, which takes all alerts of a cluster for one and never exceeds the number of clusters: it
    keeps a sample without a single false alert from promising too much.
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
