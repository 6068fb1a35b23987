"""What each feature added to one learner's score, on the scale of log-odds.

Boosted trees and forests are taken apart exactly, by path-dependent TreeSHAP (Lundberg et al., 2020): the game is what
the trees expect when a feature is unknown, by the rows that went each way in training, so that features that move
together share what they tell. A linear model is taken apart exactly as well, and a network by integrated gradients
(Sundararajan et al., 2017), both against a unit with the median of every feature (the interventional game with one
reference). All of these add up to the row's log-odds minus those of their reference; a member of an ensemble can
therefore be weighed as the ensemble weighs it. Networks on sequences say what their log-odds lose when a whole channel
is put to its median, baselines what their points lose when a feature is unknown: neither adds up.
"""

from __future__ import annotations

from typing import Any

import lightgbm
import numpy as np
import xgboost
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier

from models.baselines import Baseline
from models.forest_trees import forest_as_booster
from models.light.contributions import along_gradients, as_log_odds, without_each
from models.metrics import Floats
from models.prepared import PreparedClassifier
from models.reasons import ADDITIVE, GRADIENTS, LINEAR, OCCLUSION, TREES, UNKNOWN
from models.sequence.tabular import inner_of

__all__ = ["ADDITIVE", "GRADIENTS", "LINEAR", "OCCLUSION", "TREES", "UNKNOWN", "contributions", "explainable"]


def contributions(learner: Any, X: np.ndarray) -> tuple[Floats, str]:
    """Contribution of each feature to each row's score.

    ``learner``: a fitted learner as :func:`models.learners.make_learner` makes it, or a baseline.
    ``X``: rows to explain; NaN: unknown; shape (rows, features).
    Returns shape (rows, features).
    Returns ``method``: how they were computed: :data:`TREES`, :data:`LINEAR`, :data:`GRADIENTS`, :data:`OCCLUSION` or
    :data:`UNKNOWN`.
    Raises ``TypeError`` if the learner is of another type.
    """
    learner = inner_of(learner)
    own, method = _of_own_features(learner, X[:, : _features_of(learner, X.shape[1])])
    if own.shape[1] == X.shape[1]:
        return own, method
    # a learner that reads the first columns only, where the rest is for others
    return np.pad(own, ((0, 0), (0, X.shape[1] - own.shape[1]))), method


def explainable(learner: Any) -> bool:
    """Whether :func:`contributions` knows the learner's type."""
    learner = inner_of(learner)
    if isinstance(learner, PreparedClassifier):
        return isinstance(learner.classifier_, LogisticRegression | MLPClassifier)
    if hasattr(learner, "contributions") or hasattr(learner, "occluded"):
        return True
    known = xgboost.XGBModel | RandomForestClassifier | Baseline
    return isinstance(learner, known) or isinstance(getattr(learner, "booster_", None), lightgbm.Booster)


def _features_of(learner: Any, width: int) -> int:
    booster = getattr(learner, "booster_", None)
    if not hasattr(learner, "n_features_in_") and isinstance(booster, lightgbm.Booster):
        return min(booster.num_feature(), width)
    return min(int(getattr(learner, "n_features_in_", width)), width)


def _of_own_features(learner: Any, X: np.ndarray) -> tuple[Floats, str]:
    booster = getattr(learner, "booster_", None)
    if hasattr(learner, "contributions"):  # boosted trees of another objective: TreeSHAP of their margin
        found, method = learner.contributions(X), TREES
    elif hasattr(learner, "occluded"):
        found, method = learner.occluded(X), OCCLUSION
    elif isinstance(learner, Baseline):
        found, method = without_each(learner, X), UNKNOWN
    elif isinstance(booster, lightgbm.Booster):
        found, method = np.asarray(booster.predict(X, pred_contrib=True))[:, :-1], TREES
    elif isinstance(learner, xgboost.XGBModel):
        boosted = learner.get_booster()
        matrix = xgboost.DMatrix(X, feature_names=boosted.feature_names)
        found, method = np.asarray(boosted.predict(matrix, pred_contribs=True))[:, :-1], TREES
    elif isinstance(learner, RandomForestClassifier):
        found, method = _forest(learner, X), TREES
    elif isinstance(learner, PreparedClassifier) and isinstance(learner.classifier_, LogisticRegression):
        found, method = learner.scaler_.transform(X).astype(np.float64) * learner.classifier_.coef_[0], LINEAR
    elif isinstance(learner, PreparedClassifier) and isinstance(learner.classifier_, MLPClassifier):
        scaled = learner.scaler_.transform(X).astype(np.float64)
        network = learner.classifier_
        found, method = along_gradients(network.coefs_, network.intercepts_, network.activation, scaled), GRADIENTS
    else:
        raise TypeError(f"no way to explain a {type(learner).__name__}")
    return np.asarray(found, np.float64), method


def _forest(forest: RandomForestClassifier, X: np.ndarray) -> Floats:
    found = np.asarray(forest_as_booster(forest).predict(X, pred_contrib=True), np.float64)
    return as_log_odds(found[:, :-1], found[:, -1])
