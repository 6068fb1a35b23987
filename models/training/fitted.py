"""Result of a refit: fitted learners, ensembles and calibrators, and how they score rows."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd

from features.vocabulary import FeatureColumn
from foundation.errors import InputError
from foundation.times import instants, milliseconds
from models.calibration.fitting import Calibrator
from models.calibration.horizons import HorizonMap, add_risks
from models.config import ALL_LEARNERS, BASELINES, CASCADE, COMBINERS, PRIOR, ModelsSection
from models.ensembles import Cascade, Stacker, combine
from models.learners.baselines import Baseline
from models.rows.ranking import Bools, Floats, Hashes, Ints, mix, name_hashes, rank_within, top_nodes
from models.rows.row_reader import RowReader, batches, log_odds
from models.rows.training_set import TrainingRows
from models.training.reference import Reference

ORDERS_ONLY: frozenset[str] = frozenset({"intersection", "min_votes", "mean_rank"})
"""Models that order the units of a decision time and no more: some unit comes first even when none is at risk."""


def model_names(models: ModelsSection, *, full: bool = True) -> tuple[str, ...]:
    """List the models that a run gives predictions of: baselines, learners, parallel ensembles, cascade.

    ``full``: all of them; False: the baselines, the profile, and the learners that it needs.

    An ensemble of one is its member and is left out: parallel ensembles of one member, a cascade of one stage.
    ``min_votes`` is among them if it is asked for (as combiner, as profile, or by setting the number of votes): with
    all votes needed it equals ``intersection``.

    Raises ``InputError`` if ``models.profile`` is not among them, or the ensembles have no members.
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
        add = f"Add {models.profile} to models.learners, or choose" if models.profile in ALL_LEARNERS else "Choose"
        raise InputError(
            f"'{models.profile}' is not a model of this run",
            "parameter models.profile",
            f"{add} one of {', '.join(names)}.",
        )
    stages = models.cascade.stages if models.profile == CASCADE else ()
    needed = {*BASELINES, models.profile, *learners_of(models, (models.profile,)), *stages}
    return names if full else tuple(name for name in names if name in needed)


def learners_of(models: ModelsSection, names: Collection[str]) -> tuple[str, ...]:
    """List the learners that models need on the whole training set: themselves, members, the first stage."""
    needed = {*names}
    if needed & set(COMBINERS):
        needed |= set(models.parallel.members)
    if CASCADE in needed:
        needed.add(models.cascade.stages[0])
    return tuple(name for name in ALL_LEARNERS if name in needed)


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


Answers = Mapping[str, np.ndarray]
"""What baselines, learners and the cascade answer for each row by itself, by name: points, log-odds as fitted
(neither corrected for sampling nor pooled with a prior), the cascade's score; and by :data:`_SURVIVED` which rows pass
its filters."""

_SURVIVED = "survived"


