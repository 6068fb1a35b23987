"""Ranking and calibration metrics of arrays, with ties and cluster weights; bootstrap samples and intervals.

Every ranking metric is a function of the number of labelled rows of each cluster in each *segment* of the ranking, so
one sparse product yields the point estimate and all bootstrap replicates (see :class:`Ranking`).
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

CALIBRATION_EDGES: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.995, 0.999, 1.0)
"""Quantiles of risk at the edges of calibration bins: deciles, with the last one split because alerts are in it."""

_CELLS_PER_CHUNK = 8_000_000
"""Maximum size of a dense block (segments x replicates) in the bootstrap: 64 MB of float64."""

_CURVE_POINTS = 120


def ratio(numerator: ArrayLike, denominator: ArrayLike) -> Floats:
    """Divide elementwise; division by zero returns NaN without a warning."""
    top, bottom = np.broadcast_arrays(np.asarray(numerator, np.float64), np.asarray(denominator, np.float64))
    out = np.full(top.shape, np.nan)
    np.divide(top, bottom, out=out, where=bottom != 0)
    return out


@dataclass(frozen=True, slots=True)
class Ranking:
    """Labelled rows sorted by score, as counts by (segment, unit).

    Rows of equal score form a tie group. Groups with at least one positive are numbered ``0 .. J-1`` from the highest
    score down; the negatives between two of them form one segment. Segment ``2j + 1`` is group ``j``, segment ``2j``
    lies between groups ``j - 1`` and ``j``, and segment ``2J`` is the rest.

    ``positives``: positive rows of each unit in each group; shape (J, units).
    ``negatives``: negative rows of each unit in each segment; shape (2 J + 1, units).
    """

    positives: sparse.csr_array
    negatives: sparse.csr_array

    @classmethod
    def build(cls, score: ArrayLike, positive: ArrayLike, unit: ArrayLike | None = None, units: int = 1) -> Self:
        """Count labelled rows.

        ``score``: finite, higher is riskier; integers of small range sort several times faster; shape (rows,).
        ``positive``: labels; unlabelled rows must be excluded; shape (rows,).
        ``unit``: unit (or cluster) of each row, ``0 .. units - 1``; by default all rows are of one; shape (rows,).
        """
        scores = _descending_keys(score)
        labels = np.asarray(positive, np.bool_)
        codes = np.zeros(scores.size, np.int64) if unit is None else np.asarray(unit, np.int64)
        order = np.argsort(scores, kind="stable")
        scores, labels, codes = scores[order], labels[order], codes[order]
        starts_group = np.ones(scores.size, np.bool_)
        starts_group[1:] = scores[1:] != scores[:-1]
        group = np.cumsum(starts_group) - 1
        has_positive = np.bincount(group, weights=labels, minlength=int(starts_group.sum())) > 0
        positive_groups = np.cumsum(has_positive)
        segment = 2 * positive_groups - has_positive
        groups = int(has_positive.sum())
        return cls(
            positives=_counts((positive_groups[group] - 1)[labels], codes[labels], groups, units),
            negatives=_counts(segment[group][~labels], codes[~labels], 2 * groups + 1, units),
        )

    def precision_and_auc(self, weights: Floats | None = None) -> tuple[Floats, Floats]:
        """Return average precision and area under the ROC curve, each of shape (replicates,).

        ``weights``: weight of each unit; by default one replicate with weight 1; shape (replicates, units).
        """
        if weights is None:
            weights = np.ones((1, self.positives.shape[1]))
        chunk = max(1, _CELLS_PER_CHUNK // self.negatives.shape[0])
        parts = [self._precision_and_auc(weights[start : start + chunk]) for start in range(0, len(weights), chunk)]
        if not parts:
            return np.empty(0), np.empty(0)
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def _precision_and_auc(self, weights: Floats) -> tuple[Floats, Floats]:
        positive = self.positives @ weights.T
        negative = self.negatives @ weights.T
        true_positives = np.cumsum(positive, axis=0)
        false_positives = np.cumsum(negative, axis=0)
        false_so_far = false_positives[1::2]
        tied_negatives = negative[1::2]
        n_positive = positive.sum(axis=0)
        n_negative = false_positives[-1]
        precision = np.nan_to_num(ratio(true_positives, true_positives + false_so_far))
        average_precision = ratio((positive * precision).sum(axis=0), n_positive)
        concordant = (positive * (n_negative - false_so_far + 0.5 * tied_negatives)).sum(axis=0)
        return average_precision, ratio(concordant, n_positive * n_negative)


def _descending_keys(score: ArrayLike) -> np.ndarray:
    """Return sort keys that descend with the score; 16-bit integers if they fit, which numpy sorts by radix."""
    scores = np.asarray(score)
    if not np.issubdtype(scores.dtype, np.integer) or not scores.size:
        return -scores.astype(np.float64)
    keys = int(scores.max()) - scores.astype(np.int64)
    return keys.astype(np.uint16) if int(keys.max()) <= np.iinfo(np.uint16).max else keys


def _counts(row: Ints, column: Ints, rows: int, columns: int) -> sparse.csr_array:
    return sparse.coo_array((np.ones(row.size), (row, column)), shape=(rows, columns)).tocsr()


def rank_curve(rank: ArrayLike, positive: ArrayLike) -> dict[str, NDArray[Any]]:
    """Precision and recall if the ``k`` riskiest units of each decision time are alerted, at log-spaced ``k``.

    ``rank``: rank within the decision time, 1 is the riskiest; labelled rows only; shape (rows,).
    Returns: ``k``, ascending; ``precision`` (NaN without alerts) and ``recall`` (NaN without positives), each with at
    most :data:`_CURVE_POINTS` entries; empty without rows.
    """
    ranks = np.asarray(rank, np.int64)
    labels = np.asarray(positive, np.bool_)
    if ranks.size == 0:
        return {"k": np.empty(0, np.int64), "precision": np.empty(0), "recall": np.empty(0)}
    last = int(ranks.max())
    alerts = np.cumsum(np.bincount(ranks, minlength=last + 1))
    hits = np.cumsum(np.bincount(ranks, weights=labels, minlength=last + 1))
    k = np.unique(np.round(np.geomspace(1, last, _CURVE_POINTS)).astype(np.int64))
    return {"k": k, "precision": ratio(hits[k], alerts[k]), "recall": ratio(hits[k], labels.sum())}


@dataclass(frozen=True, slots=True)
class Calibration:
    """Calibration of risks.

    ``mean_risk``, ``observed_rate``: mean risk and share of positives in each quantile bin of risk, ascending; shape
    (bins,).
    ``rows``, ``positives``: counts in each bin; shape (bins,).
    ``error``: expected calibration error.
    ``brier_skill``: Brier skill score against the constant base rate; NaN if only one class is present.
    ``risk_ratio``: mean risk over base rate: 1 is calibrated on average, 2 is twice too high; NaN without positives.
    """

    mean_risk: Floats
    observed_rate: Floats
    rows: Ints
    positives: Ints
    error: float
    brier_skill: float
    risk_ratio: float


def calibration(risk: ArrayLike, positive: ArrayLike) -> Calibration:
    """Measure calibration in quantile bins of risk (:data:`CALIBRATION_EDGES`); ties share a bin, so bins may merge.

    ``risk``: risks in [0, 1] of labelled rows; NaN is ignored; shape (rows,).
    """
    risks = np.asarray(risk, np.float64)
    labels = np.asarray(positive, np.bool_)
    known = np.isfinite(risks)
    risks, labels = risks[known], labels[known]
    if risks.size == 0:
        empty = np.empty(0)
        none = np.empty(0, np.int64)
        return Calibration(empty, empty, none, none, np.nan, np.nan, np.nan)
    order = np.argsort(risks, kind="stable")
    risks, labels = risks[order], labels[order]
    # method="lower" puts every cut at an observed risk, so that ties are never split
    edges = np.unique(np.quantile(risks, CALIBRATION_EDGES[1:-1], method="lower"))
    bins = np.searchsorted(edges, risks, side="left")
    rows = np.bincount(bins)
    nonempty = rows > 0
    rows = rows[nonempty]
    mean_risk = np.bincount(bins, weights=risks)[nonempty] / rows
    positives = np.bincount(bins, weights=labels)[nonempty]
    observed = positives / rows
    base_rate = float(labels.mean())
    brier = float(np.mean((risks - labels) ** 2))
    return Calibration(
        mean_risk=mean_risk,
        observed_rate=observed,
        rows=rows.astype(np.int64),
        positives=positives.astype(np.int64),
        error=float(np.sum(rows * np.abs(mean_risk - observed)) / risks.size),
        brier_skill=float(1 - ratio(brier, base_rate * (1 - base_rate))),
        risk_ratio=float(ratio(risks.mean(), base_rate)),
    )


CONFIDENCE_LEVEL = 0.95
"""Confidence level of the intervals in an evaluation."""

_MIN_FINITE = 20
"""Minimum number of finite replicates for an interval."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds of a confidence interval; NaN if there is none."""

    low: float
    high: float


