"""Incidents: bursts of label-worthy events of one unit, in hindsight and as they became known.

The two views are separate. :func:`find_incidents` looks back from one instant and returns true starts and ends; labels
and evaluation use it. :func:`known_onsets` walks forward and returns what was known at each time; features and the
decision grid use it.

A ``failure`` or XID event that names a node of GPUs but none of its GPUs is no incident: assigning it to every GPU
would count one fault eight times. It is part of the node's history. If the nodes are the units (no GPUs in the
inventory), it is an incident of the node.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise

import numpy as np
import pandas as pd

from features.config import FAILURE_CLASSES, LabelSection
from features.labels.evidence import IncidentEvidence, find_evidence
from features.labels.facts import EventArrays, Sign, UnitEvidence
from features.labels.maintenance import Maintenance
from features.labels.node_incidents import number_node_incidents
from foundation.times import NEVER, Int64Array, duration_ms, instant_ms, instants
from telemetry.dataset.installations import Installations

LATE_REPAIR = timedelta(days=30)
"""Longest time after the last event at which a repair of the unit or its node, or the unit's removal, still ends the
incident, even after ``labels.cooldown``. In StepFun's InfiniteHBD trace, 95 % of repairs end within 31 days and half
take more than 20 hours; a unit awaiting repair is no negative example. Only the true end moves, not the known state."""

INCIDENT_COLUMNS = ("incident", "unit", "gpu", "node", "start", "end", "failure_class", "code", "known_at",
                    "in_maintenance", "node_incident", "common_cause")  # fmt: skip
"""Columns of the frame that :func:`find_incidents` returns."""

_OTHER = FAILURE_CLASSES.index("other")


def find_incidents(
    events: pd.DataFrame,
    inventory: pd.DataFrame,
    labels: LabelSection,
    *,
    as_of: datetime | None = None,
    data_end: datetime | None = None,
) -> pd.DataFrame:
    """Find the incidents in the events.

    Label-worthy events of one unit belong to one incident if they lie within ``labels.merge_window`` of each other, or
    if the earlier one's incident has not ended yet. An incident ends at the first repair, replacement, reset or removal
    at or after its last event, or ``labels.cooldown`` after that event. A later repair of the unit or its node, or
    removal of the unit, still ends it within :data:`LATE_REPAIR` and before the next label-worthy event. A repair that
    names one of several failures (by its code) ends nothing while another one is open. A ticket that follows a failure
    belongs to it, see :mod:`features.labels.evidence`.

    ``as_of``: use only what was known then: events with ``known_at <= as_of``, installations and removals by then.
    ``data_end``: end of the data; by default the latest time in events and inventory. An incident whose cooldown ends
    after this (or after ``as_of``) is open.
    Returns: columns ``incident`` (0, 1, ... by start, then unit), ``unit``, ``gpu`` (null for a node), ``node``,
    ``start``, ``end`` (NaT: open), ``failure_class`` (of its first event that is not ``other``), ``code`` (of that
    event), ``known_at`` (when first established), ``in_maintenance`` (whether it started in planned maintenance; see
    :func:`counted`), ``node_incident`` and ``common_cause`` (numbers, see
    :func:`features.labels.node_incidents.number_node_incidents`). Times are ``datetime64[ms, UTC]``. No two incidents
    of a unit overlap.
    """
    as_of_ms = instant_ms(as_of)
    installations = Installations.of(inventory, as_of_ms=as_of_ms)
    facts = EventArrays.of(events, installations, as_of_ms=as_of_ms)
    seen_until = min(as_of_ms, instant_ms(data_end))
    if seen_until == NEVER:
        removals = installations.removed[installations.removed < NEVER]
        seen_until = max([-NEVER, *(int(a.max()) for a in (facts.known, installations.installed, removals) if len(a))])
    incidents: list[tuple[int, int, int, int, Sign]] = []
    for unit, evidence in find_evidence(facts, installations, labels, as_of_ms=as_of_ms)[0].items():
        signs = [sign for sign in evidence.signs if sign.until == NEVER]
        for first, last in _bursts(signs, evidence.ends, labels):
            end = _end(signs, first, last, evidence, labels, seen_until)
            members = signs[first : last + 1]
            main = next((sign for sign in members if sign.class_index != _OTHER), members[0])
            incidents.append((members[0].time, unit, end, min(sign.established for sign in members), main))
    incidents.sort(key=lambda row: row[:2])
    frame = _sign_columns(installations, [row[1] for row in incidents], [row[4] for row in incidents], labels)
    frame["incident"] = np.arange(len(incidents), dtype=np.int64)
    for name, position in (("start", 0), ("end", 2), ("known_at", 3)):
        frame[name] = instants(np.asarray([row[position] for row in incidents], dtype=np.int64))
    starts, whose = (np.asarray([row[position] for row in incidents], dtype=np.int64) for position in (0, 1))
    maintenance = Maintenance.of(facts, installations)
    frame["in_maintenance"] = maintenance.within(whose, starts)
    frame["node_incident"], frame["common_cause"] = number_node_incidents(
        installations, maintenance, whose, starts, labels.node_window, by_unit=labels.acts_on == "unit"
    )
    return frame[list(INCIDENT_COLUMNS)]


def counted(incidents: pd.DataFrame) -> pd.DataFrame:
    """Drop incidents that started in planned maintenance: whether anything failed then is unknown."""
    return incidents[~incidents["in_maintenance"]].reset_index(drop=True)


def known_onsets(record: IncidentEvidence) -> pd.DataFrame:
    """Return incident onsets as they became known, for features.

    Facts are processed in order of known-at time. A label-worthy event opens an onset unless, given what is known then,
    it belongs to the same incident as another event or happened in planned maintenance. Onsets never change later:
    those known by any time depend only on facts known by that time. An onset opened by a ticket stops counting once the
    failure it belongs to becomes known.

    Returns: columns ``unit``, ``gpu``, ``node``, ``timestamp`` (of the event that opened it), ``known_at``,
    ``failure_class``, ``code``, ``until`` (when it stops counting; NaT: never); sorted by (known_at, timestamp, unit).
    """
    pairs = [(unit, sign) for unit, evidence in record.evidence.items() for sign in _openings(evidence, record.labels)]
    counts = record.is_unplanned(np.array([unit for unit, _ in pairs], dtype=np.int64), [sign for _, sign in pairs])
    onsets = [(s.established, s.time, unit, s) for (unit, s), count in zip(pairs, counts, strict=True) if count]
    onsets.sort(key=lambda row: row[:3])
    signs = [row[3] for row in onsets]
    frame = _sign_columns(record.installations, [row[2] for row in onsets], signs, record.labels)
    frame["timestamp"] = instants(np.asarray([sign.time for sign in signs], dtype=np.int64))
    frame["known_at"] = instants(np.asarray([sign.established for sign in signs], dtype=np.int64))
    frame["until"] = instants(np.asarray([sign.until for sign in signs], dtype=np.int64))
    return frame[["unit", "gpu", "node", "timestamp", "known_at", "failure_class", "code", "until"]]


def _bursts(signs: list[Sign], ends: list[tuple[int, int]], labels: LabelSection) -> list[tuple[int, int]]:
    """Return the positions of each incident's first and last event; ``signs`` and ``ends`` are sorted by time."""
    merge_window, cooldown = duration_ms(labels.merge_window), duration_ms(labels.cooldown)
    bursts: list[tuple[int, int]] = []
    for i, sign in enumerate(signs):
        if bursts:
            first, last = bursts[-1]
            since = sign.time - signs[last].time
            if since <= merge_window or (since < cooldown and not _ended(ends, signs[last].time, sign.time)):
                bursts[-1] = (first, i)
                continue
        bursts.append((i, i))
    return bursts


