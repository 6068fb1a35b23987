"""What our own classifiers share: two classes, NaN passed on, thresholds at one half."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data


class BinaryClassifier(ClassifierMixin, BaseEstimator):
    """Base of a two-class scikit-learn classifier whose ``_positive(X)`` gives the second class's probability."""

    classes_: np.ndarray

    def _begin_fit(self, X: Any, y: Any, sample_weight: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Check the training data, remember the classes, and give ``X``, ``y`` as 0 and 1, and the weights."""
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], ensure_all_finite="allow-nan")
        check_classification_targets(y)
        kind = type_of_target(y, input_name="y")
        if kind != "binary":
            raise ValueError(f"Only binary classification is supported. The type of the target is {kind}.")
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            found = self.classes_.tolist()
            raise ValueError(f"{type(self).__name__} needs two classes, found one class only: {found}")
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, allow_all_zero_weights=False)
        return X, codes.astype(np.int64), weight

    def _checked(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        return validate_data(self, X, dtype=[np.float64, np.float32], ensure_all_finite="allow-nan", reset=False)

    def _positive(self, X: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def predict_proba(self, X: Any) -> np.ndarray:
        """Give the probability of both classes, shape (n_rows, 2), for ``X`` of shape (n_rows, n_features)."""
        positive = self._positive(self._checked(X))
        return np.column_stack([1 - positive, positive])

    def predict(self, X: Any) -> np.ndarray:
        """Give the more probable class of each row, shape (n_rows,)."""
        above = (self.predict_proba(X)[:, 1] > 0.5).astype(int)
        return self.classes_[above]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags
