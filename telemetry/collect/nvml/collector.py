"""The NVML collector of one node: reads on an interval, writes what it heard, remembers what it reported."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from telemetry.collect.event import Event
from telemetry.collect.nvml.library import Identity
from telemetry.collect.nvml.node_reader import NodeReader, Row, TroubleCode, Turn
from telemetry.collect.nvml.xid_watcher import Xid
from telemetry.collect.outbox import Outbox
from telemetry.dataset.channel import Channel
from telemetry.dataset.schema import CHANNEL_TYPES, INSTANT
from telemetry.errors import InputError
from telemetry.landing.folder import Landing
from telemetry.milliseconds import to_ms
from telemetry.xids.pci import normalise_pci_bus_id

_LOG = logging.getLogger(__name__)

SOURCE: Final = "nvml"

WRITE_EVERY: Final = timedelta(minutes=1)
"""Samples of this long go into one file; events are written at once."""

INVENTORY_EVERY: Final = timedelta(hours=1)
"""An unchanged inventory is written this often, as a sign that it still holds."""

MAX_ROWS: Final = 20_000
"""Rows kept while they cannot be written (a full disk): a day of eight GPUs every 30 s."""

MAX_EVENTS: Final = 10_000
"""Events kept while they cannot be written."""

_WRITER_LENGTH: Final = 100
_INT32_MAX: Final = 2**31 - 1

MakeReader = Callable[[dict[int, Identity], dict[str, TroubleCode]], NodeReader]
"""Makes the reader from the GPUs that were seen before, by index, and the troubles that were reported before."""


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


def boot_id() -> str:
    """Return what the kernel calls this boot of the machine; an empty text where it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


