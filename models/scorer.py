"""The one way in which rows are scored, whoever read the learners: needs no library that trains, nor pandas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from features.errors import InputError
from models.calibrator import Calibrator
from models.combining import Stacker, combine
from models.config import CASCADE, COMBINERS
from models.horizon_map import HorizonMap, add_risks
from models.odds import log_odds
from models.ranking import Bools, Floats, Hashes, Ints, mix, rank_within
from models.stages import Stages


@dataclass(frozen=True, slots=True)
class ModelScore:
    """One model's scores of rows, each of shape (n_rows,).

    Attributes
    ----------
    score : ndarray of float32
        Riskiest highest; the scale is the model's own: log-odds corrected for sampling (learners,
        ``mean_log_odds``, ``stacked``, ``cascade``), the logit of a share (other ensembles), points (baselines).
    rank : ndarray of int64
        1 for the riskiest row of its decision time.
    alert : ndarray of bool
        The model's selection.
    """

    score: np.ndarray
    rank: Ints
    alert: Bools


class Pointing(Protocol):
    """A baseline: what gives points."""

    def points(self, X: np.ndarray, identity: Hashes | None = None) -> Floats:
        """Score rows; see :meth:`models.baselines.Baseline.points`."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """Learners, and how their log-odds become the scores of models.

    Attributes
    ----------
    k : int
        Alert budget a decision time.
    prior_shift : float
        Added to log-odds, to undo the sampling of negatives.
    learners : mapping of str to classifier
        All that the models to score need.
    members : tuple of str
        Members of the parallel ensemble.
    min_votes : int or None
        For ``min_votes``.
    stacker : Stacker
        For ``stacked``.
    cascade : Stages or None
        The cascade, if there is one.
    baselines : mapping of str to Pointing
        All that the models to score need.
    stand_in : str or None
        Name of a baseline that all models are scored by.
    """

    k: int
    prior_shift: float
    learners: Mapping[str, Any]
    members: tuple[str, ...]
    min_votes: int | None
    stacker: Stacker
    cascade: Stages | None
    baselines: Mapping[str, Pointing]
    stand_in: str | None = None

    def score(self, models: Iterable[str], values: np.ndarray, time: Ints, tie: Hashes) -> dict[str, ModelScore]:
        """Score rows with some models.

        Parameters
        ----------
        models : iterable of str
            Their names.
        values : ndarray of float32, shape (n_rows, n_features)
            Features.
        time : ndarray of int64, shape (n_rows,)
            Decision times in milliseconds since the epoch.
        tie : ndarray of uint64, shape (n_rows,)
            :func:`models.ranking.name_hashes` of the units.

        Returns
        -------
        dict of str to ModelScore
            One for each of ``models``.
        """
        identity = mix(tie, time)
        points = {name: baseline.points(values, identity) for name, baseline in self.baselines.items()}
        if self.stand_in is not None:
            return {name: self._ranked(points.get(name, points[self.stand_in]), time, tie) for name in models}
        raw = {name: log_odds(learner, values) for name, learner in self.learners.items()}
        scored: dict[str, ModelScore] = {}
        for name in models:
            if name in points:
                scored[name] = self._ranked(points[name], time, tie)
            elif name == CASCADE:
                scored[name] = self._cascade(values, raw, time, tie)
            elif name in COMBINERS:
                scored[name] = self._parallel(name, raw, time, tie)
            else:
                scored[name] = self._ranked(raw[name] + self.prior_shift, time, tie)
        return scored

    def _ranked(self, score: Floats, time: Ints, tie: Hashes) -> ModelScore:
        # Ranks are taken of the rounded score, so that a reader of the file finds them again.
        rounded = score.astype(np.float32)
        rank = rank_within(time, rounded, tie)
        return ModelScore(rounded, rank, rank <= self.k)

    def _parallel(self, name: str, raw: Mapping[str, Floats], time: Ints, tie: Hashes) -> ModelScore:
        combiner = next(combiner for combiner in COMBINERS if combiner == name)
        scores = np.column_stack([raw[member] + self.prior_shift for member in self.members])
        joined = combine(scores, time, tie, k=self.k, combiner=combiner, min_votes=self.min_votes, stacker=self.stacker)
        ranked = self._ranked(joined.score, time, tie)
        voted = combiner in ("intersection", "min_votes")
        return ModelScore(ranked.score, ranked.rank, joined.alert if voted else ranked.alert)

    def _cascade(self, values: np.ndarray, raw: Mapping[str, Floats], time: Ints, tie: Hashes) -> ModelScore:
        assert self.cascade is not None
        first = self.cascade.learners[0][0]
        score, survived = self.cascade.score(values, raw[first] if len(self.cascade.learners) > 1 else None)
        ranked = self._ranked(score + self.prior_shift, time, tie)
        return ModelScore(ranked.score, ranked.rank, ranked.alert & survived)


def checked_rows(values: Any, features: int) -> np.ndarray:
    """Give rows as float32.

    Raises
    ------
    InputError
        If the number of features is another.
    """
    rows = np.asarray(values, dtype=np.float32)
    if rows.ndim != 2 or rows.shape[1] != features:
        raise InputError(
            f"rows with {rows.shape[1] if rows.ndim == 2 else 'no'} features where the models were fitted on "
            f"{features}",
            "scoring",
            "Compute the features with the bundle's own list of columns.",
        )
    return rows


def risk_of(calibrator: Calibrator, score: np.ndarray) -> np.ndarray:
    """Give the risks of a model's scores, float32, shape kept."""
    return calibrator.risk(score.astype(np.float64)).astype(np.float32)


def risks_of(horizons: HorizonMap | None, risk: np.ndarray) -> dict[str, np.ndarray]:
    """Give risks at all horizons: ``risk_6h`` and so on, ascending, float32; none asked for: {}."""
    if horizons is None:
        return {}
    return add_risks(risk, np.zeros(len(risk), dtype=np.int64), [horizons])
