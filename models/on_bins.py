"""LightGBM and XGBoost fitted in bins whose edges are given."""

from __future__ import annotations

from typing import Any, Self

import lightgbm
import numpy as np
import xgboost
from sklearn.utils.class_weight import compute_sample_weight

from models.binary import BinaryClassifier
from models.kept_bins import KeptBins
from models.ranking import Ints

_NOT_LIGHTGBM = ("importance_type", "n_estimators", "class_weight", "objective", "max_bin", "subsample_for_bin")


class LightGBMOnBins(BinaryClassifier):
    """A LightGBM classifier that takes its training rows from bins that are kept.

    Its trees are those that the classifier would grow itself on edges like these.

    ``classes_``: 0 and 1.
    """

    def __init__(self, learner: Any = None, bins: Any = None) -> None:
        self.learner = learner
        self.bins = bins

    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, rows: Any) -> Self:
        """Fit.

        ``X``: Features; None where the bins hold the rows (:func:`wants_features`); shape (n_rows, n_features).
        ``y``: 0 or 1; both must occur; shape (n_rows,).
        ``sample_weight``: Weights; shape (n_rows,).
        ``rows``: positions in the matrix that the bins were made of, ascending; shape (n_rows,).
        """
        settings = self.learner.get_params()
        label = np.asarray(y, dtype=np.int64)
        weight = np.ones(len(label)) if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
        if settings["class_weight"] is not None:
            weight = weight * compute_sample_weight(settings["class_weight"], label)
        positions: Ints = np.asarray(rows, dtype=np.int64)
        kept: KeptBins = self.bins
        chosen = kept.lightgbm_rows(X, positions, label, weight, settings["max_bin"])
        params = {key: value for key, value in settings.items() if key not in _NOT_LIGHTGBM and value is not None}
        params |= {"objective": "binary", **kept.dataset_settings(settings["max_bin"])}
        self.booster_ = lightgbm.train(params, chosen, num_boost_round=settings["n_estimators"])
        self.booster_.free_dataset()
        self.classes_ = np.array([0, 1])
        self.n_features_in_ = self.booster_.num_feature()
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Give the probability of both classes, shape (n_rows, 2)."""
        positive = np.asarray(self.booster_.predict(np.asarray(X), num_threads=self.learner.n_jobs))
        return np.column_stack([1 - positive, positive])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags


class XGBoostOnBins(xgboost.XGBClassifier):
    """An XGBoost classifier whose bins have edges that are kept; each fit still puts its rows into them.

    ``bins``: the bins; set by :func:`on_bins`.
    """

    bins: KeptBins

    def _create_dmatrix(self, ref: Any, **kwargs: Any) -> Any:
        # the library's own hook for what a fit reads; `ref` is given for rows that are watched during a fit
        edges = self.bins.xgboost_edges(self.max_bin) if ref is None else ref
        return super()._create_dmatrix(ref=edges, **kwargs)

    def __sklearn_clone__(self) -> XGBoostOnBins:
        copy = XGBoostOnBins(**self.get_params(deep=False))
        copy.bins = self.bins
        return copy


def wants_features(learner: Any, rows: Ints | None) -> bool:
    """Tell whether a learner looks at the features of the rows that it is fitted on.

    ``learner``: Unfitted, from :func:`on_bins` or not.
    ``rows``: their positions in the matrix, ascending; None: unknown; shape (n_rows,).
    """
    return rows is None or not isinstance(learner, LightGBMOnBins) or not learner.bins.holds(rows)


def on_bins(learner: Any, bins: KeptBins | None) -> Any:
    """Give a learner that fits in kept bins, where its library allows that.

    ``learner``: Unfitted, as :func:`models.learners.make_learner` makes it.
    ``bins``: the bins; None: none are kept.
    Returns: for ``LGBMClassifier`` and ``XGBClassifier`` one on these bins; any other learner as it is.
    """
    if bins is None:
        return learner
    if type(learner) is lightgbm.LGBMClassifier:
        return LightGBMOnBins(learner, bins)
    if type(learner) is xgboost.XGBClassifier:
        made = XGBoostOnBins(**learner.get_params())
        made.bins = bins
        return made
    return learner
