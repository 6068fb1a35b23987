"""Sliding training: refit again and again on the recent past, score what follows, and compare with training once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from features.errors import InputError
from features.service import duration_ms, instant_ms, instants
from models.alert_reasons import AlertReasons, alert_reasons, explain_rows, riskiest_alerts
from models.attribution import attribute, attribution_frame
from models.checkpoint import FoldStore, digest_of
from models.config import BASELINES, BacktestSection, ModelsSection, TrainingSection
from models.fitted import FittedModels, model_names
from models.ranking import Ints
from models.schedule import Schedule, alert_budget, format_days, format_instant, instant_of, plan_schedule
from models.spans import candidates
from models.trainer import STAND_IN, Trainer, Unfit, reach_of
from models.training_set import Labels, Matrix, Rows

Progress = Callable[[int, int, str], None]
"""Called with the number of folds done, the number of all folds, and what is being done."""

VARIANTS: tuple[str, ...] = ("sliding", "train_once")
"""``sliding``: refitted for every fold; ``train_once``: fitted at the first refit that could be, never again."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something a backtest left out or replaced, and why.

    Attributes
    ----------
    what : str
        ``span``: a candidate that never fits; ``fold``: a refit without both classes; ``calibration``: a refit whose
        slice had too few incidents.
    fold : int or None
        The fold; None if it concerns all.
    why : str
        In words.
    """

    what: str
    fold: int | None
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}" if self.fold is None else f"{self.what} (fold {self.fold}): {self.why}"


@dataclass(frozen=True, slots=True)
class BacktestResult:
    """What a backtest found.

    Attributes
    ----------
    predictions : DataFrame
        One row for each variant, model and grid row tested, in this order. Columns: ``decision_time``, ``node``,
        ``gpu``, ``unit``, ``model``, ``variant`` (categories), ``score``, ``risk`` (float32), ``rank`` (int32),
        ``alert`` (bool), ``label`` (Int8; null: censored or not yet known), ``failure_class``, ``incident``,
        ``incident_start``, ``fold`` (int32). Baselines stand under ``sliding`` only: they learn nothing that
        training once could lack.
    folds : DataFrame
        One row for each variant and fold: ``fold``, ``variant``, ``refit_at`` (when the models used were fitted),
        ``test_start``, ``test_end`` (first and last decision time scored), ``span``, ``train_start``, ``train_end``,
        ``n_positive``, ``n_negative``, ``n_augmented``, ``n_incidents``, ``calibrated``, ``fitted`` (False: stand-ins).
    k : int
        Alert budget a decision time.
    skipped : tuple of Skipped
        What was left out or replaced.
    models : tuple of str
        Models, in the order of reports.
    reasons : tuple of AlertReasons
        Why the profile alerted, for the riskiest alerts of each fold.
    attributions : DataFrame or None
        What the profile's scores are made of, see :func:`models.attribution.attribution_frame`; None if nothing was
        to be explained.
    """

    predictions: pd.DataFrame
    folds: pd.DataFrame
    k: int
    skipped: tuple[Skipped, ...]
    models: tuple[str, ...]
    reasons: tuple[AlertReasons, ...] = ()
    attributions: pd.DataFrame | None = None


@dataclass(frozen=True, slots=True)
class _Fold:
    """A finished fold, as a checkpoint holds it."""

    table: pa.Table
    facts: dict[str, Any]


class SlidingTrainer:
    """Fits and scores the folds of a backtest, one after the other.

    Parameters
    ----------
    trainer : Trainer
        Does a refit.
    schedule : Schedule
        The folds.
    profile : str
        The model whose alerts are explained.
    explain : int
        Alerts to explain in each fold.
    """

    def __init__(self, trainer: Trainer, schedule: Schedule, *, profile: str, explain: int) -> None:
        self._trainer = trainer
        self._schedule = schedule
        self._profile = profile
        self._explain = explain
        self._fitted: dict[int, FittedModels] = {}

    def run(self, fold: int, before: list[dict[str, Any]]) -> _Fold:
        """Fit and score one fold, given the facts of all folds before it."""
        refit_ms = self._schedule.refits_ms[fold]
        labels = self._trainer.labels_at(refit_ms)
        current = timedelta(milliseconds=before[-1]["span_ms"]) if before else None
        choice = self._trainer.choose_span(refit_ms, labels, current)
        assert choice is not None  # the schedule begins where a span fits
        own = self._trainer.fit(refit_ms, labels, choice.span)
        why = own.why if isinstance(own, Unfit) else None
        facts = {"fold": fold, "span_ms": duration_ms(choice.span), "why_span": choice.why, "unfit": why}
        fitted_before = [past["fold"] for past in before if past["unfit"] is None]
        once = fitted_before[0] if fitted_before else fold
        if isinstance(own, FittedModels):
            self._keep(fold, own, once)
            used = own
        elif fitted_before:
            used = self._models_of(fitted_before[-1], before)
        else:
            used = self._trainer.stand_in(refit_ms, labels, choice.span)
        first = used if once == fold else self._models_of(once, before)
        facts |= {"sliding": _facts(used), "train_once": _facts(first)}
        table = self._score(fold, used, first)
        profile = used.models.index(self._profile)
        alerted = riskiest_alerts(table, model=profile, variant=0, count=self._explain)
        tested = self._schedule.fold_rows(self._trainer.rows, fold)
        facts["reasons"] = explain_rows(used, self._trainer.matrix, self._profile, alerted, among=tested)
        if self._explain:
            facts["attributions"] = attribute(used, self._trainer.matrix, self._profile, alerted, tested)
        return _Fold(table, facts)

    def _keep(self, fold: int, models: FittedModels, once: int) -> None:
        # Only two refits can be asked for again: the first, and the last before one that fails.
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

    def _score(self, fold: int, sliding: FittedModels, once: FittedModels) -> pa.Table:
        rows = self._trainer.rows
        tested = self._schedule.fold_rows(rows, fold)
        values = self._trainer.values(tested)
        parts: list[dict[str, Any]] = []
        done: dict[int, dict[str, Any]] = {}
        for variant, models in zip(VARIANTS, (sliding, once), strict=True):
            if id(models) not in done:
                done[id(models)] = models.score_arrays(values, rows.time[tested], rows.tie[tested])
            for number, name in enumerate(models.models):
                if variant == "train_once" and name in BASELINES:
                    continue
                scored = done[id(models)][name]
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
        return pa.table({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


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
) -> BacktestResult:
    """Replay the test period: at every refit, fit all models on the past, and score until the next refit.

    A refit at R uses rows whose labels are complete by R (decision time + gap + horizon) and known at R, from the span
    that ends gap + horizon before R; the decisions it scores begin at R.

    Parameters
    ----------
    matrix : Matrix
        Feature matrix.
    training, models, backtest : TrainingSection, ModelsSection, BacktestSection
        Parameters.
    seed : int
        Seed of everything random.
    progress : callable, optional
        See :data:`Progress`.
    checkpoint : Path, optional
        Folder for finished folds. A later run with the same inputs takes them from there.
    explain : int
        Alerts of ``models.profile`` to explain in each fold, the riskiest first; 0: explain nothing.

    Returns
    -------
    BacktestResult
        The same, bit for bit, for the same inputs, whether resumed or not.

    Raises
    ------
    InputError
        If no span fits, the test period is empty or begins too early, a name is unknown, or no refit at all has
        both classes. A single refit that lacks one falls back to the models fitted last (to ``history_count`` before
        any) and is listed in ``skipped``.
    """
    names = model_names(models)
    rows = Rows.of(matrix.rows)
    reach_ms = reach_of(rows, Labels.of(matrix.labels(None)))
    schedule = plan_schedule(matrix, rows, training=training, backtest=backtest, reach_ms=reach_ms)
    first = schedule.refits_ms[0]
    k = alert_budget(rows, Labels.of(matrix.labels(instant_of(first))), backtest, as_of_ms=first)
    trainer = Trainer(matrix, training=training, models=models, k=k, seed=seed)
    sliding = SlidingTrainer(trainer, schedule, profile=models.profile, explain=explain)
    store = None
    if checkpoint is not None:
        sections = {"training": training, "models": models, "backtest": backtest}
        content = {name: json.loads(section.model_dump_json()) for name, section in sections.items()}
        store = FoldStore(checkpoint, digest_of(matrix=matrix.digest, seed=seed, explain=explain, **content))

    total = len(schedule.refits_ms)
    folds: list[_Fold] = []
    for fold, refit_ms in enumerate(schedule.refits_ms):
        if progress is not None:
            progress(fold, total, f"refit {format_instant(refit_ms)}")
        found = None if store is None else store.load(fold)
        done = _Fold(*found) if found is not None else sliding.run(fold, [past.facts for past in folds])
        if store is not None and found is None:
            store.save(fold, done.table, done.facts)
        folds.append(done)
    if progress is not None:
        progress(total, total, "done")
    _refuse_if_none_fitted(folds, schedule, training)
    return BacktestResult(
        predictions=_predictions(matrix, folds, names),
        folds=_fold_frame(folds, schedule, rows),
        k=k,
        skipped=_skipped(folds, schedule),
        models=names,
        reasons=alert_reasons(matrix, [told for fold in folds for told in fold.facts["reasons"]]),
        attributions=attribution_frame(matrix, models.profile, [fold.facts["attributions"] for fold in folds])
        if explain
        else None,
    )


def fit_final(
    matrix: Matrix,
    *,
    training: TrainingSection,
    models: ModelsSection,
    backtest: BacktestSection,
    seed: int,
    progress: Progress | None = None,
) -> FittedModels:
    """Fit all models at the end of the data, for the bundle.

    Parameters
    ----------
    matrix : Matrix
        Feature matrix.
    training, models, backtest : TrainingSection, ModelsSection, BacktestSection
        As for :func:`run_backtest`; of ``backtest`` only ``k``, whose ``auto`` counts the whole dataset.
    seed : int
        Seed of everything random.
    progress : callable, optional
        See :data:`Progress`.

    Returns
    -------
    FittedModels
        Ready to score.

    Raises
    ------
    InputError
        If no span fits the data, or the span chosen holds one class only.
    """
    refit_ms = instant_ms(matrix.span[1])
    if progress is not None:
        progress(0, 1, f"refit {format_instant(refit_ms)}")
    rows = Rows.of(matrix.rows)
    labels = Labels.of(matrix.labels(instant_of(refit_ms)))
    reach_of(rows, labels)
    k = alert_budget(rows, labels, backtest, as_of_ms=refit_ms)
    trainer = Trainer(matrix, training=training, models=models, k=k, seed=seed)
    choice = trainer.choose_span(refit_ms, labels, None)
    if choice is None:
        listed = ", ".join(format_days(span) for span in candidates(training))
        raise InputError(
            f"no training span fits: the data span {format_days(matrix.span[1] - matrix.span[0])}, gap and horizon "
            f"take {format_days(trainer.reach_ms)}, the candidates are {listed}",
            "parameter training.spans",
            "Give a shorter span, or a dataset with more history.",
        )
    fitted = trainer.fit(refit_ms, labels, choice.span)
    if isinstance(fitted, Unfit):
        raise InputError(
            f"one class only in the training span: {fitted.why}",
            "parameter training.span",
            "Give a longer span, or a dataset with more history.",
        )
    if progress is not None:
        progress(1, 1, "done")
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
        "fitted": models.stand_in is None,
    }


def _refuse_if_none_fitted(folds: list[_Fold], schedule: Schedule, training: TrainingSection) -> None:
    if any(fold.facts["unfit"] is None for fold in folds):
        return
    last = folds[-1].facts
    listed = ", ".join(format_days(span) for span in candidates(training))
    raise InputError(
        f"one class only in the training span of every refit ({len(folds)} from "
        f"{format_instant(schedule.refits_ms[0])} to {format_instant(schedule.refits_ms[-1])}); {last['unfit']}",
        f"parameter training.span, candidates {listed}",
        "Give a longer span, or a dataset with more history; check labels.xids if failures seem to be missing.",
    )


def _skipped(folds: list[_Fold], schedule: Schedule) -> tuple[Skipped, ...]:
    out = [
        Skipped("span", None, f"{format_days(span)} is longer than the history at every refit")
        for span in schedule.never_fit
    ]
    for fold in folds:
        facts = fold.facts
        if facts["unfit"] is not None:
            used = facts["sliding"]
            instead = f"the models of {format_instant(used['refit_ms'])}" if used["fitted"] else f"{STAND_IN} alone"
            out.append(Skipped("fold", facts["fold"], f"{facts['unfit']}; scored by {instead}"))
        elif not facts["sliding"]["calibrated"]:
            why = "too few incidents for a calibration slice; risks are the scores corrected for sampling"
            out.append(Skipped("calibration", facts["fold"], why))
    return tuple(out)


def _fold_frame(folds: list[_Fold], schedule: Schedule, rows: Rows) -> pd.DataFrame:
    records = []
    for variant in VARIANTS:
        for fold in folds:
            times = rows.time[schedule.fold_rows(rows, fold.facts["fold"])]
            ends = {"test_start_ms": int(times.min()), "test_end_ms": int(times.max())}
            records.append({"fold": fold.facts["fold"], "variant": variant} | ends | fold.facts[variant])
    frame = pd.DataFrame.from_records(records)
    for name in ("refit", "test_start", "test_end", "train_start", "train_end"):
        at = instants(frame.pop(f"{name}_ms").to_numpy(dtype=np.int64))
        frame["refit_at" if name == "refit" else name] = at
    frame["span"] = pd.to_timedelta(frame.pop("span_ms"), unit="ms")
    order = [
        "fold", "variant", "refit_at", "test_start", "test_end", "span", "train_start", "train_end",
        "n_positive", "n_negative", "n_augmented", "n_incidents", "calibrated", "fitted",
    ]  # fmt: skip
    return frame[order]


def _predictions(matrix: Matrix, folds: list[_Fold], names: tuple[str, ...]) -> pd.DataFrame:
    tables = [
        fold.table.append_column("fold", pa.array(np.full(len(fold.table), fold.facts["fold"], dtype=np.int32)))
        for fold in folds
    ]
    table = pa.concat_tables([table.replace_schema_metadata(None) for table in tables])
    arrays = {name: table[name].to_numpy() for name in table.column_names}
    order = np.lexsort((arrays["row"], arrays["model"], arrays["variant"]))
    arrays = {name: values[order] for name, values in arrays.items()}
    row: Ints = arrays["row"]
    labels = matrix.labels(None)
    out: dict[str, Any] = {"decision_time": matrix.rows["decision_time"].array[row]}
    for name in ("node", "gpu", "unit"):
        out[name] = pd.Categorical(matrix.rows[name])[row]
    out["model"] = pd.Categorical.from_codes(arrays["model"], categories=list(names))
    out["variant"] = pd.Categorical.from_codes(arrays["variant"], categories=list(VARIANTS))
    out |= {name: arrays[name] for name in ("score", "risk", "rank", "alert")}
    out["label"] = labels["label"].array[row]
    out["failure_class"] = pd.Categorical(labels["failure_class"])[row]
    out["incident"] = labels["incident"].array[row]
    out["incident_start"] = labels["incident_start"].array[row]
    out["fold"] = arrays["fold"]
    return pd.DataFrame(out)
