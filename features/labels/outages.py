"""When a unit was known to be out of use: inside an incident, in a planned maintenance, or drained by another hand.

A drained unit runs nothing. Scoring it would spend the alert budget on what the operator has already taken out.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise

import numpy as np
import pandas as pd

from features.labels.evidence import IncidentEvidence
from features.labels.facts import Sign
from features.times import NEVER, Int64Array, duration_ms, instants

LONGEST_DRAIN = timedelta(days=31)
"""A drain that was not taken back counts no longer than this: the 95th percentile of repairs in StepFun's trace."""


def out_of_use(record: IncidentEvidence) -> pd.DataFrame:
    """When each unit was known to be down, in a planned maintenance, or drained and not yet given back.

    Drains by predrain's own controller do not count: a unit that it drained is still watched, and its rows have no
    label.

    Returns: columns ``unit``, ``down_from`` (included), ``down_until`` (excluded); sorted by (unit, down_from),
    disjoint. Whether a time lies in an interval depends only on facts known at that time.
    """
    stays, facts = record.stays, record.facts
    begun, begun_unit = facts.at_units(facts.drains() & ~facts.own(), stays)
    ended, ended_unit = facts.at_units(facts.releases() | facts.ends() | facts.diagnostics(passed=True), stays)
    drained = _intervals(
        np.stack([begun_unit, facts.known[begun], facts.time[begun]]),
        np.stack([ended_unit, facts.known[ended], facts.time[ended]])[:, np.isin(ended_unit, begun_unit)],
        duration_ms(LONGEST_DRAIN),
    )
    return _frame(record, np.concatenate([_down(record), drained, record.maintenance.out()], axis=1))


def down_intervals(record: IncidentEvidence) -> pd.DataFrame:
    """When each unit was known to be down, as :func:`out_of_use` gives it.

    A unit is known to be down at t if, of the facts known at t, its last label-worthy event, or the ticket that follows
    it, is followed by no repair, replacement, reset or removal and is less than ``labels.cooldown`` ago. Events that
    were known to be of a planned maintenance as soon as they were known do not count.
    """
    return _frame(record, _down(record))


def _down(record: IncidentEvidence) -> Int64Array:
    every = [(unit, s) for unit, evidence in record.evidence.items() for s in (*evidence.signs, *evidence.tickets)]
    counts = record.counts_at_once(np.array([unit for unit, _ in every], dtype=np.int64), [sign for _, sign in every])
    cooldown = duration_ms(record.labels.cooldown)
    signs: dict[int, list[Sign]] = {}
    for (unit, sign), kept in zip(every, counts, strict=True):
        if kept:
            signs.setdefault(unit, []).append(sign)
    revised = {unit for unit, of_unit in signs.items() if any(sign.until < NEVER for sign in of_unit)}
    begun = [(unit, s.established, s.time) for unit, of_unit in signs.items() if unit not in revised for s in of_unit]
    ends = [(unit, known, time) for unit, evidence in record.evidence.items() for time, known in evidence.ends]
    by_then = [(u, *span) for u in sorted(revised) for span in _revised(signs[u], record.evidence[u].ends, cooldown)]
    begins, ended = (np.array(rows, dtype=np.int64).reshape(-1, 3).T for rows in (begun, ends))
    steady = _intervals(begins, ended, cooldown)
    return np.concatenate([steady, np.array(by_then, dtype=np.int64).reshape(-1, 3).T], axis=1)


def _revised(signs: list[Sign], ends: list[tuple[int, int]], cooldown: int) -> Iterator[tuple[int, int]]:
    """Tell from when until when a unit was known to be down, some of whose signs ceased to count."""
    moments = {moment for sign in signs for moment in (sign.established, sign.until)} | {known for _, known in ends}
    for moment, following in pairwise(sorted({*moments, NEVER})):
        begun = max((sign.time for sign in signs if sign.established <= moment < sign.until), default=-NEVER)
        ended = max((time for time, known in ends if known <= moment), default=-NEVER)
        if ended < begun and moment < begun + cooldown:
            yield moment, min(following, begun + cooldown)


def _intervals(begins: Int64Array, ends: Int64Array, longest: int) -> Int64Array:
    """Tell from when until when units were known to be out of use: unit, from, until; shape (3, n).

    ``begins``, ``ends``: unit, when it was known, and when it happened; shape (3, n).
    ``longest``: how long a begin counts (ms) where no end follows it.
    """
    moments = np.concatenate([ends, begins], axis=1)
    is_begin = np.arange(moments.shape[1]) >= ends.shape[1]
    order = np.lexsort((is_begin, moments[2], moments[1], moments[0]))
    (unit, known, time), is_begin = moments[:, order], is_begin[order]
    last_begin = _newest(np.where(is_begin, time, -NEVER), unit)
    last_end = _newest(np.where(is_begin, -NEVER, time), unit)
    following = np.append(np.where(unit[1:] == unit[:-1], known[1:], NEVER), NEVER)[: unit.size]
    until = np.minimum(following, last_begin + longest)
    held = (last_end < last_begin) & (known < until)
    return np.stack([unit[held], known[held], until[held]])


def _newest(values: Int64Array, unit: Int64Array) -> Int64Array:
    """Give the highest value of each unit so far; a unit's values follow each other."""
    return pd.Series(values).groupby(unit, sort=False).cummax().to_numpy(np.int64)


def _frame(record: IncidentEvidence, intervals: Int64Array) -> pd.DataFrame:
    """Join intervals of a unit that overlap or touch."""
    unit, start, end = intervals[:, np.lexsort((intervals[1], intervals[0]))]
    until = _newest(end, unit)
    goes_on = np.r_[False, (unit[1:] == unit[:-1]) & (start[1:] <= until[:-1])][: unit.size]
    first = np.flatnonzero(~goes_on)
    last = np.append(first[1:], unit.size)[: first.size] - 1
    return pd.DataFrame(
        {
            "unit": pd.array(record.stays.units[unit[first]], dtype="str"),
            "down_from": instants(start[first]),
            "down_until": instants(until[last]),
        }
    )
