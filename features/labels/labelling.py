"""Labels of decision rows: whether an incident of the unit starts in (t + gap, t + gap + horizon]."""

from datetime import datetime

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from features.config import LabelSection
from features.labels.facts import EventArrays
from features.labels.maintenance import Maintenance
from foundation.times import NEVER, BoolArray, Int64Array, duration_ms, instant_ms, instants, milliseconds, text
from telemetry.dataset.installations import Installations, Timeline


def label_rows(
    rows: pd.DataFrame,
    incidents: pd.DataFrame,
    inventory: pd.DataFrame,
    labels: LabelSection,
    *,
    data_end: datetime,
    as_of: datetime | None = None,
    events: pd.DataFrame | None = None,
    units: tuple[Int64Array, NDArray[np.object_]] | None = None,
) -> pd.DataFrame:
    """Label decision rows.

    The label is 1 if an incident of the row's unit starts in (t + gap, t + gap + horizon], else 0. It is null (censored
    or not yet known) in these cases, the first two even if an incident starts:

    * the unit is inside an incident or planned maintenance at t, even if that became known only later;
    * the horizon ends after ``data_end`` or ``as_of``: counting the failures already observed, without the negatives
      around them, would inflate the ranking metrics of those times;
    * ``labels.censor_leavers``, and the unit leaves service in (t, t + gap + horizon] with no incident started after t
      and by then;
    * predrain's controller drained the unit or its node (``drain`` events whose source begins with ``predrain``), the
      unit was out of use at some time in (t, t + gap + horizon], and it then neither failed nor passed a diagnostic
      within the horizon: the outcome without the drain is unknown;
    * an incident starts in (t, t + gap + horizon] during planned maintenance: whether anything failed is unknown. Such
      an incident never makes a label 1.

    ``rows``: columns ``decision_time`` and ``unit``, in any order; scales to millions of rows.
    ``incidents``: from :func:`features.labels.incidents.find_incidents`, called with the same ``as_of``.
    ``events``: events of the dataset, for predrain's drains and maintenance; None ignores both.
    ``units``: result of :func:`unit_positions` for these rows, for callers that label them repeatedly.
    Returns: aligned with ``rows``: ``label`` (Int8), ``incident``, ``node_incident``, ``common_cause`` (Int64),
    ``incident_start`` and ``failure_class`` of the incident that makes a label 1 (else null), ``complete_at`` (t + gap
    + horizon).
    """
    as_of_ms = instant_ms(as_of)
    installations = Installations.of(inventory, as_of_ms=as_of_ms)
    decided = milliseconds(rows["decision_time"], "decision_time")
    unit_position, names = unit_positions(rows) if units is None else units
    unit = installations.codes(names)[unit_position] if len(names) else np.zeros(0, dtype=np.int64)
    horizon_start = decided + duration_ms(labels.gap)
    horizon_end = horizon_start + duration_ms(labels.horizon)

    all_incidents = _Incidents(incidents, installations)
    counted = _Incidents(incidents[~incidents["in_maintenance"]], installations)
    next_incident = counted.timeline.next(unit, horizon_start)
    starts = np.append(counted.start, NEVER)
    positive = starts[next_incident] <= horizon_end

    is_down = all_incidents.last_end(unit, decided) > decided
    next_start = starts[counted.timeline.next(unit, decided)]
    incomplete = horizon_end > min(instant_ms(data_end), as_of_ms)
    unknown = np.zeros(len(decided), dtype=bool)
    if len(all_incidents.start) > len(counted.start):
        in_maintenance = _Incidents(incidents[incidents["in_maintenance"]], installations)
        unknown |= np.append(in_maintenance.start, NEVER)[in_maintenance.timeline.next(unit, decided)] <= horizon_end
    if labels.censor_leavers:
        leave_time = _next_leave(installations, unit, decided)
        unknown |= (leave_time <= horizon_end) & (next_start > leave_time)
    if events is not None:
        facts = EventArrays.of(events, installations, as_of_ms=as_of_ms)
        unknown |= _drained_by_predrain(facts, installations, counted, unit, decided, horizon_end)
        is_down |= Maintenance.of(facts, installations).within(unit, decided)

    # A failure that was observed counts, even if something hid the outcome without it.
    null = is_down | incomplete | (unknown & ~positive)
    incident = np.where(positive & ~null, next_incident, -1)
    classes = pd.array(counted.failure_class, dtype="str")
    return pd.DataFrame(
        {
            "label": pd.arrays.IntegerArray(positive.astype(np.int8), null),
            **{
                name: pd.arrays.IntegerArray(np.append(number, 0)[incident], incident < 0)
                for name, number in counted.numbers.items()
            },
            "incident_start": instants(np.where(incident < 0, NEVER, starts[incident])),
            "failure_class": classes.take(incident, allow_fill=True),
            "complete_at": instants(horizon_end),
        },
        index=rows.index,
    )


