"""Lands what several requests brought as one file, and notes in the inventory what their labels tell."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.atomic import write_bytes
from telemetry.collect.remote_write.decoding import Book, Samples
from telemetry.collect.series.identity import Series, XidCount
from telemetry.collect.series.rows import assemble, observed_spans
from telemetry.collect.series.xid_counts import SeriesSamples, XidCounts, split, watched
from telemetry.dataset.schema import INSTANT
from telemetry.errors import InputError
from telemetry.landing.folder import Landing
from telemetry.landing.tables import LANDED_EVENTS

_STATE = "receive-xid-counts.json"
_SAVE_EVERY = timedelta(minutes=1)
# Far less than the time in which a count is remembered: a restart then neither repeats nor misses an XID.


class XidEvents:
    """Follows the counts and lands their rises; used by one thread at a time.

    ``clock``: aware now: an event is known when it is read here.
    """

    def __init__(self, landing: Landing, clock: Callable[[], datetime]) -> None:
        self._landing = landing
        self._clock = clock
        self._counts: XidCounts | None = None
        self._waiting: list[pa.Table] = []
        self._saved = clock()
        self._changed = False

    def land(self, told: SeriesSamples[Series], counts: SeriesSamples[XidCount]) -> None:
        """Take the samples of one group of requests.

        Raises ``InputError`` if the disk is full; the events are kept and land with the next group.
        """
        follower = self._follower()
        events = follower.follow(counts.series, counts.index, counts.ms, counts.values, watched=watched(told))
        self._changed = True
        now = self._clock()
        if events.num_rows:
            instant = pa.scalar(now, INSTANT)
            at = events.column("timestamp")
            known = pc.if_else(pc.greater(at, instant), at, instant)
            self._waiting.append(events.set_column(LANDED_EVENTS.get_field_index("known_at"), "known_at", known))
        if self._waiting:
            self._landing.land("events", pa.concat_tables(self._waiting))
            self._waiting = []
            self.save()
        elif now - self._saved > _SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """Write down what a restarted receiver must know."""
        self._saved = self._clock()
        if self._counts is not None and self._changed:
            write_bytes(self._landing.state(_STATE), json.dumps(self._counts.as_state()).encode())
            self._changed = False

    def _follower(self) -> XidCounts:
        if self._counts is None:
            state: Any = None
            try:
                state = json.loads(self._landing.state(_STATE).read_text(encoding="utf-8"))
            except FileNotFoundError:
                pass
            except (OSError, ValueError, InputError) as error:
                _LOG.warning("the XID counts of before cannot be read, they begin anew: %s", error)
            self._counts = XidCounts(timedelta(0), state)
        return self._counts


_LOG = logging.getLogger(__name__)

_GPUS_KEPT = 200_000

_Told = dict[str, tuple[tuple[str | None, ...], int]]
"""What is known of each GPU, its node first, and the time of the sample that last told it."""


class SampleWriter:
    """Lands batches of samples; used by one thread at a time.

    ``inventory_every_s``: a GPU that is where it was, and as it was, is noted this often by the time of its samples.
    """

    def __init__(self, landing: Landing, *, inventory_every_s: float, clock: Callable[[], datetime]) -> None:
        self._landing = landing
        self._xids = XidEvents(landing, clock)
        self._every_ms = round(inventory_every_s * 1000)
        self._told: _Told = {}

    def land(self, batches: Sequence[Samples]) -> tuple[int, Counter[str]]:
        """Write the samples of ``batches``; when this returns they are on the disk.

        Returns ``problems``: values that could not be used, by reason.
        Raises ``InputError`` if the disk is full or may not be written to. Nothing is half written; what has landed
        lands once more when the clients send it again, and counts once.
        """
        problems: Counter[str] = Counter()
        rows = 0
        books: dict[int, tuple[Book, list[Samples]]] = {}
        for batch in batches:
            if len(batch):
                books.setdefault(id(batch.book), (batch.book, []))[1].append(batch)
        for book, given in books.values():
            index = np.concatenate([each.index for each in given])
            ms = np.concatenate([each.ms for each in given])
            values = np.concatenate([each.values for each in given])
            told, counts = split(book.series, index, ms, values)
            table = assemble(told.series, told.index, told.ms, told.values, problems=problems)
            sights, states = self._news(observed_spans(told.series, told.index, told.ms))
            # The inventory first: samples of a GPU that no inventory knows would be set aside.
            self._landing.land("inventory", sights)
            self._xids.land(told, counts)
            self._landing.land("samples", table)
            self._remember(states)
            rows += table.num_rows
        return rows, problems

    def close(self) -> None:
        """Keep what the next run must know; a disk that does not take it costs a repeated XID at most."""
        try:
            self._xids.save()
        except (InputError, OSError) as error:
            _LOG.warning("the XID counts cannot be kept for the next start: %s", error)

    def _news(self, sights: pa.Table) -> tuple[pa.Table, _Told]:
        """Keep the rows that say something new, or come an hour after the last that did; and what is then told.

        A label that a series lacks is no news: recording rules keep few labels, and come in requests of their own.
        """
        keep = []
        told: _Told = {}
        for key, state, at in _rows(sights):
            held = told.get(key) or self._told.get(key)
            known, known_at = held or (state, at - self._every_ms)
            differs = any(new is not None and new != old for new, old in zip(state, known, strict=True))
            news = (differs and at >= known_at) or at - known_at >= self._every_ms
            keep.append(news)
            if news:
                merged = tuple(old if new is None else new for new, old in zip(state, known, strict=True))
                told[key] = (merged if state[0] == known[0] else state, at)
        return sights.filter(pa.array(keep, pa.bool_())), told

    def _remember(self, told: _Told) -> None:
        if len(self._told) > _GPUS_KEPT:
            self._told.clear()
        self._told.update(told)


def _rows(sights: pa.Table) -> list[tuple[str, tuple[str | None, ...], int]]:
    """Return of each sight the GPU, what was told (the node first), and when."""
    names = ["node", *(name for name in sights.column_names if name not in ("gpu", "node", "seen_at"))]
    states = list(zip(*(sights.column(name).to_pylist() for name in names), strict=True))
    ms = pc.cast(sights.column("seen_at"), pa.int64()).to_pylist()
    return list(zip(sights.column("gpu").to_pylist(), states, ms, strict=True))
