"""Contribution of each feature to one learner's score, in log-odds, and the reasons derived from it.

Boosted trees and forests are decomposed exactly by path-dependent TreeSHAP (Lundberg et al., 2020): unknown features
are marginalized over the training rows of each branch, so correlated features share their contribution. A linear model
is decomposed exactly as well, and a network by integrated gradients (Sundararajan et al., 2017), both relative to a
unit with the median of every feature (the interventional game with one reference). All of these add up to the row's
log-odds minus those of the reference, so members of an ensemble can be weighted as in the ensemble. For sequence
networks, a contribution is the change in log-odds when a whole channel is set to its median; for baselines, the change
in points when a feature is unknown: neither adds up.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Self

import lightgbm
import numpy as np
import xgboost
from scipy.special import expit
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier

from features.vocabulary import FeatureColumn, describe, describe_percentile
from models.config import BASELINES, CASCADE, COMBINERS, PRIOR, THREADS
from models.learners.baselines import Baseline
from models.learners.prepared import ColumnSubset, PreparedClassifier, inner_of
from models.rows.ranking import Floats
from models.rows.row_reader import logit
from models.training.fitted import FittedModels

TREES: Final = "exact tree contributions"
LINEAR: Final = "coefficient times distance from the median"
GRADIENTS: Final = "gradients summed on the way from the median"
UNKNOWN: Final = "change in points when the feature is set to unknown"
OCCLUSION: Final = "change when a channel is set to its median"

ADDITIVE: Final = frozenset({TREES, LINEAR, GRADIENTS})
"""Methods whose contributions sum to a difference of log-odds."""

_KINDS = {
    "last": "level", "mean": "level", "min": "level", "max": "level", "std": "spread", "slope": "trend",
    "delta": "trend", "rise": "rise", "rise_delta": "rise",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScoreReason:
    """One reason for a raised score.

    ``column``: the named feature: among equivalent features over several windows, the one with the largest
    contribution; if that aggregates all counters, the counter that determines its value.
    ``contribution``: total contribution of all of them to the log-odds, positive.
    """

    column: str
    contribution: float
    text: str


def reason_group(column: FeatureColumn) -> tuple[str | None, ...]:
    """Return the key by which columns are reported together: group, scope, channel and kind, for all windows.

    Rises over 1 h, 6 h and 24 h are one reason to a reader; level, spread and trend are three. All statistics of one
    history (counts, recency) are one, and so are the aggregates of the onsets of all counters.

    >>> reason_group(FeatureColumn.of("telemetry", "gpu_temp_c", "max"))
    ('telemetry', None, 'gpu_temp_c', 'level')
    """
    kind = "history" if column.group == "history" else _KINDS.get(column.statistic, column.statistic)
    if column.group in ("peers", "onset"):
        kind = column.group
    return (column.group, column.scope, column.channel, kind)


@dataclass(frozen=True, slots=True)
class ReasonPlan:
    """Mapping of a matrix's columns to reasons.

    ``group``: number of each column's :func:`reason_group`; shape (features,).
    ``surges``: columns of each counter's surge, by window.
    ``most``: columns that aggregate all counters, by statistic and window.
    """

    columns: tuple[FeatureColumn, ...]
    group: np.ndarray
    surges: Mapping[timedelta | None, np.ndarray]
    most: Mapping[tuple[str, timedelta | None], int]

    @classmethod
    def of(cls, columns: Sequence[FeatureColumn]) -> Self:
        """Build the plan of a matrix's columns."""
        keys = [reason_group(column) for column in columns]
        number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        surges: dict[timedelta | None, list[int]] = {}
        most = {}
        for i, column in enumerate(columns):
            if column.group == "onset" and column.statistic == "surge":
                surges.setdefault(column.window, []).append(i)
            elif column.group == "onset":
                most[column.statistic, column.window] = i
        group = np.array([number[key] for key in keys])
        return cls(tuple(columns), group, {window: np.array(positions) for window, positions in surges.items()}, most)

    def counters(self, row: np.ndarray) -> dict[int, int]:
        """Return, for columns that aggregate all counters, the counter that determines their value in a row.

        Returns: aggregate column to the surge column of that counter; without those whose counter the row does not
        determine.
        """
        counter_of = {}
        for (statistic, window), joining in self.most.items():
            surges = self.surges.get(window)
            if surges is None or np.isnan(row[surges]).all():
                continue
            highest = int(surges[np.nanargmax(row[surges])])
            if not row[highest] > 0:
                continue
            # a surge equals its excess over the fleet only if the fleet is the stricter baseline
            excess = self.most.get(("excess_max", window))
            if statistic.startswith("surge") or (excess is not None and row[excess] == row[highest]):
                counter_of[joining] = highest
        return counter_of


def largest_reasons(
    values: Floats, row: np.ndarray, plan: ReasonPlan, *, top: int = 3, fleet: np.ndarray | None = None, noun: str = ""
) -> tuple[tuple[ScoreReason, ...], float]:
    """Describe the largest positive contributions to one row's score; also return the sum of all positive ones.

    ``fleet``: to rank a value in the fleet; shape (units, features).
    """
    group, counters = plan.group.copy(), plan.counters(row)
    for position, counter in counters.items():  # report an aggregate of all counters with the leading one
        group[position] = group[counter]
    sums = np.bincount(group, weights=values)
    # ties go to the earlier column, for reproducible reports
    order = np.argsort(-sums, kind="stable")[:top]
    reasons = []
    for key in order[sums[order] > 0]:
        members = np.flatnonzero(group == key)
        position = int(members[np.argmax(values[members])])
        position = counters.get(position, position)
        column, value = plan.columns[position], float(row[position])
        text = describe(column, value)
        if fleet is not None:
            text += f" ({describe_percentile(column, value, fleet[:, position], noun)})"
        reasons.append(ScoreReason(column.name, float(sums[key]), text))
    return tuple(reasons), float(sums.clip(min=0).sum())


_STEPS: Final = 64
"""Points of the midpoint rule; the error of the sum is tested to stay within 2 %."""

_ACTIVATIONS: Final[dict[str, Callable[[Floats], Floats]]] = {
    "relu": lambda z: np.maximum(z, 0),
    "tanh": np.tanh,
    "logistic": expit,
    "identity": lambda z: z,
}
_SLOPES: Final[dict[str, Callable[[Floats], Floats]]] = {
    "relu": lambda z: (z > 0).astype(np.float64),
    "tanh": lambda z: 1 - np.tanh(z) ** 2,
    "logistic": lambda z: expit(z) * (1 - expit(z)),
    "identity": np.ones_like,
}


def contributions(learner: Any, X: np.ndarray) -> tuple[Floats, str]:
    """Return the contribution of each feature to each row's score.

    ``learner``: fitted, from :func:`models.learners.factory.make_learner`, or a baseline.
    ``X``: rows to explain; NaN: unknown; shape (rows, features).
    Returns ``method``: :data:`TREES`, :data:`LINEAR`, :data:`GRADIENTS`, :data:`OCCLUSION` or :data:`UNKNOWN`.
    """
    if not isinstance(learner, ColumnSubset):
        return _of_own_features(learner, X)
    values = np.zeros(X.shape)
    values[:, learner.columns], method = _of_own_features(learner.classifier_, learner.select(X))
    return values, method


def explainable(learner: Any) -> bool:
    """Return whether :func:`contributions` supports the learner's type."""
    learner = inner_of(learner)
    if isinstance(learner, PreparedClassifier):
        return isinstance(learner.classifier_, LogisticRegression | MLPClassifier)
    known = xgboost.XGBModel | RandomForestClassifier | Baseline
    boosted = isinstance(getattr(learner, "booster_", None), lightgbm.Booster)
    return boosted or isinstance(learner, known) or hasattr(learner, "occluded")


def _of_own_features(learner: Any, X: np.ndarray) -> tuple[Floats, str]:
    booster = getattr(learner, "booster_", None)
    if hasattr(learner, "occluded"):
        values, method = learner.occluded(X), OCCLUSION
    elif isinstance(learner, Baseline):
        values, method = _without_each(learner, X), UNKNOWN
    elif isinstance(booster, lightgbm.Booster):
        values, method = np.asarray(booster.predict(X, pred_contrib=True, num_threads=THREADS))[:, :-1], TREES
    elif isinstance(learner, xgboost.XGBModel):
        boosted = learner.get_booster()
        matrix = xgboost.DMatrix(X, feature_names=boosted.feature_names)
        values, method = np.asarray(boosted.predict(matrix, pred_contribs=True))[:, :-1], TREES
    elif isinstance(learner, RandomForestClassifier):
        values, method = _forest(learner, X), TREES
    elif isinstance(learner, PreparedClassifier) and isinstance(learner.classifier_, LogisticRegression):
        values, method = learner.scaler_.transform(X).astype(np.float64) * learner.classifier_.coef_[0], LINEAR
    elif isinstance(learner, PreparedClassifier) and isinstance(learner.classifier_, MLPClassifier):
        scaled = learner.scaler_.transform(X).astype(np.float64)
        network = learner.classifier_
        values, method = _along_gradients(network.coefs_, network.intercepts_, network.activation, scaled), GRADIENTS
    else:
        raise TypeError(f"no explanation method for a {type(learner).__name__}")
    return np.asarray(values, np.float64), method


@functools.cache
def load_shap() -> Any:
    """Import SHAP, which explains forests; call before starting threads, which share Python's warning filters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from the plotting library that it imports
        import shap  # takes seconds to import; only forests need it
    return shap


def _forest(forest: RandomForestClassifier, X: np.ndarray) -> Floats:
    explainer = load_shap().TreeExplainer(forest, feature_perturbation="tree_path_dependent")
    shap_values = np.asarray(explainer.shap_values(X, check_additivity=False), np.float64)
    return _as_log_odds(shap_values[..., 1], float(np.asarray(explainer.expected_value)[1]))


def _as_log_odds(values: Floats, base: float) -> Floats:
    """Scale a forest's contributions to its probability to the difference in log-odds, by one factor per row.

    The forest is additive in probability, not in log-odds; one factor per row keeps order, signs and proportions.
    """
    change = values.sum(axis=1)
    log_change = logit(base + change) - logit(np.array(base))
    slope = np.full(len(values), 1 / max(base * (1 - base), 1e-7))
    # if contributions cancel out, use the slope of the logit
    factor = np.divide(log_change, change, out=slope, where=np.abs(change) > 1e-12)
    return values * factor[:, None]


def _along_gradients(
    weights: Sequence[np.ndarray], intercepts: Sequence[np.ndarray], activation: str, values: Floats
) -> Floats:
    """Integrate the gradient of a network's log-odds along the straight line from 0 (all medians) to each row."""
    total = np.zeros(values.shape)
    for step in range(_STEPS):
        hidden = values * ((step + 0.5) / _STEPS)
        slopes = []
        for weight, bias in zip(weights[:-1], intercepts[:-1], strict=True):
            inputs = hidden @ weight.astype(np.float64) + bias
            slopes.append(_SLOPES[activation](inputs))
            hidden = _ACTIVATIONS[activation](inputs)
        gradient = np.broadcast_to(weights[-1][:, 0].astype(np.float64), hidden.shape)
        for weight, slope in zip(weights[-2::-1], slopes[::-1], strict=True):
            gradient = (gradient * slope) @ weight.astype(np.float64).T
        total += gradient
    return total / _STEPS * values


