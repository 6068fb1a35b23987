"""The rate of positives that a refit expects next, from the failures it knows of."""

from __future__ import annotations

from datetime import timedelta

from features.times import duration_ms
from models.rows.training_set import Labels, TrainingRows, count_incidents, known_rows

RECENT = timedelta(days=14)
"""Length of the window that the recent rate of failures is counted in."""

BEFORE = timedelta(days=28)
"""Length of the window before it that tells its trend."""

RATE_WEIGHT = 10.0
"""Incidents' worth of belief that both windows have the same rate."""


def rate_at(rows: TrainingRows, labels: Labels, refit_ms: int) -> float:
    """Give the share of positives among grid rows to expect after a refit, see :func:`recent_rate`.

    Returns: from 0 to one half; 0 where no incident is known.
    """
    start = refit_ms - duration_ms(RECENT) - duration_ms(BEFORE)
    known = known_rows(rows, labels, start_ms=start, complete_by_ms=refit_ms, as_of_ms=refit_ms) & ~rows.augmented
    # The last labels complete are a horizon old: the windows end there, not at the refit.
    newest = int(rows.time[known].max()) if known.any() else refit_ms
    late = known & (rows.time > newest - duration_ms(RECENT))
    early = known & ~late
    positive = labels.label == 1
    seen = [
        (count_incidents(rows.tie[part & positive], labels.incident[part & positive]), int(part.sum()))
        for part in (late, early)
    ]
    incidents = seen[0][0] + seen[1][0]
    return recent_rate(seen[0], seen[1], int((known & positive).sum()) / max(incidents, 1))


def recent_rate(recent: tuple[int, int], before: tuple[int, int], rows_per_incident: float) -> float:
    """Give the rate of positives to expect next: the recent one, drawn to the longer one, with half of its trend.

    ``recent``, ``before``: incidents and labelled grid rows of the last :data:`RECENT` and of the :data:`BEFORE` until
    then.
    Returns: share of positive rows; 0 without rows.

    Both rates are drawn towards their common mean with the weight of :data:`RATE_WEIGHT` incidents (the posterior mean
    of a Poisson rate under a gamma prior). A label is known a day late and a refit serves a week, so a level set on the
    past lags behind a fleet whose failures grow; the trend between the two windows, at most twofold, is followed half
    of the way. Set on simulated development fleets, see docs/decisions/0007-promises.md.
    """
    rows = recent[1] + before[1]
    if rows == 0:
        return 0.0
    rate = (recent[0] + before[0]) / rows
    if rate == 0:
        return 0.0
    now, then = ((seen + RATE_WEIGHT) / (rate * of + RATE_WEIGHT) for seen, of in (recent, before))
    trend = min(max(now / then, 0.5), 2.0)
    return float(min(rate * now * trend**0.5 * rows_per_incident, 0.5))
