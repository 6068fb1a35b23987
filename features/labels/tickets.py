"""Tickets that follow a failure: which failure each belongs to, and from when that is known.

An operator's ticket is dated hours or days after the XID that it is about (on GWDG's A100 nodes 4 to 109 hours). As a
failure of its own it would make the dead GPU its own precursor. So a ``failure`` without a code, or dated by day,
continues the failure of its unit or node that nobody has repaired, where there is one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from operator import attrgetter

import numpy as np

from features.config import LabelSection
from features.labels.facts import EventArrays
from features.labels.node_incidents import is_dated_by_day
from features.labels.signs import Sign, UnitEvidence
from features.times import NEVER, BoolArray, Int64Array, duration_ms
from telemetry.dataset.installations import Installations

_DAY = duration_ms(timedelta(days=1))


def tickets(facts: EventArrays) -> BoolArray:
    """Tell which facts may be the ticket of an earlier failure."""
    return (facts.type == "failure") & ((facts.code == "") | is_dated_by_day(facts.time))


@dataclass(frozen=True, slots=True)
class _Failure:
    """A sign that is no ticket, with the unit and the node that it sat in."""

    time: int
    unit: int
    node: str | None
    sign: Sign


_Followed = tuple[tuple[int, int, bool], ...]
"""What a ticket belongs to: units, the failure class of each, and whether the ticket still found the unit down."""


def settle_tickets(
    facts: EventArrays,
    chosen: BoolArray,
    stays: Installations,
    evidence: Mapping[int, UnitEvidence],
    labels: LabelSection,
) -> Int64Array:
    """Move the signs of tickets to the failures that they belong to, from when both are known.

    A ticket belongs to the newest failure of its unit, or else of its node, in the ``labels.ticket_lag`` before it that
    no repair, replacement or removal followed before the ticket (resets mend nothing). With a day for a date, only
    what was repaired before that day is closed. All units of the node whose failures form a node incident with that one
    are down until the ticket. It may name another of the node's units, which then has no failure of its own.

    ``chosen``: what :func:`tickets` gives.
    ``evidence``: by unit, with ``own_ends`` sorted; its signs are changed.
    Returns: from when each fact is known to belong to another failure (ms); :data:`NEVER`: it does not.
    """
    repeats = np.full(len(facts.time), NEVER, dtype=np.int64)
    asked = np.flatnonzero(chosen & ((facts.unit >= 0) | facts.node_wide))
    if not len(asked):
        return repeats
    mine = {sign.fact: sign for of_unit in evidence.values() for sign in of_unit.signs if sign.fact >= 0}
    for of_unit in evidence.values():
        of_unit.signs = [sign for sign in of_unit.signs if sign.fact < 0]
    by_unit, by_node = _failures(stays, evidence)
    stay = stays.timeline().last(facts.unit, facts.time)
    for i in asked.tolist():
        unit, time = int(facts.unit[i]), int(facts.time[i])
        node = stays.node[stay[i]] if unit >= 0 else facts.node[i]
        earliest = time - duration_ms(labels.ticket_lag)
        near = _within(by_unit.get(unit, ()), earliest, time)
        near += [failure for failure in _within(by_node.get(node, ()), earliest, time) if failure.unit != unit]
        states = list(_states(near, evidence, facts, i, labels)) if near else [(int(facts.known[i]), ())]
        for (since, followed), (until, _) in pairwise([*states, (NEVER, ())]):
            if followed:
                repeats[i] = min(repeats[i], since)
            elif i in mine:
                evidence[unit].signs.append(replace(mine[i], established=since, until=until))
            for other, class_index, is_down in followed:
                if is_down:
                    sign = Sign(time, since, class_index, facts.code[i], facts.node[i] or "", "", i, until)
                    evidence[other].tickets.append(sign)
    return repeats


def _failures(
    stays: Installations, evidence: Mapping[int, UnitEvidence]
) -> tuple[dict[int, list[_Failure]], dict[str, list[_Failure]]]:
    """Give the failures of each unit and of each node, sorted by time."""
    by_unit: dict[int, list[_Failure]] = {}
    by_node: dict[str, list[_Failure]] = {}
    timeline = stays.timeline()
    for unit, of_unit in evidence.items():
        time = np.array([sign.time for sign in of_unit.signs], dtype=np.int64)
        places = stays.node[timeline.last(np.full(len(time), unit, dtype=np.int64), time)]
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
    near: list[_Failure], evidence: Mapping[int, UnitEvidence], facts: EventArrays, ticket: int, labels: LabelSection
) -> Iterator[tuple[int, _Followed]]:
    """Give what a ticket is known to belong to, and since when, from when the ticket itself is known."""
    time, known = int(facts.time[ticket]), int(facts.known[ticket])
    before = time - _DAY if is_dated_by_day(facts.time[[ticket]])[0] else time
    units, first = {failure.unit for failure in near}, min(failure.time for failure in near)
    mended = {u: [end for end in evidence[u].own_ends if first <= end[0] <= time] for u in units}
    moments = {known, *(f.sign.established for f in near), *(since for ends in mended.values() for _, since in ends)}
    latest: _Followed | None = None
    for moment in sorted(moment for moment in moments if moment >= known):

        def was_mended(failure: _Failure, until: int, moment: int = moment) -> bool:
            return any(failure.time <= end < until and since <= moment for end, since in mended[failure.unit])

        known_ones = [failure for failure in near if failure.sign.established <= moment]
        open_ones = [failure for failure in known_ones if not was_mended(failure, before)]
        together = _node_incident(open_ones, int(facts.unit[ticket]), duration_ms(labels.node_window))
        followed = tuple((f.unit, f.sign.class_index, not was_mended(f, time + 1)) for f in together)
        if followed != latest:
            yield moment, followed
            latest = followed


def _node_incident(open_ones: list[_Failure], unit: int, window: int) -> list[_Failure]:
    """Give the last failure of each unit in the newest node incident, of the unit itself if it failed."""
    if not open_ones:
        return []
    newest = [failure for failure in open_ones if failure.unit == unit] or open_ones
    target = max(newest, key=lambda failure: (failure.time, failure.unit))
    beside = [f for f in open_ones if f is target or (target.node and f.node == target.node)]
    times = sorted(failure.time for failure in beside)
    first = last = times.index(target.time)
    while first > 0 and times[first] - times[first - 1] <= window:
        first -= 1
    while last + 1 < len(times) and times[last + 1] - times[last] <= window:
        last += 1
    newest_of = {f.unit: f for f in sorted(open_ones, key=lambda failure: failure.time)}
    return sorted(
        (f for f in beside if newest_of[f.unit] is f and times[first] <= f.time <= times[last]), key=lambda f: f.unit
    )
