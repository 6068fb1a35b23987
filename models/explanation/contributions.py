"""Contribution of each feature to one learner's score, in log-odds, and the reasons derived from it.

Boosted trees and forests are decomposed exactly by path-dependent TreeSHAP (Lundberg et al., 2020): unknown features
are marginalized over the training rows of each branch, so correlated features share their contribution. A linear model
is decomposed exactly as well, relative to a unit with the median of every feature. Both add up to the row's log-odds
minus those of the reference, so members of an ensemble can be weighted as in the ensemble. For networks and baselines,
a contribution is the change of the score when a feature (of a sequence network: a whole channel) is unknown or at its
median: these do not add up.
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
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier

from features.vocabulary import FeatureColumn, describe, describe_percentile
from models.config import BASELINES, CASCADE, COMBINERS, PRIOR, THREADS
from models.learners.baselines import Baseline
from models.learners.prepared import ColumnSubset, PreparedClassifier
from models.rows.ranking import Floats
from models.rows.row_reader import log_odds, logit
from models.training.fitted import FittedModels

TREES: Final = "exact tree contributions"
LINEAR: Final = "coefficient times distance from the median"
UNKNOWN: Final = "change when the feature is set to unknown"
OCCLUSION: Final = "change when a channel is set to its median"

ADDITIVE: Final = frozenset({TREES, LINEAR})
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
    """Describe the largest positive contributions to one row's score; also return the sum of all positive ones."""
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


def contributions(learner: Any, X: np.ndarray) -> tuple[Floats, str]:
    """Return the contribution of each feature to each row's score, shape (rows, features), and the method.

    ``learner``: fitted, from :func:`models.learners.factory.make_learner`, or a baseline.
    """
    if not isinstance(learner, ColumnSubset):
        return _of_own_features(learner, X)
    values = np.zeros(X.shape)
    values[:, learner.columns], method = _of_own_features(learner.classifier_, learner.select(X))
    return values, method


def _of_own_features(learner: Any, X: np.ndarray) -> tuple[Floats, str]:
    booster = getattr(learner, "booster_", None)
    if hasattr(learner, "occluded"):
        values, method = learner.occluded(X), OCCLUSION
    elif isinstance(learner, Baseline):
        # random scores depend on identity only: no feature changes them
        values, method = _without_each(lambda X: learner.points(X, np.zeros(len(X), np.uint64)), X), UNKNOWN
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
        values, method = _without_each(lambda X: log_odds(learner, X), X), UNKNOWN
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
    """Convert a forest's contributions from probability to log-odds, by one factor per row."""
    change = values.sum(axis=1)
    log_change = logit(base + change) - logit(np.array(base))
    slope = np.full(len(values), 1 / max(base * (1 - base), 1e-7))
    # if contributions cancel out, use the slope of the logit
    factor = np.divide(log_change, change, out=slope, where=np.abs(change) > 1e-12)
    return values * factor[:, None]


def _without_each(score: Callable[[np.ndarray], Floats], X: np.ndarray) -> Floats:
    """Return by how much a score falls when each feature alone is unknown; shape of ``X``."""
    out = np.zeros(X.shape)
    for row in range(len(X)):
        known = np.flatnonzero(~np.isnan(X[row]))
        without = np.repeat(X[row : row + 1], len(known) + 1, axis=0)  # the last one is the row itself
        without[np.arange(len(known)), known] = np.nan
        scores = score(without)
        out[row, known] = scores[-1] - scores[:-1]
    return out


def members_of(fitted: FittedModels, model: str) -> list[tuple[str, Any]]:
    """Return the learners whose scores make up a model's score, then the prior that they are pooled with.

    Of a cascade, the last stage, which orders survivors; the stand-in if nothing could be fitted.
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


def explained_by(fitted: FittedModels, model: str, X: np.ndarray) -> tuple[Floats, str]:
    """Attribute a model's score to features, through its members.

    Contributions that add up to log-odds are weighted and summed; others are used only if no member is additive,
    because they have a scale of their own.

    Returns: contributions to the score, shape (rows, features), and the methods of the members.
    """
    shares = weights_in(fitted, model)
    parts = [
        (name, weight, *contributions(learner, X))
        for (name, learner), weight in zip(members_of(fitted, model), shares, strict=True)
    ]
    explained = [part for part in parts if part[3] in ADDITIVE] or parts
    names_by_method: dict[str, list[str]] = {}
    for name, _, _, method in explained:
        names_by_method.setdefault(method, []).append(name)
    text = "; ".join(f"{method} of {', '.join(names)}" for method, names in names_by_method.items())
    if len(explained) < len(parts):
        text += f" (without {', '.join(name for name, _, _, method in parts if method not in ADDITIVE)})"
    share = sum(weight for _, weight, _, _ in explained)
    # assume that omitted members agree with the others, to keep the scale of the whole score
    scale = sum(shares) / share if share > 0 else 1.0
    total = np.zeros(X.shape)
    for _, weight, values, _ in explained:
        total += weight * scale * values
    return total, text
