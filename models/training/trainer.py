"""One refit: choose span and rows, fit every learner once, build the ensembles on them, calibrate."""

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np

from foundation.errors import InputError
from foundation.instants import from_ms
from foundation.times import duration_ms, instant_ms, milliseconds
from models.calibration.fitting import MIN_INCIDENTS, at_level, fit_calibrator
from models.calibration.horizons import HorizonLabels, fit_horizons, slice_horizons
from models.config import (
    ALL_LEARNERS,
    BASELINES,
    CASCADE,
    COMBINERS,
    PRIOR,
    SEQUENCE,
    ModelsSection,
    TrainingSection,
)
from models.ensembles import Cascade, Stacker, fit_cascade
from models.learners.baselines import make_baseline
from models.learners.factory import FitRows, LearnerStore, fit_learners, make_learner
from models.learners.prepared import ColumnSubset, seen_columns
from models.learners.prior import default_share, fit_share, load_prior
from models.rows.failure_rate import rate_at
from models.rows.ranking import Bools, Ints, mix, seed_of
from models.rows.row_reader import HeldRows, Room
from models.rows.training_set import Labels, Matrix, TrainingRows, TrainingSet, choose_rows, count_incidents, known_rows
from models.sequence.layout import WindowedMatrix, tabular_values
from models.training.fitted import Answers, FittedModels, learners_of, model_names
from models.training.reference import LabelledRows
from models.training.schedule import format_days, format_instant
from models.training.spans import choose_span, usable_spans

Progress = Callable[[int, int, str], None]
"""Called with completed steps, total steps, and the name of the last step."""


def _steps(progress: Progress | None, total: int) -> Callable[[str], None]:
    """Return a thread-safe counter of the fits of a refit."""
    numbers, guard = itertools.count(1), threading.Lock()

    def step(step_name: str) -> None:
        if progress is not None:
            with guard:
                progress(next(numbers), total, step_name)

    return step


MAX_CONCURRENT_FITS = min(os.cpu_count() or 1, 4)
"""Concurrent refits in one process; does not change the result."""

STAND_IN = "history_count"
"""Baseline that replaces every model while nothing could be fitted and there is no prior."""

NEW_INCIDENTS, MAX_SKIPPED = 10, 3
"""New incidents that justify a refit on events alone, and consecutive refits that may be skipped otherwise."""

_CHECKED_ROWS = 2000
"""Rows in which a refit looks for telemetry: if 1 % have any, it misses them once in 500 million times."""

_LOG_ODDS = frozenset({*ALL_LEARNERS, "mean_log_odds", "stacked", CASCADE})


@dataclass(frozen=True, slots=True)
class _Split:
    """Rows of one refit: training rows, and the later slice for calibrators, stacker and thresholds.

    ``full``: rows of the whole span, if a final fit uses them.
    """

    training: TrainingSet
    full: TrainingSet
    slice_rows: Ints
    slice_label: np.ndarray
    slice_incidents: int
    held_out: bool
    base_rate: float
    horizons: tuple[timedelta, dict[timedelta, HorizonLabels]]


