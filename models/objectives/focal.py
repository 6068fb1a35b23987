"""Focal loss: well-told rows count less, so that the few hard ones shape the trees."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import lightgbm
import numpy as np
from scipy.optimize import brentq
from scipy.special import expit
from sklearn.utils.class_weight import compute_sample_weight

from models.objective_maps import focal_derivatives, focal_probability, probability_of
from models.objectives.boosted import BoostedObjective, library_settings, margin
from models.ranking import Floats

_LOWEST_CURVATURE = 1e-3
"""Floor of the second derivative over that of the likelihood: the focal loss is not convex far from the truth."""


class FocalClassifier(BoostedObjective):
    """LightGBM trees fitted by focal loss; probabilities are mapped back to those of the classes.

    ``gamma``: focusing parameter, 0 or more; 0 gives the likelihood.
    ``class_weight``: weight of each class, as scikit-learn understands it.
    ``settings``: settings of ``lightgbm.LGBMModel``.
    ``random_state``: Seed; None counts as 0.
    ``booster_``: the trees, whose margins come on top of ``start_``.
    ``start_``: margin that stands for the weighted share of positives.
    ``gamma_``: the focusing parameter it was fitted with.
    """

    _saved: ClassVar[tuple[str, ...]] = ("start_", "gamma_")

    def __init__(
        self,
        gamma: float = 1.0,
        class_weight: Any = None,
        settings: Any = None,
        random_state: int | None = None,
    ) -> None:
        self.gamma = gamma
        self.class_weight = class_weight
        self.settings = settings
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the trees to ``X``, shape (n_rows, n_features), NaN allowed, and two classes ``y``, with weights."""
        if not self.gamma >= 0:
            raise ValueError(f"gamma is {self.gamma}: give 0 or more.")
        X, codes, weight = self._begin_fit(X, y, sample_weight)
        if self.class_weight is not None:
            weight = weight * compute_sample_weight(self.class_weight, self.classes_[codes])
        gamma = float(self.gamma)
        share = float(np.clip(np.average(codes, weights=weight), 1e-6, 1 - 1e-6))
        # Far margins lose their derivatives to rounding: the search stays where they are exact.
        start = float(brentq(lambda z: float(probability_of(np.array([z]), gamma)[0]) - share, -30.0, 30.0))

        def objective(truth: np.ndarray, raw: np.ndarray) -> tuple[Floats, Floats]:
            z = np.asarray(raw, dtype=np.float64)
            first, second = focal_derivatives(z, np.asarray(truth, dtype=np.int64), gamma)
            likelihood = expit(z) * expit(-z)
            return first * weight, np.maximum(second, _LOWEST_CURVATURE * likelihood) * weight

        trees = lightgbm.LGBMRegressor(**library_settings("lightgbm", self.settings, self.random_state))
        # With an objective of its own LightGBM fails where few rows let it drop every feature beforehand.
        trees.set_params(objective=objective, feature_pre_filter=False)
        trees.fit(X, codes, sample_weight=weight, init_score=np.full(len(codes), start))
        self.booster_, self.start_, self.gamma_ = trees.booster_, start, gamma
        return self

    def _positive(self, X: np.ndarray) -> np.ndarray:
        return focal_probability(margin(self.booster_, X), self.start_, self.gamma_)
