"""Per-incident outcome of a model: caught or missed, lead time, and whether the node ranked in the top 5 %."""

from __future__ import annotations

import numpy as np
import pandas as pd

from evaluation.metrics.metrics import ratio
from evaluation.metrics.scored import Scored
from models.rows.ranking import group_starts

TOP_SHARE = 0.05
"""Share of the nodes of a decision time that count as its top (capture in the top 5 %)."""

_MS_PER_HOUR = 3_600_000.0

INCIDENT_COLUMNS: tuple[str, ...] = (
    "incident", "node", "nodes", "failure_class", "start", "caught", "first_alert", "lead_time_hours", "in_top",
)  # fmt: skip
"""Columns of :func:`incident_table`."""


def incident_table(scored: Scored) -> pd.DataFrame:
    """Each failure that at least one scored row could have caught: node incidents, those of one cause as one.

    A node incident is *caught* when its node is alerted at any decision time whose label it makes positive; one that
    follows another so closely that no row carries it is not counted. Its lead time runs from the first such alert to
    its start. It is *in the top* when, at the last such decision time, its node was among the riskiest 5 % (rounded
    up) of the nodes scored then. A cause of several nodes is caught, or in the top, if at least half of its node
    incidents are, and has their median lead time.

    Returns: :data:`INCIDENT_COLUMNS`, one row a failure, by ``incident``, the first node incident of it, on ``node``;
    ``nodes``: node incidents; ``failure_class``: those of its units, joined by ``, ``; ``start`` and ``first_alert``
    (NaT: not caught) are UTC, ``lead_time_hours`` is NaN where it was not caught.
    """
    rows, there = scored.rows, scored.rows.incidents
    first = np.flatnonzero(group_starts(there.place))
    last = np.append(first[1:], len(there.place)) - 1
    never = np.iinfo(np.int64).max
    alerted_at = np.where(scored.alert[there.row], scored.shared.times_ms[rows.time[there.row]], never)
    in_service = scored.per_time(np.ones(len(rows.time), np.bool_))
    top = scored.top(np.ceil(TOP_SHARE * in_service).astype(np.int64))
    node_incidents = pd.DataFrame(
        {
            "cause": there.cause,
            "incident": there.number,
            "start": there.start_ms,
            "alerted_at": np.minimum.reduceat(alerted_at, first) if len(first) else np.empty(0, np.int64),
            "in_top": top[there.row[last]] if len(first) else np.empty(0, np.bool_),
        }
    )
    alerted = node_incidents["alerted_at"] != never
    lead = (node_incidents["start"] - node_incidents["alerted_at"]).where(alerted) / _MS_PER_HOUR
    grouped = node_incidents.assign(caught=alerted, lead=lead).groupby("cause", sort=True)
    caught = grouped["caught"].mean().to_numpy() >= 0.5
    return pd.DataFrame(
        {
            "incident": grouped["incident"].min().to_numpy(),
            "node": pd.array(scored.shared.nodes[there.node], dtype="str"),
            "nodes": grouped.size().to_numpy(),
            "failure_class": pd.array(there.families, dtype="str"),
            "start": _times(grouped["start"].min().to_numpy()),
            "caught": caught,
            "first_alert": _times(np.where(caught, grouped["alerted_at"].min().to_numpy(), np.iinfo(np.int64).min)),
            "lead_time_hours": grouped["lead"].median().where(caught).to_numpy(dtype=np.float64),
            "in_top": grouped["in_top"].mean().to_numpy() >= 0.5,
        }
    )


def recall_by_class(incidents: pd.DataFrame) -> pd.DataFrame:
    """Recall of incidents in each failure class; one of several classes counts in each.

    ``incidents``: as :func:`incident_table` returns it.
    Returns: ``failure_class``, ``incidents``, ``caught``, ``recall``, ``lead_time_median_hours`` (NaN: none caught),
    sorted by class.
    """
    by_family = incidents.assign(failure_class=incidents["failure_class"].str.split(", ")).explode("failure_class")
    grouped = by_family.groupby("failure_class", sort=True)
    table = grouped.agg(
        incidents=("caught", "size"), caught=("caught", "sum"), lead_time_median_hours=("lead_time_hours", "median")
    ).reset_index()
    table.insert(3, "recall", ratio(table["caught"], table["incidents"]))
    return table


def _times(milliseconds: np.ndarray) -> pd.Series:
    # int64's minimum is NaT in numpy's own encoding
    return pd.Series(milliseconds.astype("datetime64[ms]")).dt.tz_localize("UTC")
