"""Taking in again what a journal holds, as it came: many small pushes in one go where that makes no difference."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from features.errors import InputError
from features.service import instant_ms
from serving.online.journal import Arrival, Journal
from serving.online.state import OnlineState

_LOG = logging.getLogger(__name__)
_MOST_ROWS: Final = 50_000
_TIDY_EVERY: Final = 256  # rounds


def replay(state: OnlineState, journal: Journal, first: int, end: int | None = None) -> int:
    """Push again what was pushed before, each at the time at which it came.

    ``first``, ``end``: as for :meth:`serving.online.journal.Journal.arrivals`.

    The state is that which pushes one by one make. Samples are joined up to the next step to be closed, as long as
    none is of a step that is closed already (what a late sample becomes depends on what came before it); events as
    long as none was known before one that is held (of two that tell the same, the one known first stays).
    """
    events, samples = _Events(state), _Samples(state)
    for arrival in journal.arrivals(first, end):
        taker = samples if arrival.kind == "samples" else events
        taker.take(arrival)
    return samples.flush() + events.flush()


def _one_by_one(state: OnlineState, arrivals: Sequence[Arrival]) -> int:
    count = 0
    for each in arrivals:
        try:
            if each.kind == "samples":
                state.push(each.table, at=each.at)
            else:
                state.push_events(each.table)
        except InputError as error:  # what another version took
            _LOG.warning("a push of %s cannot be taken again: %s", each.at.isoformat(), error)
            continue
        count += 1
    return count


@dataclass(slots=True)
class _Samples:
    """Samples that have been read and not yet pushed again."""

    state: OnlineState
    held: list[Arrival] = field(default_factory=list)
    rows: int = 0
    pushes: int = 0
    rounds: int = 0

    def take(self, arrival: Arrival) -> None:
        """Take an arrival in, in the order in which they came."""
        if self.held and not self._fits(arrival):
            self.flush()
        self.held.append(arrival)
        self.rows += arrival.table.num_rows
        if self.rows >= _MOST_ROWS or not self._open(arrival) or self.state.closes_at(arrival.at):
            self.flush()  # what comes after it finds other steps closed, or what it has put beside them

    def flush(self) -> int:
        """Push what is held; give the number of all pushes so far."""
        held, self.held, self.rows = self.held, [], 0
        if len(held) > 1:
            table = pa.concat_tables([each.table for each in held])
            counts = [each.table.num_rows for each in held]
            came = np.repeat(np.array([instant_ms(each.at) for each in held], dtype=np.int64), counts)
            try:
                self.state.push(table, at=came)
                self.pushes += len(held)
            except InputError:  # one of them cannot be used: which?
                self.pushes += _one_by_one(self.state, held)
        else:
            self.pushes += _one_by_one(self.state, held)
        self.rounds += 1
        if self.rounds % _TIDY_EVERY == 0:
            self.state.tidy()
        return self.pushes

    def _fits(self, arrival: Arrival) -> bool:
        last = self.held[-1]
        return arrival.at >= last.at and arrival.table.schema.equals(last.table.schema) and self._open(arrival)

    def _open(self, arrival: Arrival) -> bool:
        """Tell whether all samples are of steps that are not closed yet."""
        if not arrival.table.num_rows:
            return False
        oldest = pc.min(arrival.table.column("timestamp")).as_py()
        return oldest is not None and oldest > self.state.closed_to


@dataclass(slots=True)
class _Events:
    """Events that have been read and not yet pushed again."""

    state: OnlineState
    held: list[Arrival] = field(default_factory=list)
    newest: datetime | None = None
    pushes: int = 0

    def take(self, arrival: Arrival) -> None:
        """Take an arrival in, in the order in which they came."""
        known = arrival.table.column("known_at") if "known_at" in arrival.table.column_names else None
        if known is None or known.null_count or not len(known):
            self.flush()
            self.pushes += _one_by_one(self.state, [arrival])
            return
        if not self.held:
            self.newest = _latest(self.state)
        first, last = pc.min(known).as_py(), pc.max(known).as_py()
        if self.newest is not None and first < self.newest:
            self.flush()
            self.newest = _latest(self.state)
        self.held.append(arrival)
        self.newest = last if self.newest is None else max(self.newest, last)

    def flush(self) -> int:
        """Push what is held; give the number of all pushes so far."""
        held, self.held = self.held, []
        if len(held) > 1:
            try:
                self.state.push_events(pa.concat_tables([each.table for each in held], promote_options="permissive"))
                self.pushes += len(held)
            except (InputError, pa.ArrowException):
                self.pushes += _one_by_one(self.state, held)
        else:
            self.pushes += _one_by_one(self.state, held)
        return self.pushes


def _latest(state: OnlineState) -> datetime | None:
    """Give when the last of the held events became known; None where there is none."""
    events = state.fleet[1]
    newest: datetime | None = events["known_at"].max().to_pydatetime() if len(events) else None
    return newest
