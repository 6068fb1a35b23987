"""The history features in plain, slow Python: one unit, one decision time, one column."""

from __future__ import annotations

import math
from datetime import timedelta

import pandas as pd

from features.config import LabelSection
from features.groups.history import RECENCY_HALF_LIFE
from features.labels.evidence import Record
from features.labels.incidents import known_onsets
from tests.features import oracle

GROUPS = {"48": "xid_memory", "79": "xid_bus", "74": "xid_interconnect", "149": "xid_interconnect",
          "63": "xid_precursor", "31": "xid_app", "46": "xid_watch"}  # fmt: skip


def kinds_of(row):
    kind = row["type"]
    if kind == "xid":
        return {GROUPS[row["code"]]} | ({"xid_hardware"} if row["code"] != "31" else set())
    out = {kind} & {"failure", "driver"}
    if oracle.is_end(row):
        out.add("repair")
    if kind == "diagnostic" and row["code"] == "failed":
        out.add("diagnostic_failed")
    return out


def place(unit, time, held):
    """Node and slot that a unit was last put in."""
    stays = [row for row in oracle.stays_of(unit, held) if row["installed_at"] <= time] if unit else []
    return (stays[-1]["node"], stays[-1]["slot"]) if stays else None


def facts_of(events: pd.DataFrame, inventory: pd.DataFrame, labels: LabelSection) -> list[tuple]:
    """(kinds, time, known, unit, node, xid) of events and onsets; what an onset is, is another oracle's matter."""
    out = [
        (kinds_of(r), r["timestamp"], oracle.known(r), r["gpu"], r["node"], r["code"] if r["type"] == "xid" else None)
        for r in oracle.records(events)
    ]
    onsets = oracle.records(known_onsets(Record.of(events, inventory, labels)))
    return out + [({"incident"}, r["timestamp"], r["known_at"], r["unit"], r["node"], None) for r in onsets]


def plain_value(column, t, unit, node, facts, held):
    """Compute a column's value from the facts and the inventory's records."""
    here = place(unit, t, held)
    seen = []
    for kinds, time, known, gpu, where, xid in facts:
        if known > t:
            continue
        mine = {
            "gpu": gpu == unit and place(gpu, time, held) is not None,
            "slot": gpu is not None and here is not None and place(gpu, time, held) == here,
            "node": where == node,
        }[column.scope]
        if mine:
            seen.append((kinds, time, xid))
    ages = [t - time for kinds, time, _ in seen if column.channel in kinds]
    if column.statistic == "count":
        return float(sum(age < column.window for age in ages))
    if column.statistic == "since":
        return min(ages) / timedelta(hours=1) if ages else math.nan
    if column.statistic == "recency":
        return sum(0.5 ** (age / RECENCY_HALF_LIFE) for age in ages)
    return float(len({xid for _, time, xid in seen if xid is not None and t - time < column.window}))
