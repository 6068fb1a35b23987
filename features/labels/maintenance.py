"""Planned maintenance of units and nodes, and when each window became known.

Observations during maintenance say nothing about the hardware: a rack that reboots looks like a rack that failed. A
window is a ``maintenance`` event at its start. Its code is the planned end (ISO 8601 with time zone), or ``begin``: the
window then lasts until the next event of the same GPU or node with the code ``end``, at most :data:`MAX_LENGTH`.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Self

import numpy as np
import pandas as pd

from features.labels.facts import EventArrays, normalized
from foundation.times import NEVER, BoolArray, Int64Array, duration_ms, instant_ms
from telemetry.dataset.installations import Installations, Timeline
from telemetry.dataset.schema import MAINTENANCE_BEGIN, MAINTENANCE_END

MAX_LENGTH = timedelta(days=31)
"""Limit of a window whose end is never reported, the same as for a drain."""


@dataclass(frozen=True, slots=True)
class Maintenance:
    """Windows as they became known, sorted by (entity, start); times in ms.

    A window whose end becomes known later has one entry valid until then and another one from then on.

    ``entity``: unit code, with the window clipped to its installation on the node; from the number of units on: whole
    nodes.
    ``start``, ``end``: of the window; ``end`` is excluded.
    ``known``, ``until``: period in which the entry is valid knowledge.
    ``reach``: latest ``end`` of the entity's entries so far.
    """

    nodes: pd.Index
    units: int
    entity: Int64Array
    start: Int64Array
    end: Int64Array
    known: Int64Array
    until: Int64Array
    reach: Int64Array

    @classmethod
    def of(cls, facts: EventArrays, installations: Installations) -> Self:
        """Read the windows in the facts."""
        windows = list(_windows(facts))
        on_nodes = [window for window in windows if isinstance(window[0], str)]
        code, nodes = pd.factorize(np.array([window[0] for window in on_nodes], dtype=object))
        units = len(installations.units)
        per_unit = [window for window in windows if not isinstance(window[0], str)]
        per_unit += [(units + int(node), *window[1:]) for node, window in zip(code, on_nodes, strict=True)]
        table = np.array(per_unit, dtype=np.int64).reshape(-1, 5)
        if on_nodes:  # one entry per unit, clipped to its installation
            installed = pd.DataFrame(
                {
                    "node": installations.node,
                    "unit": installations.unit,
                    "in": installations.installed,
                    "out": installations.removed,
                }
            )
            spans = pd.DataFrame(on_nodes, columns=["node", "start", "end", "known", "until"]).merge(
                installed, on="node"
            )
            start, end = np.maximum(spans["start"], spans["in"]), np.minimum(spans["end"], spans["out"] + 1)
            table = np.r_[table, np.stack([spans["unit"], start, end, spans["known"], spans["until"]], axis=1)]
        table = table[(table[:, 1] < table[:, 2]) & (table[:, 3] < table[:, 4])]
        entity, start, end, known, until = table[np.lexsort(table.T[::-1])].T.copy()
        reach = pd.Series(end).groupby(entity).cummax().to_numpy(np.int64)
        return cls(pd.Index(nodes, dtype=object), units, entity, start, end, known, until, reach)

    def concerned(self, facts: EventArrays) -> Int64Array:
        """Return the entity of each fact: its unit, or its node if it names no unit; -1: no known entity."""
        node = self.nodes.get_indexer(pd.Index(facts.node, dtype=object))
        wide = np.where(facts.node_wide & (node >= 0), node + self.units, -1)
        return np.where(facts.unit >= 0, facts.unit, wide).astype(np.int64)

    def known_inside(self, entity: Int64Array, time: Int64Array, known: Int64Array) -> Int64Array:
        """Return from when each occurrence is known to have happened during maintenance.

        ``entity``: -1: none. ``time``, ``known``: when it happened and when it became known (ms).
        Returns: never before ``known``; :data:`NEVER`: outside maintenance, or never known to be inside.
        """
        out = np.full(len(time), NEVER, dtype=np.int64)
        for occurrence, row in self._recent(entity, time, time):
            holds = (time[occurrence] < self.end[row]) & (known[occurrence] < self.until[row])
            since = np.where(holds, np.maximum(self.known[row], known[occurrence]), NEVER)
            out[occurrence] = np.minimum(out[occurrence], since)
        return out

    def _recent(self, entity: Int64Array, time: Int64Array, after: Int64Array) -> Iterator[tuple[Int64Array, ...]]:
        """Yield positions in ``entity`` with a window each that starts by ``time`` and may end later than ``after``.

        The newest windows come first.
        """
        row = Timeline(self.entity, self.start, self.units + len(self.nodes)).last(entity, time)
        position = np.flatnonzero(row >= 0)
        row = row[position]
        while position.size:
            yield position, row
            goes_on = (row > 0) & (self.entity[row - 1] == self.entity[row]) & (self.reach[row - 1] > after[position])
            position, row = position[goes_on], row[goes_on] - 1

    def within(self, entity: Int64Array, time: Int64Array) -> BoolArray:
        """Return whether entities were in maintenance at the given times, in hindsight."""
        return self.known_inside(entity, time, np.full(len(time), NEVER - 1, dtype=np.int64)) < NEVER

    def begin(self, entity: Int64Array, time: Int64Array) -> Int64Array:
        """Return the earliest start of the maintenance that each entity is in at each time; there must be one."""
        covering = [
            (self.entity == e) & (self.start <= t) & (t < self.end) & (self.until == NEVER)
            for e, t in zip(entity, time, strict=True)
        ]
        return np.array([self.start[chosen].min() for chosen in covering], dtype=np.int64)

    def out(self) -> Int64Array:
        """Return when units were known to be in maintenance: unit, from, until; shape (3, n)."""
        since, until = np.maximum(self.start, self.known), np.minimum(self.end, self.until)
        chosen = (self.entity < self.units) & (since < until)
        return np.stack([self.entity[chosen], since[chosen], until[chosen]])

    def recently(self, unit: Int64Array, time: Int64Array, span: int) -> BoolArray:
        """Return whether units were known to be in maintenance, or out of it for less than ``span`` (ms)."""
        out = np.zeros(len(time), dtype=bool)
        for position, row in self._recent(unit, time, time - span):
            out[position] |= (self.known[row] <= time[position]) & (time[position] - span < self.end[row])
        return out

    def last_end(self, unit: Int64Array, time: Int64Array) -> Int64Array:
        """Return the latest maintenance end of each unit that was known to be over at each time.

        ``unit``: -1: none. Returns: ms; ``-NEVER``: none.
        """
        moment = np.maximum(self.end, self.known)
        ended = np.flatnonzero((self.entity < self.units) & (moment < self.until))
        ended = ended[np.lexsort((moment[ended], self.entity[ended]))]
        latest = pd.Series(self.end[ended]).groupby(self.entity[ended]).cummax().to_numpy(np.int64)
        row = Timeline(self.entity[ended], moment[ended], self.units).last(unit, time)
        return np.append(latest, -NEVER)[row]


_Window = tuple[Any, int, int, int, int]


def _windows(facts: EventArrays) -> Iterator[_Window]:
    """Yield unit (or node name), start, end and validity period (known, until) of each window."""
    ends: dict[Any, list[tuple[int, int]]] = {}
    begins: list[tuple[Any, int, int]] = []
    for i in np.flatnonzero((facts.type == "maintenance") & ((facts.unit >= 0) | facts.node_wide)).tolist():
        subject = str(facts.node[i]) if facts.unit[i] < 0 else int(facts.unit[i])
        time, known, code = int(facts.time[i]), int(facts.known[i]), normalized(facts.code[i])
        if code == MAINTENANCE_END:
            ends.setdefault(subject, []).append((time, known))
        elif code == MAINTENANCE_BEGIN:
            begins.append((subject, time, known))
        elif (end := _instant(code)) is not None:
            yield subject, time, end, known, NEVER
    for window in ends.values():
        window.sort()
    for subject, start, known in begins:
        end, since = start + duration_ms(MAX_LENGTH), known
        for reported, time in _first_ends(ends.get(subject, []), start):
            if time < end:
                yield subject, start, end, since, max(reported, known)
                end, since = time, max(reported, known)
        yield subject, start, end, since, NEVER


def _first_ends(ends: list[tuple[int, int]], start: int) -> list[tuple[int, int]]:
    """Return (known-at, end) pairs: the first end at or after ``start`` as of each time that a new one became known.

    A later end that became known sooner is the first until the earlier one becomes known.
    """
    out: list[tuple[int, int]] = []
    for time, known in ends[bisect_left(ends, (start, -NEVER)) :]:
        if out and time >= min(out)[0]:
            break
        out.append((known, time))
    return sorted(out)


def _instant(code: str) -> int | None:
    try:
        value = datetime.fromisoformat(code.upper())
    except ValueError:
        return None
    return None if value.tzinfo is None else instant_ms(value)
