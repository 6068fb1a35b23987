"""Sliding training: refit again and again on the recent past, score what follows, and compare with training once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from evaluation.backtest.drift_watch import DriftWatch
from evaluation.backtest.frames import VARIANTS, Fold
from features.times import duration_ms, instant_ms
from models.config import BASELINES, BacktestSection, ModelsSection, TrainingSection
from models.explanation.alert_reasons import explain_rows, riskiest_alerts
from models.explanation.importance import attribute
from models.rows.ranking import Ints
from models.rows.training_set import Labels, Matrix, Rows
from models.sequence.windows import with_windows
from models.training.fitted import FittedModels, model_names
from models.training.reference import LabelledRows
from models.training.schedule import (
    Schedule,
    alert_budget,
    instant_of,
    plan_schedule,
)
from models.training.trainer import Trainer, Unfit, reach_of

_OWN_FACTS = (
    "span_ms", "why_span", "unfit", "sliding", "horizons", "reasons", "attributions",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ahead:
    """Refits that are done.

    ``refits``: what :meth:`evaluation.backtest.sliding.SlidingTrainer.refit_apart` gave, by fold.
    """

    refits: Mapping[int, Fold] = field(default_factory=dict)

    def holds(self, fold: int, *, once: int) -> bool:
        """Tell whether a fold can be taken: its own refit is done, and that of the models trained once."""
        own, first = self.refits.get(fold), self.refits.get(once)
        if own is None or first is None or own.facts["unfit"] is not None:
            return False
        return fold in first.facts["once_for"]

    def fold(self, fold: int, once: int, facts: Mapping[str, Any], tested: Ints) -> Fold:
        """Put a fold together.

        ``fold``, ``once``: the fold, and the one whose models are those trained once.
        """
        own, first = self.refits[fold], self.refits[once]
        mine = own.table.filter(pc.equal(own.table["variant"], VARIANTS.index("sliding")))
        theirs = np.isin(first.table["row"].to_numpy(), tested)
        theirs &= first.table["variant"].to_numpy() == VARIANTS.index("train_once")
        table = pa.concat_tables([mine, first.table.filter(pa.array(theirs))]).combine_chunks()
        own_facts = {name: own.facts[name] for name in _OWN_FACTS if name in own.facts}
        folds = {"refit_fold": fold, "once_fold": once, "train_once": first.facts["sliding"]}
        return Fold(table, {**facts, **own_facts, **folds})


NOTHING_AHEAD = Ahead()
"""No refit is done."""


class SlidingTrainer:
    """Fits and scores the folds of a backtest, one after the other.

    ``explain``: alerts to explain in each fold.
    """

    def __init__(self, trainer: Trainer, schedule: Schedule, *, profile: str, explain: int) -> None:
        self._trainer = trainer
        self._schedule = schedule
        self._profile = profile
        self._explain = explain
        self._fitted: dict[int, FittedModels] = {}
        self._watch = DriftWatch(trainer, schedule.refits_ms, profile)

    def run(self, fold: int, before: list[Fold], ahead: Ahead = NOTHING_AHEAD) -> Fold:
        """Check for drift, fit, and score one fold, given all folds before it."""
        earlier = [each.facts for each in before]
        refit_ms = self._schedule.refits_ms[fold]
        frame = self._trainer.matrix.labels(instant_of(refit_ms))
        found = self._watch.check(fold, before, LabelledRows.of(self._trainer.rows, frame))
        fits = [each["fold"] for each in earlier if each["unfit"] is None]
        facts: dict[str, Any] = {"fold": fold}
        facts["drift"] = None if found is None else found.to_json()
        once = (fits or [fold])[0]
        if ahead.holds(fold, once=once):
            return ahead.fold(fold, once, facts, self._schedule.fold_rows(self._trainer.rows, fold))
        used = self._refit(fold, earlier, Labels.of(frame), facts)
        first = used if once == fold else self._models_of(once, earlier)
        facts["refit_fold"] = fold if facts["unfit"] is None or not fits else fits[-1]
        facts["once_fold"] = once
        facts |= {"sliding": _facts(used), "train_once": _facts(first)}
        scored = self._scores(fold, used)
        parts = self._parts(fold, used, scored, "sliding")
        parts += self._parts(fold, first, scored if first is used else self._scores(fold, first), "train_once")
        table = _table(parts)
        return Fold(table, facts | self._told(fold, used, table))

    def refit_apart(self, fold: int, span: timedelta, why: str, *, once_for: Sequence[int]) -> Fold:
        """Fit and score a fold without knowing anything of the folds before it.

        ``once_for``: folds to score as well with these models, as those that were trained once: this one and later
        ones.
        """
        refit_ms = self._schedule.refits_ms[fold]
        own = self._trainer.fit(refit_ms, self._trainer.labels_at(refit_ms), span)
        facts: dict[str, Any] = {"span_ms": duration_ms(span), "why_span": why, "once_for": list(once_for)}
        if isinstance(own, Unfit):
            return Fold(pa.table({}), facts | {"unfit": own.why})
        scored = self._scores(fold, own)
        table = _table(self._parts(fold, own, scored, "sliding"))
        facts |= {"unfit": None, "sliding": _facts(own)}
        facts |= self._told(fold, own, table)
        parts: list[dict[str, Any]] = []
        for each in once_for:
            parts += self._parts(each, own, scored if each == fold else self._scores(each, own), "train_once")
        if parts:
            table = pa.concat_tables([table, _table(parts)])
        return Fold(table, facts)

    def _told(self, fold: int, used: FittedModels, table: pa.Table) -> dict[str, Any]:
        """Explain a fold's riskiest alerts."""
        profile = used.models.index(self._profile)
        alerted = riskiest_alerts(table, model=profile, variant=0, count=self._explain)
        tested = self._schedule.fold_rows(self._trainer.rows, fold)
        matrix, read = self._trainer.matrix, self._trainer.values
        facts: dict[str, Any] = {"horizons": used.horizons[self._profile].to_json() if used.horizons else None}
        facts["reasons"] = explain_rows(used, matrix, self._profile, alerted, among=tested, values=read)
        if self._explain:
            facts["attributions"] = attribute(used, self._trainer.matrix, self._profile, alerted, tested)
        return facts

    def _refit(self, fold: int, earlier: list[dict[str, Any]], labels: Labels, facts: dict[str, Any]) -> FittedModels:
        """Fit a fold's models, or take the last before it where its span holds one class only."""
        refit_ms = self._schedule.refits_ms[fold]
        current = timedelta(milliseconds=earlier[-1]["span_ms"]) if earlier else None
        choice = self._trainer.choose_span(refit_ms, labels, current)
        assert choice is not None  # the schedule begins where a span fits
        own = self._trainer.fit(refit_ms, labels, choice.span)
        why = own.why if isinstance(own, Unfit) else None
        facts |= {"span_ms": duration_ms(choice.span), "why_span": choice.why, "unfit": why}
        fits = [each["fold"] for each in earlier if each["unfit"] is None]
        if isinstance(own, FittedModels):
            self._keep(fold, own, (fits or [fold])[0])
            return own
        if fits:
            return self._models_of(fits[-1], earlier)
        return self._trainer.stand_in(refit_ms, labels, choice.span)

    def _keep(self, fold: int, models: FittedModels, once: int) -> None:
        # Only two refits can be asked for again: the first, and the last.
        self._fitted = {kept: self._fitted[kept] for kept in (once,) if kept in self._fitted}
        self._fitted[fold] = models

    def _models_of(self, fold: int, before: list[dict[str, Any]]) -> FittedModels:
        """Give an earlier fold's models; after a restart they are fitted again, bit for bit the same."""
        if fold not in self._fitted:
            refit_ms = self._schedule.refits_ms[fold]
            span = timedelta(milliseconds=before[fold]["span_ms"])
            again = self._trainer.fit(refit_ms, self._trainer.labels_at(refit_ms), span)
            assert isinstance(again, FittedModels)
            self._fitted[fold] = again
        return self._fitted[fold]

    def _scores(self, fold: int, models: FittedModels) -> dict[str, Any]:
        """Score a fold's rows, by model."""
        rows = self._trainer.rows
        tested = self._schedule.fold_rows(rows, fold)
        return models.score_rows(self._trainer.values, tested, rows.time[tested], rows.tie[tested])

    def _parts(self, fold: int, models: FittedModels, scores: dict[str, Any], variant: str) -> list[dict[str, Any]]:
        """Give the columns of a fold's predictions, model by model."""
        tested = self._schedule.fold_rows(self._trainer.rows, fold)
        parts: list[dict[str, Any]] = []
        for number, name in enumerate(models.models):
            if variant == "train_once" and name in BASELINES:
                continue
            scored = scores[name]
            parts.append(
                {
                    "row": tested,
                    "variant": np.full(len(tested), VARIANTS.index(variant), dtype=np.int8),
                    "model": np.full(len(tested), number, dtype=np.int8),
                    "score": scored.score,
                    "risk": models.risk(name, scored.score),
                    "rank": scored.rank.astype(np.int32),
                    "alert": scored.alert,
                }
            )
        return parts