def _without_each(baseline: Baseline, X: np.ndarray) -> Floats:
    """Return the loss of a baseline's points when each feature alone is unknown; shape of ``X``."""
    identity = np.zeros(1, np.uint64)  # random scores depend on identity only: no feature changes them
    out = np.zeros(X.shape)
    for row in range(len(X)):
        known = np.flatnonzero(~np.isnan(X[row]))
        without = np.repeat(X[row : row + 1], len(known), axis=0)
        without[np.arange(len(known)), known] = np.nan
        score = baseline.points(X[row : row + 1], identity)
        out[row, known] = score - baseline.points(without, np.repeat(identity, len(known)))
    return out


def members_of(fitted: FittedModels, model: str) -> list[tuple[str, Any]]:
    """Return the learners whose scores make up a model's score.

    Returns: the learner itself; an ensemble's members; then the prior that they are pooled with; of a cascade, the
    last stage, which orders survivors; the stand-in if nothing could be fitted.
    """
    if model not in fitted.models:
        raise ValueError(f"{model} is not among {', '.join(fitted.models)}")
    if model in BASELINES or fitted.stand_in is not None:
        name = model if model in BASELINES else str(fitted.stand_in)
        return [(name, fitted.baselines[name] if name in fitted.baselines else fitted.learners[name])]
    if model == CASCADE:
        assert fitted.cascade is not None
        return [fitted.cascade.stages[-1]]
    names = fitted.members if model in COMBINERS else (model,)
    return [(name, fitted.learners[name]) for name in (*names, *((PRIOR,) if fitted.prior_weight else ()))]


def weights_in(fitted: FittedModels, model: str) -> tuple[float, ...]:
    """Return the weight of each of :func:`members_of` in a model's score.

    Returns: ``stacked``: the fitted weights; else equal weights that sum to 1; a prior takes its share of either.
    """
    names = [name for name, _ in members_of(fitted, model)]
    pooled = fitted.prior_weight if names[-1] == PRIOR and fitted.prior_weight and fitted.stand_in is None else None
    count = len(names) - (pooled is not None)
    weights = (1 / count,) * count
    if model == "stacked" and fitted.stand_in is None and any(fitted.stacker.weights):
        weights = fitted.stacker.weights
    return weights if pooled is None else (*((1 - pooled) * weight for weight in weights), pooled * sum(weights))


def attribute_score(
    members: Sequence[tuple[str, Any]], X: np.ndarray, weights: Sequence[float] | None = None
) -> tuple[Floats, str]:
    """Attribute a combined score to features, through its members.

    Contributions that add up to log-odds are weighted and summed; others are used only if no member is additive,
    because they have a scale of their own.

    ``weights``: weight of each member; default: equal.
    Returns ``values``: contributions to the score; all 0 if no member can be explained; shape (rows, features).
    """
    shares = [1 / len(members)] * len(members) if weights is None else list(weights)
    parts = [
        (name, weight, *contributions(learner, X))
        for (name, learner), weight in zip(members, shares, strict=True)
        if explainable(learner) or len(members) == 1
    ]
    parts = [part for part in parts if part[3] in ADDITIVE] or parts
    names_by_method: dict[str, list[str]] = {}
    for name, _, _, method in parts:
        names_by_method.setdefault(method, []).append(name)
    text = "; ".join(f"{method} of {', '.join(names)}" for method, names in names_by_method.items())
    used = {name for name, *_ in parts}
    missing = [name for name, _ in members if name not in used]
    if missing:
        text += f" (without {', '.join(missing)})"
    share = sum(weight for _, weight, _, _ in parts)
    # assume that omitted members agree with the others, to keep the scale of the whole score
    scale = sum(shares) / share if share > 0 else 1.0
    total = np.zeros(X.shape)
    for _, weight, values, _ in parts:
        total += weight * scale * values
    return total, text.strip()


def explained_by(fitted: FittedModels, model: str, X: np.ndarray) -> tuple[Floats, str]:
    """Return the contributions to a model's score, and the method; see :func:`attribute_score`."""
    return attribute_score(members_of(fitted, model), X, weights_in(fitted, model))
