"""Compiled sweep of the history features: counts an entity's known events at each of its rows."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from foundation.times import NEVER
from telemetry.dataset.installations import Timeline

IntArray = NDArray[np.int64]
Float64Array = NDArray[np.float64]

_HOUR_MS = 3_600_000.0
_NONE = -(2**62)


class EntityEvents(NamedTuple):
    """Events of each entity of a scope, sorted by (entity, known); shapes (events,).

    ``starts``: first event of each entity; shape (entities + 1,).
    ``known``, ``time``: when each event became known and when it happened (ms).
    ``kinds``: event types as a bit set.
    ``code``: index of its XID among ``codes`` distinct ones; -1: no XID.
    ``size``: number of events that it represents.
    ``by_time``: events sorted by (entity, time).
    """

    starts: IntArray
    known: IntArray
    time: IntArray
    kinds: NDArray[np.uint32]
    code: IntArray
    size: IntArray
    by_time: IntArray
    codes: int

    @classmethod
    def of(
        cls,
        entity: IntArray,
        entities: int,
        *,
        time: IntArray,
        known: IntArray,
        kinds: NDArray[np.uint32],
        size: IntArray,
        code: IntArray,
        codes: int = 0,
    ) -> "EntityEvents":
        """Sort events; ``entity``: entity of each event, from 0 to ``entities`` - 1."""
        order = np.lexsort((kinds, time, known, entity))
        entity, time = entity[order], time[order]
        return cls(
            starts=np.searchsorted(entity, np.arange(entities + 1)).astype(np.int64),
            known=known[order],
            time=time,
            kinds=kinds[order],
            code=code[order].astype(np.int64),
            size=size[order],
            by_time=np.lexsort((time, entity)).astype(np.int64),
            codes=codes,
        )


@dataclass(frozen=True, slots=True)
class EventVersions:
    """Events of entities, some of which count only until a known time.

    Where an event ceases to count, its entity continues as a new version that never had the event.

    ``entities``: number of entities; the first version of an entity has the entity's number.
    ``changes``: (entity, when) of all further versions, numbered in this order.
    """

    events: EntityEvents
    entities: int
    changes: Timeline | None

    @classmethod
    def of(
        cls,
        entity: IntArray,
        entities: int,
        *,
        time: IntArray,
        known: IntArray,
        until: IntArray,
        kinds: NDArray[np.uint32],
        size: IntArray,
        code: IntArray | None = None,
        codes: int = 0,
    ) -> "EventVersions":
        """Sort events; ``until``: when each ceases to count (ms), after it became known."""
        code = np.full(len(entity), -1, dtype=np.int64) if code is None else code
        ceases = until < NEVER

        def events(owner: IntArray, owners: int, chosen: IntArray | slice) -> EntityEvents:
            return EntityEvents.of(
                owner, owners, time=time[chosen], known=known[chosen], kinds=kinds[chosen], size=size[chosen],
                code=code[chosen], codes=codes,
            )  # fmt: skip

        owner, since = np.unique(np.stack([entity[ceases], until[ceases]], axis=1), axis=0).T.copy()
        if not len(owner):
            return cls(events(entity, entities, slice(None)), entities, None)
        # A version has all events of its entity except those that ceased to count by then.
        order = np.argsort(entity, kind="stable")
        first, last = (np.searchsorted(entity[order], owner, side=side) for side in ("left", "right"))
        version = np.repeat(np.arange(len(owner)), last - first)
        member = order[np.arange(len(version)) - np.repeat(np.cumsum(last - first) - last, last - first)]
        counts = until[member] > since[version]
        owners = np.r_[entity, version[counts] + entities]
        versions = events(owners, entities + len(owner), np.r_[: len(entity), member[counts]])
        return cls(versions, entities, Timeline(owner, since, entities))

    def version_at(self, entity: IntArray, time: IntArray) -> IntArray:
        """Return the version of each entity (-1: none) at each time."""
        if self.changes is None:
            return entity
        change = self.changes.last(entity, time)
        return np.where(change >= 0, change + self.entities, entity)


@njit(cache=True, nogil=True)
def _has(kinds: np.uint32, bit: int) -> bool:
    return (kinds >> np.uint32(bit)) & np.uint32(1) == np.uint32(1)


@njit(cache=True, nogil=True)
def _count(
    event: int, span: int, sign: int, events: EntityEvents, counted: IntArray, counts: IntArray, per_code: IntArray
) -> None:
    """Add an event to a window, or remove it (negative ``sign``); the last window counts by XID."""
    if span == counts.shape[1]:
        if events.code[event] >= 0:
            per_code[events.code[event]] += sign
        return
    for b in range(len(counted)):
        if _has(events.kinds[event], counted[b]):
            counts[b, span] += sign


@njit(cache=True, nogil=True)
def _learn(
    events: EntityEvents,
    event: int,
    first: int,
    timed: IntArray,
    latest: IntArray,
    weighed: IntArray,
    weight: Float64Array,
    half_life: float,
) -> None:
    """Add a newly known event to the last times and to the weighted sums, relative to the first event."""
    kinds, time = events.kinds[event], events.time[event]
    for b in range(len(timed)):
        if _has(kinds, timed[b]):
            latest[b] = max(latest[b], time)
    for b in range(len(weighed)):
        if _has(kinds, weighed[b]):
            # Growing relative to the first event, so that one factor fades the whole sum at each row. It overflows
            # after 1,024 half-lives, 19 years.
            weight[b] += events.size[event] * 2.0 ** ((time - events.time[first]) / half_life)


@njit(cache=True, nogil=True)
def _write(
    out: NDArray[np.float32],
    column: int,
    t: int,
    counts: IntArray,
    latest: IntArray,
    weight: Float64Array,
    fade: float,
    per_code: IntArray,
) -> None:
    for b in range(counts.shape[0]):
        for s in range(counts.shape[1]):
            out[column] = counts[b, s]
            column += 1
    for b in range(len(latest)):
        out[column] = (t - latest[b]) / _HOUR_MS if latest[b] > _NONE else np.nan
        column += 1
    for b in range(len(weight)):
        out[column] = weight[b] * fade
        column += 1
    distinct = 0
    for c in range(len(per_code)):
        distinct += per_code[c] > 0
    out[column] = distinct


@njit(cache=True, nogil=True)
def sweep_history(
    row_order: IntArray,
    row_entity: IntArray,
    row_time: IntArray,
    events: EntityEvents,
    windows: IntArray,
    counted: IntArray,
    timed: IntArray,
    weighed: IntArray,
    half_life: float,
    first_column: int,
    out: NDArray[np.float32],
) -> None:
    """Fill the history columns of one scope.

    At a row of time t an event counts if it is known (``known <= t``), in a window w if ``time > t - w``.

    ``row_order``: rows sorted by (entity, time); shape (n,).
    ``row_entity``, ``row_time``: entity of each row (-1: none, no events) and its time (ms).
    ``windows``: windows of the counts (ms), then that of the distinct XIDs; shape (w + 1,).
    ``counted``, ``timed``, ``weighed``: bits that get a count per window, hours since the last, and a recency-weighted
    sum.
    ``first_column``: first column of the scope in ``out``: counts (by bit, then window), hours, weights, distinct XIDs.

    An event enters each window at the first row after it is known and leaves at the first row past the window, so the
    cost is events times windows plus rows times columns. A value does not depend on the other rows: counts are
    integers, and the weighted sum is relative to the entity's first known event.
    """
    spans = len(windows)
    counts = np.zeros((len(counted), spans - 1), dtype=np.int64)
    latest = np.zeros(len(timed), dtype=np.int64)
    weight = np.zeros(len(weighed), dtype=np.float64)
    per_code = np.zeros(max(events.codes, 1), dtype=np.int64)
    in_span = np.zeros((len(events.time), spans), dtype=np.bool_)
    oldest = np.zeros(spans, dtype=np.int64)
    entity = -2
    begin = end = newest = 0
    for position in range(len(row_order)):
        row = row_order[position]
        t = row_time[row]
        if row_entity[row] != entity:
            entity = row_entity[row]
            begin, end = (events.starts[entity], events.starts[entity + 1]) if entity >= 0 else (0, 0)
            newest = begin
            oldest[:] = begin
            counts[:] = 0
            latest[:] = _NONE
            weight[:] = 0.0
            per_code[:] = 0
        for s in range(spans):
            while oldest[s] < end and events.time[events.by_time[oldest[s]]] <= t - windows[s]:
                event = events.by_time[oldest[s]]
                oldest[s] += 1
                # An event that became known too late never entered the window.
                if in_span[event, s]:
                    in_span[event, s] = False
                    _count(event, s, -events.size[event], events, counted, counts, per_code)
        while newest < end and events.known[newest] <= t:
            for s in range(spans):
                if events.time[newest] > t - windows[s]:
                    in_span[newest, s] = True
                    _count(newest, s, events.size[newest], events, counted, counts, per_code)
            _learn(events, newest, begin, timed, latest, weighed, weight, half_life)
            newest += 1
        fade = 2.0 ** (-(t - events.time[begin]) / half_life) if newest > begin else 0.0
        _write(out[row], first_column, t, counts, latest, weight, fade, per_code)
