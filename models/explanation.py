"""Why a unit was alerted: what each feature added to the model's score, and the largest additions in plain words.

Contributions are on the scale of log-odds and relative to what the learner says of an average (trees) or median
(others) unit. Trees of LightGBM and XGBoost are explained exactly (path-dependent TreeSHAP, as the libraries compute
it); a random forest by the steps of its decision paths; a linear model by coefficient times value; a network by what
its score loses when one feature at a time is put to its median. All of it costs, so only alerts are explained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightgbm
import numpy as np
import xgboost
from scipy import sparse
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression

from features.vocabulary import FeatureColumn, describe
from models.baselines import Baseline
from models.config import BASELINES
from models.fitted import CASCADE, COMBINERS, FittedModels
from models.learners import logit
from models.metrics import Floats
from models.native import LoadedLightGBM
from models.prepared import PreparedClassifier

TREES = "exact tree contributions"
PATHS = "steps along the forest's decision paths"
LINEAR = "coefficient times distance from the median"
OCCLUSION = "change when the feature is put to its median"
UNKNOWN = "change in points when the feature is put to unknown"

_ROWS_PER_PASS = 4096


@dataclass(frozen=True, slots=True)
class Reason:
    """One feature that raised a score.

    Attributes
    ----------
    column : str
        Name of the feature's column.
    value : float
        Its value at the decision time; NaN: unknown.
    contribution : float
        What it added to the log-odds, positive.
    text : str
        The same in plain words, with the number.
    """

    column: str
    value: float
    contribution: float
    text: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why one unit was alerted.

    Attributes
    ----------
    reasons : tuple of Reason
        The largest positive contributions, largest first; fewer where nothing else raised the score.
    method : str
        How the contributions were computed, and over which members.
    """

    reasons: tuple[Reason, ...]
    method: str


def contributions(learner: Any, X: np.ndarray) -> tuple[Floats, str]:
    """Contribution of each feature to each row's score.

    Parameters
    ----------
    learner : scikit-learn classifier
        A fitted learner as :func:`models.learners.make_learner` makes it.
    X : ndarray of float32, shape (rows, features)
        Rows to explain; NaN: unknown.

    Returns
    -------
    values : ndarray of float64, shape (rows, features)
        Additions to the log-odds.
    method : str
        How they were computed.

    Raises
    ------
    TypeError
        If the learner is of another type.
    """
    if isinstance(learner, lightgbm.LGBMClassifier | LoadedLightGBM):
        return np.asarray(learner.booster_.predict(X, pred_contrib=True), np.float64)[:, :-1], TREES
    if isinstance(learner, xgboost.XGBClassifier):
        booster = learner.get_booster()
        matrix = xgboost.DMatrix(X, feature_names=booster.feature_names)
        return np.asarray(booster.predict(matrix, pred_contribs=True), np.float64)[:, :-1], TREES
    if isinstance(learner, RandomForestClassifier):
        return _along_paths(learner, X), PATHS
    if isinstance(learner, PreparedClassifier) and isinstance(learner.classifier_, LogisticRegression):
        return learner.scaler_.transform(X).astype(np.float64) * learner.classifier_.coef_[0], LINEAR
    if isinstance(learner, PreparedClassifier):
        return _occluded(learner, X), OCCLUSION
    if isinstance(learner, Baseline):
        return _unknown(learner, X), UNKNOWN
    raise TypeError(f"no way to explain a {type(learner).__name__}")


def members_of(fitted: FittedModels, model: str) -> list[tuple[str, Any]]:
    """Find the learners whose scores make a model's alerts.

    Parameters
    ----------
    fitted : FittedModels
        What one refit made.
    model : str
        One of ``fitted.models``.

    Returns
    -------
    list of (name, fitted learner)
        The learner itself; an ensemble's members; of a cascade its last stage, which gives survivors their score;
        where a baseline stands in for all models, that one.

    Raises
    ------
    ValueError
        If there is no such model.
    """
    if model not in fitted.models:
        raise ValueError(f"{model} is not among {', '.join(fitted.models)}")
    if model in BASELINES or fitted.stand_in is not None:
        name = model if model in BASELINES else str(fitted.stand_in)
        return [(name, fitted.baselines[name])]
    if model in COMBINERS:
        return [(name, fitted.learners[name]) for name in fitted.members]
    if model == CASCADE:
        assert fitted.cascade is not None
        return [fitted.cascade.stages_[-1]]
    return [(model, fitted.learners[model])]


