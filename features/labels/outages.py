"""When a unit was known to be out of use: inside an incident, or drained by someone else and not yet given back.

A drained unit runs nothing. Scoring it would spend the alert budget on what the operator has already taken out.
"""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pandas as pd

from features.labels.evidence import Record
from features.labels.incidents import down_intervals
from features.times import NEVER, Int64Array, duration_ms, instants, milliseconds

LONGEST_DRAIN = timedelta(days=31)
"""A drain that nobody took back counts no longer than this: the 95th percentile of repairs in StepFun's trace."""


def out_of_use(record: Record) -> pd.DataFrame:
    """When each unit was known to be down or drained.

    Our own controller's drains do not count: a unit that it drained is still watched, and its rows have no label.

    Returns: as :func:`features.labels.incidents.down_intervals`.
    """
    down = down_intervals(record)
    both = pd.concat([down, _drained(record)], ignore_index=True)
    both = both.sort_values(["unit", "down_from"], kind="stable", ignore_index=True)
    unit = pd.factorize(both["unit"])[0]
    start, end = milliseconds(both["down_from"], "down_from"), milliseconds(both["down_until"], "down_until")
    same = unit[1:] == unit[:-1]
    ends_by_now = _newest(end, unit)
    goes_on = np.r_[False, same & (start[1:] <= ends_by_now[:-1])][: unit.size]
    first = np.flatnonzero(~goes_on)
    last = np.append(first[1:], unit.size)[: first.size] - 1
    return pd.DataFrame(
        {
            "unit": both["unit"].iloc[first].reset_index(drop=True),
            "down_from": instants(start[first]),
            "down_until": instants(ends_by_now[last]),
        }
    )


def _newest(values: Int64Array, unit: Int64Array) -> Int64Array:
    """Give the highest value of each unit so far; a unit's values follow each other."""
    return pd.Series(values).groupby(unit, sort=False).cummax().to_numpy(np.int64)


def _drained(record: Record) -> pd.DataFrame:
    stays, facts = record.stays, record.facts
    begun, begun_unit = facts.at_units(facts.drains() & ~facts.own(), stays)
    ended, ended_unit = facts.at_units(facts.releases() | facts.ends() | facts.diagnostics(passed=True), stays)
    again = np.isin(ended_unit, begun_unit)
    ended, ended_unit = ended[again], ended_unit[again]
    fact, unit = np.r_[ended, begun], np.r_[ended_unit, begun_unit]
    begins = np.arange(fact.size) >= ended.size
    known, time = facts.known[fact], facts.time[fact]
    order = np.lexsort((begins, time, known, unit))
    unit, known, time, begins = unit[order], known[order], time[order], begins[order]
    last_begin = _newest(np.where(begins, time, -NEVER), unit)
    last_end = _newest(np.where(begins, -NEVER, time), unit)
    following = np.append(np.where(unit[1:] == unit[:-1], known[1:], NEVER), NEVER)[: unit.size]
    until = np.minimum(following, last_begin + duration_ms(LONGEST_DRAIN))
    held = (last_end < last_begin) & (known < until)
    return pd.DataFrame(
        {
            "unit": pd.array(stays.units[unit[held]], dtype="str"),
            "down_from": instants(known[held]),
            "down_until": instants(until[held]),
        }
    )
