"""Learners that see some of the columns: a learner's feature groups, or all that stands before a raw window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, clone

from features.config import Group
from features.vocabulary import FeatureColumn
from models.sequence.layout import window_of


class ColumnSubset(BaseEstimator):
    """Fit and score a classifier on some columns of the rows.

    ``classifier``: fitted as a clone; None: given fitted, see :meth:`around`.
    ``columns``: positions of the columns that it sees.
    """

    def __init__(self, classifier: Any = None, columns: Sequence[int] = ()) -> None:
        self.classifier = classifier
        self.columns = columns

    @classmethod
    def around(cls, fitted: Any, columns: Sequence[int]) -> ColumnSubset:
        """Wrap a classifier that is fitted already."""
        wrapped = cls(None, columns)
        wrapped.classifier_ = fitted
        return wrapped

    def fit(self, X: np.ndarray, y: np.ndarray, sample_weight: np.ndarray | None = None) -> Self:
        """Fit the classifier on rows of shape (n_rows, n_features); NaN allowed if it takes it."""
        self.classifier_ = clone(self.classifier).fit(self.select(X), y, sample_weight=sample_weight)
        return self

    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        """Give the probability of both classes, shape (n_rows, 2)."""
        return np.asarray(self.classifier_.predict_proba(self.select(X)))

    def select(self, X: np.ndarray) -> np.ndarray:
        """Copy the columns that the classifier sees, in row order as libraries expect it."""
        return np.ascontiguousarray(np.take(X, self.columns, axis=1))


def inner_of(learner: Any) -> Any:
    """Give the classifier inside a fitted :class:`ColumnSubset`; anything else as it is."""
    return learner.classifier_ if isinstance(learner, ColumnSubset) else learner


def seen_columns(columns: Sequence[FeatureColumn], groups: Sequence[Group] | None = None) -> tuple[int, ...]:
    """Give the positions of the columns that a learner of tabular rows sees.

    ``columns``: a raw window at their end is left out.
    ``groups``: its feature groups; None: all.
    Returns: all where no column is of one of the groups, as in data without telemetry.
    """
    window = window_of(columns)
    tabular = tuple(range(len(columns) if window is None else window.tabular))
    return tuple(at for at in tabular if groups is None or columns[at].group in groups) or tabular
