"""Learning to rank: trees that order the GPUs of one decision time, as an alert budget does."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import lightgbm
import numpy as np
import xgboost
from scipy.optimize import minimize
from scipy.special import expit, log_expit

from models.objective_maps import ranked_probability
from models.objectives.boosted import BoostedObjective, Library, library_settings, margin
from models.ranking import Floats, Ints

LARGEST_GROUP = 5_000
"""Rows in a group at most; LightGBM refuses groups above 10,000, and time grows with the square."""

_MS_PER_HOUR = 3_600_000


def sigmoid_map(z: Floats, y: Ints, weight: Floats) -> tuple[float, float]:
    """Fit a rising sigmoid from margins to probabilities by weighted maximum likelihood.

    ``z``: Margins; shape (n,).
    ``y``: 0 or 1; shape (n,).
    ``weight``: Weights; shape (n,).
    Returns: Slope, zero or more, and intercept of the log-odds. The targets are drawn in from 0 and 1 as Platt proposes
    ("Probabilistic outputs for support vector machines", 1999), so that the slope stays finite where margins separate
    the classes.
    """
    up, down = float(weight[y == 1].sum()), float(weight[y == 0].sum())
    target = np.where(y == 1, (up + 1) / (up + 2), 1 / (down + 2))
    centre, spread = float(np.average(z, weights=weight)), float(z.std())
    if spread < 1e-12:
        return 0.0, float(np.log((up + 0.5) / (down + 0.5)))
    scaled = (z - centre) / spread
    total = up + down

    def loss(point: Floats) -> tuple[float, Floats]:
        odds = point[0] * scaled + point[1]
        residual = weight * (expit(odds) - target)
        value = -float(np.sum(weight * (target * log_expit(odds) + (1 - target) * log_expit(-odds))))
        return value / total, np.array([residual @ scaled, residual.sum()]) / total

    start = np.array([1.0, np.log((up + 0.5) / (down + 0.5))])
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=[(0, None), (None, None)])
    slope = float(found.x[0]) / spread
    return slope, float(found.x[1]) - slope * centre


class RankClassifier(BoostedObjective):
    """Trees fitted to rank positives first within groups of rows; a sigmoid gives the ranks' margins a scale.

    A ranking margin has an order and no scale, but sampling is undone and risks are calibrated on log-odds. So margins
    go through a rising sigmoid fitted on the training rows, which changes no order. Fitted on rows that the trees have
    seen it is too sure of itself; the calibrator, fitted on later rows, takes that back.

    ``library``: ``lightgbm`` or ``xgboost``.
    ``objective``: LightGBM: ``lambdarank`` (None) or ``rank_xendcg``. XGBoost: ``rank:ndcg`` (None), ``rank:pairwise``
    or ``rank:map``.
    ``group_hours``: rows of one period of this many hours are ranked together; 0: rows of one decision time.
    ``settings``: settings of ``lightgbm.LGBMRanker`` or ``xgboost.XGBRanker``.
    ``random_state``: Seed; None counts as 0.
    ``slope_``, ``intercept_``: Log-odds are slope times margin plus intercept; the slope is zero or more.

    LightGBM weighs rows; XGBoost weighs whole groups, here by the mean weight of a group's rows.
    """

    _saved: ClassVar[tuple[str, ...]] = ("slope_", "intercept_")

    def __init__(
        self,
        library: Library = "lightgbm",
        objective: str | None = None,
        group_hours: float = 0.0,
        settings: Any = None,
        random_state: int | None = None,
    ) -> None:
        self.library = library
        self.objective = objective
        self.group_hours = group_hours
        self.settings = settings
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, times: Any = None) -> Self:
        """Fit the trees and the sigmoid.

        ``X``: Features; NaN allowed; shape (n_rows, n_features).
        ``y``: two classes; the second in sorted order is the positive one; shape (n_rows,).
        ``sample_weight``: Weights; shape (n_rows,).
        ``times``: decision times in milliseconds; without them all rows are one group. A group above
        :data:`LARGEST_GROUP` rows is dealt out to several of equal size; shape (n_rows,).
        """
        X, codes, weight = self._begin_fit(X, y, sample_weight)
        order, sizes = self._groups(len(codes), times)
        settings = library_settings(self.library, self.settings, self.random_state)
        if self.library == "lightgbm":
            ranker = lightgbm.LGBMRanker(**settings, objective=self.objective or "lambdarank")
            ranker.fit(X[order], codes[order], sample_weight=weight[order], group=sizes)
            self.booster_ = ranker.booster_
        else:
            ranked = xgboost.XGBRanker(**settings, objective=self.objective or "rank:ndcg")
            group = np.repeat(np.arange(len(sizes)), sizes)
            mean = np.bincount(group, weight[order]) / sizes
            ranked.fit(X[order], codes[order], sample_weight=mean, qid=group)
            self.booster_ = ranked.get_booster()
        self.slope_, self.intercept_ = sigmoid_map(margin(self.booster_, X), codes, weight)
        return self

    def _groups(self, n: int, times: Any) -> tuple[Ints, Ints]:
        """Give the rows in the order of their groups, and the size of each group."""
        at = np.zeros(n, dtype=np.int64) if times is None else np.asarray(times, dtype=np.int64)
        if self.group_hours > 0:
            at = at // round(self.group_hours * _MS_PER_HOUR)
        _, group, counts = np.unique(at, return_inverse=True, return_counts=True)
        # Rows are dealt out, not cut: consecutive rows may be one unit's.
        parts = -(-counts // LARGEST_GROUP)
        place = np.empty(n, dtype=np.int64)
        by_group = np.argsort(group, kind="stable")
        place[by_group] = np.arange(n) - np.repeat(np.cumsum(counts) - counts, counts)
        key = np.stack([group, place % parts[group]])
        order = np.lexsort((np.arange(n), key[1], key[0]))
        _, sizes = np.unique(key, axis=1, return_counts=True)
        return order, sizes.astype(np.int64)

    def _positive(self, X: np.ndarray) -> np.ndarray:
        return ranked_probability(margin(self.booster_, X), self.slope_, self.intercept_)

    def contributions(self, X: np.ndarray) -> Floats:
        """Contribution of each feature to the log-odds, shape of ``X``: TreeSHAP of the margin times the slope."""
        return super().contributions(X) * self.slope_
