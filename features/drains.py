"""When a unit was known to be out of use: inside an incident, or drained by someone else and not yet given back.

A drained unit runs nothing. Scoring it would spend the alert budget on what the operator has already taken out.
"""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pandas as pd

from features.config import LabelSection
from features.evidence import Record
from features.incidents import down_intervals
from features.service import NEVER, duration_ms, instants, milliseconds

LONGEST_DRAIN = timedelta(days=31)
"""A drain that nobody took back counts no longer than this: the 95th percentile of repairs in StepFun's trace."""


def out_of_use(
    events: pd.DataFrame, inventory: pd.DataFrame, labels: LabelSection, *, record: Record | None = None
) -> pd.DataFrame:
    """When each unit was known to be down or drained.

    Our own controller's drains do not count: a unit that it drained is still watched, and its rows have no label.

    Parameters
    ----------
    events, inventory : DataFrame
        As a dataset holds them.
    labels : LabelSection
        What is label-worthy, and the spans.
    record : Record, optional
        Of the same, where it has been read already.

    Returns
    -------
    DataFrame
        Columns ``unit``, ``down_from`` (included), ``down_until`` (excluded); sorted by (unit, down_from), disjoint.
        Whether a time lies in an interval depends only on facts known at that time.
    """
    record = record or Record.of(events, inventory, labels)
    down = down_intervals(events, inventory, labels, record=record)
    both = pd.concat([down, _drained(record)], ignore_index=True)
    both = both.sort_values(["unit", "down_from"], kind="stable", ignore_index=True)
    unit = both["unit"].to_numpy()
    start, end = milliseconds(both["down_from"], "down_from"), milliseconds(both["down_until"], "down_until")
    kept: list[tuple[int, int]] = []
    rows: list[int] = []
    for i in range(len(both)):
        if rows and unit[rows[-1]] == unit[i] and start[i] <= kept[-1][1]:
            kept[-1] = (kept[-1][0], max(kept[-1][1], int(end[i])))
        else:
            kept.append((int(start[i]), int(end[i])))
            rows.append(i)
    merged = np.asarray(kept, dtype=np.int64).reshape(-1, 2)
    return pd.DataFrame(
        {
            "unit": both["unit"].iloc[rows].reset_index(drop=True),
            "down_from": instants(merged[:, 0]),
            "down_until": instants(merged[:, 1]),
        }
    )


def _drained(record: Record) -> pd.DataFrame:
    stays, facts = record.stays, record.facts
    begun, begun_unit = facts.at_units(facts.drains() & ~facts.own(), stays)
    ended, ended_unit = facts.at_units(facts.releases() | facts.ends() | facts.diagnostics(passed=True), stays)
    moments = [(int(u), int(facts.known[p]), int(facts.time[p]), True) for p, u in zip(begun, begun_unit, strict=True)]
    drained = {unit for unit, *_ in moments}
    moments += [
        (int(u), int(facts.known[p]), int(facts.time[p]), False)
        for p, u in zip(ended, ended_unit, strict=True)
        if int(u) in drained
    ]
    moments.sort()
    longest = duration_ms(LONGEST_DRAIN)
    rows: list[tuple[int, int, int]] = []
    last_begin = last_end = -NEVER
    for i, (unit, known, time, begins) in enumerate(moments):
        if i == 0 or moments[i - 1][0] != unit:
            last_begin = last_end = -NEVER
        if begins:
            last_begin = max(last_begin, time)
        else:
            last_end = max(last_end, time)
        following = moments[i + 1][1] if i + 1 < len(moments) and moments[i + 1][0] == unit else NEVER
        until = min(following, last_begin + longest)
        if last_end < last_begin and known < until:
            rows.append((unit, known, until))
    table = np.asarray(rows, dtype=np.int64).reshape(-1, 3)
    return pd.DataFrame(
        {
            "unit": pd.array(stays.units[table[:, 0]] if rows else [], dtype="str"),
            "down_from": instants(table[:, 1]),
            "down_until": instants(table[:, 2]),
        }
    )
