"""Which training window to fit on: a fixed one, the whole history, or the best of several on later, purged tails."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

import numpy as np
from sklearn.metrics import average_precision_score

from foundation.times import duration_ms
from models.config import TrainingSection
from models.learners.factory import LearnerStore, fit_learners, make_learner
from models.rows.ranking import Ints, seed_of
from models.rows.row_reader import RowReader, log_odds_of
from models.rows.training_set import Labels, TrainingRows, TrainingSet, choose_rows, count_incidents, known_rows

TAIL_SHARE = 0.2
"""Length of the validation tail over that of the longest span that fits."""

TAIL_AT_LEAST, TAIL_AT_MOST = timedelta(days=7), timedelta(days=14)
"""Bounds of the tail: shorter holds too few incidents, longer evaluates by the past."""

MIN_TAIL_INCIDENTS = 5
"""With fewer distinct incidents in the tail, average precision is noise and the longest span is taken."""

MIN_SPAN_INCIDENTS = 100
"""Candidates that hold fewer incidents are left out, but for the longest: a lucky tail would choose one, and what few
incidents teach is mostly noise."""

EXPANDING = "expanding"
"""``training.window`` that takes everything since the data began, at each refit more."""

_MS_PER_DAY = 86_400_000
_REFERENCE = {"n_estimators": 60, "learning_rate": 0.1}
_REFERENCE_RATIO = 10


def candidates(training: TrainingSection) -> tuple[timedelta, ...]:
    """Give the spans that may be used, ascending: the fixed one, or those of ``training.candidate_windows``.

    With ``expanding`` that is the shortest of ``training.candidate_windows``: the least history that a refit waits for.
    """
    if isinstance(training.window, timedelta):
        return (training.window,)
    spans = tuple(sorted(set(training.candidate_windows)))
    return spans[:1] if training.window == EXPANDING else spans


def usable_spans(training: TrainingSection, *, refit_ms: int, first_ms: int, reach_ms: int) -> tuple[timedelta, ...]:
    """Give the spans that can be fitted at a refit, ascending: unless one is fixed, the last is the whole history.

    That is counted in whole days, so that spans read well and the first hours of a dataset do not matter.

    ``refit_ms``, ``first_ms``: the refit and the beginning of the data, in milliseconds since the epoch.
    Returns: empty where the history is too short for each.
    """
    history_ms = refit_ms - reach_ms - first_ms
    fit = tuple(span for span in candidates(training) if duration_ms(span) <= history_ms)
    whole = timedelta(days=history_ms // _MS_PER_DAY)
    if isinstance(training.window, timedelta) or not fit or whole <= fit[-1]:
        return fit
    return (whole,) if training.window == EXPANDING else (*fit, whole)


def choose_span(
    read: RowReader,
    rows: TrainingRows,
    labels: Labels,
    spans: Sequence[timedelta],
    *,
    refit_ms: int,
    first_ms: int,
    reach_ms: int,
    training: TrainingSection,
    current: timedelta | None,
    seed: int,
    min_incidents: int = MIN_SPAN_INCIDENTS,
    max_rows: int | None = None,
    store: LearnerStore | None = None,
) -> timedelta:
    """Choose among the spans that fit.

    Each candidate is tried as it would have been used at the beginning of a tail: a small LightGBM model is fitted on
    the span that ends gap + horizon before the tail, and scored by average precision on the tail's grid rows, of one
    decision time in a gap + horizon. A span that would begin before the data is cut there. The span in use, or the
    longest where it was the whole history, stays unless another is better by more than the share ``hysteresis``; among
    equals the longest wins.

    ``max_rows``: rows to fit on that there is room for; see :func:`models.rows.training_set.choose_rows`.
    Returns: the longest candidate where no other holds ``min_incidents``, or the tail holds fewer than
    :data:`MIN_TAIL_INCIDENTS`.
    """
    longest = max(spans)
    if len(spans) == 1:
        return longest
    newest = refit_ms - reach_ms
    tail_ms = min(max(int(TAIL_SHARE * duration_ms(longest)), duration_ms(TAIL_AT_LEAST)), duration_ms(TAIL_AT_MOST))
    tail_ms = min(tail_ms, (newest - first_ms) // 3)
    spans = _well_filled(rows, labels, spans, min_incidents, refit_ms=refit_ms, newest_ms=newest)
    if len(spans) == 1:
        return longest
    tail_start = newest - tail_ms
    tail = known_rows(rows, labels, start_ms=tail_start, complete_by_ms=refit_ms, as_of_ms=refit_ms)
    tail_rows = np.flatnonzero(tail & ~rows.augmented)
    times = np.unique(rows.time[tail_rows])  # once in a horizon: rows between ask the same again
    often = max(reach_ms // max(int(np.diff(times).min(initial=reach_ms)), 1), 1)
    tail_rows = tail_rows[np.isin(rows.time[tail_rows], times[::often])]
    truth = labels.label[tail_rows]
    positives = tail_rows[truth == 1]
    if count_incidents(rows.tie[positives], labels.incident[positives]) < MIN_TAIL_INCIDENTS or truth.min() == 1:
        return longest
    starts = {span: max(tail_start - reach_ms - duration_ms(span), first_ms) for span in sorted(spans)}
    chosen = {
        start: choose_rows(
            rows,
            labels,
            start_ms=start,
            complete_by_ms=tail_start,
            as_of_ms=refit_ms,
            negative_ratio=min(training.negative_ratio, _REFERENCE_RATIO),
            seed=seed,
            max_rows=max_rows,
        )
        for start in dict.fromkeys(starts.values())
    }
    tried = _tail_scores(seed_of(seed, "span", refit_ms), read, chosen, tail_rows, truth, store)
    scores = {span: tried[starts[span]] for span in spans}
    best = max(scores, key=lambda span: (scores[span], span))
    if current is not None and current not in candidates(training):
        current = longest  # it was the whole history of an earlier refit
    if current in scores and scores[best] <= scores[current] * (1 + training.hysteresis):
        return current
    return best


def _well_filled(
    rows: TrainingRows, labels: Labels, spans: Sequence[timedelta], least: int, *, refit_ms: int, newest_ms: int
) -> Sequence[timedelta]:
    """Keep the candidates that hold enough incidents, and the longest."""
    candidates = []
    for span in spans:
        start = newest_ms - duration_ms(span)
        known = known_rows(rows, labels, start_ms=start, complete_by_ms=refit_ms, as_of_ms=refit_ms)
        positives = np.flatnonzero(known & ~rows.augmented & (labels.label == 1))
        if span == max(spans) or count_incidents(rows.tie[positives], labels.incident[positives]) >= least:
            candidates.append(span)
    return candidates


def _tail_scores(
    seed: int,
    read: RowReader,
    chosen: Mapping[int, TrainingSet],
    tail_rows: Ints,
    truth: np.ndarray,
    store: LearnerStore | None,
) -> dict[int, float]:
    """Average precision of the reference learner on the tail, by the start of the span that it was fitted on."""
    learners = {}
    for start, rows in chosen.items():
        if rows.usable:
            unfitted = {"lightgbm": make_learner("lightgbm", seed=seed, settings=_REFERENCE)}
            learners[start] = fit_learners(unfitted, read(rows.rows), rows.label, rows.weight, store=store)["lightgbm"]
    scores = log_odds_of(list(learners.values()), read, tail_rows)
    scored = zip(learners, scores, strict=True)
    return dict.fromkeys(chosen, 0.0) | {start: float(average_precision_score(truth, score)) for start, score in scored}
