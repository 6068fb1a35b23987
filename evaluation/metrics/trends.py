"""How the gain of sliding training grows with the age of the model that was trained once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from evaluation.metrics.assessment import Assessment
from evaluation.metrics.bootstrap import Interval, interval
from evaluation.metrics.comparison import SLIDING, TRAIN_ONCE, share_better
from evaluation.metrics.metrics import Floats, Ints, Ranking, ratio
from evaluation.metrics.scored import Scored

MONTH_DAYS = 30.0
"""Days of the month that slopes are given by."""

PERIOD_DAYS = 7
"""Days of decisions that make one point of the line: a refit's, unless ``training.refit_every`` says otherwise."""

TREND_STATISTICS: tuple[str, ...] = ("precision_at_k", "average_precision")
"""Statistics whose difference is followed over time."""

_MS_PER_DAY = 86_400_000
_COLUMNS = (
    "model", "statistic", "periods", "months", "first", "last", "slope", "low", "high", "share_growing",
)  # fmt: skip


def trends(assessed: Sequence[Assessment], weights: Floats) -> pd.DataFrame:
    """Slope of each model's paired difference, sliding minus trained once, since the first decision.

    ``weights``: bootstrap samples; shape (replicates, units).
    Returns: one row a model and statistic, as :func:`paired_trend` gives them.
    """
    by_name = {each.scored.name: each.scored for each in assessed}
    rows: list[dict[str, object]] = []
    for (model, variant), scored in by_name.items():
        if variant == SLIDING and (model, TRAIN_ONCE) in by_name:
            days = days_since(scored.shared.times_ms, int(scored.shared.times_ms[0]))
            rows += paired_trend(scored, by_name[model, TRAIN_ONCE], weights, days)
    return pd.DataFrame(rows, columns=list(_COLUMNS))


def days_since(times_ms: Ints, first_ms: int) -> Floats:
    """Give the age in days of each decision time: 0 at the first, when both variants were fitted alike.

    ``times_ms``: decision times in milliseconds since the epoch; shape (times,).
    Returns shape (times,).
    """
    return (times_ms - first_ms) / _MS_PER_DAY


def paired_trend(sliding: Scored, once: Scored, weights: Floats, days: Floats) -> list[dict[str, object]]:
    """Slope of one model's paired difference over the age of its first fit, with a bootstrap by unit.

    The decisions are taken in periods of :data:`PERIOD_DAYS`. In each, the statistic of both variants is taken on the
    same rows; a weighted least-squares line goes through their differences, the periods weighted by what the statistic
    rests on (alerts with a label; positives). Each resample of units draws its own line. Both variants begin as the
    same model, so the first period's difference is zero by construction wherever the first refit serves it whole.

    ``weights``: bootstrap samples; of several fleets, resampled within each (``resample_fleets``);
    shape (replicates, units).
    ``days``: days since the first fit of each decision time; fleets that are pooled each count from their own; shape
    (times,).
    Returns: for each of :data:`TREND_STATISTICS`: ``model``, ``statistic``, ``periods``, ``months`` (of 30 days, from
    the first to the last decision), ``first`` and ``last`` (the line at both ends), ``slope`` (by month), its interval
    ``low``, ``high`` (NaN: none), ``share_growing`` (of the resamples). NaN where fewer than two periods count.
    """
    period = np.floor(days / PERIOD_DAYS).astype(np.int64)
    _, code = np.unique(period, return_inverse=True)
    periods = int(code.max()) + 1
    age = np.bincount(code, weights=days, minlength=periods) / np.bincount(code, minlength=periods) / MONTH_DAYS
    every = np.concatenate([np.ones((1, weights.shape[1])), weights])
    out: list[dict[str, object]] = []
    for name, measure in zip(TREND_STATISTICS, (_precision, _average_precision), strict=True):
        one, base = measure(sliding, code, periods, every)
        two, _ = measure(once, code, periods, every)
        slope, level = _line(age, one - two, base)
        # where neither variant ever has a hit there is nothing to resample
        silent = not (np.nan_to_num(one[:, 0]).any() or np.nan_to_num(two[:, 0]).any())
        bounds = Interval(np.nan, np.nan) if silent else interval(slope[1:])
        reach = float(days.max()) / MONTH_DAYS
        out.append(
            {
                "model": sliding.model,
                "statistic": name,
                "periods": periods,
                "months": reach,
                "first": float(level[0]),
                "last": float(level[0] + slope[0] * reach),
                "slope": float(slope[0]),
                "low": bounds.low,
                "high": bounds.high,
                "share_growing": share_better(slope[1:]),
            }
        )
    return out


def _line(age: Floats, difference: Floats, base: Floats) -> tuple[Floats, Floats]:
    """Weighted least squares by column: slopes, and the line's value at age zero."""
    usable = np.isfinite(difference) & (base > 0)
    weight = np.where(usable, base, 0.0)
    value = np.where(usable, difference, 0.0)
    total = weight.sum(axis=0)
    x = ratio(weight.T @ age, total)
    y = ratio((weight * value).sum(axis=0), total)
    centred = age[:, None] - x
    slope = ratio((weight * centred * value).sum(axis=0), (weight * centred**2).sum(axis=0))
    slope[usable.sum(axis=0) < 2] = np.nan
    return slope, y - slope * x


def _precision(scored: Scored, code: Ints, periods: int, weights: Floats) -> tuple[Floats, Floats]:
    """Precision at K by period and resample, and the alerts that it rests on."""
    top = scored.top(scored.shared.budget) & scored.known
    n = scored.n_units
    place = code[scored.time] * n + scored.unit
    known = np.bincount(place[top], minlength=periods * n).reshape(periods, n) @ weights.T
    hits = np.bincount(place[top & scored.positive], minlength=periods * n).reshape(periods, n) @ weights.T
    return ratio(hits, known), known


def _average_precision(scored: Scored, code: Ints, periods: int, weights: Floats) -> tuple[Floats, Floats]:
    """Average precision by period and resample, rows pooled by rank, and the positives that it rests on."""
    value = np.full((periods, len(weights)), np.nan)
    base = np.zeros((periods, len(weights)))
    of_row = code[scored.time]
    for period in range(periods):
        rows = scored.known & (of_row == period)
        positive = scored.positive[rows]
        if not positive.any():
            continue
        unit = scored.unit[rows]
        ranking = Ranking.build(-scored.rank[rows], positive, unit, scored.n_units)
        value[period] = ranking.average_precision(weights)
        base[period] = weights @ np.bincount(unit[positive], minlength=scored.n_units)
    return value, base