def resample(clusters: int, replicates: int, seed: int) -> Floats:
    """Draw bootstrap samples of clusters."""
    if clusters == 0 or replicates == 0:
        return np.zeros((replicates, clusters))
    rng = np.random.default_rng([seed, clusters])
    out = np.empty((replicates, clusters))
    for replicate in range(replicates):
        out[replicate] = np.bincount(rng.integers(0, clusters, clusters), minlength=clusters)
    return out


def share_interval(values: Floats, *, point: float, counts: Floats) -> Interval:
    """Interval of a share; exact if the share is 0 or 1, otherwise as :func:`interval`.

    The percentile interval of a share of 0 is [0, 0], since no resample has a hit, and so overstates certainty. The
    bounds are instead those of Clopper and Pearson (1934) for 0 of n or n of n, about 3.7 / n wide (the rule of three,
    two-sided). Rows of a cluster are not independent, so n is the effective number of clusters,
    ``(sum of rows)^2 / sum of squared rows`` (Kish 1965).

    ``values``: the share in each replicate; empty: no interval requested; shape (replicates,).
    ``counts``: rows of each cluster in the denominator of the share; shape (clusters,).
    """
    squares = float(np.square(counts).sum())
    if values.size == 0 or point not in (0.0, 1.0) or squares == 0:
        return interval(values)
    effective = float(counts.sum()) ** 2 / squares
    width = 1 - ((1 - CONFIDENCE_LEVEL) / 2) ** (1 / effective)
    return Interval(0.0, width) if point == 0 else Interval(1 - width, 1.0)


