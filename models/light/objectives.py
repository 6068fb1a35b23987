"""Trees that learned by an objective of ours: facts beside them in their file, and probabilities of their margins."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np
from scipy.special import expit

from models.objective_maps import focal_probability, hazard_risk, ranked_probability, room_for_interval
from models.ranking import Floats
from models.trees.evaluate import TreeEvaluator
from models.trees.lightgbm_text import HEADER
from models.trees.xgboost_ubj import ATTRIBUTE
from models.ubjson import read_ubjson

_FACTS: Final[dict[str, tuple[str, ...]]] = {
    "focal": ("start_", "gamma_"),
    "rank": ("slope_", "intercept_"),
    "hazard": ("edges_", "start_"),
}


class ObjectiveScorer:
    """A learner of :mod:`models.objectives` that scores rows.

    ``kind``: ``focal``, ``rank`` or ``hazard``.
    ``classes_``: 0 and 1.
    ``n_features_in_``: features of a row.
    """

    def __init__(self, kind: str, trees: TreeEvaluator, facts: dict[str, Any]) -> None:
        self._kind = kind
        self._trees = trees
        self._facts = facts
        self.classes_ = np.array([0, 1])
        self.n_features_in_ = trees.n_features_in_ - (kind == "hazard")

    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        """Give the probability of both classes, shape (n_rows, 2), of rows of float32; NaN: unknown."""
        positive = self._positive(X)
        return np.column_stack([1 - positive, positive])

    def contributions(self, X: np.ndarray) -> Floats:
        """Take the score apart as the learner's own ``contributions`` does; float64 of the shape of ``X``.

        Raises ``ValueError`` if the file does not say how many rows went each way.
        """
        facts = self._facts
        if self._kind == "focal":
            return self._trees.contributions(X)
        if self._kind == "rank":
            return np.asarray(self._trees.contributions(X) * facts["slope_"], np.float64)
        hazard = expit(self._hazard_margins(X))
        risk = np.maximum(-np.expm1(np.log1p(-hazard).sum(axis=1)), 1e-12)
        rows, out = room_for_interval(X), np.zeros(X.shape)
        for interval in range(len(facts["start_"])):
            rows[:, -1] = interval
            out += self._trees.contributions(rows)[:, :-1] * (hazard[:, interval] / risk)[:, None]
        return out

    def _positive(self, X: np.ndarray) -> Floats:
        facts = self._facts
        if self._kind == "focal":
            return focal_probability(self._margins(X), facts["start_"], facts["gamma_"])
        if self._kind == "rank":
            return ranked_probability(self._margins(X), facts["slope_"], facts["intercept_"])
        return hazard_risk(self._hazard_margins(X))

    def _hazard_margins(self, X: np.ndarray) -> Floats:
        rows = room_for_interval(X)
        margins = np.empty((len(X), len(self._facts["start_"])))
        for interval, start in enumerate(self._facts["start_"]):
            rows[:, -1] = interval
            margins[:, interval] = self._margins(rows, np.full(len(X), start, np.float64))
        return margins

    def _margins(self, X: np.ndarray, base: Floats | None = None) -> Floats:
        return self._trees.margins(X, base).astype(np.float64)


def objective_of(name: str, content: bytes, trees: TreeEvaluator) -> ObjectiveScorer:
    """Join the trees of a file of ours with the facts that it keeps beside them.

    ``name``: the learner, such as ``lightgbm_rank``.
    Raises ``ValueError, KeyError, TypeError`` if the facts are not there or not what they should be.
    """
    kind = name.rpartition("_")[2]
    facts = _facts(content)
    if not isinstance(facts, dict) or set(facts) != set(_FACTS[kind]):
        raise ValueError(f"the facts beside the trees are not {', '.join(_FACTS[kind])}")
    for fact, value in facts.items():
        several = kind == "hazard"
        if isinstance(value, list) != several or not all(map(_number, value if several else [value])):
            raise ValueError(f"'{fact}' is {str(value)[:40]}")
    if kind == "hazard" and (
        len(facts["start_"]) != len(facts["edges_"]) + 1 or facts["edges_"] != sorted(facts["edges_"])
    ):
        raise ValueError("its intervals do not fit their borders")
    return ObjectiveScorer(kind, trees, facts)


def _facts(content: bytes) -> Any:
    if content.startswith(HEADER.encode()):
        return json.loads(content.partition(b"\n")[0].decode("ascii").removeprefix(HEADER))
    return json.loads(read_ubjson(content)["learner"]["attributes"][ATTRIBUTE])


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value)