@dataclass(frozen=True, slots=True)
class FittedModels:
    """All models of one refit.

    ``refit_at``, ``train_start``, ``train_end``: when it was fitted, and first and last decision time of the training
    span (aware UTC).
    ``k``: alert budget: nodes a decision time.
    ``prior_shift``: added to learners' log-odds to undo the sampling of negatives.
    ``learners``: fitted on the whole training set; members among them, and the cascade's first stage.
    ``min_votes``: for ``min_votes``; None: all members.
    ``stacker``: for ``stacked``; takes corrected log-odds.
    ``horizons``: of the profile, where further horizons were asked for.
    ``calibrated``: whether calibrators were fitted on a slice; else they are the fallback of
    :func:`models.calibration.fitting.fit_calibrator`.
    ``thinned_to``: negatives for each positive, where ``training.memory`` left room for fewer than asked for; None: as
    asked for.
    ``stand_in``: name of what all models are scored by because nothing could be fitted yet: a baseline, or
    :data:`models.config.PRIOR`, which then is the only one of ``learners``; None: none.
    ``prior_weight``: share of a prior, one of ``learners``, in the log-odds of every other learner; 0: it was left out;
    None: there is none. Cascades do without.
    ``reference``: what the rows and scores were like that they were fitted on, to tell drift from; None: not kept.
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
    cascade: Cascade | None
    baselines: Mapping[str, Baseline]
    calibrators: Mapping[str, Calibrator] = field(default_factory=dict)
    horizons: Mapping[str, HorizonMap] = field(default_factory=dict)
    n_positive: int = 0
    n_negative: int = 0
    n_augmented: int = 0
    n_incidents: int = 0
    calibrated: bool = False
    thinned_to: int | None = None
    stand_in: str | None = None
    prior_weight: float | None = None
    reference: Reference | None = None

    @property
    def learner_names(self) -> frozenset[str]:
        """Names of all learners that rows are asked of, those of the cascade's stages among them."""
        return frozenset({*self.learners, *(name for name, _ in (self.cascade.stages if self.cascade else ()))})

    def score(self, values: np.ndarray, times: Any, units: Any, nodes: Any = None) -> pd.DataFrame:
        """Score rows with every model.

        ``values``: features in the order of ``columns``; NaN: unknown; shape (n_rows, n_features).
        ``times``: decision time of each row, with a time zone. Ranks and alerts are taken inside a decision time, so
        all units to compare must be given in one call; shape (n_rows,).
        ``nodes``: node of each row, by which alerts are counted; None: each unit is one by itself; shape (n_rows,).
        Returns: ``decision_time``, ``unit``, ``model``, ``score`` and ``risk`` (float32), ``rank`` (int32), ``alert``;
        one row for each model and row, models in order.
        Raises ``InputError`` if the number of features is not that of ``columns``.
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
        tie = name_hashes(units)
        scores = self.score_arrays(values, time, tie, tie if nodes is None else name_hashes(nodes))
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

    def score_arrays(self, values: np.ndarray, time: Ints, tie: Hashes, node: Ints | Hashes) -> dict[str, ModelScore]:
        """Score rows with every model, as arrays.

        ``time``: decision times in milliseconds since the epoch; shape (n_rows,).
        ``tie``: :func:`models.rows.ranking.name_hashes` of the units; shape (n_rows,).
        ``node``: what tells the nodes of the rows apart, since alerts are counted by nodes; shape (n_rows,).
        """
        return self.compare(self._answer(values, mix(tie, time)), time, tie, node)

    def score_rows(self, read: RowReader, rows: Ints, matrix_rows: TrainingRows) -> dict[str, ModelScore]:
        """Score rows of a matrix, of which a batch at a time is in memory; see :meth:`score_arrays`."""
        time, tie = matrix_rows.time[rows], matrix_rows.tie[rows]
        return self.compare(self.answer_rows(read, rows, mix(tie, time)), time, tie, matrix_rows.node[rows])

    def answer_rows(self, read: RowReader, rows: Ints, identity: Hashes) -> Answers:
        """Ask everyone about rows of a matrix, of which a batch at a time is in memory.

        ``identity``: hash of each row's unit and time; shape (n_rows,).
        """
        parts = [self._answer(read(rows[part]), identity[part]) for part in batches(len(rows))]
        return parts[0] if len(parts) == 1 else {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}

    def _answer(self, values: np.ndarray, identity: Hashes) -> Answers:
        answers: dict[str, np.ndarray] = {
            name: baseline.points(values, identity) for name, baseline in self.baselines.items()
        }
        answers |= {name: log_odds(learner, values) for name, learner in self.learners.items()}
        if self.cascade is not None:
            first = answers.get(self.cascade.stages[0][0]) if len(self.cascade.stages) > 1 else None
            answers[CASCADE], answers[_SURVIVED] = self.cascade.score(values, first)
        return answers

    def compare(self, answers: Answers, time: Ints, tie: Hashes, node: Ints | Hashes) -> dict[str, ModelScore]:
        """Give every model's scores of rows from what was answered for them; parameters as of :meth:`score_arrays`."""
        pooled = self.pooled(answers)
        return {name: self._compared(name, pooled, time, tie, node) for name in self.models}

    def pooled(self, answers: Answers) -> Answers:
        """Give the answers with the prior's share in every learner's log-odds."""
        if not self.prior_weight or self.stand_in is not None:
            return answers
        share = self.prior_weight
        return dict(answers) | {
            name: (1 - share) * answers[name] + share * answers[PRIOR] for name in self.learners if name != PRIOR
        }

    def _compared(self, name: str, answers: Answers, time: Ints, tie: Hashes, node: Ints | Hashes) -> ModelScore:
        if name in BASELINES or self.stand_in is not None:
            return self._ranked(answers[name if name in answers else str(self.stand_in)], time, tie, node)
        if name not in COMBINERS:
            ranked = self._ranked(answers[name] + self.prior_shift, time, tie, node)
            return replace(ranked, alert=ranked.alert & answers[_SURVIVED]) if name == CASCADE else ranked
        combiner = next(combiner for combiner in COMBINERS if combiner == name)
        scores = np.column_stack([answers[member] + self.prior_shift for member in self.members])
        score, alert = combine(
            scores, time, tie, node, k=self.k, combiner=combiner, min_votes=self.min_votes, stacker=self.stacker
        )
        ranked = self._ranked(score, time, tie, node)
        return ranked if alert is None else replace(ranked, alert=alert)

    def _ranked(self, score: Floats, time: Ints, tie: Hashes, node: Ints | Hashes) -> ModelScore:
        # Ranks are taken of the rounded score, so that a reader of the file finds them again.
        rounded = score.astype(np.float32)
        rank = rank_within(time, rounded, tie)
        return ModelScore(rounded, rank, top_nodes(time, rank, node, self.k))

    def risk(self, name: str, score: np.ndarray) -> np.ndarray:
        """Give the risks of a model's scores, float32, shape kept."""
        return self.calibrators[name].risk(score.astype(np.float64)).astype(np.float32)

    def risks(self, name: str, score: np.ndarray) -> dict[str, np.ndarray]:
        """Give the risks of a model's scores at all horizons: ``risk_6h`` and so on, ascending; none asked for: {}."""
        if name not in self.horizons:
            return {}
        return add_risks(self.risk(name, score), np.zeros(len(score), dtype=np.int64), [self.horizons[name]])
