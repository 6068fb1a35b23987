"""Feature scaling for learners that need finite, bounded inputs, and wrappers that scale or select columns."""

from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, clone
from threadpoolctl import threadpool_limits

from features.config import Group
from features.vocabulary import FeatureColumn
from models.sequence.layout import window_of


def signed_log(values: np.ndarray) -> np.ndarray:
    """Return log(1 + abs(x)) with the sign of x; NaN stays NaN."""
    out = np.abs(values, order="C")
    np.log1p(out, out=out)
    return np.copysign(out, values, out=out)


def scale_logs(logs: np.ndarray, center: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Scale signed logarithms in place, for classifiers that cannot handle NaN.

    ``logs``: signed logarithms of features; NaN: unknown; shape (n_rows, n_features).
    ``center``, ``scale``: median and spread of each feature's signed logarithm; shape (n_features,).
    Returns: within :data:`_CLIP` of 0; 0 for NaN.
    """
    logs -= center.astype(logs.dtype)
    logs /= scale.astype(logs.dtype)
    np.clip(logs, -_CLIP, _CLIP, out=logs)
    return np.nan_to_num(logs, nan=0.0, copy=False)


_CLIP = 5.0
_IQR_TO_SIGMA = 1.349
"""Ratio of interquartile range to standard deviation of a normal distribution."""

_COLUMNS = 16
"""Columns of float32 per cache line."""


_STEPS = 100
"""Minimum gradient steps of a network per epoch: smaller data uses smaller batches, so that it learns as much. The
library divides a network's penalty by a batch's sum of weights, so the penalty shrinks with the batch to have the same
effect."""


class SignedLogScaler(BaseEstimator):
    """Transform features by signed logarithm, robust centering and scaling, clipping, and 0 for NaN.

    Counters and byte rates span ten decades, and most features have rare huge values that are the signal; the signed
    logarithm keeps their order and bounds their leverage. NaN becomes the column's median, without an indicator column:
    missing telemetry has its own features (group ``gaps``).

    ``center_``: median of the signed logarithm; 0 for a column that is all NaN; shape (n_features,).
    ``scale_``: interquartile range over 1.349, or the standard deviation if that is 0, or 1 if both are; shape
    (n_features,).
    """

    def fit_transform(self, X: np.ndarray) -> np.ndarray:
        """Fit and transform ``X``, shape (n_rows, n_features), computing the logarithms once; NaN allowed."""
        logs = signed_log(X)
        known = ~np.isnan(logs).all(axis=0)
        center = np.zeros(logs.shape[1])
        scale = np.ones(logs.shape[1])
        if known.any():
            statistics = [_location_and_spread(column) for column in _columns(logs, np.flatnonzero(known))]
            low, middle, high, deviation = np.array(statistics).T
            spread = (high - low) / _IQR_TO_SIGMA
            # Most counters are almost always 0: their quartiles coincide, so use the standard deviation.
            spread = np.where(spread > 1e-9, spread, np.where(deviation > 1e-9, deviation, 1.0))
            center[known], scale[known] = middle, spread
        self.center_ = center
        self.scale_ = scale
        return scale_logs(logs, center, scale)

    def transform(self, X: np.ndarray) -> np.ndarray:
        """Transform ``X``: same shape, finite, within :data:`_CLIP` of 0."""
        return scale_logs(signed_log(X), self.center_, self.scale_)


class PreparedClassifier(BaseEstimator):
    """A classifier behind a :class:`SignedLogScaler`, fitted on one thread for reproducibility.

    Weights apply to the classifier only: they undo the sampling of negatives, which scaling does not need.

    ``classifier``: fitted on the scaled features; must accept ``sample_weight``. Batches of a network hold at most a
    hundredth of the rows.
    """

    def __init__(self, classifier: Any) -> None:
        self.classifier = classifier

    def fit(self, X: np.ndarray, y: np.ndarray, sample_weight: np.ndarray | None = None) -> Self:
        """Fit scaler and classifier."""
        self.scaler_ = SignedLogScaler()
        self.classifier_ = clone(self.classifier)
        batch = getattr(self.classifier_, "batch_size", None)
        if isinstance(batch, int) and batch > 0:  # the library rejects invalid values
            batch_size = max(1, min(batch, len(X) // _STEPS))
            self.classifier_.set_params(batch_size=batch_size, alpha=self.classifier_.alpha * batch_size / batch)
        prepared = self.scaler_.fit_transform(X)
        with threadpool_limits(limits=1):
            self.classifier_.fit(prepared, y, sample_weight=sample_weight)
        return self

    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        """Return the probability of both classes, shape (n_rows, 2)."""
        with threadpool_limits(limits=1):
            return self.classifier_.predict_proba(self.scaler_.transform(X))


def _columns(values: np.ndarray, chosen: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the chosen columns; copied in batches, since each touched row costs a cache line."""
    for begin in range(0, len(chosen), _COLUMNS):
        yield from np.ascontiguousarray(values[:, chosen[begin : begin + _COLUMNS]].T)


def _location_and_spread(column: np.ndarray) -> np.ndarray:
    """Return quartiles (in the column's own precision) and standard deviation of a column's known values."""
    known = column[~np.isnan(column)]
    return np.r_[np.quantile(known, [0.25, 0.5, 0.75]), known.std(dtype=np.float64)]


class ColumnSubset(BaseEstimator):
    """Fit and score a classifier on a subset of columns.

    ``classifier``: cloned for fitting; None: already fitted, see :meth:`around`.
    """

    def __init__(self, classifier: Any = None, columns: Sequence[int] = ()) -> None:
        self.classifier = classifier
        self.columns = columns

    @classmethod
    def around(cls, fitted: Any, columns: Sequence[int]) -> "ColumnSubset":
        """Wrap a fitted classifier."""
        wrapped = cls(None, columns)
        wrapped.classifier_ = fitted
        return wrapped

    def fit(self, X: np.ndarray, y: np.ndarray, sample_weight: np.ndarray | None = None) -> Self:
        """Fit the classifier on rows of shape (n_rows, n_features); NaN allowed if it accepts them."""
        self.classifier_ = clone(self.classifier).fit(self.select(X), y, sample_weight=sample_weight)
        return self

    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        """Return the probability of both classes, shape (n_rows, 2)."""
        return np.asarray(self.classifier_.predict_proba(self.select(X)))

    def select(self, X: np.ndarray) -> np.ndarray:
        """Copy the classifier's columns in row-major order, as libraries expect."""
        return np.ascontiguousarray(np.take(X, self.columns, axis=1))


def inner_of(learner: Any) -> Any:
    """Return the classifier inside a fitted :class:`ColumnSubset`; anything else unchanged."""
    return learner.classifier_ if isinstance(learner, ColumnSubset) else learner


def seen_columns(columns: Sequence[FeatureColumn], groups: Sequence[Group] | None = None) -> tuple[int, ...]:
    """Return the positions of the columns that a tabular learner uses; a raw window at their end is excluded.

    Returns: all tabular columns if none belongs to the groups, as in data without telemetry, or ``groups`` is None.
    """
    window = window_of(columns)
    tabular = tuple(range(len(columns) if window is None else window.tabular))
    return tuple(position for position in tabular if groups is None or columns[position].group in groups) or tabular
