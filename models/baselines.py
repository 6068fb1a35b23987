"""Baselines of the same shape as the learners: chance, the count of past faults, and the vendor's own thresholds.

None of them learns: ``fit`` only checks its input and remembers the classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from features.vocabulary import FeatureColumn
from models.binary import BinaryClassifier
from models.points import HistoryPoints, Points, RandomPoints, VendorPoints, unknown_baseline


class Baseline(Points, BinaryClassifier):
    """What the baselines have in common.

    ``columns``: the columns of ``X``, in order; None: no column is known, and the score is constant.
    ``seed``: seed of ``random``; the others ignore it.
    """

    def __init__(self, columns: Sequence[FeatureColumn] | None = None, seed: int = 0) -> None:
        self.columns = columns
        self.seed = seed

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Remember the classes of ``y``, shape (n_rows,); ``X`` has shape (n_rows, n_features), NaN allowed."""
        self._begin_fit(X, y, sample_weight)
        return self

    def _positive(self, X: np.ndarray) -> np.ndarray:
        # An order and no probability: predict_proba must stay within 0 and 1.
        points = self.points(X)
        return points / (1 + points)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.classifier_tags.poor_score = True
        return tags


class RandomScore(RandomPoints, Baseline):
    """Chance: a number drawn from who the row is, the same in every run."""


class HistoryCount(HistoryPoints, Baseline):
    """The number of hardware faults known of the GPU in the last 30 days; see :class:`models.points.HistoryPoints`."""


class VendorRules(VendorPoints, Baseline):
    """NVIDIA's own health thresholds as points; see :class:`models.points.VendorPoints`."""


_CLASSES: dict[str, type[Baseline]] = {
    "random": RandomScore,
    "history_count": HistoryCount,
    "vendor_rules": VendorRules,
}


def make_baseline(name: str, *, columns: Sequence[FeatureColumn], seed: int) -> Baseline:
    """Make a baseline.

    ``name``: one of :data:`models.config.BASELINES`.
    ``seed``: seed of ``random``.
    Returns: ready to score: baselines need no fit.
    Raises ``InputError`` if there is no such baseline.
    """
    if name not in _CLASSES:
        raise unknown_baseline(name)
    return _CLASSES[name](columns, seed)