def _ended(ends: list[tuple[int, int]], first: int, last: int) -> bool:
    """Return whether an end lies in [first, last]."""
    position = bisect_left(ends, (first, -NEVER))
    return position < len(ends) and ends[position][0] <= last


def _end(
    signs: list[Sign], first: int, last: int, evidence: UnitEvidence, labels: LabelSection, seen_until: int
) -> int:
    assert first <= last
    following = signs[last + 1].time if last + 1 < len(signs) else NEVER
    latest = max(
        [signs[last].time]
        + [s.time for s in evidence.tickets if s.until == NEVER and signs[last].time <= s.time < following]
    )
    ends_at = latest + duration_ms(labels.cooldown)
    position = bisect_left(evidence.ends, (latest, -NEVER))
    if position < len(evidence.ends) and evidence.ends[position][0] <= ends_at:
        return min(evidence.ends[position][0], following)
    # Before the next event: a late repair at or after it answers that one.
    limit = min(latest + duration_ms(LATE_REPAIR), following - 1)
    position = bisect_left(evidence.own_ends, (latest, -NEVER))
    if position < len(evidence.own_ends) and evidence.own_ends[position][0] <= limit:
        return evidence.own_ends[position][0]
    ends_at = min(ends_at, following)
    return ends_at if ends_at <= seen_until else NEVER