def interval(values: Floats) -> Interval:
    """Percentile interval of bootstrap replicates.

    ``values``: the statistic in each replicate; NaN if undefined; shape (replicates,).
    Returns: NaN bounds if fewer than twenty replicates, or fewer than half of them, are finite.
    """
    finite = values[np.isfinite(values)]
    if finite.size < max(_MIN_FINITE, values.size / 2):
        return Interval(np.nan, np.nan)
    low, high = np.quantile(finite, [(1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2])
    return Interval(float(low), float(high))


@dataclass(frozen=True, slots=True)
class UnitFigures:
    """Per-unit metrics of a model; unlabelled rows are ignored.

    ``known``, ``positive``, ``risk``, ``error``: labelled rows of each cluster, positive rows, sum of risks, and sum of
    squared errors of the risks; shape (clusters,).
    ``alerts``, ``hits``: alerted labelled rows, and the positive ones among them.
    ``incidents``, ``caught``: incidents of units that a row could have caught, and those caught.
    """

    known: Floats
    positive: Floats
    risk: Floats
    error: Floats
    alerts: int
    hits: int
    incidents: int
    caught: int
    calibration: Calibration

    @classmethod
    def of(cls, label: np.ndarray, risk: Floats, alert: Bools, incident: Ints, cluster: Ints, clusters: int) -> Self:
        """Count rows of units; ``label`` is 1, 0 or -1, ``cluster`` that of the node's decision; shape (rows,)."""
        known, positive = np.flatnonzero(label >= 0), label == 1
        group, hits = cluster[known], positive[known]
        return cls(
            known=np.bincount(group, minlength=clusters).astype(np.float64),
            positive=np.bincount(group, hits, clusters).astype(np.float64),
            risk=np.bincount(group, risk[known], clusters).astype(np.float64),
            error=np.bincount(group, (risk[known] - hits) ** 2, clusters).astype(np.float64),
            alerts=int(alert[known].sum()),
            hits=int((alert & positive).sum()),
            incidents=len(np.unique(incident[positive])),
            caught=len(np.unique(incident[positive & alert])),
            calibration=calibration(risk[known], hits),
        )

    def columns(self) -> dict[str, object]:
        """Return the ``unit_`` columns: precision and recall with their denominators."""
        return {
            "unit_alerts_labelled": self.alerts,
            "unit_precision": float(ratio(self.hits, self.alerts)),
            "unit_incidents": self.incidents,
            "unit_recall": float(ratio(self.caught, self.incidents)),
        }
