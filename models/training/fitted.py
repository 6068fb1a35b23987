"""Result of a refit: fitted learners, ensembles and calibrators, and scoring with them."""

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
"""Models that only rank the units of a decision time: some unit comes first even if none is at risk."""


def model_names(models: ModelsSection, *, full: bool = True) -> tuple[str, ...]:
    """List the models that a run predicts with: baselines, learners, parallel ensembles, cascade.

    ``full``: all of them; False: the baselines, the profile, and the learners that it needs.

    Ensembles with a single member are omitted: parallel ensembles of one member, a cascade of one stage. ``min_votes``
    is included only on request (as combiner, as profile, or by setting the number of votes): if all votes are needed,
    it equals ``intersection``.

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
    with_votes = "min_votes" in (parallel.combiner, models.profile) or parallel.min_votes is not None
    combiners = (
        tuple(name for name in COMBINERS if name != "min_votes" or with_votes) if len(parallel.members) > 1 else ()
    )
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
    """List the learners that models need on the whole training set: themselves, members, the first cascade stage."""
    needed = {*names}
    if needed & set(COMBINERS):
        needed |= set(models.parallel.members)
    if CASCADE in needed:
        needed.add(models.cascade.stages[0])
    return tuple(name for name in ALL_LEARNERS if name in needed)


@dataclass(frozen=True, slots=True)
class ModelScore:
    """Scores of one model, each of shape (n_rows,).

    ``score``: riskiest highest; the scale depends on the model: log-odds corrected for sampling (learners,
    ``mean_log_odds``, ``stacked``, ``cascade``), the logit of a share (other ensembles), points (baselines).
    ``rank``: 1 for the riskiest row of its decision time.
    """

    score: np.ndarray
    rank: Ints
    alert: Bools


Answers = Mapping[str, np.ndarray]
"""Raw outputs per row by name: points of baselines, log-odds of learners as fitted (neither corrected for sampling nor
pooled with a prior), the cascade's score; and by :data:`_SURVIVED` which rows pass its filters."""

_SURVIVED = "survived"


@dataclass(frozen=True, slots=True)
class FittedModels:
    """All models of one refit.

    ``refit_at``, ``train_start``, ``train_end``: time of the fit, and first and last decision time of the training span
    (aware UTC).
    ``k``: alert budget, in nodes per decision time.
    ``prior_shift``: added to learners' log-odds to undo the sampling of negatives.
    ``learners``: fitted on the whole training set; includes members and the cascade's first stage.
    ``min_votes``: for ``min_votes``; None: all members.
    ``stacker``: for ``stacked``; takes corrected log-odds.
    ``horizons``: of the profile, if further horizons were requested.
    ``calibrated``: whether calibrators were fitted on a slice; otherwise they are the fallback of
    :func:`models.calibration.fitting.fit_calibrator`.
    ``thinned_to``: negatives per positive if ``training.memory`` limited them; None: as requested.
    ``stand_in``: replacement for all models while nothing could be fitted: a baseline, or :data:`models.config.PRIOR`,
    which then is the only one of ``learners``; None: not needed.
    ``prior_weight``: share of a prior, one of ``learners``, in the log-odds of every other learner; 0: prior dropped;
    None: no prior. Cascades do not use it.
    ``reference``: summary of the training rows for drift checks; None: not stored.
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
        """Names of all learners that score rows, including the cascade's stages."""
        return frozenset({*self.learners, *(name for name, _ in (self.cascade.stages if self.cascade else ()))})

    def score(self, values: np.ndarray, times: Any, units: Any) -> pd.DataFrame:
        """Score rows with every model; each unit counts as its own node.

        ``values``: features in the order of ``columns``; NaN: unknown; shape (n_rows, n_features).
        ``times``: decision time of each row, with time zone. Ranks and alerts are computed within a decision time, so
        pass all units to compare in one call; shape (n_rows,).
        Returns: ``decision_time``, ``unit``, ``model``, ``score`` and ``risk`` (float32), ``rank`` (int32), ``alert``;
        one row per model and input row, models in order.
        Raises ``InputError`` if the number of features differs from ``columns``.
        """
        values = np.asarray(values, dtype=np.float32)
        if values.ndim != 2 or values.shape[1] != len(self.columns):
            raise InputError(
                f"the rows have {values.shape[1] if values.ndim == 2 else 'no'} features, but the models were fitted "
                f"on {len(self.columns)}",
                "scoring",
                "Compute the features with the bundle's own list of columns.",
            )
        time = milliseconds(pd.Series(times))
        tie = name_hashes(units)
        scores = self.score_arrays(values, time, tie, tie)
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
        ``node``: code or hash of each row's node, for the alert budget; shape (n_rows,).
        """
        return self.compare(self._answers_of(values, mix(tie, time)), time, tie, node)

    def score_rows(self, read: RowReader, rows: Ints, matrix_rows: TrainingRows) -> dict[str, ModelScore]:
        """Score rows of a matrix in batches; see :meth:`score_arrays`."""
        time, tie = matrix_rows.time[rows], matrix_rows.tie[rows]
        return self.compare(self.answer_rows(read, rows, mix(tie, time)), time, tie, matrix_rows.node[rows])

    def answer_rows(self, read: RowReader, rows: Ints, identity: Hashes) -> Answers:
        """Compute the raw outputs of baselines, learners and cascade for rows of a matrix, in batches.

        ``identity``: hash of each row's unit and time; shape (n_rows,).
        """
        parts = [self._answers_of(read(rows[part]), identity[part]) for part in batches(len(rows))]
        return parts[0] if len(parts) == 1 else {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}

    def _answers_of(self, values: np.ndarray, identity: Hashes) -> Answers:
        answers: dict[str, np.ndarray] = {
            name: baseline.points(values, identity) for name, baseline in self.baselines.items()
        }
        answers |= {name: log_odds(learner, values) for name, learner in self.learners.items()}
        if self.cascade is not None:
            first = answers.get(self.cascade.stages[0][0]) if len(self.cascade.stages) > 1 else None
            answers[CASCADE], answers[_SURVIVED] = self.cascade.score(values, first)
        return answers

    def compare(self, answers: Answers, time: Ints, tie: Hashes, node: Ints | Hashes) -> dict[str, ModelScore]:
        """Return every model's scores from the raw outputs; parameters as for :meth:`score_arrays`."""
        pooled = self.pooled(answers)
        return {name: self._compared(name, pooled, time, tie, node) for name in self.models}

    def pooled(self, answers: Answers) -> Answers:
        """Return the raw outputs with the prior pooled into every learner's log-odds."""
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
        # Rank the rounded score, so that ranks can be reproduced from the file.
        rounded = score.astype(np.float32)
        rank = rank_within(time, rounded, tie)
        return ModelScore(rounded, rank, top_nodes(time, rank, node, self.k))

    def risk(self, name: str, score: np.ndarray) -> np.ndarray:
        """Return the risks of a model's scores, float32, shape kept."""
        return self.calibrators[name].risk(score.astype(np.float64)).astype(np.float32)

    def risks(self, name: str, score: np.ndarray) -> dict[str, np.ndarray]:
        """Return risks at all horizons: ``risk_6h`` and so on, ascending; empty without further horizons."""
        if name not in self.horizons:
            return {}
        return add_risks(self.risk(name, score), np.zeros(len(score), dtype=np.int64), [self.horizons[name]])
