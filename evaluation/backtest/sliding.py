"""Sliding refits: plan which models score each fold, then fit and score folds independently of each other."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from evaluation.backtest.frames import VARIANTS, Fold
from evaluation.drift.check import examine
from evaluation.drift.outcomes import AlertCounts, count_in_windows
from evaluation.drift.verdict import CheckFindings
from foundation.times import duration_ms, instant_ms
from models.bundle.serialization import FitStore
from models.config import BASELINES, CASCADE, BacktestSection, ModelsSection, TrainingSection
from models.explanation.alert_reasons import attribute, explain_rows, riskiest_alerts
from models.explanation.contributions import load_shap
from models.rows.training_set import Matrix
from models.sequence.layout import tabular_columns, tabular_values, with_windows
from models.training.fitted import FittedModels, learners_of, model_names
from models.training.reference import LabelledRows, Reference, make_reference
from models.training.schedule import alert_budget, format_instant, plan_schedule
from models.training.trainer import Trainer

RECENT_SPAN = timedelta(days=14)
"""Drift checks compare the features of rows this recent, or since the previous refit if that is longer ago."""

EARLIER_ALERTS = timedelta(days=56)
"""Drift checks compare alerts with those from this long before the last fit, in windows as long as the time since."""


class DriftWatch:
    """Checks the folds of a backtest for drift."""

    def __init__(self, trainer: Trainer, refits_ms: Sequence[int], profile: str) -> None:
        self._trainer = trainer
        self._refits_ms = tuple(refits_ms)
        self._profile = profile
        self._read = tabular_values(trainer.matrix, trainer.values)
        self._columns_read = tabular_columns(trainer.matrix)
        self._references: dict[int, Reference] = {}
        self._last: tuple[int, LabelledRows] | None = None

    def check(self, fold: int, earlier: Sequence[Fold], labelled: LabelledRows) -> CheckFindings | None:
        """Compare the time since the last fit before a fold with that fit; None before the first fit."""
        fits = [past.facts["fold"] for past in earlier if past.facts["unfit"] is None]
        if not fits:
            self._last = fold, labelled
            return None
        fit = fits[-1]
        now_ms, fit_ms = self._refits_ms[fold], self._refits_ms[fit]
        width = max(duration_ms(RECENT_SPAN), now_ms - self._refits_ms[fold - 1])
        reference = self._reference(fit, earlier[fit].facts)
        self._last = fold, labelled
        numbers = {name: i for i, name in enumerate(self._trainer.names)}
        since = earlier[fit:]
        return examine(
            reference,
            labelled,
            self._read,
            self._trainer.matrix.rows["node"],
            start_ms=max(fit_ms, now_ms - width),
            end_ms=now_ms,
            seed=self._trainer.seed,
            alerts=(
                self._alerts(
                    [past for past in earlier[:fit] if self._refits_ms[past.facts["fold"]] >= fit_ms - _EARLIER_MS],
                    numbers[self._profile],
                    labelled,
                    length=len(since),
                ),
                self._alerts(since, numbers[self._profile], labelled, length=len(since)),
            ),
        )

    def _reference(self, fit: int, facts: Mapping[str, Any]) -> Reference:
        """Summarise the training rows of a fold's fit; depends on the matrix alone, so it survives a restart."""
        if fit not in self._references:
            labelled = (
                self._last[1] if self._last and self._last[0] == fit else self._trainer.labels_at(self._refits_ms[fit])
            )
            fit_facts = facts["sliding"]
            reference = make_reference(
                labelled,
                self._read,
                self._columns_read,
                start_ms=fit_facts["train_start_ms"],
                end_ms=fit_facts["train_end_ms"],
                as_of_ms=self._refits_ms[fit],
                seed=self._trainer.seed,
            )
            self._references = {fit: reference}
        return self._references[fit]

    def _alerts(self, folds: Sequence[Fold], model: int, labelled: LabelledRows, *, length: int) -> AlertCounts:
        alerted = []
        for fold in folds:
            columns = {name: fold.table[name].to_numpy() for name in ("row", "alert", "model", "variant")}
            is_alert = (
                (columns["model"] == model) & (columns["variant"] == VARIANTS.index("sliding")) & columns["alert"]
            )
            alerted.append(columns["row"][is_alert])
        return count_in_windows([(self._trainer.rows.node[rows], labelled.label[rows]) for rows in alerted], length)


_EARLIER_MS = duration_ms(EARLIER_ALERTS)


@dataclass(frozen=True, slots=True)
class BacktestSetup:
    """Parameters of a backtest, as :func:`evaluation.backtest.run.run_backtest` takes them.

    ``fits``: folder of fitted learners that runs with other parameters may reuse; None: no reuse.
    """

    training: TrainingSection
    models: ModelsSection
    backtest: BacktestSection
    seed: int
    explain: int = 0
    full: bool = True
    fits: Path | None = None


@dataclass(frozen=True, slots=True)
class Refit:
    """Plan of one fold.

    ``source``: fold whose start is the refit time of the models used: this fold, or the last fitted one if this
    fold's window has one class only or no new data; None: no fold was fitted yet, a baseline stands in.
    ``span``: training window of that fit.
    ``unfit``: why this fold is not refitted; None: it is.
    ``train_once_folds``: folds to score with the same models for the ``train_once`` variant.
    """

    fold: int
    source: int | None
    span: timedelta
    unfit: str | None
    train_once_folds: tuple[int, ...] = ()