def _openings(evidence: UnitEvidence, labels: LabelSection) -> list[Sign]:
    merge_window, cooldown = duration_ms(labels.merge_window), duration_ms(labels.cooldown)
    ends_by_known = sorted((known, time) for time, known in evidence.ends)
    ends: list[tuple[int, int]] = []
    times: list[int] = []
    n_ends = 0
    openings: list[Sign] = []

    def is_same(earlier: int, later: int) -> bool:
        since = later - earlier
        return since <= merge_window or (since < cooldown and not _ended(ends, earlier, later))

    moments = [(sign.established, True, sign) for sign in evidence.signs]
    moments += [(sign.until, False, sign) for sign in evidence.signs if sign.until < NEVER]
    # False sorts first: signs that cease to count are removed before others of the same moment are compared with them.
    for moment, counts, sign in sorted(moments):
        if not counts:
            times.remove(sign.time)
            continue
        while n_ends < len(ends_by_known) and ends_by_known[n_ends][0] <= moment:
            known, time = ends_by_known[n_ends]
            insort(ends, (time, known))
            n_ends += 1
        position = bisect_right(times, sign.time)
        joins_left = position > 0 and is_same(times[position - 1], sign.time)
        joins_right = position < len(times) and is_same(sign.time, times[position])
        if not (joins_left or joins_right):
            openings.append(sign)
        times.insert(position, sign.time)
    return openings


def _sign_columns(
    installations: Installations, units: list[int], signs: list[Sign], labels: LabelSection
) -> pd.DataFrame:
    """Return unit, GPU (null if the unit is a node), node, failure class and code of each sign."""
    code = np.asarray(units, dtype=np.int64)
    gpu = np.full(len(installations.units), None, dtype=object)
    gpu[installations.unit] = installations.gpu
    none, classes = np.zeros(0, dtype=object), labels.all_classes
    return pd.DataFrame(
        {
            "unit": pd.array(installations.units[code] if units else none, dtype="str"),
            "gpu": pd.array(gpu[code] if units else none, dtype="str"),
            "node": pd.array([sign.node for sign in signs], dtype="str"),
            "failure_class": pd.array([classes[sign.class_index] for sign in signs], dtype="str"),
            "code": pd.array([sign.code for sign in signs], dtype="str"),
        }
    )


MAX_DRAIN_LENGTH = timedelta(days=31)
"""Limit of a drain that is never released: the 95th percentile of repairs in StepFun's trace."""


def out_of_use(record: IncidentEvidence) -> pd.DataFrame:
    """Return when each unit was known to be down, in planned maintenance, or drained and not yet released.

    Drains by predrain's own controller do not count: the unit is still scored, and its rows have no label.

    Returns: columns ``unit``, ``down_from`` (included), ``down_until`` (excluded); sorted by (unit, down_from),
    disjoint. Whether a time lies in an interval depends only on facts known at that time.
    """
    installations, facts = record.installations, record.facts
    drain_rows, drain_unit = facts.at_units(facts.drains() & ~facts.is_by_predrain(), installations)
    ended, ended_unit = facts.at_units(facts.releases() | facts.ends() | facts.diagnostics(passed=True), installations)
    drained = _intervals(
        np.stack([drain_unit, facts.known[drain_rows], facts.time[drain_rows]]),
        np.stack([ended_unit, facts.known[ended], facts.time[ended]])[:, np.isin(ended_unit, drain_unit)],
        duration_ms(MAX_DRAIN_LENGTH),
    )
    intervals = np.concatenate([_down(record), drained, record.maintenance.out()], axis=1)
    unit, start, end = intervals[:, np.lexsort((intervals[1], intervals[0]))]
    until = _newest(end, unit)
    goes_on = np.r_[False, (unit[1:] == unit[:-1]) & (start[1:] <= until[:-1])][: unit.size]  # overlap or adjoin
    first = np.flatnonzero(~goes_on)
    last = np.append(first[1:], unit.size)[: first.size] - 1
    return pd.DataFrame(
        {
            "unit": pd.array(installations.units[unit[first]], dtype="str"),
            "down_from": instants(start[first]),
            "down_until": instants(until[last]),
        }
    )


