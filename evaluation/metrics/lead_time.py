"""Outcome of each incident: caught or missed, lead time, and whether the node ranked in the top 5 %."""

import math

import numpy as np
import pandas as pd

from evaluation.metrics.aggregation import split_predictions
from evaluation.metrics.metrics import ratio
from evaluation.metrics.scored import Scored
from models.rows.ranking import group_starts

TOP_SHARE = 0.05
"""Share of the nodes scored at a decision time that count as its top (for ``capture``)."""

_MS_PER_HOUR = 3_600_000.0

INCIDENT_COLUMNS: tuple[str, ...] = (
    "incident", "node", "nodes", "failure_class", "start", "caught", "first_alert", "lead_time_hours", "in_top",
)  # fmt: skip
"""Columns of :func:`incident_table`."""


def incident_table(scored: Scored) -> pd.DataFrame:
    """Tabulate every failure that at least one scored row could have caught; a failure is a common cause.

    A node incident is *caught* if its node is alerted at any decision time whose label it makes positive. Its lead time
    runs from the first such alert to its start. It is *in the top* if its node was among the riskiest 5 % (rounded up)
    at the last such decision time. A cause of several node incidents is caught, or in the top, if at least half of
    them are; its lead time is their median. A node incident that no row's label refers to, because it follows another
    one too closely, is not counted.

    Returns: :data:`INCIDENT_COLUMNS`, one row per failure: ``incident``, its first node incident, on ``node``;
    ``nodes``: number of node incidents; ``failure_class``: classes of its units, joined by ``, ``; ``start`` and
    ``first_alert`` in UTC (NaT if missed); ``lead_time_hours`` (NaN if missed).
    """
    rows, incidents = scored.rows, scored.rows.incidents
    first = np.flatnonzero(group_starts(incidents.place))
    last = np.append(first[1:], len(incidents.place)) - 1
    latest = np.iinfo(np.int64).max
    alerted_at = np.where(scored.alert[incidents.row], scored.shared.times_ms[rows.time[incidents.row]], latest)
    in_service = scored.per_time(np.ones(len(rows.time), np.bool_))
    top = scored.top(np.ceil(TOP_SHARE * in_service).astype(np.int64))
    node_incidents = pd.DataFrame(
        {
            "cause": incidents.cause,
            "incident": incidents.number,
            "start": incidents.start_ms,
            "alerted_at": np.minimum.reduceat(alerted_at, first) if len(first) else np.empty(0, np.int64),
            "in_top": top[incidents.row[last]] if len(first) else np.empty(0, np.bool_),
        }
    )
    alerted = node_incidents["alerted_at"] != latest
    lead = (node_incidents["start"] - node_incidents["alerted_at"]).where(alerted) / _MS_PER_HOUR
    grouped = node_incidents.assign(caught=alerted, lead=lead).groupby("cause", sort=True)
    is_caught = grouped["caught"].mean().to_numpy() >= 0.5
    return pd.DataFrame(
        {
            "incident": grouped["incident"].min().to_numpy(),
            "node": pd.array(scored.shared.nodes[incidents.node], dtype="str"),
            "nodes": grouped.size().to_numpy(),
            "failure_class": pd.array(incidents.families, dtype="str"),
            "start": _times(grouped["start"].min().to_numpy()),
            "caught": is_caught,
            "first_alert": _times(np.where(is_caught, grouped["alerted_at"].min().to_numpy(), np.iinfo(np.int64).min)),
            "lead_time_hours": grouped["lead"].median().where(is_caught).to_numpy(dtype=np.float64),
            "in_top": grouped["in_top"].mean().to_numpy() >= 0.5,
        }
    )


def recall_by_class(incidents: pd.DataFrame) -> pd.DataFrame:
    """Recall of incidents by failure class, sorted by class; an incident of several classes counts in each."""
    by_class = incidents.assign(failure_class=incidents["failure_class"].str.split(", ")).explode("failure_class")
    grouped = by_class.groupby("failure_class", sort=True)
    table = grouped.agg(
        incidents=("caught", "size"), caught=("caught", "sum"), lead_time_median_hours=("lead_time_hours", "median")
    ).reset_index()
    table.insert(3, "recall", ratio(table["caught"], table["incidents"]))
    return table


def _times(milliseconds: np.ndarray) -> pd.Series:
    # numpy encodes NaT as the minimum of int64
    return pd.Series(milliseconds.astype("datetime64[ms]")).dt.tz_localize("UTC")