class Collector:
    """Reads a node's GPUs and writes what they report.

    ``landing``: of the writer :func:`writer_of`.
    ``boot``: which boot of the machine this is: after another one, GPUs may stand in other places, and a GPU that is
    still lost is lost again.
    ``wake``: called after each write.
    Raises ``InputError`` if another collector of the same node writes to the same folder.
    """

    def __init__(
        self,
        landing: Landing,
        node: str,
        channels: Mapping[str, Channel],
        reader: MakeReader,
        *,
        clock: Callable[[], datetime],
        monotonic: Callable[[], float],
        interval: timedelta,
        boot: str = "",
        wake: Callable[[], object] = lambda: None,
    ) -> None:
        self._landing = landing
        self._node = node
        self._channels = channels
        self._clock = clock
        self._monotonic = monotonic
        self._interval_s = interval.total_seconds()
        self._wake = wake
        self._outbox = Outbox(landing, writer_of(node))
        state = self._outbox.position or {"driver": None, "inventory": "", "inventory_at": 0}
        if state.get("boot") != boot:
            state |= {"boot": boot, "known": [], "troubles": {}}
        self._state = state
        known = {each["index"]: Identity(**each) for each in state["known"]}
        self._reader = reader(known, dict(state["troubles"]))
        self._rows: list[Row] = []
        self._written_at_s = monotonic()
        self._guard = threading.Lock()
        self._events: list[Event] = []
        self._inventory: list[dict[str, Any]] = []
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
        """Read on the interval until ``stopped``, then write what is held; call ``begun`` after the first reading.

        Raises ``InputError`` if the node has no driver, at the first reading only.
        """
        try:
            due_s = self._monotonic()
            while not stopped.is_set():
                self.turn()
                if self.counts.turns == 1:
                    begun()
                now_s = self._monotonic()
                if self._rows and now_s - self._written_at_s >= WRITE_EVERY.total_seconds():
                    self.write_samples()
                # Ticks that were missed (a hang, a suspended machine) are not made up for.
                due_s += self._interval_s * max(1, -(-(now_s - due_s) // self._interval_s))
                stopped.wait(max(0.0, due_s - self._monotonic()))
        finally:
            self.close()

    def once(self, pause: Callable[[float], object]) -> None:
        """Read once and write it, after a reading that is not written: profiling metrics are means since another."""
        try:
            self.turn(keep=False)
            pause(1.0)
            self.turn()
        finally:
            self.close()

    def turn(self, *, keep: bool = True) -> None:
        """Read every GPU once; write events and a changed inventory."""
        turn = self._reader.turn()
        self.counts.turns += 1
        if keep:
            self._rows += turn.rows
            self.counts.rows += len(turn.rows)
            if len(self._rows) > MAX_ROWS:
                over = len(self._rows) - MAX_ROWS
                self.counts.dropped_rows += over
                del self._rows[:over]
        with self._guard:
            self._note(turn)
        self._try(self._commit)
        if turn.returned:
            self._returned()

    def hear(self, xid: Xid) -> None:
        """Write an XID at once; called by the watcher's thread."""
        detail = None if xid.instance is None else f"GPU instance {xid.instance}"
        with self._guard:
            self.counts.xids += 1
            self._events.append(self._event(xid.at, "xid", str(xid.xid), detail, xid.gpu))
        self._try(self._commit)

    def write_samples(self) -> None:
        """Write the samples that are held; they stay held where the disk is full."""
        self._written_at_s = self._monotonic()
        self._try(self._write_samples)

    def close(self) -> None:
        """Write everything that is held, and let go of the driver."""
        self._reader.close()
        self._try(self._commit)
        self.write_samples()
        self._outbox.close()

    def _note(self, turn: Turn) -> None:
        """Decide on events and on rows of the inventory, and change the state that goes with them."""
        events = []
        for trouble in turn.troubles:
            gpu, address = _names(trouble.identity)
            events.append(self._event(trouble.at, "other", trouble.code, trouble.detail, gpu, address))
        driver, before, now = self._reader.driver, self._state["driver"], self._clock()
        present = self._reader.present
        if driver is not None and before is not None and driver != before:
            _LOG.info("the driver is now %s, it was %s", driver, before)
            # One a GPU, in the words of the compaction, which sees the same change in the inventory.
            for identity in present:
                events.append(self._event(now, "driver", driver, f"driver {before} before", *_names(identity)))
        self.counts.events += len(events)
        self._events = [*self._events, *events][-MAX_EVENTS:]
        self._state = self._state | {
            "driver": driver or before,
            "known": [asdict(identity) for identity in self._reader.known.values()],
            "troubles": dict(self._reader.troubles),
        }
        signature = json.dumps([driver, *(asdict(identity) for identity in present)], sort_keys=True)
        written = self._state["inventory_at"]
        # A clock that was set back must not keep the inventory from being written.
        holds = written <= to_ms(now) < written + INVENTORY_EVERY.total_seconds() * 1000
        if driver is None or not present or (signature == self._state["inventory"] and holds):
            return
        self._inventory = [_inventory_row(identity, self._node, driver, now) for identity in present]
        self._state = self._state | {"inventory": signature, "inventory_at": to_ms(now)}

    def _commit(self) -> None:
        with self._guard:
            written = self._outbox.landed.total()
            if self._events or self._inventory or self._state != self._outbox.position:
                self._outbox.commit(self._state, events=self._events, inventory=self._inventory)
                self._events, self._inventory = [], []
            self._outbox.flush()
            news = self._outbox.landed.total() > written
        if news:
            self._wake()

    def _write_samples(self) -> None:
        if self._rows:
            self._landing.stage("samples", samples_table(self._rows, self._node, self._channels))
            self._rows = []
            self._wake()

    def _event(
        self, at: datetime, kind: str, code: str, detail: str | None, gpu: str | None, address: str | None = None
    ) -> Event:
        return Event(at, self._node, kind, SOURCE, at, code, detail, gpu, address)

    def _try(self, act: Callable[[], None]) -> None:
        """Do what writes; a disk that is full is waited for, and logged once for each thing that cannot be written."""
        what = act.__name__
        try:
            act()
        except (InputError, OSError) as error:
            with self._guard:
                self._events = self._events[-MAX_EVENTS:]
            if what not in self._blocked:
                self._blocked.add(what)
                _LOG.error("writing waits, and what was heard is held in memory (logged once): %s", error)
            return
        if what in self._blocked:
            self._blocked.discard(what)
            _LOG.info("writing goes on")


def samples_table(rows: Sequence[Row], node: str, channels: Mapping[str, Channel]) -> pa.Table:
    """Return raw samples in the landing layout: one row a reading, one column a channel that any row has."""
    columns: dict[str, pa.Array] = {
        "timestamp": pa.array([row.at for row in rows], INSTANT),
        "node": pa.array([node] * len(rows), pa.string()),
        "gpu": pa.array([row.identity.gpu for row in rows], pa.string()),
    }
    reported = {name for row in rows for name in row.values}
    for name, channel in channels.items():
        if name in reported:
            values = [_typed(row.values.get(name), channel) for row in rows]
            columns[name] = pa.array(values, CHANNEL_TYPES[channel.kind])
    return pa.table(columns)


def _inventory_row(identity: Identity, node: str, driver: str, seen_at: datetime) -> dict[str, Any]:
    gpu, address = _names(identity)
    return {
        "gpu": gpu,
        "node": node,
        "slot": str(identity.index),
        "pci_bus_id": address,
        "serial": identity.serial,
        "model": identity.model,
        "driver": driver,
        "nvlink_domain": identity.nvlink_domain,
        "seen_at": to_ms(seen_at),
    }


def _names(identity: Identity | None) -> tuple[str | None, str | None]:
    """Return a GPU's UUID and its PCI address in the form of the dataset."""
    if identity is None:
        return None, None
    return identity.gpu, None if identity.pci_bus_id is None else normalise_pci_bus_id(identity.pci_bus_id)


def _typed(value: float | None, channel: Channel) -> float | int | None:
    if value is None or math.isnan(value) or channel.kind in ("gauge", "counter"):
        return value
    number = round(value)
    # Flags are a mask of 64 bits, an enum has 31: what does not fit is no value of the channel.
    return number if 0 <= number < 2**64 and (channel.kind == "flags" or number <= _INT32_MAX) else None
