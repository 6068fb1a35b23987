"""Choice of the training window: fixed, the whole history, or the best of several on a later, purged tail."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

import numpy as np
from sklearn.metrics import average_precision_score

from foundation.times import duration_ms
from models.config import TrainingSection
from models.learners.factory import FitRows, LearnerStore, fit_learners, make_learner
from models.rows.ranking import Ints, seed_of
from models.rows.row_reader import RowReader, log_odds_of
from models.rows.training_set import Labels, TrainingRows, TrainingSet, choose_rows, count_incidents, known_rows

TAIL_SHARE = 0.2
"""Length of the validation tail relative to the longest span that fits."""

MIN_TAIL, MAX_TAIL = timedelta(days=7), timedelta(days=14)
"""Limits of the tail: a shorter one has too few incidents, a longer one evaluates on the past."""

MIN_TAIL_INCIDENTS = 5
"""Minimum distinct incidents in the tail; with fewer, average precision is noise and the longest span is used."""

MIN_SPAN_INCIDENTS = 100
"""Minimum incidents of a candidate, except the longest: with fewer, a lucky tail could select it, and what it learns is
mostly noise."""

EXPANDING = "expanding"
"""Value of ``training.window`` for the whole history, which grows with each refit."""

_MS_PER_DAY = 86_400_000
_REFERENCE = {"n_estimators": 60, "learning_rate": 0.1}
_REFERENCE_RATIO = 10


def candidates(training: TrainingSection) -> tuple[timedelta, ...]:
    """Return the candidate spans, ascending: the fixed one, or those of ``training.candidate_windows``.

    With ``expanding``, the shortest of ``training.candidate_windows``: the minimum history for a refit.
    """
    if isinstance(training.window, timedelta):
        return (training.window,)
    spans = tuple(sorted(set(training.candidate_windows)))
    return spans[:1] if training.window == EXPANDING else spans


def usable_spans(training: TrainingSection, *, refit_ms: int, first_ms: int, reach_ms: int) -> tuple[timedelta, ...]:
    """Return the spans that fit at a refit, ascending; unless the window is fixed, the last is the whole history.

    The whole history is rounded down to days, so that the first hours of a dataset do not matter.

    ``refit_ms``, ``first_ms``: the refit and the start of the data, in milliseconds since the epoch.
    Returns: empty if the history is shorter than every candidate.
    """
    history_ms = refit_ms - reach_ms - first_ms
    fit = tuple(span for span in candidates(training) if duration_ms(span) <= history_ms)
    history = timedelta(days=history_ms // _MS_PER_DAY)
    if isinstance(training.window, timedelta) or not fit or history <= fit[-1]:
        return fit
    return (history,) if training.window == EXPANDING else (*fit, history)


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

    Each candidate is evaluated as if used at the start of a tail: a small LightGBM model is fitted on the span that
    ends gap + horizon before the tail, and scored by average precision on the tail's grid rows, at one decision time
    per gap + horizon. Spans are truncated at the start of the data. The current span (the longest if it was the whole
    history) is kept unless another is better by more than the share ``hysteresis``; ties go to the longest.

    ``max_rows``: maximum rows to fit on; see :func:`models.rows.training_set.choose_rows`.
    Returns: the longest candidate if no other has ``min_incidents``, or the tail has fewer than
    :data:`MIN_TAIL_INCIDENTS`.
    """
    longest = max(spans)
    if len(spans) == 1:
        return longest
    newest = refit_ms - reach_ms
    tail_ms = min(max(int(TAIL_SHARE * duration_ms(longest)), duration_ms(MIN_TAIL)), duration_ms(MAX_TAIL))
    tail_ms = min(tail_ms, (newest - first_ms) // 3)
    spans = _well_filled(rows, labels, spans, min_incidents, refit_ms=refit_ms, newest_ms=newest)
    if len(spans) == 1:
        return longest
    tail_start = newest - tail_ms
    tail = known_rows(rows, labels, start_ms=tail_start, complete_by_ms=refit_ms, as_of_ms=refit_ms)
    tail_rows = np.flatnonzero(tail & ~rows.augmented)
    times = np.unique(rows.time[tail_rows])  # once per horizon: rows in between share the same outcomes
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
    tail_scores = _tail_scores(seed_of(seed, "span", refit_ms), read, chosen, tail_rows, truth, store)
    scores = {span: tail_scores[starts[span]] for span in spans}
    best = max(scores, key=lambda span: (scores[span], span))
    if current is not None and current not in candidates(training):
        current = longest  # it was an earlier refit's whole history
    if current in scores and scores[best] <= scores[current] * (1 + training.hysteresis):
        return current
    return best


def _well_filled(
    rows: TrainingRows, labels: Labels, spans: Sequence[timedelta], min_incidents: int, *, refit_ms: int, newest_ms: int
) -> Sequence[timedelta]:
    """Return the candidates with enough incidents, and the longest."""
    candidates = []
    for span in spans:
        start = newest_ms - duration_ms(span)
        known = known_rows(rows, labels, start_ms=start, complete_by_ms=refit_ms, as_of_ms=refit_ms)
        positives = np.flatnonzero(known & ~rows.augmented & (labels.label == 1))
        if span == max(spans) or count_incidents(rows.tie[positives], labels.incident[positives]) >= min_incidents:
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
    """Return the reference learner's average precision on the tail, by the start of its training span."""
    learners = {}
    for start, rows in chosen.items():
        if rows.usable:
            unfitted = {"lightgbm": make_learner("lightgbm", seed=seed, settings=_REFERENCE)}
            fit_on = FitRows(read(rows.rows), rows.label, rows.weight)
            learners[start] = fit_learners(unfitted, fit_on, store=store)["lightgbm"]
    scores = log_odds_of(list(learners.values()), read, tail_rows)
    scored = zip(learners, scores, strict=True)
    return dict.fromkeys(chosen, 0.0) | {start: float(average_precision_score(truth, score)) for start, score in scored}
