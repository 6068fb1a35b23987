"""Sliding training: refit again and again on the recent past, score what follows, and compare with training once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from features.engine import Engine
from features.errors import InputError
from features.times import duration_ms, instant_ms
from models.as_of import refit_time
from models.backtest_frames import VARIANTS, BacktestResult, Fold, Skipped, fold_frame, predictions_of, skipped_of
from models.checkpoint import FoldStore, digest_of
from models.config import BASELINES, BacktestSection, ModelsSection, TrainingSection
from models.drift.check import reference_at
from models.drift.reference import LabelledRows
from models.drift.verdict import Findings
from models.drift.watch import DriftWatch, refit_reason
from models.explanation.alert_reasons import alert_reasons, explain_rows, riskiest_alerts
from models.explanation.importance import attribute, attribution_frame
from models.fits import Fits
from models.fitted import FittedModels, model_names
from models.horizon_map import horizon_maps
from models.precedent_table import precedent_frame
from models.precedents import library_at
from models.refits_ahead import NOTHING_AHEAD, Ahead, BacktestOrder, refits_ahead
from models.schedule import (
    Schedule,
    alert_budget,
    candidates_told,
    format_days,
    format_instant,
    instant_of,
    plan_schedule,
)
from models.search import search_table
from models.searched import search_facts
from models.sequence.windows import with_windows
from models.spans import EXPANDING
from models.trainer import Trainer, Unfit, reach_of
from models.training_set import Labels, Matrix, Rows

__all__ = ["VARIANTS", "BacktestResult", "Progress", "Skipped", "SlidingTrainer", "fit_final", "run_backtest"]

Progress = Callable[[int, int, str], None]
"""Called with the number of folds done, the number of all folds, and what is being done."""


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
        """Check for drift, fit or keep the earlier models, and score one fold, given all folds before it."""
        earlier = [each.facts for each in before]
        refit_ms = self._schedule.refits_ms[fold]
        frame = self._trainer.matrix.labels(instant_of(refit_ms))
        found = self._watch.check(fold, before, LabelledRows.of(self._trainer.rows, frame))
        fits = [each["fold"] for each in earlier if each["scored"] is not None]
        training = self._trainer.training
        anew, why_refit = refit_reason(
            found,
            on=training.refit_on,
            age_ms=refit_ms - self._schedule.refits_ms[fits[-1]] if fits else None,
            every_ms=duration_ms(training.refit_every),
            at_most_ms=duration_ms(training.refit_at_most),
        )
        facts: dict[str, Any] = {"fold": fold, "why_refit": why_refit, "scored": None, "kept": not anew}
        facts["drift"] = None if found is None else found.to_json()
        once = (fits or [fold])[0]
        if anew and ahead.holds(fold, once=once):
            return ahead.fold(fold, once, facts, self._schedule.fold_rows(self._trainer.rows, fold))
        if anew:
            used = self._refit(fold, earlier, Labels.of(frame), facts)
        else:
            used = self._models_of(fits[-1], earlier)
            facts |= {name: earlier[-1][name] for name in ("span_ms", "why_span")} | {"unfit": None}
        first = used if once == fold else self._models_of(once, earlier)
        facts["refit_fold"] = fold if facts["scored"] is not None or not fits else fits[-1]
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
            return Fold(pa.table({}), facts | {"unfit": own.why, "scored": None})
        scored = self._scores(fold, own)
        table = _table(self._parts(fold, own, scored, "sliding"))
        facts |= {"unfit": None, "scored": self._watch.scored(own), "sliding": _facts(own)}
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
        # incidents known at this refit, whichever refit's models are used
        known = instant_of(self._schedule.refits_ms[fold])
        past = library_at(matrix, known, seed=self._trainer.seed, values=read) if alerted.size else None
        facts: dict[str, Any] = {"horizons": used.horizons[self._profile].to_json() if used.horizons else None}
        facts["reasons"] = explain_rows(used, matrix, self._profile, alerted, among=tested, library=past, values=read)
        facts["library"] = {} if past is None else past.class_counts()
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
        fits = [each["fold"] for each in earlier if each["scored"] is not None]
        if isinstance(own, FittedModels):
            self._keep(fold, own, (fits or [fold])[0])
            facts["scored"] = self._watch.scored(own)
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
    matrix = with_windows(matrix, models)
    rows = Rows.of(matrix.rows)
    reach_ms = reach_of(rows, Labels.of(matrix.labels(None)))
    schedule = plan_schedule(matrix, rows, training=training, backtest=backtest, reach_ms=reach_ms)
    first = schedule.refits_ms[0]
    k = alert_budget(rows, Labels.of(matrix.labels(instant_of(first))), backtest, as_of_ms=first)
    trainer = Trainer(
        matrix, training=training, models=models, k=k, seed=seed, search_at_ms=first, refits_ms=schedule.refits_ms
    )
    sliding = SlidingTrainer(trainer, schedule, profile=models.profile, explain=explain)
    return Begun(matrix, rows, schedule, trainer, sliding, names, k)


def run_backtest(
    matrix: Matrix,
    *,
    training: TrainingSection,
    models: ModelsSection,
    backtest: BacktestSection,
    seed: int,
    progress: Progress | None = None,
    checkpoint: Path | None = None,
    explain: int = 0,
    engine: Engine | None = None,
) -> BacktestResult:
    """Replay the test period: at every refit, fit all models on the past, and score until the next refit.

    A refit at R uses rows whose labels are complete by R (decision time + gap + horizon) and known at R, from the span
    that ends gap + horizon before R; the decisions it scores begin at R.

    ``progress``: see :data:`Progress`.
    ``checkpoint``: folder for finished folds. A later run with the same inputs and code takes them from there; what
    changes the evaluation alone is no input. What others left there goes when all folds are done.
    ``explain``: alerts of ``models.profile`` to explain in each fold, the riskiest first; 0: explain nothing.
    ``engine``: who does the refits, several at a time; default: this process, one after the other. The result is the
    same, bit for bit. The matrix is read from its folder then, by everyone.
    Returns: the same, bit for bit, for the same inputs, whether resumed or not.
    Raises ``InputError`` if an engine is given and ``training.refit_on`` is ``drift``: then each refit waits for the
    folds before it. If no span fits, the test period is empty or begins too early, a name is unknown, or no refit at
    all has both classes. A single refit that lacks one falls back to the models fitted last (to ``history_count``
    before any) and is listed in ``skipped``.
    """
    begun = begin_backtest(matrix, training=training, models=models, backtest=backtest, seed=seed, explain=explain)
    schedule, trainer, sliding, names, rows = begun.schedule, begun.trainer, begun.sliding, begun.names, begun.rows
    store = None
    if checkpoint is not None:
        content = {
            "training": training.model_dump(mode="json"),
            "models": models.model_dump(mode="json", exclude={"promises"}),
            "backtest": backtest.model_dump(mode="json", exclude={"bootstrap"}),
        }
        digest = digest_of(matrix=begun.matrix.digest, seed=seed, explain=explain, **content)
        store = FoldStore(checkpoint, digest)

    total = len(schedule.refits_ms)
    ahead = NOTHING_AHEAD
    if engine is not None:
        order = BacktestOrder.of(
            matrix, training=training, models=models, backtest=backtest, seed=seed, explain=explain
        )
        apart = None if checkpoint is None else FoldStore(checkpoint.resolve(), f"{digest}-refits")
        ahead = refits_ahead(engine, order, begun, finished=store, kept=apart, progress=progress)
    folds: list[Fold] = []
    for fold, refit_ms in enumerate(schedule.refits_ms):
        found = None if store is None else store.load(fold)
        if progress is not None and found is None:
            progress(fold if engine is None else total, total, f"refit {format_instant(refit_ms)}")
        done = Fold(*found) if found is not None else sliding.run(fold, folds, ahead)
        if store is not None and found is None:
            store.save(fold, done.table, done.facts)
        folds.append(done)
    if progress is not None:
        progress(total, total, "done")
    if store is not None:
        store.forget_others()
    _refuse_if_none_fitted(folds, schedule, training)
    return BacktestResult(
        predictions=predictions_of(begun.matrix, folds, names),
        folds=fold_frame(folds, schedule, rows),
        k=begun.k,
        horizons=horizon_maps([fold.facts["horizons"] for fold in folds]),
        skipped=skipped_of(folds, schedule),
        models=names,
        searched=search_table(trainer.search()),
        drift=tuple(None if f.facts["drift"] is None else Findings.from_json(f.facts["drift"]) for f in folds),
        reasons=alert_reasons(begun.matrix, [told for fold in folds for told in fold.facts["reasons"]]),
        attributions=attribution_frame(begun.matrix, models.profile, [fold.facts["attributions"] for fold in folds])
        if explain
        else None,
        precedents=precedent_frame(begun.matrix, [fold.facts for fold in folds]) if explain else None,
    )


def fit_final(
    matrix: Matrix,
    *,
    training: TrainingSection,
    models: ModelsSection,
    backtest: BacktestSection,
    seed: int,
    until: datetime | None = None,
    progress: Progress | None = None,
    fits: Fits | None = None,
) -> FittedModels:
    """Fit all models at the end of the data, for the bundle.

    ``training``, ``models``, ``backtest``: as for :func:`run_backtest`; of ``backtest`` only ``k``, whose ``auto``
    counts the whole dataset.
    ``until``: fit as of this time (aware), with labels as they were known then; default: the end of the data.
    ``progress``: called with the training rows gone through, all of them, and what was fitted
    (:class:`models.fit_steps.FitSteps`).
    ``fits``: who fits learners on the rows chosen; default: this process.
    Raises ``InputError`` if no span fits the data, or the span chosen holds one class only.
    """
    refit_ms = instant_ms(refit_time(matrix.span, until))
    matrix = with_windows(matrix, models)
    rows = Rows.of(matrix.rows)
    frame = matrix.labels(instant_of(refit_ms))
    labels = Labels.of(frame)
    reach_of(rows, labels)
    k = alert_budget(rows, labels, backtest, as_of_ms=refit_ms)
    trainer = Trainer(
        matrix, training=training, models=models, k=k, seed=seed, search_at_ms=refit_ms, fits=fits, progress=progress
    )
    choice = trainer.choose_span(refit_ms, labels, None)
    if choice is None:
        before = format_days(refit_ms - trainer.first_ms)
        history = (
            f"the data span {before}"
            if until is None
            else f"{before} of the data lie before {format_instant(refit_ms)} (--until)"
        )
        raise InputError(
            f"no training span fits: {history}, gap and horizon take {format_days(trainer.reach_ms)}; "
            f"{candidates_told(training)}",
            "parameter training.span" if isinstance(training.span, timedelta) else "parameter training.spans",
            f"Give {'a shorter span' if until is None else 'a later time, a shorter span'}, or a dataset with more "
            "history.",
        )
    fitted = trainer.fit(refit_ms, labels, choice.span)
    if isinstance(fitted, Unfit):
        raise InputError(
            f"one class only in the training span: {fitted.why}",
            "parameter training.span",
            "Give a longer span, or a dataset with more history.",
        )
    reference = reference_at(fitted, models.profile, matrix, frame, read=trainer.values, seed=seed)
    fitted = replace(
        fitted,
        reference=reference,
        precedents=library_at(matrix, instant_of(refit_ms), seed=seed, values=trainer.values),
        searched=search_facts(search_table(trainer.search())),
    )
    return fitted


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


def _refuse_if_none_fitted(folds: list[Fold], schedule: Schedule, training: TrainingSection) -> None:
    if any(fold.facts["unfit"] is None for fold in folds):
        return
    last = folds[-1].facts
    fixed = "" if training.span == EXPANDING else "a longer span, or "
    raise InputError(
        f"one class only in the training span of every refit ({len(folds)} from "
        f"{format_instant(schedule.refits_ms[0])} to {format_instant(schedule.refits_ms[-1])}); {last['unfit']}",
        f"parameter training.span, {candidates_told(training)}",
        f"Give {fixed}a dataset with more history; check labels.xids if failures seem to be missing.",
    )
