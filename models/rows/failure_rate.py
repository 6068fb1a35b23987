"""Forecast of the positive rate after a refit, from the failures known by then.

Failures of a small fleet come in bursts, and rates of a large one drift. A level that follows the newest failures
chases bursts; the mean of the whole history lags behind drift. Both are forecasts, with moving averages in between, and
each is weighted by its probability given the weekly incidents of this fleet so far (Bayesian model averaging). Counts
are negative binomial of several sizes: clustered incidents are weaker evidence.
"""

from datetime import timedelta

import numpy as np
from scipy.special import logsumexp
from scipy.stats import nbinom

from models.rows.ranking import Floats, Ints
from models.rows.training_set import Labels, TrainingRows, known_rows

RATE_WEIGHT = 10.0
"""Prior weight, in incidents, of the hypothesis that the rate has not changed in the newest weeks."""

_WEEK = timedelta(days=7)
_WEEK_MS = 7 * 86_400_000
_RECENT, _BEFORE = 2, 4  # weeks
_HALF_LIVES = (4.0, 13.0)  # weeks
_BELIEFS = np.array([0.5, *(3 * [0.5 / 3])])
_SIZES = np.array([0.5, 2.0, 8.0, 1e6])  # of the negative binomial: from clusters to Poisson
_MIN_IMPLIED = 0.5  # minimum incidents over all weeks so far that a forecast implies


def rate_at(rows: TrainingRows, labels: Labels, refit_ms: int, *, serves: timedelta = _WEEK) -> float:
    """Return the expected share of positives among grid rows until the next refit (``serves`` later).

    Returns: from 0 to one half, see :func:`expected_rate`; 0 if no incident is known.
    """
    known = known_rows(rows, labels, start_ms=0, complete_by_ms=refit_ms, as_of_ms=refit_ms) & ~rows.augmented
    positive = np.flatnonzero(known & (labels.label == 1))
    if not len(positive):
        return 0.0
    time = rows.time[known]
    # The newest complete labels are a horizon old: weeks end there, not at the refit.
    weeks = int(time.max() - time.min()) // _WEEK_MS + 1
    order = positive[np.argsort(rows.time[positive], kind="stable")]
    key = np.where(labels.incident[order] >= 0, labels.incident[order].astype(np.uint64), rows.tie[order])
    first = order[np.unique(key, return_index=True)[1]]

    def by_week(times: Ints) -> Floats:
        return np.bincount(weeks - 1 - (time.max() - times) // _WEEK_MS, minlength=weeks).astype(np.float64)

    exposure, incidents = by_week(time), by_week(rows.time[first])
    has_rows = exposure > 0  # weeks without decisions: gaps in the data
    rate = expected_rate(incidents[has_rows], exposure[has_rows], ahead=max(round(serves / _WEEK), 1))
    return float(min(rate * len(positive) / len(first), 0.5))


def expected_rate(incidents: Floats, rows: Floats, ahead: int = 1) -> float:
    """Return the expected incidents per row: the forecasts, weighted by their past predictive likelihood.

    ``incidents``, ``rows``: incidents that started and labelled grid rows by week, oldest first; shape (weeks,).
    ``ahead``: forecast horizon in weeks.
    """
    log_likelihood = np.zeros((len(_BELIEFS), len(_SIZES)))
    # In steps of `ahead`, so that no week counts as evidence twice.
    for week in range(_RECENT + _BEFORE, len(rows) - ahead + 1, ahead):
        forecast = np.maximum(forecasts(incidents[:week], rows[:week]), _MIN_IMPLIED / rows[:week].sum())
        mean = (forecast * rows[week : week + ahead].sum())[:, None]
        log_likelihood += nbinom.logpmf(incidents[week : week + ahead].sum(), _SIZES, _SIZES / (_SIZES + mean))
    evidence = np.log(_BELIEFS) + logsumexp(log_likelihood, axis=1)
    return float(np.exp(evidence - logsumexp(evidence)) @ forecasts(incidents, rows))


def forecasts(incidents: Floats, rows: Floats) -> Floats:
    """Return all forecasts: the recent rate with its trend, moving averages, and the mean of all weeks."""
    age = np.arange(len(rows))[::-1]
    moving = [0.5 ** (age / half_life) for half_life in _HALF_LIVES]
    averages = [weight @ incidents / (weight @ rows) for weight in (*moving, np.ones(len(rows)))]
    newest, baseline = slice(-_RECENT, None), slice(-_RECENT - _BEFORE, -_RECENT)
    recent = recent_rate(
        (incidents[newest].sum(), rows[newest].sum()), (incidents[baseline].sum(), rows[baseline].sum())
    )
    return np.array([recent, *averages])


def recent_rate(recent: tuple[float, float], baseline: tuple[float, float]) -> float:
    """Return the rate of the last two weeks, shrunk to that of the last six, plus half of its trend.

    ``recent``, ``baseline``: incidents and labelled grid rows of the last two weeks and of the four weeks before.
    Returns: incidents per row; 0 without incidents or rows.

    Both rates are shrunk to their common mean with the weight of :data:`RATE_WEIGHT` incidents (the posterior mean of a
    Poisson rate under a gamma prior). Labels are known a day late and a refit serves a week, so a level set on the past
    lags behind a fleet with growing failure rates; half of the trend between the two windows, limited to a factor of
    two, is extrapolated. Tuned on simulated development fleets, see docs/decisions/0007-promises.md.
    """
    if recent[0] + baseline[0] == 0:
        return 0.0
    rate = (recent[0] + baseline[0]) / (recent[1] + baseline[1])
    ratio, base_ratio = ((hits + RATE_WEIGHT) / (rate * rows + RATE_WEIGHT) for hits, rows in (recent, baseline))
    return float(rate * ratio * min(max(ratio / base_ratio, 0.5), 2.0) ** 0.5)
