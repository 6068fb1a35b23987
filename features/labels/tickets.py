"""Tickets: failure events that report an earlier failure of the same node, not a new one."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from operator import attrgetter

import numpy as np

from features.config import LabelSection
from features.labels.facts import EventArrays, Sign, UnitEvidence
from features.labels.node_incidents import is_dated_by_day
from foundation.times import NEVER, BoolArray, Int64Array, duration_ms
from telemetry.dataset.installations import Installations

_DAY = duration_ms(timedelta(days=1))


def possible_tickets(facts: EventArrays) -> BoolArray:
    """Return which facts may be the ticket of an earlier failure."""
    return (facts.type == "failure") & ((facts.code == "") | is_dated_by_day(facts.time))


@dataclass(frozen=True, slots=True)
class _Failure:
    """A sign that is no ticket, with its unit and that unit's node at the time."""

    time: int
    unit: int
    node: str | None
    sign: Sign


_Followed = tuple[tuple[int, int, bool], ...]
"""Failures that a ticket belongs to: unit, failure class, and whether the unit was still down at the ticket."""


def assign_tickets(
    facts: EventArrays,
    is_ticket: BoolArray,
    installations: Installations,
    evidence: Mapping[int, UnitEvidence],
    labels: LabelSection,
) -> Int64Array:
    """Move the signs of tickets to the failures they belong to, from when both are known.

    A ticket belongs to the newest failure of its unit, or else of its node, within ``labels.ticket_lag`` before it and
    not followed by a repair, replacement or removal before the ticket (resets do not count). If the ticket is dated by
    day, only repairs before that day close a failure. All units of the node whose failures form a node incident with
    that one are down until the ticket. The ticket may name another unit of the node, which then has no failure of its
    own.

    ``evidence``: by unit, with ``own_ends`` sorted; modified in place.
    Returns: from when each fact is known to belong to another failure (ms); :data:`NEVER`: it does not.
    """
    repeats = np.full(len(facts.time), NEVER, dtype=np.int64)
    attributable = np.flatnonzero(is_ticket & ((facts.unit >= 0) | facts.node_wide))
    if not len(attributable):
        return repeats
    sign_of = {sign.fact: sign for of_unit in evidence.values() for sign in of_unit.signs if sign.fact >= 0}
    for of_unit in evidence.values():
        of_unit.signs = [sign for sign in of_unit.signs if sign.fact < 0]
    by_unit, by_node = _failures(installations, evidence)
    installation = installations.timeline().last(facts.unit, facts.time)
    for i in attributable.tolist():
        unit, time = int(facts.unit[i]), int(facts.time[i])
        node = installations.node[installation[i]] if unit >= 0 else facts.node[i]
        earliest = time - duration_ms(labels.ticket_lag)
        recent = _within(by_unit.get(unit, ()), earliest, time)
        recent += [failure for failure in _within(by_node.get(node, ()), earliest, time) if failure.unit != unit]
        states = list(_states(recent, evidence, facts, i, labels)) if recent else [(int(facts.known[i]), ())]
        for (known_since, followed), (until, _) in pairwise([*states, (NEVER, ())]):
            if followed:
                repeats[i] = min(repeats[i], known_since)
            elif i in sign_of:
                evidence[unit].signs.append(replace(sign_of[i], established=known_since, until=until))
            for failed_unit, class_index, is_down in followed:
                if is_down:
                    sign = Sign(time, known_since, class_index, facts.code[i], facts.node[i] or "", "", i, until)
                    evidence[failed_unit].tickets.append(sign)
    return repeats


def _failures(
    installations: Installations, evidence: Mapping[int, UnitEvidence]
) -> tuple[dict[int, list[_Failure]], dict[str, list[_Failure]]]:
    """Return the failures of each unit and of each node, sorted by time."""
    by_unit: dict[int, list[_Failure]] = {}
    by_node: dict[str, list[_Failure]] = {}
    timeline = installations.timeline()
    for unit, of_unit in evidence.items():
        time = np.array([sign.time for sign in of_unit.signs], dtype=np.int64)
        places = installations.node[timeline.last(np.full(len(time), unit, dtype=np.int64), time)]
        for sign, node in zip(of_unit.signs, places, strict=True):
            failure = _Failure(sign.time, unit, node, sign)
            by_unit.setdefault(unit, []).append(failure)
            by_node.setdefault(node or "", []).append(failure)
    by_node.pop("", None)
    for failures in (*by_unit.values(), *by_node.values()):
        failures.sort(key=lambda failure: (failure.time, failure.unit))
    return by_unit, by_node


def _within(failures: Sequence[_Failure], first: int, last: int) -> list[_Failure]:
    time = attrgetter("time")
    return list(failures[bisect_left(failures, first, key=time) : bisect_right(failures, last, key=time)])


def _states(
    recent: list[_Failure], evidence: Mapping[int, UnitEvidence], facts: EventArrays, ticket: int, labels: LabelSection
) -> Iterator[tuple[int, _Followed]]:
    """Yield the failures that a ticket belongs to and from when, starting at the ticket's known-at time."""
    time, known = int(facts.time[ticket]), int(facts.known[ticket])
    repaired_before = time - _DAY if is_dated_by_day(facts.time[[ticket]])[0] else time
    units, first = {failure.unit for failure in recent}, min(failure.time for failure in recent)
    repairs = {u: [end for end in evidence[u].own_ends if first <= end[0] <= time] for u in units}
    moments = {known, *(f.sign.established for f in recent), *(since for ends in repairs.values() for _, since in ends)}
    latest: _Followed | None = None
    for moment in sorted(moment for moment in moments if moment >= known):

        def was_repaired(failure: _Failure, until: int, moment: int = moment) -> bool:
            return any(failure.time <= end < until and since <= moment for end, since in repairs[failure.unit])

        known_failures = [failure for failure in recent if failure.sign.established <= moment]
        open_failures = [failure for failure in known_failures if not was_repaired(failure, repaired_before)]
        failures = _node_incident(open_failures, int(facts.unit[ticket]), duration_ms(labels.node_window))
        # Plus 1, because `until` is excluded: a repair at the ticket's own time ends the downtime.
        followed = tuple((f.unit, f.sign.class_index, not was_repaired(f, time + 1)) for f in failures)
        if followed != latest:
            yield moment, followed
            latest = followed


def _node_incident(open_failures: list[_Failure], unit: int, window: int) -> list[_Failure]:
    """Return each unit's last failure in the ticket unit's newest node incident, or else the node's newest."""
    if not open_failures:
        return []
    newest = [failure for failure in open_failures if failure.unit == unit] or open_failures
    target = max(newest, key=lambda failure: (failure.time, failure.unit))
    related = [f for f in open_failures if f is target or (target.node and f.node == target.node)]
    times = sorted(failure.time for failure in related)
    first = last = times.index(target.time)
    while first > 0 and times[first] - times[first - 1] <= window:
        first -= 1
    while last + 1 < len(times) and times[last + 1] - times[last] <= window:
        last += 1
    newest_of = {f.unit: f for f in sorted(open_failures, key=lambda failure: failure.time)}
    return sorted(
        (f for f in related if newest_of[f.unit] is f and times[first] <= f.time <= times[last]), key=lambda f: f.unit
    )