class Trainer:
    """Fits all models of a matrix at any refit; thread-safe.

    ``events_only``: whether all features are histories or static, as without telemetry.
    ``names``: models to fit; default: all that ``models`` requests.
    ``progress``: called from any thread with the completed fits of a refit, their total, and the name of the last one.
    """

    def __init__(
        self,
        matrix: Matrix,
        *,
        training: TrainingSection,
        models: ModelsSection,
        seed: int,
        k: int = 1,
        names: tuple[str, ...] | None = None,
        progress: Progress | None = None,
        store: LearnerStore | None = None,
    ) -> None:
        self._progress = progress
        self._store = store
        self.matrix = matrix
        self.events_only = {column.group for column in matrix.columns} <= {"history", "static"}
        self.training = training
        self.models = models
        prior = None if training.prior is None else load_prior(training.prior)
        self._coverage = 0.0 if prior is None else prior.coverage(matrix.columns)
        self.prior = prior if self._coverage else None
        self.names = names or model_names(models)
        self.k = k
        self.seed = seed
        self.rows = TrainingRows.of(matrix.rows)
        self.values = HeldRows(matrix, training.bytes_held)
        self._row_bytes = 4 * len(matrix.columns)
        self.max_rows = max(training.bytes_of_a_fit // self._row_bytes, 1)
        self._room = Room(training.bytes_of_a_fit)
        self.first_ms = instant_ms(matrix.span[0])
        self._labels: dict[int, LabelledRows] = {}
        self._lock = threading.Lock()
        self.reach_ms = _reach_of(self.rows, self.labels_at(instant_ms(matrix.span[1])))

    def labels_at(self, refit_ms: int) -> LabelledRows:
        """Return the labels as of a refit; those of recent refits are cached."""
        with self._lock:
            if refit_ms not in self._labels:
                self._labels[refit_ms] = LabelledRows.join(self.rows, self.matrix.labels(from_ms(refit_ms)))
                if len(self._labels) > MAX_CONCURRENT_FITS + 1:
                    del self._labels[next(iter(self._labels))]
            return self._labels[refit_ms]

    def choose_span(self, refit_ms: int, labels: Labels, current: timedelta | None) -> timedelta | None:
        """Choose the span at a refit; None if none fits.

        Without telemetry, ``auto`` is the whole history: history features already capture change over time, and the few
        incidents of a tail cannot distinguish the candidates.
        """
        spans = usable_spans(self.training, refit_ms=refit_ms, first_ms=self.first_ms, reach_ms=self.reach_ms)
        if not spans:
            return None
        if self.events_only and self.training.window == "auto":
            return max(spans)
        return choose_span(
            tabular_values(self.matrix, self.values),
            self.rows,
            labels,
            spans,
            refit_ms=refit_ms,
            first_ms=self.first_ms,
            reach_ms=self.reach_ms,
            training=self.training,
            current=current,
            seed=self.seed,
            max_rows=self.max_rows,
            store=self._store,
        )

    def unfit(self, refit_ms: int, labels: Labels, span: timedelta) -> str | None:
        """Return why the span before a refit cannot be fitted on (it has a single class); None: it can."""
        start = refit_ms - self.reach_ms - duration_ms(span)
        label = labels.label[self._known(refit_ms, labels, start)]
        if (label == 1).any() and (label == 0).any():
            return None
        chosen = self._choose(refit_ms, labels, start, refit_ms)
        refit = f"refit at {format_instant(refit_ms)}, window {format_days(span)}"
        if chosen.usable:
            return None
        if chosen.n_positive == 0:
            return f"{refit}: no positive rows (0 positives): no incident has one"
        return f"{refit}: {chosen.n_positive} positives and {chosen.n_negative} negatives"

    def why_repeated(self, since_ms: int, refit_ms: int) -> str | None:
        """Return why a refit would repeat the one at ``since_ms``; None: it would not.

        With telemetry: no incident became known since, and no newly complete row has telemetry (a sample of
        :data:`_CHECKED_ROWS`). Events only: fewer than :data:`NEW_INCIDENTS`, and fewer than a tenth of the earlier
        ones, became known; after :data:`MAX_SKIPPED` skipped refits, a refit is due anyway to update the risk level.
        """
        known = milliseconds(self.matrix.incidents(from_ms(refit_ms))["known_at"], "known_at")
        earlier, new = int((known <= since_ms).sum()), int(((known > since_ms) & (known <= refit_ms)).sum())
        since = f"since {format_instant(since_ms)}"
        if self.events_only:
            due = refit_ms - since_ms > MAX_SKIPPED * duration_ms(self.training.refit_every)
            is_few = new < min(NEW_INCIDENTS, earlier / 10)
            return f"{new} new incidents {since}, too few to refit" if is_few and not due else None
        telemetry = [i for i, column in enumerate(self.matrix.columns) if column.group == "telemetry"]
        if new or not telemetry:
            return None
        complete = self.rows.time + self.reach_ms
        rows = np.flatnonzero(~self.rows.augmented & (complete > since_ms) & (complete <= refit_ms))
        rows = np.sort(rows[np.argsort(mix(self.rows.tie[rows], self.rows.time[rows]))][:_CHECKED_ROWS])
        return f"no telemetry and no incident {since}" if np.isnan(self.values(rows)[:, telemetry]).all() else None

    def fit(self, refit_ms: int, labels: Labels, span: timedelta) -> FittedModels:
        """Fit all models on the span that ends gap + horizon before a refit.

        The last ``models.calibration.slice`` of the span, at most a third, is held out if it and the rest have
        ``MIN_INCIDENTS`` incidents each. Calibrators, the stacker and the cascade's thresholds are fitted on it; with
        ``models.calibration.refit``, the learners are then fitted again on everything. Otherwise all rows are used for
        training, and calibrators fall back.

        ``span``: must hold both classes, see :meth:`unfit`.
        """
        split = self._split(refit_ms, labels, span)
        chosen = split.training
        refits_all = split.held_out and self.models.calibration.refit
        names = learners_of(self.models, self.names)
        steps = _steps(self._progress, (len(names) + (CASCADE in self.names)) * (2 if refits_all else 1))
        positives = split.slice_rows[split.slice_label == 1] if split.held_out else None
        incidents = chosen.n_incidents
        learners, cascade = self._fit_on(chosen, names, refit_ms, incidents, steps, later_positives=positives)
        if self.prior is not None and self.models.profile not in (*BASELINES, CASCADE):
            learners[PRIOR] = self.prior.model_for(self.matrix.columns)
        fitted = self._fitted(refit_ms, span, chosen, learners=learners, cascade=cascade, calibrated=split.held_out)
        calibrated = self._calibrated(fitted, split)
        if not refits_all:
            return calibrated
        # refit the learners on the whole span; keep what was fitted on the held-out slice
        thresholds = None if cascade is None else cascade.thresholds
        learners, cascade = self._fit_on(split.full, names, refit_ms, incidents, steps, thresholds=thresholds)
        learners = dict(calibrated.learners) | learners
        # Keep the level that was calibrated without the slice: otherwise its change of the odds would count twice.
        shift = chosen.prior_shift + chosen.sampled_log_odds - split.full.sampled_log_odds
        counts = _counts(split.full) | {"prior_shift": shift}
        return replace(calibrated, learners=learners, cascade=cascade, **counts)

    def stand_in(self, refit_ms: int, labels: Labels, span: timedelta) -> FittedModels:
        """Return models that score by the prior alone, or :data:`STAND_IN`, while nothing can be fitted."""
        split = self._split(refit_ms, labels, span)
        no_training = replace(split.training, prior_shift=0.0, n_augmented=0, n_incidents=0, thinned_to=None)
        if self.prior is None:
            return self._calibrated(self._fitted(refit_ms, span, no_training, stand_in=STAND_IN), split)
        learners = {PRIOR: self.prior.model_for(self.matrix.columns)}
        return self._calibrated(self._fitted(refit_ms, span, no_training, stand_in=PRIOR, learners=learners), split)

    def _fitted(self, refit_ms: int, span: timedelta, chosen: TrainingSet, **facts: Any) -> FittedModels:
        members = self.models.parallel.members if set(self.names) & set(COMBINERS) else ()
        columns = tuple(self.matrix.columns)
        return FittedModels(
            refit_at=from_ms(refit_ms),
            train_start=from_ms(refit_ms - self.reach_ms - duration_ms(span)),
            train_end=from_ms(refit_ms - self.reach_ms),
            span=span,
            columns=columns,
            models=self.names,
            k=self.k,
            members=members,
            min_votes=self.models.parallel.min_votes,
            stacker=Stacker.mean(len(members)),
            baselines={
                name: make_baseline(name, columns=columns, seed=seed_of(self.seed, name))
                for name in BASELINES
                if name in self.names or name == facts.get("stand_in")
            },
            **{"learners": {}, "cascade": None} | _counts(chosen) | facts,
        )

    def _known(self, refit_ms: int, labels: Labels, start_ms: int) -> Bools:
        usable = known_rows(self.rows, labels, start_ms=start_ms, complete_by_ms=refit_ms, as_of_ms=refit_ms)
        return usable & ~self.rows.augmented

    def _choose(self, refit_ms: int, labels: Labels, start_ms: int, complete_by_ms: int) -> TrainingSet:
        return choose_rows(
            self.rows,
            labels,
            start_ms=start_ms,
            complete_by_ms=complete_by_ms,
            as_of_ms=refit_ms,
            negative_ratio=self.training.negative_ratio,
            seed=self.seed,
            max_rows=self.max_rows,
            events_only=self.events_only,
        )

    def _split(self, refit_ms: int, labels: Labels, span: timedelta) -> _Split:
        newest = refit_ms - self.reach_ms
        start = newest - duration_ms(span)
        slice_start = newest - min(duration_ms(self.models.calibration.slice), duration_ms(span) // 3)

        in_span = self._known(refit_ms, labels, start)
        slice_rows = np.flatnonzero(in_span & (self.rows.time >= slice_start))
        slice_label = labels.label[slice_rows]
        positive = slice_rows[slice_label == 1]
        incidents = count_incidents(self.rows.tie[positive], labels.incident[positive])
        choice = self._choose(refit_ms, labels, start, slice_start)
        held_out = incidents >= MIN_INCIDENTS and choice.n_incidents >= MIN_INCIDENTS and choice.usable
        positives = int((labels.label[in_span] == 1).sum())
        refits_all = not held_out or self.models.calibration.refit
        full_set = self._choose(refit_ms, labels, start, refit_ms) if refits_all else choice
        return _Split(
            training=choice if held_out else full_set,
            full=full_set,
            slice_rows=slice_rows,
            # Training rows must not calibrate the models; their scores still set the level.
            slice_label=slice_label if held_out else np.full(len(slice_label), -1),
            slice_incidents=incidents,
            held_out=held_out,
            base_rate=rate_at(self.rows, labels, refit_ms, serves=self.training.refit_every)
            if self.models.calibration.level == "recent"
            else max(positives, 0.5) / max(int(in_span.sum()), 1),
            horizons=slice_horizons(
                self.matrix, self.rows, labels, slice_rows, self.models.horizons, refit_ms=refit_ms
            ),
        )

    def _learner(self, name: str, refit_ms: int, incidents: int) -> Any:
        """Make an unfitted learner that uses its subset of the matrix's columns."""
        settings = next((value for key, value in self.models.settings.items() if key == name), {})
        seed = seed_of(self.seed, name, refit_ms)
        learner = make_learner(name, seed=seed, settings=settings, incidents=incidents)
        if name in SEQUENCE and isinstance(self.matrix, WindowedMatrix):
            return learner.set_params(layout=self.matrix.facts.layout)
        columns = self.matrix.columns
        seen_by = seen_columns(columns, next((value for key, value in self.models.groups.items() if key == name), None))
        return learner if len(seen_by) == len(columns) else ColumnSubset(learner, seen_by)

    def _fit_on(
        self,
        chosen: TrainingSet,
        names: Sequence[str],
        refit_ms: int,
        incidents: int,
        steps: Callable[[str], None],
        *,
        later_positives: Ints | None = None,
        thresholds: Sequence[float] | None = None,
    ) -> tuple[dict[str, Any], Cascade | None]:
        """Fit learners and cascade on a training set.

        ``incidents``: determines the learners' size; the same for both fits of a refit.
        ``later_positives``: rows on which the cascade's thresholds are set, unless ``thresholds`` are given.
        """
        with self._room.take(self._row_bytes * len(chosen.rows)):
            values = self.values(chosen.rows)
            unfitted = {name: self._learner(name, refit_ms, incidents) for name in names}
            times = self.rows.time[chosen.rows]
            rows = FitRows(values, chosen.label, chosen.weight, times, self.reach_ms)
            learners = fit_learners(unfitted, rows, steps, self._store)
            if CASCADE not in self.names:
                return learners, None
            cascade = fit_cascade(
                [(name, self._learner(name, refit_ms, incidents)) for name in self.models.cascade.stages],
                values,
                chosen.label,
                chosen.weight,
                times=times,
                purge_ms=self.reach_ms,
                recall_floor=self.models.cascade.recall_floor,
                later_positives=None if later_positives is None else self.values(later_positives),
                fitted_first=learners[self.models.cascade.stages[0]],
                thresholds=thresholds,
                store=self._store,
            )
            steps(CASCADE)
            return learners, cascade

    def _calibrated(self, fitted: FittedModels, split: _Split) -> FittedModels:
        """Fit the prior's share, stacker, calibrators and horizons on the slice, which is scored once."""
        time, tie = self.rows.time[split.slice_rows], self.rows.tie[split.slice_rows]
        answers = fitted.answer_rows(self.values, split.slice_rows, mix(tie, time))
        if PRIOR in fitted.learners and fitted.stand_in is None:
            fitted = self._with_prior(fitted, answers, split)
        if split.held_out and "stacked" in self.names and fitted.stand_in is None:
            pooled = fitted.pooled(answers)
            members = np.column_stack([pooled[name] for name in fitted.members]) + fitted.prior_shift
            fitted = replace(fitted, stacker=Stacker.fit(members, split.slice_label.astype(np.int64)))
        scored = fitted.compare(answers, time, tie, self.rows.node[split.slice_rows])
        scores = {name: model_score.score.astype(np.float64) for name, model_score in scored.items()}
        calibrators = {
            name: fit_calibrator(
                scores[name],
                split.slice_label,
                n_incidents=split.slice_incidents if split.held_out else 0,
                base_rate=split.base_rate,
                log_odds=name in _LOG_ODDS and fitted.stand_in is None,
            )
            for name in fitted.models
        }
        if (split.held_out or fitted.prior_weight) and self.models.calibration.level == "recent":
            calibrators = {
                name: at_level(calibrator, scores[name], split.base_rate) for name, calibrator in calibrators.items()
            }
        main_horizon, labels_by_horizon = split.horizons
        if not labels_by_horizon:
            return replace(fitted, calibrators=calibrators)
        main = HorizonLabels(split.slice_label, split.slice_incidents if split.held_out else 0)
        no_labels = HorizonLabels(np.full(len(split.slice_rows), -1), 0)
        profile = self.models.profile
        fitted_map = fit_horizons(
            calibrators[profile].risk(scores[profile]),
            main,
            {further: labels if split.held_out else no_labels for further, labels in labels_by_horizon.items()},
            horizon=main_horizon,
            base_rate=split.base_rate,
        )
        return replace(fitted, calibrators=calibrators, horizons={profile: fitted_map})

    def _with_prior(self, fitted: FittedModels, answers: Answers, split: _Split) -> FittedModels:
        """Fit the share of the prior pooled with the profile's learners, or drop the prior."""
        n_incidents = fitted.n_incidents + (split.slice_incidents if split.held_out else 0)
        share = default_share(n_incidents, self._coverage)
        if split.held_out:
            fleet_log_odds = np.mean(
                [answers[name] for name in learners_of(self.models, (self.models.profile,))], axis=0
            )
            positive, incidents = split.slice_label == 1, split.slice_incidents
            share = fit_share(fleet_log_odds, answers[PRIOR], positive, n_incidents=incidents, believed=share)
        learners = (
            fitted.learners if share else {name: fitted.learners[name] for name in fitted.learners if name != PRIOR}
        )
        return replace(fitted, learners=learners, prior_weight=share)


def _counts(chosen: TrainingSet) -> dict[str, Any]:
    names = ("prior_shift", "n_positive", "n_negative", "n_augmented", "n_incidents", "thinned_to")
    return {name: getattr(chosen, name) for name in names}


def _reach_of(rows: TrainingRows, labels: Labels) -> int:
    """Return gap + horizon in milliseconds, the time from a decision to its complete label.

    Raises ``InputError`` if the matrix has no rows.
    """
    if len(rows.time) == 0 or rows.augmented.all():
        raise InputError(
            "the feature matrix has no decision rows",
            "matrix",
            "Check that the inventory has units in service within the dataset's span.",
        )
    return int((labels.complete - rows.time).max())