def unit_positions(rows: pd.DataFrame) -> tuple[Int64Array, NDArray[np.object_]]:
    """Return the position of each row's unit among the distinct units, and their names."""
    position, names = pd.factorize(rows["unit"])
    return position.astype(np.int64), np.asarray(names, dtype=object)


class _Incidents:
    """Incidents sorted by (unit, start)."""

    __slots__ = ("end", "failure_class", "numbers", "start", "timeline", "unit")

    def __init__(self, incidents: pd.DataFrame, installations: Installations) -> None:
        unit = installations.codes(text(incidents["unit"]))
        start = milliseconds(incidents["start"], "start")
        end = milliseconds(incidents["end"], "end")
        order = np.lexsort((end, start, unit))
        order = order[unit[order] >= 0]
        self.unit, self.start, self.end = unit[order], start[order], end[order]
        names = ("incident", "node_incident", "common_cause")
        self.numbers = {name: incidents[name].to_numpy(np.int64)[order] for name in names}
        self.failure_class = incidents["failure_class"].iloc[order]
        self.timeline = Timeline(self.unit, self.start, len(installations.units))

    def last_end(self, unit: Int64Array, time: Int64Array) -> Int64Array:
        """Return the end of each unit's last incident that started at or before each time; ``-NEVER``: none."""
        return np.append(self.end, -NEVER)[self.timeline.last(unit, time)]


def _next_leave(installations: Installations, unit: Int64Array, time: Int64Array) -> Int64Array:
    unit_code, leave_time = installations.leaves()
    return np.append(leave_time, NEVER)[Timeline(unit_code, leave_time, len(installations.units)).next(unit, time)]


def _drained_by_predrain(
    facts: EventArrays,
    installations: Installations,
    incidents: _Incidents,
    unit: Int64Array,
    decided: Int64Array,
    horizon_end: Int64Array,
) -> BoolArray:
    """Return the rows whose outcome is hidden by a drain of predrain."""
    position, drained = facts.at_units(facts.drains() & facts.is_by_predrain(), installations)
    is_hidden = np.zeros(len(unit), dtype=bool)
    if not len(position):
        return is_hidden
    passed = facts.diagnostics(passed=True)
    returns = _UnitTimes(facts, facts.releases() | facts.ends() | passed, installations, incidents)
    passes = _UnitTimes(facts, passed, installations, incidents)
    by_unit = np.argsort(unit, kind="stable")
    first = np.searchsorted(unit[by_unit], drained, side="left")
    last = np.searchsorted(unit[by_unit], drained, side="right")
    for fact, code, begin, end in zip(position, drained, first, last, strict=True):
        chosen = by_unit[begin:end]
        since = int(facts.time[fact])
        returned_at, passed_at = returns.first_after(int(code), since), passes.first_after(int(code), since)
        # Either the drain starts inside the horizon, or it started by t and the unit was still out of use at t.
        begins = (since > decided[chosen]) & (since <= horizon_end[chosen])
        still_absent = (since <= decided[chosen]) & (returned_at > decided[chosen])
        failed_before = _failed_between(incidents, code, decided[chosen], since)
        is_hidden[chosen] |= ((begins & ~failed_before) | still_absent) & (passed_at > horizon_end[chosen])
    return is_hidden


class _UnitTimes:
    """Times of chosen facts and of incident starts, by unit."""

    __slots__ = ("timeline", "times")

    def __init__(
        self, facts: EventArrays, chosen: BoolArray, installations: Installations, incidents: _Incidents
    ) -> None:
        position, unit = facts.at_units(chosen, installations)
        unit, time = np.r_[unit, incidents.unit], np.r_[facts.time[position], incidents.start]
        order = np.lexsort((time, unit))
        self.times = np.append(time[order], NEVER)
        self.timeline = Timeline(unit[order], time[order], len(installations.units))

    def first_after(self, unit: int, time: int) -> int:
        """Return the unit's first time after ``time``; :data:`NEVER` if there is none."""
        position = self.timeline.next(np.asarray([unit], dtype=np.int64), np.asarray([time], dtype=np.int64))
        return int(self.times[position[0]])


def _failed_between(incidents: _Incidents, unit: int, after: Int64Array, until: int) -> BoolArray:
    """Whether an incident of the unit started in (after, until]."""
    starts = np.append(incidents.start, NEVER)
    return starts[incidents.timeline.next(np.full(len(after), unit, dtype=np.int64), after)] <= until