class Backtest:
    """Plans, fits and scores the folds of a backtest."""

    def __init__(self, matrix: Matrix, setup: BacktestSetup) -> None:
        models = setup.models
        self.names = model_names(models, full=setup.full)
        self.matrix = with_windows(matrix, {*models.learners, *models.parallel.members, *models.cascade.stages})
        self._trainer = trainer = Trainer(
            self.matrix,
            training=setup.training,
            models=models,
            seed=setup.seed,
            names=self.names,
            store=None if setup.fits is None else FitStore(setup.fits),
        )
        self.rows = trainer.rows
        self.schedule = plan_schedule(
            self.matrix, self.rows, training=setup.training, backtest=setup.backtest, reach_ms=trainer.reach_ms
        )
        first = self.schedule.refits_ms[0]
        self.k = trainer.k = alert_budget(self.rows, trainer.labels_at(first), setup.backtest, as_of_ms=first)
        self._watch = DriftWatch(trainer, self.schedule.refits_ms, models.profile)
        self._profile, self._explain, self._full = models.profile, setup.explain, setup.full
        explained = models.cascade.stages if models.profile == CASCADE else learners_of(models, (models.profile,))
        if setup.explain and "random_forest" in explained:
            load_shap()
        self._fitted: tuple[int, FittedModels] | None = None

    def plan(self) -> Iterator[Refit]:
        """Plan each fold, in order; fits models only to select the training window."""
        span, source = None, None
        for fold, refit_ms in enumerate(self.schedule.refits_ms):
            unfit = None if source is None else self._why_repeated(source[0], refit_ms)
            if unfit is None:
                labels = self._trainer.labels_at(refit_ms)
                span = self._trainer.choose_span(refit_ms, labels, span)
                assert span is not None  # the schedule starts where a window fits
                unfit = self._trainer.unfit(refit_ms, labels, span)
            assert span is not None
            is_first_fit = source is None and unfit is None
            source = (fold, span) if unfit is None else source
            if source is None:
                yield Refit(fold, None, span, unfit, train_once_folds=(fold,) if self._full else ())
            else:
                later = range(fold, len(self.schedule.refits_ms)) if is_first_fit and self._full else ()
                yield Refit(fold, *source, unfit, train_once_folds=tuple(later))

    def _why_repeated(self, source: int, refit_ms: int) -> str | None:
        """Return why a refit would repeat an earlier one; None if it would not."""
        why = self._trainer.why_repeated(self.schedule.refits_ms[source], refit_ms)
        return None if why is None else f"refit at {format_instant(refit_ms)}: {why}"

    def refit(self, refit: Refit) -> Fold:
        """Fit and score a fold; thread-safe."""
        models = self._models(refit)
        scored = self._scores(refit.fold, models)
        parts = self._parts(refit.fold, models, scored, "sliding")
        for fold in refit.train_once_folds:
            parts += self._parts(
                fold, models, scored if fold == refit.fold else self._scores(fold, models), "train_once"
            )
        table = pa.table({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
        facts = {
            "fold": refit.fold,
            "unfit": refit.unfit,
            "refit_fold": refit.fold if refit.source is None else refit.source,
            "sliding": _fit_facts(models),
        }
        return Fold(table, facts | self._explained(refit.fold, models, table))

    def check_drift(self, earlier: Sequence[Fold]) -> CheckFindings | None:
        """Check for drift between the last fit in ``earlier`` and the next refit, with data known at that refit."""
        return self._watch.check(len(earlier), earlier, self._trainer.labels_at(self.schedule.refits_ms[len(earlier)]))

    def _models(self, refit: Refit) -> FittedModels:
        refit_ms = self.schedule.refits_ms[refit.fold if refit.source is None else refit.source]
        labels = self._trainer.labels_at(refit_ms)
        if refit.source is None:
            return self._trainer.stand_in(refit_ms, labels, refit.span)
        cached = self._fitted  # read once: other threads replace it
        if cached is None or cached[0] != refit.source:
            cached = self._fitted = refit.source, self._trainer.fit(refit_ms, labels, refit.span)
        return cached[1]

    def _explained(self, fold: int, models: FittedModels, table: pa.Table) -> dict[str, Any]:
        """Return a fold's further horizons, and explanations of its riskiest alerts."""
        alerted = riskiest_alerts(table, model=models.models.index(self._profile), variant=0, count=self._explain)
        tested, read = self.schedule.fold_rows(self.rows, fold), self._trainer.values
        return {
            "horizons": models.horizons.get(self._profile),
            "reasons": explain_rows(models, self.matrix, self._profile, alerted, candidates=tested, values=read),
            "attributions": attribute(models, self.matrix, self._profile, alerted, tested, read)
            if self._explain
            else None,
        }

    def _scores(self, fold: int, models: FittedModels) -> dict[str, Any]:
        """Score a fold's rows with every model."""
        tested = self.schedule.fold_rows(self.rows, fold)
        return models.score_rows(self._trainer.values, tested, self.rows)

    def _parts(self, fold: int, models: FittedModels, scores: dict[str, Any], variant: str) -> list[dict[str, Any]]:
        """Return the columns of a fold's predictions, one dict per model."""
        tested = self.schedule.fold_rows(self.rows, fold)
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


def _fit_facts(models: FittedModels) -> dict[str, Any]:
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
        "stand_in": models.stand_in,
        "prior_weight": models.prior_weight,
    }
