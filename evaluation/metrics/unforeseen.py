"""Failures that no model could have seen: by the simulator's truth, or by what no model of a run saw."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from evaluation.metrics.lead_time import TOP_SHARE
from evaluation.metrics.scored import Scored, split_predictions
from models.rows.ranking import group_starts

COLUMNS: tuple[str, ...] = (
    "incident", "node", "failure_class", "seen", "chance", "true_risk", "true_base", "announced",
)  # fmt: skip
"""Columns of :func:`unforeseen_incidents`."""


def unforeseen_incidents(predictions: pd.DataFrame, truth: pd.DataFrame | None = None) -> pd.DataFrame:
    """Tell for each failure whether anything stood out before it.

    ``predictions``: as ``run_backtest`` returns it; its ``sliding`` variant is used, without
    ``random``.
    ``truth``: the oracle's rows for the same decisions (``oracle_predictions``), whose ``risk`` is
    the true one.
    Returns: :data:`COLUMNS`, one row a failure: ``seen`` (some model ranked its node in the top 5 % of a decision
    time whose label it makes positive), ``chance`` (the share of all nodes that were so ranked at one of the same
    decision times: the probability that ``seen`` is chance), and with truth ``true_risk`` (highest true risk at those
    times), ``true_base`` (the mean true risk of the fleet's nodes then) and ``announced`` (the first is above the
    second); without truth they are NaN and null. A cause of several nodes is seen if at least half of its node
    incidents are.
    """
    used = ((predictions["variant"] == "sliding") & (predictions["model"] != "random")).to_numpy()
    kinds = {
        "true_risk": "float64",
        "true_base": "float64",
        "announced": "boolean",
        "seen": "bool",
        "chance": "float64",
    }
    if not used.any():
        return pd.DataFrame(columns=list(COLUMNS)).astype(kinds)
    parts = split_predictions(predictions[used], 1, more=truth)
    models = [part for part in parts if part.variant == "sliding"]
    oracle = next((part for part in parts if part.variant != "sliding"), None)
    shared, rows, there = models[0].shared, models[0].rows, models[0].rows.incidents
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
    for place, pairs in enumerate(np.split(there.row, np.flatnonzero(group_starts(there.place))[1:])):
        if not len(pairs):
            break
        when, who = rows.time[pairs], int(rows.node[pairs[0]])
        others = np.flatnonzero(present[when].any(axis=0))
        records.append(
            {
                "cause": int(there.cause[place]),
                "incident": int(there.number[place]),
                "seen": bool(top[when, who].any()),
                "chance": float(np.any(top[np.ix_(when, others)], axis=0).mean()),
            }
            | _true(true[when], who)
        )
    return _by_cause(pd.DataFrame.from_records(records), models[0]).astype(kinds)


def _by_cause(found: pd.DataFrame, scored: Scored) -> pd.DataFrame:
    if found.empty:
        return pd.DataFrame(columns=list(COLUMNS))
    there, grouped = scored.rows.incidents, found.groupby("cause", sort=True)
    risk, base = grouped["true_risk"].max(), grouped["true_base"].mean()
    frame = pd.DataFrame(
        {
            "incident": grouped["incident"].min(),
            "node": pd.array(scored.shared.nodes[there.node], dtype="str"),
            "failure_class": pd.array(there.families, dtype="str"),
            "seen": grouped["seen"].mean() >= 0.5,
            "chance": grouped["chance"].mean(),
            "true_risk": risk,
            "true_base": base,
            "announced": (risk > base).astype("boolean").mask(risk.isna()),
        }
    )
    return frame[list(COLUMNS)].sort_values("incident", ignore_index=True)


def _true(risk: np.ndarray, who: int) -> dict[str, float]:
    own = risk[:, who]
    if not np.isfinite(own).any():
        return {"true_risk": math.nan, "true_base": math.nan}
    return {"true_risk": float(np.nanmax(own)), "true_base": float(np.nanmean(risk))}
