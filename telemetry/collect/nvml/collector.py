"""The NVML collector of one node: reads on an interval, lands what it heard, remembers what it told."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Final, Protocol

from telemetry.atomic import disk_errors
from telemetry.collect.nvml.node_reader import NodeReader, Row, Trouble, Turn
from telemetry.collect.nvml.tables import Event, RunState, address_of, events_table, inventory_table, samples_table
from telemetry.collect.nvml.xid_watcher import Xid
from telemetry.dataset.channel import Channel
from telemetry.errors import InputError
from telemetry.landing.folder import Landing

_LOG = logging.getLogger(__name__)

LAND_EVERY: Final = timedelta(minutes=1)
"""Samples land in one file for this long; events at once."""

INVENTORY_EVERY: Final = timedelta(hours=1)
"""An unchanged inventory lands this often, as a sign that it still holds."""

MOST_ROWS: Final = 20_000
"""Rows kept while they cannot land (a full disk): more than a day of eight GPUs every 30 s would need less."""

MOST_EVENTS: Final = 10_000
"""Events kept while they cannot land."""

_WRITER_LENGTH: Final = 100


class Waker(Protocol):
    """Is told when something has landed."""

    def wake(self) -> None:
        """Look into the spool."""


@dataclass(slots=True)
class Counts:
    """What one run did; read by any thread."""

    turns: int = 0
    rows: int = 0
    xids: int = 0
    events: int = 0
    dropped_rows: int = 0


def writer_of(node: str) -> str:
    """Return the collector's name in the names of its files: the node's, in the letters allowed there."""
    name = "nvml-" + re.sub(r"[^A-Za-z0-9.-]", "-", node)
    if len(name) > _WRITER_LENGTH or name != f"nvml-{node}":
        name = f"{name[: _WRITER_LENGTH - 9]}-{hashlib.sha256(node.encode()).hexdigest()[:8]}"
    return name


class Collector:
    """Reads a node's GPUs and lands what they say.

    ``landing``: of the writer :func:`writer_of`.
    ``channels``: channels that samples may have.
    ``reader``: makes the reader from the lost and hung GPUs that were told before.
    ``clock``, ``monotonic``: now (aware UTC), and seconds of a clock that never jumps.
    ``boot``: which boot of the machine this is, see :func:`telemetry.collect.nvml.tables.boot_id`.
    ``waker``: told after each landing.
    Raises ``InputError`` if another collector of the same node lands in the same folder.
    """

    def __init__(
        self,
        landing: Landing,
        node: str,
        channels: Mapping[str, Channel],
        reader: Callable[[RunState], NodeReader],
        *,
        clock: Callable[[], datetime],
        monotonic: Callable[[], float],
        interval: timedelta,
        boot: str = "",
        waker: Waker | None = None,
    ) -> None:
        self._landing = landing
        self._node = node
        self._writer = writer_of(node)
        self._channels = channels
        self._clock = clock
        self._monotonic = monotonic
        self._interval_s = interval.total_seconds()
        self._waker = waker
        self._lock = self._only_one()
        self._state = RunState.read(landing.state(f"{self._writer}.json"), boot)
        self._reader = reader(self._state)
        self._rows: list[Row] = []
        self._landed_at_s = monotonic()
        self._events: list[Event] = []
        self._guard = threading.Lock()
        self._blocked: set[str] = set()
        self._returned: Callable[[], None] = lambda: None
        self.counts = Counts()

    @property
    def errors(self) -> dict[str, int]:
        """Questions that failed otherwise than by not being supported, by the name of the error."""
        return dict(self._reader.errors)

    def on_return(self, act: Callable[[], None]) -> None:
        """Call this when a GPU that was in trouble answers again."""
        self._returned = act

    def run(self, stopped: threading.Event, begun: Callable[[], None] = lambda: None) -> None:
        """Read on the interval until ``stopped``, then land what is held; call ``begun`` after the first reading.

        Raises ``InputError`` if the node has no driver, at the first reading only.
        """
        try:
            self._tell_again()
            due_s = self._monotonic()
            while not stopped.is_set():
                self.turn()
                if self.counts.turns == 1:
                    begun()
                now_s = self._monotonic()
                if self._rows and now_s - self._landed_at_s >= LAND_EVERY.total_seconds():
                    self.land()
                # Ticks that were missed (a hang, a suspended machine) are not made up for.
                due_s += self._interval_s * max(1, -(-(now_s - due_s) // self._interval_s))
                stopped.wait(max(0.0, due_s - self._monotonic()))
        finally:
            self.close()

    def once(self, pause: Callable[[float], object]) -> None:
        """Read once and land it.

        ``pause``: waits a number of seconds: profiling metrics are means since a first reading, which is not landed.
        """
        try:
            self._tell_again()
            self.turn(keep=False)
            pause(1.0)
            self.turn()
        finally:
            self.close()

    def turn(self, *, keep: bool = True) -> None:
        """Read every GPU once; land events and a changed inventory."""
        turn = self._reader.turn()
        self.counts.turns += 1
        if keep:
            self._rows += turn.rows
            self.counts.rows += len(turn.rows)
            if len(self._rows) > MOST_ROWS:
                over = len(self._rows) - MOST_ROWS
                self.counts.dropped_rows += over
                del self._rows[:over]
        self._tell(turn)
        if turn.returned:
            self._returned()
        if self._events:
            self._try(self._land_events)
        self._land_inventory()

    def hear(self, xid: Xid) -> None:
        """Land an XID at once; called by the watcher's thread."""
        detail = None if xid.instance is None else f"GPU instance {xid.instance}"
        with self._guard:
            self.counts.xids += 1
            self._events.append(Event(None, xid.at, xid.gpu, None, "xid", str(xid.xid), detail))
            del self._events[:-MOST_EVENTS]
        self._try(self._land_events)

    def land(self) -> None:
        """Land the samples that are held; they stay held where the disk is full."""
        self._landed_at_s = self._monotonic()
        self._try(self._land_samples)

    def close(self) -> None:
        """Land everything that is held, and let go of the driver."""
        self._reader.close()
        self._try(self._land_events)
        self.land()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _tell(self, turn: Turn) -> None:
        """Write decided events into the state first, then land each under its name."""
        state = self._state
        events = [self._event_of(each) for each in turn.troubles]
        driver = self._reader.driver
        if driver is not None and state.driver is not None and driver != state.driver:
            _LOG.info("the driver is now %s, it was %s", driver, state.driver)
            at = self._clock()
            # One a GPU, in the words of the fold, which sees the same change in the inventory.
            events += [
                Event(
                    f"{self._writer}.driver.{each.gpu}.{_milliseconds(at)}",
                    at,
                    each.gpu,
                    address_of(each),
                    "driver",
                    driver,
                    f"driver {state.driver} before",
                )
                for each in self._reader.present
            ]
        if events or turn.returned or self._reader.known != state.known or driver not in (None, state.driver):
            state.known = self._reader.known
            state.driver = driver or state.driver
            state.lost, state.hung = set(self._reader.lost), set(self._reader.hung)
            state.outbox = [*state.outbox, *events][-MOST_EVENTS:]
            self._try(state.write)
        if state.outbox:
            self._try(self._tell_outbox)

    def _tell_again(self) -> None:
        """Land what the last run had decided and perhaps not landed."""
        if self._state.outbox:
            self._try(self._tell_outbox)

    def _tell_outbox(self) -> None:
        for event in self._state.outbox:
            self._landing.land("events", events_table([event], self._node), name=event.name)
            self.counts.events += 1
        self._state.outbox = []
        self._state.write()
        self._wake()

    def _event_of(self, trouble: Trouble) -> Event:
        place = re.sub(r"[^A-Za-z0-9-]", "-", trouble.key)
        known = trouble.identity
        return Event(
            f"{self._writer}.{trouble.code}.{place}.{_milliseconds(trouble.at)}",
            trouble.at,
            None if known is None else known.gpu,
            None if known is None else address_of(known),
            "other",
            trouble.code,
            trouble.detail,
        )

    def _land_events(self) -> None:
        with self._guard:
            if not self._events:
                return
            self._landing.land("events", events_table(self._events, self._node))
            self._events = []
        self._wake()

    def _land_samples(self) -> None:
        if self._rows:
            self._landing.land("samples", samples_table(self._rows, self._node, self._channels))
            self._rows = []
            self._wake()

    def _land_inventory(self) -> None:
        state, present, driver = self._state, self._reader.present, self._reader.driver
        if driver is None or not present:
            return
        now = self._clock()
        signature = json.dumps([driver, *(asdict(each) for each in present)], sort_keys=True)
        told = state.inventory_at
        # A clock that was set back must not keep the inventory from landing.
        if signature == state.inventory and told is not None and told <= now < told + INVENTORY_EVERY:
            return

        def land() -> None:
            self._landing.land("inventory", inventory_table(present, self._node, driver, now))
            state.inventory, state.inventory_at = signature, now
            state.write()
            self._wake()

        self._try(land)

    def _try(self, act: Callable[[], None]) -> None:
        """Do what writes; a disk that is full is waited for, and said once for each thing that cannot be written."""
        what = act.__name__
        try:
            act()
        except (InputError, OSError) as error:
            if what not in self._blocked:
                self._blocked.add(what)
                _LOG.error("landing waits, and what was heard is held in memory (said once): %s", error)
            return
        if what in self._blocked:
            self._blocked.discard(what)
            _LOG.info("landing goes on")

    def _wake(self) -> None:
        if self._waker is not None:
            self._waker.wake()

    def _only_one(self) -> int | None:
        """Lock the state; two collectors of one node would tell everything twice."""
        path = self._landing.state(f"{self._writer}.lock")
        with disk_errors(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise InputError(
                f"another collector of the node {self._node} lands here",
                str(self._landing.root),
                "Stop it first, or give this one another --node or --spool.",
            ) from None
        except OSError:  # a network file system without locks
            with contextlib.suppress(OSError):
                os.close(descriptor)
            return None
        return descriptor


def _milliseconds(at: datetime) -> int:
    return round(at.timestamp() * 1000)
