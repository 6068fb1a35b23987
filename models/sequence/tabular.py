"""A learner that sees the first columns of a row only, beside others that also read the window after them."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression

from models.binary import BinaryClassifier, takes_nan


class FirstColumns(BinaryClassifier):
    """Fit and score a classifier on the first columns of the rows.

    ``classifier``: fitted as a clone; None: logistic regression.
    ``columns``: how many columns it sees; None: all.
    ``classifier_``: Fitted, with classes 0 and 1.
    """

    def __init__(self, classifier: Any = None, columns: int | None = None) -> None:
        self.classifier = classifier
        self.columns = columns

    @classmethod
    def around(cls, fitted: Any, columns: int, features: int) -> FirstColumns:
        """Wrap a classifier that is fitted already, for rows of ``features`` columns."""
        wrapped = cls(None, columns)
        wrapped.classifier_ = fitted
        wrapped.classes_ = np.array([0, 1])
        wrapped.n_features_in_ = features
        return wrapped

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the classifier.

        ``X``: Rows; NaN allowed if the classifier takes it; shape (n_rows, n_features).
        ``y``: two classes; the second in sorted order is the positive one; shape (n_rows,).
        ``sample_weight``: Weights; shape (n_rows,).
        """
        X, codes, weight = self._begin_fit(X, y, sample_weight)
        inner = LogisticRegression() if self.classifier is None else clone(self.classifier)
        self.classifier_ = inner.fit(self._first(X), codes, sample_weight=weight)
        return self

    def _first(self, X: np.ndarray) -> np.ndarray:
        # A copy in row order: libraries that take views would read past the window at each row.
        return np.ascontiguousarray(X[:, : self.columns])

    def _positive(self, X: np.ndarray) -> np.ndarray:
        return np.asarray(self.classifier_.predict_proba(self._first(X))[:, 1])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.classifier is not None and takes_nan(self.classifier)
        return tags


def inner_of(learner: Any) -> Any:
    """Give the classifier inside a fitted :class:`FirstColumns`; anything else as it is."""
    return learner.classifier_ if isinstance(learner, FirstColumns) else learner
