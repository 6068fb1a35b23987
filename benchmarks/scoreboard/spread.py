"""Intervals, by resampled GPUs, of what the evaluation gives as a number alone: precision by month, and lead times."""

from __future__ import annotations

import numpy as np
import pandas as pd

from evaluation.metrics.bootstrap import Interval, honest_interval, interval
from evaluation.metrics.metrics import Floats, Ints, ratio
from evaluation.metrics.scored import Scored


def month_bounds(scored: Scored, month: Ints, names: np.ndarray, every: Floats) -> pd.DataFrame:
    """Give the interval of precision at K in each month.

    ``month``: position of the row's month in ``names``; shape (rows,).
    ``names``: in ascending order; shape (months,).
    ``every``: weights of the units: ones, then those of each resample; shape (1 + replicates, units).
    Returns: ``model``, ``variant``, ``month``, ``low``, ``high``; exact where no alert was right, NaN where too few
    resamples have one.
    """
    top = scored.top(scored.shared.budget) & scored.known
    rows = []
    for at, name in enumerate(names):
        chosen = top & (month == at)
        counts = scored.per_unit(chosen)
        found = ratio(every @ scored.per_unit(chosen & scored.positive), every @ counts)
        bounds = honest_interval(found[1:], point=float(found[0]), counts=counts)
        rows.append((scored.model, scored.variant, name, bounds.low, bounds.high))
    return pd.DataFrame(rows, columns=["model", "variant", "month", "low", "high"])


def lead_bounds(incidents: pd.DataFrame, units: np.ndarray, weights: Floats) -> Interval:
    """Give the interval of the median lead time of the incidents that were caught.

    ``incidents``: from :func:`evaluation.metrics.lead_time.incident_table`.
    ``units``: in the order of the weights; shape (units,).
    ``weights``: shape (replicates, units).
    Returns: in hours; NaN bounds where too few resamples hold a caught incident.
    """
    caught = incidents.dropna(subset=["lead_time_hours"]).sort_values("lead_time_hours", kind="stable")
    if caught.empty:
        return Interval(np.nan, np.nan)
    code = pd.Index(units.astype(object)).get_indexer(pd.Index(caught["unit"].to_numpy(dtype=object)))
    counted = np.cumsum(weights[:, code], axis=1)
    lead = caught["lead_time_hours"].to_numpy(dtype=np.float64)
    # the median lies between the incidents that hold the two middle places; where their number is odd, they are one
    lower = np.argmax(2 * counted >= counted[:, -1:], axis=1)
    upper = np.argmax(2 * counted > counted[:, -1:], axis=1)
    return interval(np.where(counted[:, -1] > 0, (lead[lower] + lead[upper]) / 2, np.nan))
