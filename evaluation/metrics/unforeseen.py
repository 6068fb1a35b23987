"""Failures that no model could have seen: by the simulator's truth, or by what no model of a run saw."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from evaluation.metrics.lead_time import TOP_SHARE
from features.times import coded, milliseconds

COLUMNS: tuple[str, ...] = (
    "incident", "unit", "failure_class", "seen", "chance", "true_risk", "true_base", "announced",
)  # fmt: skip
"""Columns of :func:`unforeseen_incidents`."""


def unforeseen_incidents(predictions: pd.DataFrame, truth: pd.DataFrame | None = None) -> pd.DataFrame:
    """Tell for each incident whether anything stood out before it.

    ``predictions``: as ``run_backtest`` returns it; its ``sliding`` variant is used, without
    ``random``.
    ``truth``: the oracle's rows for the same decisions (``oracle_predictions``), whose ``risk`` is
    the true one.
    Returns: :data:`COLUMNS`, one row an incident: ``seen`` (some model ranked its unit in the top 5 % of a decision
    time whose label it makes positive), ``chance`` (the share of all units that were so ranked at one of the same
    decision times: the probability that ``seen`` is chance), and with truth ``true_risk`` (highest true risk at those
    times), ``true_base`` (the mean true risk of the fleet then) and ``announced`` (the first is above the second);
    without truth they are NaN and null.
    """
    used = predictions[((predictions["variant"] == "sliding") & (predictions["model"] != "random")).to_numpy()]
    unit, units = coded(used["unit"])
    time_ms = milliseconds(used["decision_time"])
    times = np.sort(pd.unique(time_ms))
    time = np.searchsorted(times, time_ms)
    one = (used["model"] == used["model"].iloc[0]).to_numpy() if len(used) else np.zeros(0, dtype=bool)
    present = np.zeros((len(times), len(units)), dtype=bool)
    present[time[one], unit[one]] = True
    budget = np.ceil(TOP_SHARE * present.sum(axis=1))
    top = np.zeros_like(present)
    high = used["rank"].to_numpy() <= budget[time]
    top[time[high], unit[high]] = True
    true = np.full(present.shape, np.nan)
    if truth is not None:
        at = np.searchsorted(times, milliseconds(truth["decision_time"]))
        true[at, units.get_indexer(truth["unit"].astype("str"))] = truth["risk"].to_numpy(dtype=np.float64)
    rows = used[one & (used["label"].fillna(0) == 1).to_numpy() & used["incident"].notna().to_numpy()]
    records = []
    for incident, part in rows.groupby("incident", sort=True):
        when = np.searchsorted(times, milliseconds(part["decision_time"]))
        who = int(units.get_loc(str(part["unit"].iloc[0])))
        others = np.flatnonzero(present[when].any(axis=0))
        records.append(
            {
                "incident": int(incident),
                "unit": str(units[who]),
                "failure_class": str(part["failure_class"].iloc[0]),
                "seen": bool(top[when, who].any()),
                "chance": float(np.any(top[np.ix_(when, others)], axis=0).mean()),
            }
            | _true(true[when], who)
        )
    frame = pd.DataFrame.from_records(records, columns=COLUMNS)
    kinds = {
        "true_risk": "float64",
        "true_base": "float64",
        "announced": "boolean",
        "seen": "bool",
        "chance": "float64",
    }
    return frame.astype(kinds)


def _true(risk: np.ndarray, who: int) -> dict[str, float | bool | None]:
    own = risk[:, who]
    if not np.isfinite(own).any():
        return {"true_risk": math.nan, "true_base": math.nan, "announced": None}
    highest, base = float(np.nanmax(own)), float(np.nanmean(risk))
    return {"true_risk": highest, "true_base": base, "announced": highest > base}
