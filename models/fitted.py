"""What one refit makes: fitted learners, ensembles and calibrators, and the one way in which rows are scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd

from features.errors import InputError
from features.service import instants, milliseconds
from features.vocabulary import FeatureColumn
from models.baselines import Baseline
from models.calibration import Calibrator
from models.cascade import CascadeEnsemble
from models.config import ALL_LEARNERS, BASELINES, Combiner, ModelsSection
from models.drift.reference import Reference
from models.horizons import HorizonMap, add_risks
from models.learners import log_odds
from models.parallel import Stacker, combine
from models.precedents import PrecedentLibrary
from models.ranking import Bools, Floats, Hashes, Ints, mix, name_hashes, rank_within

COMBINERS: tuple[Combiner, ...] = ("intersection", "min_votes", "mean_rank", "mean_log_odds", "stacked")
"""Combiners in the order of reports; each is also the name of a model."""

ORDERS_ONLY: frozenset[str] = frozenset({"intersection", "min_votes", "mean_rank"})
"""Models that order the units of a decision time and no more: some unit comes first even when none is at risk."""

CASCADE = "cascade"
"""Name of the cascade among the models."""


def model_names(models: ModelsSection) -> tuple[str, ...]:
    """List the models that a run gives predictions of: baselines, learners, parallel ensembles, cascade.

    An ensemble of one is its member and is left out: parallel ensembles of one member, a cascade of one stage.
    ``min_votes`` is among them if it is asked for (as combiner, as profile, or by setting the number of votes): with
    all votes needed it equals ``intersection``.

    Parameters
    ----------
    models : ModelsSection
        What is trained.

    Returns
    -------
    tuple of str
        Names, in the order of reports.

    Raises
    ------
    InputError
        If ``models.profile`` is not among them, or the ensembles have no members.
    """
    parallel = models.parallel
    for key, members in (("parallel.members", parallel.members), ("cascade.stages", models.cascade.stages)):
        if not members:
            raise InputError("an empty list", f"parameter models.{key}", "Name at least one learner.")
    if parallel.min_votes is not None and not 1 <= parallel.min_votes <= len(parallel.members):
        raise InputError(
            f"min_votes is {parallel.min_votes} with {len(parallel.members)} members",
            "parameter models.parallel.min_votes",
            f"Give a number from 1 to {len(parallel.members)}, or null for all members.",
        )
    asked = "min_votes" in (parallel.combiner, models.profile) or parallel.min_votes is not None
    combiners = tuple(name for name in COMBINERS if name != "min_votes" or asked) if len(parallel.members) > 1 else ()
    learners = tuple(name for name in ALL_LEARNERS if name in models.learners)
    names = (*BASELINES, *learners, *combiners, *((CASCADE,) if len(models.cascade.stages) > 1 else ()))
    if models.profile not in names:
        raise InputError(
            f"'{models.profile}' is not a model of this run",
            "parameter models.profile",
            f"Choose one of {', '.join(names)}.",
        )
    return names


def fitted_learners(models: ModelsSection) -> tuple[str, ...]:
    """List the learners to fit on the whole training set: those asked for, the members and the first stage."""
    needed = {*models.learners, *models.parallel.members, models.cascade.stages[0]}
    return tuple(name for name in ALL_LEARNERS if name in needed)


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


@dataclass(frozen=True, slots=True)
class FittedModels:
    """All models of one refit.

    Attributes
    ----------
    refit_at, train_start, train_end : datetime
        When it was fitted, and first and last decision time of the training span (aware UTC).
    span : timedelta
        Training span.
    columns : tuple of FeatureColumn
        The features, in order.
    models : tuple of str
        Models that scores are given of, in the order of reports.
    k : int
        Alert budget a decision time.
    prior_shift : float
        Added to learners' log-odds to undo the sampling of negatives.
    learners : dict of str to classifier
        Fitted on the whole training set; members and the cascade's first stage among them.
    members : tuple of str
        Members of the parallel ensembles.
    min_votes : int or None
        For ``min_votes``; None: all members.
    stacker : Stacker
        For ``stacked``; takes corrected log-odds.
    cascade : CascadeEnsemble or None
        Its first stage is the learner of that name.
    baselines : dict of str to Baseline
        By name.
    calibrators : dict of str to Calibrator
        For each of ``models``.
    horizons : dict of str to HorizonMap
        For each of ``models``, where further horizons were asked for.
    n_positive, n_negative, n_augmented, n_incidents : int
        Size of the training set.
    calibrated : bool
        Whether calibrators were fitted on a slice; else they are the fallback of
        :func:`models.calibration.fit_calibrator`.
    stand_in : str or None
        Name of a baseline that all models are scored by because nothing could be fitted yet; None: none.
    precedents : PrecedentLibrary or None
        Past incidents to compare alerts with; only the models of a bundle carry it.
    reference : Reference or None
        What the rows and scores were like that they were fitted on, to tell drift from; None: not kept.
    """

    refit_at: datetime
    train_start: datetime
    train_end: datetime
    span: timedelta
    columns: tuple[FeatureColumn, ...]
    models: tuple[str, ...]
    k: int
    prior_shift: float
    learners: Mapping[str, Any]
    members: tuple[str, ...]
    min_votes: int | None
    stacker: Stacker
    cascade: CascadeEnsemble | None
    baselines: Mapping[str, Baseline]
    calibrators: Mapping[str, Calibrator] = field(default_factory=dict)
    horizons: Mapping[str, HorizonMap] = field(default_factory=dict)
    n_positive: int = 0
    n_negative: int = 0
    n_augmented: int = 0
    n_incidents: int = 0
    calibrated: bool = False
    stand_in: str | None = None
    precedents: PrecedentLibrary | None = None
    reference: Reference | None = None

    def score(self, values: np.ndarray, times: Any, units: Any) -> pd.DataFrame:
        """Score rows with every model.

        Parameters
        ----------
        values : ndarray of float32, shape (n_rows, n_features)
            Features in the order of ``columns``; NaN: unknown.
        times : DatetimeIndex or Series, shape (n_rows,)
            Decision time of each row, with a time zone. Ranks and alerts are taken inside a decision time, so all
            units to compare must be given in one call.
        units : array-like of str, shape (n_rows,)
            Unit of each row.

        Returns
        -------
        DataFrame
            ``decision_time``, ``unit``, ``model``, ``score`` and ``risk`` (float32), ``rank`` (int32), ``alert``; one
            row for each model and row, models in order.

        Raises
        ------
        InputError
            If the number of features is not that of ``columns``.
        """
        values = np.asarray(values, dtype=np.float32)
        if values.ndim != 2 or values.shape[1] != len(self.columns):
            raise InputError(
                f"rows with {values.shape[1] if values.ndim == 2 else 'no'} features where the models were fitted on "
                f"{len(self.columns)}",
                "scoring",
                "Compute the features with the bundle's own list of columns.",
            )
        time = milliseconds(pd.Series(times))
        scores = self.score_arrays(values, time, name_hashes(units))
        unit = pd.Series(units, dtype=object).to_numpy()
        frames = [
            pd.DataFrame(
                {
                    "decision_time": instants(time),
                    "unit": unit,
                    "model": pd.Categorical.from_codes(np.full(len(time), i), categories=list(self.models)),
                    "score": scores[name].score,
                    "risk": self.risk(name, scores[name].score),
                    "rank": scores[name].rank.astype(np.int32),
                    "alert": scores[name].alert,
                }
            )
            for i, name in enumerate(self.models)
        ]
        return pd.concat(frames, ignore_index=True)

    def score_arrays(self, values: np.ndarray, time: Ints, tie: Hashes) -> dict[str, ModelScore]:
        """Score rows with every model, as arrays.

        Parameters
        ----------
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
            return {name: self._ranked(points.get(name, points[self.stand_in]), time, tie) for name in self.models}
        raw = {name: log_odds(learner, values) for name, learner in self.learners.items()}
        scored: dict[str, ModelScore] = {}
        for name in self.models:
            if name in points:
                scored[name] = self._ranked(points[name], time, tie)
            elif name == CASCADE:
                scored[name] = self._cascade(values, raw, time, tie)
            elif name in COMBINERS:
                scored[name] = self._parallel(name, raw, time, tie)
            else:
                scored[name] = self._ranked(raw[name] + self.prior_shift, time, tie)
        return scored

    def risk(self, name: str, score: np.ndarray) -> np.ndarray:
        """Give the risks of a model's scores, float32, shape kept."""
        return self.calibrators[name].risk(score.astype(np.float64)).astype(np.float32)

    def risks(self, name: str, score: np.ndarray) -> dict[str, np.ndarray]:
        """Give the risks of a model's scores at all horizons: ``risk_6h`` and so on, ascending; none asked for: {}."""
        if name not in self.horizons:
            return {}
        return add_risks(self.risk(name, score), np.zeros(len(score), dtype=np.int64), [self.horizons[name]])

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
        first = self.cascade.stages_[0][0]
        score, survived = self.cascade.score_rows(values, raw[first] if len(self.cascade.stages_) > 1 else None)
        ranked = self._ranked(score + self.prior_shift, time, tie)
        return ModelScore(ranked.score, ranked.rank, ranked.alert & survived)