def _table(parts: list[dict[str, Any]]) -> pa.Table:
    return pa.table({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


@dataclass(frozen=True, slots=True)
class Begun:
    """A backtest before its first fold.

    ``matrix``: with raw windows where a learner reads them.
    ``rows``, ``schedule``, ``trainer``: what the folds are made of.
    ``names``: Models, in the order of reports.
    ``k``: alert budget a decision time.
    """

    matrix: Matrix
    rows: Rows
    schedule: Schedule
    trainer: Trainer
    sliding: SlidingTrainer
    names: tuple[str, ...]
    k: int


def begin_backtest(
    matrix: Matrix,
    *,
    training: TrainingSection,
    models: ModelsSection,
    backtest: BacktestSection,
    seed: int,
    explain: int,
) -> Begun:
    """Lay out a backtest; see :func:`run_backtest`."""
    names = model_names(models)
    matrix = with_windows(matrix, {*models.learners, *models.parallel.members, *models.cascade.stages})
    rows = Rows.of(matrix.rows)
    reach_ms = reach_of(rows, Labels.of(matrix.labels(None)))
    schedule = plan_schedule(matrix, rows, training=training, backtest=backtest, reach_ms=reach_ms)
    first = schedule.refits_ms[0]
    k = alert_budget(rows, Labels.of(matrix.labels(instant_of(first))), backtest, as_of_ms=first)
    trainer = Trainer(matrix, training=training, models=models, k=k, seed=seed)
    sliding = SlidingTrainer(trainer, schedule, profile=models.profile, explain=explain)
    return Begun(matrix, rows, schedule, trainer, sliding, names, k)


def _facts(models: FittedModels) -> dict[str, Any]:
    return {
        "refit_ms": instant_ms(models.refit_at),
        "span_ms": duration_ms(models.span),
        "train_start_ms": instant_ms(models.train_start),
        "train_end_ms": instant_ms(models.train_end),
        "n_positive": models.n_positive,
        "n_negative": models.n_negative,
        "n_augmented": models.n_augmented,
        "n_incidents": models.n_incidents,
        "calibrated": models.calibrated,
        "thinned_to": models.thinned_to,
        "fitted": models.stand_in is None,
    }