def explain(
    members: Sequence[tuple[str, Any]],
    X: np.ndarray,
    columns: Sequence[FeatureColumn],
    *,
    top: int = 3,
    usual: np.ndarray | None = None,
) -> list[Explanation]:
    """Explain alerts by the members of the model that gave them.

    Members that are boosted trees are explained exactly and averaged; other members join in only where no member is
    one, because their contributions are approximations on a scale of their own.

    Parameters
    ----------
    members : sequence of (name, fitted learner)
        The learners whose scores make the alert: one for a single learner, the members of an ensemble.
    X : ndarray of float32, shape (rows, features)
        The alerted rows.
    columns : sequence of FeatureColumn, length features
        What the features are.
    top : int
        Reasons a row at most.
    usual : ndarray, shape (features,), optional
        What is usual of each feature, such as its median over the fleet, to be said beside the value; NaN: nothing is.

    Returns
    -------
    list of Explanation
        One for each row.

    Raises
    ------
    ValueError
        If the rows have another number of features than there are columns, or there are no members.
    """
    if X.ndim != 2 or X.shape[1] != len(columns):
        raise ValueError(f"rows of shape {X.shape} do not match {len(columns)} columns")
    if not members:
        raise ValueError("no members to explain by")
    if len(X) == 0:
        return []
    found = [(name, *contributions(learner, X)) for name, learner in _exact(members) or members]
    mean = np.mean([values for _, values, _ in found], axis=0)
    ways = {method: [name for name, _, each in found if each == method] for _, _, method in found}
    method = "; ".join(f"{way} of {', '.join(names)}" for way, names in ways.items())
    left_out = [name for name, _ in members if name not in {entry[0] for entry in found}]
    if left_out:
        method += f" (without {', '.join(left_out)})"
    return [Explanation(_reasons(mean[row], X[row], columns, top, usual), method) for row in range(len(X))]


def explained_by(fitted: FittedModels, model: str, X: np.ndarray) -> Floats:
    """Contributions to a model's score, averaged over its members as :func:`explain` does.

    Parameters
    ----------
    fitted : FittedModels
    model : str
        One of ``fitted.models``.
    X : ndarray of float32, shape (rows, features)

    Returns
    -------
    ndarray of float64, shape (rows, features)
        Additions to the log-odds.
    """
    members = members_of(fitted, model)
    return np.asarray(np.mean([contributions(learner, X)[0] for _, learner in _exact(members) or members], axis=0))


def _exact(members: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    boosted = lightgbm.LGBMClassifier | LoadedLightGBM | xgboost.XGBClassifier
    return [(name, learner) for name, learner in members if isinstance(learner, boosted)]


def _reasons(
    values: Floats, row: np.ndarray, columns: Sequence[FeatureColumn], top: int, usual: np.ndarray | None
) -> tuple[Reason, ...]:
    # ties go to the earlier column, so that a report is the same on every run
    order = np.argsort(-values, kind="stable")[:top]
    found = []
    for at in order[values[order] > 0]:
        value = float(row[at])
        text = describe(columns[at], value, None if usual is None else float(usual[at]))
        found.append(Reason(columns[at].name, value, float(values[at]), text))
    return tuple(found)


def _along_paths(forest: RandomForestClassifier, X: np.ndarray) -> Floats:
    """Sum, over the nodes of each row's paths, the change of the positive share from the parent, by its split feature.

    The sums are of probabilities; each row's are scaled by one factor so that they add up to its difference in
    log-odds from the forest's average root, which keeps their order and signs.
    """
    total = np.zeros((len(X), X.shape[1]))
    root = 0.0
    for estimator in forest.estimators_:
        tree = estimator.tree_
        share = tree.value[:, 0, 1] / tree.value[:, 0, :].sum(axis=1)
        split = np.flatnonzero(tree.children_left >= 0)
        child = np.concatenate([tree.children_left[split], tree.children_right[split]])
        parent = np.concatenate([split, split])
        step = sparse.csr_array(
            (share[child] - share[parent], (child, tree.feature[parent])), shape=(tree.node_count, X.shape[1])
        )
        visited = sparse.csr_array(estimator.decision_path(np.asarray(X, np.float32)), dtype=np.float64)
        total += (visited @ step).toarray()
        root += share[0]
    count = len(forest.estimators_)
    total /= count
    change = total.sum(axis=1)
    log_change = logit(root / count + change) - logit(np.asarray(root / count))
    factor = np.divide(log_change, change, out=np.ones(len(X)), where=np.abs(change) > 1e-12)
    return total * factor[:, None]


def _occluded(learner: PreparedClassifier, X: np.ndarray) -> Floats:
    scaled = learner.scaler_.transform(X)
    whole = _score(learner, scaled)
    out = np.zeros(scaled.shape)
    for row in range(len(scaled)):
        # a feature at its median is 0 after scaling: nothing to put back
        changed = np.flatnonzero(scaled[row])
        for start in range(0, len(changed), _ROWS_PER_PASS):
            part = changed[start : start + _ROWS_PER_PASS]
            without = np.repeat(scaled[row : row + 1], len(part), axis=0)
            without[np.arange(len(part)), part] = 0
            out[row, part] = whole[row] - _score(learner, without)
    return out


def _unknown(baseline: Baseline, X: np.ndarray) -> Floats:
    identity = np.zeros(1, np.uint64)  # chance depends on nothing but who the row is: no feature moves it
    out = np.zeros(X.shape)
    for row in range(len(X)):
        known = np.flatnonzero(~np.isnan(X[row]))
        without = np.repeat(X[row : row + 1], len(known), axis=0)
        without[np.arange(len(known)), known] = np.nan
        whole = baseline.points(X[row : row + 1], identity)
        out[row, known] = whole - baseline.points(without, np.repeat(identity, len(known)))
    return out


def _score(learner: PreparedClassifier, scaled: np.ndarray) -> Floats:
    return logit(learner.classifier_.predict_proba(scaled)[:, 1])
