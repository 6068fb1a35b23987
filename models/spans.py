"""Which training span to fit on: a fixed one, or the best of several on a later, purged tail of the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
from sklearn.metrics import average_precision_score

from features.service import duration_ms
from models.config import TrainingSection
from models.learners import log_odds, make_learner
from models.ranking import seed_of
from models.training_set import Labels, RowReader, Rows, choose_rows, count_incidents, known_rows

TAIL_SHARE = 0.2
"""Length of the validation tail over that of the longest span that fits."""

TAIL_AT_LEAST, TAIL_AT_MOST = timedelta(days=7), timedelta(days=14)
"""Bounds of the tail: shorter holds too few incidents, longer judges by the past."""

MIN_TAIL_INCIDENTS = 5
"""With fewer distinct incidents in the tail, average precision is noise and the longest span is taken."""

_REFERENCE = {"n_estimators": 60, "learning_rate": 0.1}
_REFERENCE_RATIO = 10


@dataclass(frozen=True, slots=True)
class SpanChoice:
    """A training span and why it was taken.

    Attributes
    ----------
    span : timedelta
        The span.
    scores : dict of timedelta to float
        Average precision of the reference learner on the tail, by candidate; empty if nothing was compared.
    why : str
        In words.
    """

    span: timedelta
    scores: Mapping[timedelta, float]
    why: str


def candidates(training: TrainingSection) -> tuple[timedelta, ...]:
    """Give the spans that may be used, ascending: the fixed one, or those of ``training.spans``."""
    if isinstance(training.span, timedelta):
        return (training.span,)
    return tuple(sorted(set(training.spans)))


def fitting(spans: Sequence[timedelta], *, refit_ms: int, first_ms: int, reach_ms: int) -> tuple[timedelta, ...]:
    """Keep the spans that lie within the history at a refit.

    Parameters
    ----------
    spans : sequence of timedelta
        Candidates.
    refit_ms, first_ms : int
        The refit and the beginning of the data, in milliseconds since the epoch.
    reach_ms : int
        Gap + horizon: the span ends that long before the refit.

    Returns
    -------
    tuple of timedelta
        In the given order.
    """
    return tuple(span for span in spans if refit_ms - reach_ms - duration_ms(span) >= first_ms)


def choose_span(
    read: RowReader,
    rows: Rows,
    labels: Labels,
    spans: Sequence[timedelta],
    *,
    refit_ms: int,
    first_ms: int,
    reach_ms: int,
    hysteresis: float,
    current: timedelta | None,
    negative_ratio: int,
    seed: int,
) -> SpanChoice:
    """Choose among the spans that fit.

    Each candidate is tried as it would have been used at the beginning of the tail: a small LightGBM model is fitted on
    the span that ends gap + horizon before the tail, and scored on the tail's grid rows by average precision. A
    span that would begin before the data is cut there. The span in use stays unless another is better by more
    than the share ``hysteresis``; among equals the longest wins.

    Parameters
    ----------
    read, rows, labels
        Reader of features, the rows, and the labels as of the refit.
    spans : sequence of timedelta
        Candidates that fit, one or more.
    refit_ms, first_ms, reach_ms : int
        As for :func:`fitting`.
    hysteresis : float
        ``training.hysteresis``.
    current : timedelta or None
        The span in use.
    negative_ratio : int
        ``training.negative_ratio``.
    seed : int
        Seed of the reference model.

    Returns
    -------
    SpanChoice
        The longest candidate where the tail holds fewer than :data:`MIN_TAIL_INCIDENTS` incidents.
    """
    longest = max(spans)
    if len(spans) == 1:
        return SpanChoice(longest, {}, "the only span that fits")
    newest = refit_ms - reach_ms
    tail_ms = min(max(int(TAIL_SHARE * duration_ms(longest)), duration_ms(TAIL_AT_LEAST)), duration_ms(TAIL_AT_MOST))
    tail_start = newest - min(tail_ms, (newest - first_ms) // 3)
    tail = known_rows(rows, labels, start_ms=tail_start, complete_by_ms=refit_ms, as_of_ms=refit_ms)
    judged = np.flatnonzero(tail & ~rows.augmented)
    truth = labels.label[judged]
    found = count_incidents(rows, labels, judged[truth == 1])
    if found < MIN_TAIL_INCIDENTS or truth.min() == 1:
        return SpanChoice(longest, {}, f"the longest that fits: {found} incidents in the tail are too few to compare")

    values = read(judged)
    scores: dict[timedelta, float] = {}
    tried: dict[int, float] = {}
    for span in sorted(spans):
        start = max(tail_start - reach_ms - duration_ms(span), first_ms)
        if start not in tried:
            chosen = choose_rows(
                rows,
                labels,
                start_ms=start,
                complete_by_ms=tail_start,
                as_of_ms=refit_ms,
                negative_ratio=min(negative_ratio, _REFERENCE_RATIO),
                seed=seed,
            )
            tried[start] = 0.0
            if chosen.usable:
                learner = make_learner("lightgbm", seed=seed_of(seed, "span", refit_ms), settings=_REFERENCE)
                learner.fit(read(chosen.rows), chosen.label, sample_weight=chosen.weight)
                tried[start] = float(average_precision_score(truth, log_odds(learner, values)))
        scores[span] = tried[start]
    best = max(scores, key=lambda span: (scores[span], span))
    if current in scores and scores[best] <= scores[current] * (1 + hysteresis):
        return SpanChoice(current, scores, "no other is better by more than the hysteresis")
    return SpanChoice(best, scores, "best average precision on the tail")