UNFORESEEN_COLUMNS: tuple[str, ...] = (
    "incident", "node", "failure_class", "seen", "chance", "true_risk", "true_base", "announced",
)  # fmt: skip
"""Columns of :func:`unforeseen_incidents`."""


def unforeseen_incidents(predictions: pd.DataFrame, truth: pd.DataFrame | None = None) -> pd.DataFrame:
    """Report for each failure whether any model ranked its node high beforehand, that is, whether it had a precursor.

    ``predictions``: as ``run_backtest`` returns it; its ``sliding`` variant is used, without ``random``.
    ``truth``: the oracle's predictions of the same decisions (``oracle_predictions``), whose ``risk`` is the true one.
    Returns: :data:`UNFORESEEN_COLUMNS`, one row per failure: ``seen`` (any model ranked its node in the top 5 % at a
    decision time whose label it makes positive), ``chance`` (share of nodes ranked that high at any of these times: the
    probability of ``seen`` by chance), ``true_risk`` (maximum true risk of the node at these times), ``true_base``
    (mean true risk of the fleet then) and ``announced`` (``true_risk`` exceeds ``true_base``). Without truth, the last
    three are NaN or null. A cause of several node incidents is seen if at least half of them are.
    """
    is_used = ((predictions["variant"] == "sliding") & (predictions["model"] != "random")).to_numpy()
    kinds = {
        "true_risk": "float64",
        "true_base": "float64",
        "announced": "boolean",
        "seen": "bool",
        "chance": "float64",
    }
    if not is_used.any():
        return pd.DataFrame(columns=list(UNFORESEEN_COLUMNS)).astype(kinds)
    parts = split_predictions(predictions[is_used], 1, extra=truth)
    models = [part for part in parts if part.variant == "sliding"]
    oracle = next((part for part in parts if part.variant != "sliding"), None)
    shared, rows, incidents = models[0].shared, models[0].rows, models[0].rows.incidents
    shape = (len(shared.times_ms), len(shared.nodes))
    present, top, true = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool), np.full(shape, np.nan)
    present[rows.time, rows.node] = True
    budget = np.ceil(TOP_SHARE * present.sum(axis=1)).astype(np.int64)
    for part in models:
        high = part.top(budget)
        top[part.rows.time[high], part.rows.node[high]] = True
    if oracle is not None:
        true[oracle.rows.time, oracle.rows.node] = oracle.risk
    records = []
    for place, pairs in enumerate(np.split(incidents.row, np.flatnonzero(group_starts(incidents.place))[1:])):
        if not len(pairs):
            break
        times, node = rows.time[pairs], int(rows.node[pairs[0]])
        present_nodes = np.flatnonzero(present[times].any(axis=0))
        records.append(
            {
                "cause": int(incidents.cause[place]),
                "incident": int(incidents.number[place]),
                "seen": bool(top[times, node].any()),
                "chance": float(np.any(top[np.ix_(times, present_nodes)], axis=0).mean()),
            }
            | _true_risks(true[times], node)
        )
    return _by_cause(pd.DataFrame.from_records(records), models[0]).astype(kinds)


def _by_cause(table: pd.DataFrame, scored: Scored) -> pd.DataFrame:
    if table.empty:
        return pd.DataFrame(columns=list(UNFORESEEN_COLUMNS))
    incidents, grouped = scored.rows.incidents, table.groupby("cause", sort=True)
    risk, base = grouped["true_risk"].max(), grouped["true_base"].mean()
    frame = pd.DataFrame(
        {
            "incident": grouped["incident"].min(),
            "node": pd.array(scored.shared.nodes[incidents.node], dtype="str"),
            "failure_class": pd.array(incidents.families, dtype="str"),
            "seen": grouped["seen"].mean() >= 0.5,
            "chance": grouped["chance"].mean(),
            "true_risk": risk,
            "true_base": base,
            "announced": (risk > base).astype("boolean").mask(risk.isna()),
        }
    )
    return frame[list(UNFORESEEN_COLUMNS)].sort_values("incident", ignore_index=True)


def _true_risks(risk: np.ndarray, node: int) -> dict[str, float]:
    node_risk = risk[:, node]
    if not np.isfinite(node_risk).any():
        return {"true_risk": math.nan, "true_base": math.nan}
    return {"true_risk": float(np.nanmax(node_risk)), "true_base": float(np.nanmean(risk))}
