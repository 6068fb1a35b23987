"""Incidents that stood out to some model of a part, and those whose true risk never rose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from benchmarks.scoreboard.store import Stored
from evaluation.metrics.comparison import SLIDING
from evaluation.metrics.lead_time import TOP_SHARE
from evaluation.metrics.oracle import ORACLE


def foreseen_incidents(part: Stored) -> pd.DataFrame:
    """Tell for each incident of a part whether anything stood out before it.

    As ``unforeseen_incidents`` does from predictions: that would take all models' rows at once.

    Returns: ``incident``, ``seen``, ``chance`` and ``announced`` as there, by incident.
    """
    rows = part.rows()
    times, time = np.unique(rows["time_ms"], return_inverse=True)
    unit = rows["unit"]
    shape = (len(times), len(part.units()))
    present, top, true = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool), np.full(shape, np.nan)
    present[time, unit] = True
    budget = np.ceil(TOP_SHARE * present.sum(axis=1))[time]
    for model, variant in part.models:
        if variant == SLIDING and model != "random":
            high = part.scores(model, variant)["rank"] <= budget
            top[time[high], unit[high]] = True
    true[time, unit] = part.scores(ORACLE, ORACLE)["risk"]
    records = []
    positive = np.flatnonzero((rows["label"] == 1) & (rows["incident"] >= 0))
    for incident in np.unique(rows["incident"][positive]):
        mine = positive[rows["incident"][positive] == incident]
        when, who = time[mine], int(unit[mine[0]])
        others = np.flatnonzero(present[when].any(axis=0))
        own = true[when, who]
        known = bool(np.isfinite(own).any())
        records.append(
            {
                "incident": int(incident),
                "seen": bool(top[when, who].any()),
                "chance": float(top[np.ix_(when, others)].any(axis=0).mean()),
                "announced": bool(np.nanmax(own) > np.nanmean(true[when])) if known else None,
            }
        )
    frame = pd.DataFrame.from_records(records, columns=["incident", "seen", "chance", "announced"])
    return frame.astype({"seen": "bool", "chance": "float64", "announced": "boolean"})


def foreseen_table(parts: Mapping[str, Sequence[Stored]]) -> pd.DataFrame:
    """Pool the incidents of each scenario.

    Returns: ``scenario``; ``incidents``; and shares of them: ``silent`` (by the simulator's truth their risk never rose
    above the fleet's mean), ``missed`` (stood out to no model) and ``by_chance`` (what ``missed`` would be had the
    models ranked at random in the same way).
    """
    told = []
    for scenario, stored in parts.items():
        found = pd.concat([foreseen_incidents(part) for part in stored], ignore_index=True)
        if len(found):
            told.append(
                {
                    "scenario": scenario,
                    "incidents": len(found),
                    "silent": 1 - float(found["announced"].dropna().astype(bool).mean()),
                    "missed": 1 - float(found["seen"].mean()),
                    "by_chance": 1 - float(found["chance"].mean()),
                }
            )
    return pd.DataFrame(told, columns=["scenario", "incidents", "silent", "missed", "by_chance"])
