"""Incidents as a model met them: caught or not, how early, and whether the unit stood near the top before."""

from __future__ import annotations

import numpy as np
import pandas as pd

from evaluation.metrics.metrics import ratio
from evaluation.metrics.scored import Scored

TOP_SHARE = 0.05
"""Share of the units of a decision time that count as its top (capture in the top 5 %)."""

_MS_PER_HOUR = 3_600_000.0

INCIDENT_COLUMNS: tuple[str, ...] = (
    "incident", "unit", "failure_class", "start", "caught", "first_alert", "lead_time_hours", "in_top",
)  # fmt: skip
"""Columns of :func:`incident_table`."""


def incident_table(scored: Scored) -> pd.DataFrame:
    """Each incident that at least one scored row could have caught.

    An incident is *caught* when its unit is alerted at any decision time whose label it makes positive; an incident
    that follows another so closely that no row carries it is not counted. Its lead time runs from the first such
    alert to its start. It is *in the top* when, at the last such decision time, its unit was among the riskiest 5 %
    (rounded up) of the units scored then.

    Returns: :data:`INCIDENT_COLUMNS`, one row an incident, ascending; ``start`` and ``first_alert`` (NaT: not caught)
    are UTC, ``lead_time_hours`` is NaN where it was not caught.
    """
    rows = np.flatnonzero(scored.incident >= 0)
    order = rows[np.lexsort((scored.time[rows], scored.incident[rows]))]
    incident = scored.incident[order]
    first = np.flatnonzero(np.diff(incident, prepend=-1))
    last = np.append(first[1:], len(order)) - 1
    alert = scored.alert[order]
    time_ms = scored.shared.times_ms[scored.time[order]]
    never = np.iinfo(np.int64).max
    alerted_at = np.where(alert, time_ms, never)
    first_alert = np.minimum.reduceat(alerted_at, first) if len(first) else np.empty(0, np.int64)
    caught = first_alert != never
    start = scored.incident_start_ms[order][first]
    in_service = scored.per_time(np.ones(len(scored.time), np.bool_))
    top = scored.top(np.ceil(TOP_SHARE * in_service).astype(np.int64))
    return pd.DataFrame(
        {
            "incident": incident[first],
            "unit": pd.array(scored.shared.units[scored.unit[order][first]], dtype="str"),
            "failure_class": pd.array(scored.failure_class[order][first], dtype="str"),
            "start": _times(start),
            "caught": caught,
            "first_alert": _times(np.where(caught, first_alert, np.iinfo(np.int64).min)),
            "lead_time_hours": np.where(caught, (start - np.where(caught, first_alert, 0)) / _MS_PER_HOUR, np.nan),
            "in_top": top[order][last] if len(order) else np.empty(0, np.bool_),
        }
    )


def recall_by_class(incidents: pd.DataFrame) -> pd.DataFrame:
    """Recall of incidents in each failure class.

    ``incidents``: as :func:`incident_table` returns it.
    Returns: ``failure_class``, ``incidents``, ``caught``, ``recall``, ``lead_time_median_hours`` (NaN: none caught),
    sorted by class.
    """
    grouped = incidents.groupby("failure_class", sort=True)
    table = grouped.agg(
        incidents=("caught", "size"), caught=("caught", "sum"), lead_time_median_hours=("lead_time_hours", "median")
    ).reset_index()
    table.insert(3, "recall", ratio(table["caught"], table["incidents"]))
    return table


def _times(milliseconds: np.ndarray) -> pd.Series:
    # int64's minimum is NaT in numpy's own encoding
    return pd.Series(milliseconds.astype("datetime64[ms]")).dt.tz_localize("UTC")