def _down(record: IncidentEvidence) -> Int64Array:
    """Return when each unit was known to be down: unit, from, until; shape (3, n).

    A unit is known to be down at t if, of the facts known at t, its last label-worthy event or the ticket that follows
    it is less than ``labels.cooldown`` ago and not followed by a repair, replacement, reset or removal. Events known
    from the outset to be in planned maintenance do not count.
    """
    pairs = [(unit, s) for unit, evidence in record.evidence.items() for s in (*evidence.signs, *evidence.tickets)]
    counts = record.is_unplanned(np.array([unit for unit, _ in pairs], dtype=np.int64), [sign for _, sign in pairs])
    cooldown = duration_ms(record.labels.cooldown)
    signs: dict[int, list[Sign]] = {}
    for (unit, sign), count in zip(pairs, counts, strict=True):
        if count:
            signs.setdefault(unit, []).append(sign)
    revised = {unit for unit, of_unit in signs.items() if any(sign.until < NEVER for sign in of_unit)}
    onsets_known = [
        (unit, s.established, s.time) for unit, of_unit in signs.items() if unit not in revised for s in of_unit
    ]
    ends = [(unit, known, time) for unit, evidence in record.evidence.items() for time, known in evidence.ends]
    by_then = [(u, *span) for u in sorted(revised) for span in _revised(signs[u], record.evidence[u].ends, cooldown)]
    begins, ended = (np.array(rows, dtype=np.int64).reshape(-1, 3).T for rows in (onsets_known, ends))
    steady = _intervals(begins, ended, cooldown)
    return np.concatenate([steady, np.array(by_then, dtype=np.int64).reshape(-1, 3).T], axis=1)


def _revised(signs: list[Sign], ends: list[tuple[int, int]], cooldown: int) -> Iterator[tuple[int, int]]:
    """Yield when a unit was known to be down, if some of its signs ceased to count."""
    moments = {moment for sign in signs for moment in (sign.established, sign.until)} | {known for _, known in ends}
    for moment, following in pairwise(sorted({*moments, NEVER})):
        last_sign = max((sign.time for sign in signs if sign.established <= moment < sign.until), default=-NEVER)
        ended = max((time for time, known in ends if known <= moment), default=-NEVER)
        if ended < last_sign and moment < last_sign + cooldown:
            yield moment, min(following, last_sign + cooldown)


def _intervals(begins: Int64Array, ends: Int64Array, longest: int) -> Int64Array:
    """Return when units were known to be out of use: unit, from, until; shape (3, n).

    ``begins``, ``ends``: unit, known-at time and time; shape (3, n).
    ``longest``: limit of a begin without an end (ms).
    """
    moments = np.concatenate([ends, begins], axis=1)
    is_begin = np.arange(moments.shape[1]) >= ends.shape[1]
    order = np.lexsort((is_begin, moments[2], moments[1], moments[0]))
    (unit, known, time), is_begin = moments[:, order], is_begin[order]
    last_begin = _newest(np.where(is_begin, time, -NEVER), unit)
    last_end = _newest(np.where(is_begin, -NEVER, time), unit)
    following = np.append(np.where(unit[1:] == unit[:-1], known[1:], NEVER), NEVER)[: unit.size]
    until = np.minimum(following, last_begin + longest)
    overlapping = (last_end < last_begin) & (known < until)
    return np.stack([unit[overlapping], known[overlapping], until[overlapping]])


def _newest(values: Int64Array, unit: Int64Array) -> Int64Array:
    """Return the running maximum of each unit; the values of a unit are contiguous."""
    return pd.Series(values).groupby(unit, sort=False).cummax().to_numpy(np.int64)
