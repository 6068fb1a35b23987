"""How learners' log-odds become the scores, ranks and alerts of models: the one way in which rows are scored."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from scipy.special import expit

from features.errors import InputError
from models.calibration.fitting import Calibrator
from models.calibration.horizons import HorizonMap, add_risks
from models.config import CASCADE, COMBINERS
from models.ensembles.combining import Stacker, combine
from models.rows.odds import log_odds
from models.rows.ranking import Bools, Floats, Hashes, Ints, mix, rank_within
from models.rows.row_batches import batches
from models.rows.row_reader import RowReader


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a cascade and what separates them; see :class:`models.ensembles.cascade.CascadeEnsemble`.

    ``learners``: names and fitted classifiers, from first to last.
    ``thresholds``: Log-odds at or above which a row is passed on, one for each stage but the last.
    ``floor``: Log-odds that rows filtered out stay below, and survivors above.
    ``order_by``: what survivors are ordered by: the ``last`` stage's log-odds, or the ``mean`` of all stages'.
    """

    learners: Sequence[tuple[str, Any]]
    thresholds: Sequence[float]
    floor: float
    order_by: Literal["last", "mean"] = "last"

    def score(self, X: np.ndarray, first_log_odds: Floats | None = None) -> tuple[Floats, Bools]:
        """Score rows.

        ``X``: Features; shape (n_rows, n_features).
        ``first_log_odds``: the first stage's log-odds of the rows, where they are known already; shape (n_rows,).
        Returns: the score, and whether a row passes all filters; shape (n_rows,).
        """
        filters = len(self.thresholds)
        alive = np.arange(len(X))
        score = np.empty(len(X))
        total = np.zeros(len(X))
        for i, threshold in enumerate(self.thresholds):
            stage = self.learners[i][1]
            z = first_log_odds if i == 0 and first_log_odds is not None else log_odds(stage, X[alive])
            out = z < threshold
            # 0.999: in float32, too, the band's upper end must not touch the next band.
            score[alive[out]] = self.floor - (filters - i) + 0.999 * 2 * expit(z[out] - threshold)
            total[alive] += z
            alive = alive[~out]
        z = log_odds(self.learners[-1][1], X[alive])
        if self.order_by == "mean":
            z = (total[alive] + z) / len(self.learners)
        score[alive] = self.floor + np.logaddexp(0, z - self.floor)
        survived = np.zeros(len(X), dtype=bool)
        survived[alive] = True
        return score, survived


@dataclass(frozen=True, slots=True)
class ModelScore:
    """One model's scores of rows, each of shape (n_rows,).

    ``score``: riskiest highest; the scale is the model's own: log-odds corrected for sampling (learners,
    ``mean_log_odds``, ``stacked``, ``cascade``), the logit of a share (other ensembles), points (baselines).
    ``rank``: 1 for the riskiest row of its decision time.
    """

    score: np.ndarray
    rank: Ints
    alert: Bools


class Pointing(Protocol):
    """A baseline: what gives points."""

    def points(self, X: np.ndarray, identity: Hashes | None = None) -> Floats:
        """Score rows; see :meth:`models.learners.baselines.Baseline.points`."""


@dataclass(frozen=True, slots=True)
class Said:
    """What baselines, learners and the cascade say of rows, each row for itself: before any is compared with others.

    ``points``: of the baselines; shape (n_rows,).
    ``log_odds``: of the learners, as they were fitted: not corrected for sampling; shape (n_rows,).
    ``cascade``: score and survival; None: not asked for; shape (n_rows,).
    """

    points: dict[str, Floats]
    log_odds: dict[str, Floats]
    cascade: tuple[Floats, Bools] | None = None

    @classmethod
    def joined(cls, parts: Sequence[Said]) -> Said:
        """Put what was said of batches of rows together, in their order."""
        if len(parts) == 1:
            return parts[0]
        cascades = [part.cascade for part in parts if part.cascade is not None]
        return cls(
            {name: np.concatenate([part.points[name] for part in parts]) for name in parts[0].points},
            {name: np.concatenate([part.log_odds[name] for part in parts]) for name in parts[0].log_odds},
            (np.concatenate([each[0] for each in cascades]), np.concatenate([each[1] for each in cascades]))
            if cascades
            else None,
        )


@dataclass(frozen=True, slots=True)
class Scorer:
    """Learners, and how their log-odds become the scores of models.

    ``k``: alert budget a decision time.
    ``prior_shift``: added to log-odds, to undo the sampling of negatives.
    ``learners``: all that the models to score need.
    ``members``: members of the parallel ensemble.
    ``min_votes``: for ``min_votes``.
    ``stacker``: for ``stacked``.
    ``cascade``: the cascade, if there is one.
    ``baselines``: all that the models to score need.
    ``stand_in``: name of a baseline that all models are scored by.
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

    def score(self, models: Collection[str], values: np.ndarray, time: Ints, tie: Hashes) -> dict[str, ModelScore]:
        """Score rows with some models.

        ``values``: Features; shape (n_rows, n_features).
        ``time``: decision times in milliseconds since the epoch; shape (n_rows,).
        ``tie``: :func:`models.rows.ranking.name_hashes` of the units; shape (n_rows,).
        Returns: one for each of ``models``.
        """
        return self.compare(models, self.say(models, values, mix(tie, time)), time, tie)

    def say(self, models: Collection[str], values: np.ndarray, identity: Hashes) -> Said:
        """Ask everyone about each row; ``identity`` is a hash of its unit and time."""
        points = {name: baseline.points(values, identity) for name, baseline in self.baselines.items()}
        if self.stand_in is not None:
            return Said(points, {})
        raw = {name: log_odds(learner, values) for name, learner in self.learners.items()}
        if self.cascade is None or CASCADE not in models:
            return Said(points, raw)
        first = self.cascade.learners[0][0]
        return Said(points, raw, self.cascade.score(values, raw[first] if len(self.cascade.learners) > 1 else None))

    def say_of(self, models: Collection[str], read: RowReader, rows: Ints, identity: Hashes) -> Said:
        """Ask everyone about rows of a matrix, of which a batch at a time is in memory.

        ``rows``: Positions; shape (n_rows,).
        ``identity``: hash of each row's unit and time; shape (n_rows,).
        """
        return Said.joined([self.say(models, read(rows[part]), identity[part]) for part in batches(len(rows))])

    def compare(self, models: Collection[str], said: Said, time: Ints, tie: Hashes) -> dict[str, ModelScore]:
        """Give the models' scores of rows from what was said of them; parameters as of :meth:`score`."""
        points = said.points
        if self.stand_in is not None:
            return {name: self._ranked(points.get(name, points[self.stand_in]), time, tie) for name in models}
        scored: dict[str, ModelScore] = {}
        for name in models:
            if name in points:
                scored[name] = self._ranked(points[name], time, tie)
            elif name == CASCADE:
                scored[name] = self._cascade(said, time, tie)
            elif name in COMBINERS:
                scored[name] = self._parallel(name, said.log_odds, time, tie)
            else:
                scored[name] = self._ranked(said.log_odds[name] + self.prior_shift, time, tie)
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

    def _cascade(self, said: Said, time: Ints, tie: Hashes) -> ModelScore:
        assert said.cascade is not None
        score, survived = said.cascade
        ranked = self._ranked(score + self.prior_shift, time, tie)
        return ModelScore(ranked.score, ranked.rank, ranked.alert & survived)


def checked_rows(values: Any, features: int) -> np.ndarray:
    """Give rows as float32.

    Raises ``InputError`` if the number of features is another.
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
