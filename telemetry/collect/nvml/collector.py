"""NVML collector of one node: reads GPUs at an interval, listens for XIDs, and stages samples and events."""

import hashlib
import json
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from foundation.errors import InputError
from foundation.instants import to_ms
from foundation.running import Failing
from telemetry.accounting import Accounting
from telemetry.collect.nvml.library import Identity
from telemetry.collect.nvml.node_reader import NodeReader, Process, Row
from telemetry.collect.outbox import DROPPED, Outbox, RowBuffer
from telemetry.collect.series.batch import assemble
from telemetry.collect.series.identity import Series
from telemetry.dataset.channels import Channel
from telemetry.staging.folder import StagingFolder

_LOG = logging.getLogger(__name__)

WRITE_EVERY_S: Final = 60.0
"""Time span of samples per file; events are written immediately."""

INVENTORY_EVERY: Final = timedelta(hours=1)
"""An unchanged inventory is written again after this long, to confirm it."""

MAX_ROWS: Final = 20_000
"""Maximum rows kept while writes fail: about a day of 8 GPUs at 30 s."""

MAX_EVENTS: Final = 10_000
"""Maximum events kept while writes fail."""

_LISTEN_S: Final = 1.0
# How often the flag that signals set is polled.
_WRITER_LENGTH: Final = 100


def writer_of(node: str) -> str:
    """Return the writer name of a node's collector, in characters allowed in file names."""
    name = "nvml-" + re.sub(r"[^A-Za-z0-9.-]", "-", node)
    if len(name) > _WRITER_LENGTH or name != f"nvml-{node}":
        name = f"{name[: _WRITER_LENGTH - 9]}-{hashlib.sha256(node.encode()).hexdigest()[:8]}"
    return name


def boot_id() -> str:
    """Return the kernel's boot ID; empty if it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


class NvmlCollector:
    """Reads a node's GPUs and stages samples, events and inventory.

    ``staging``: with the writer :func:`writer_of`.
    ``boot``: boot ID; after a reboot, GPU indices may differ, and a GPU that is still lost is reported again.
    ``trim``: called after each write of samples.
    Raises ``InputError`` if another collector of the same node writes to the same folder.
    """

    def __init__(
        self,
        staging: StagingFolder,
        node: str,
        channels: Mapping[str, Channel],
        spawn: Callable[[], Process],
        *,
        clock: Callable[[], datetime],
        interval: timedelta,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        boot: str = "",
        trim: Callable[[], object] = lambda: None,
    ) -> None:
        self.accounting = Accounting()
        self._node, self._channels = node, channels
        self._clock, self._monotonic, self._sleep = clock, monotonic, sleep
        self._interval_s = interval.total_seconds()
        self._trim = trim
        self._outbox = Outbox(staging, writer_of(node), self.accounting)
        self._state: dict[str, Any] = {"inventory": "", "inventory_at": 0, **self._outbox.position}
        if self._state.get("boot") != boot:
            self._state |= {"boot": boot, "known": [], "troubles": {}}
        known = {entry["index"]: Identity(**entry) for entry in self._state["known"]}
        self._reader = NodeReader(
            spawn,
            node,
            clock=clock,
            monotonic=monotonic,
            sleep=sleep,
            known=known,
            open_faults=self._state["troubles"],
            accounting=self.accounting,
        )
        self._samples = RowBuffer(staging, self.accounting, max_rows=MAX_ROWS)
        self._written_at_s = monotonic()
        self._inventory: list[dict[str, Any]] = []
        self._failing = Failing(_LOG)

    def run(self, stopped: threading.Event) -> None:
        """Read at the interval and listen for XIDs until ``stopped``; raises ``InputError`` without a driver."""
        try:
            due_s = self._monotonic()
            while not stopped.is_set():
                self.read_gpus()
                now_s = self._monotonic()
                # Missed intervals (a hang, a suspended machine) are skipped.
                due_s += self._interval_s * max(1, -(-(now_s - due_s) // self._interval_s))
                while not stopped.is_set() and (left_s := due_s - self._monotonic()) > 0:
                    self._reader.listen(min(left_s, _LISTEN_S))
                    self.write()
        finally:
            self.close()

    def once(self) -> None:
        """Read twice and write the second reading: profiling metrics are means since the previous reading."""
        try:
            self.read_gpus(keep=False)
            self._sleep(1.0)
            self.read_gpus()
        finally:
            self.close()

    def read_gpus(self, *, keep: bool = True) -> None:
        """Read every GPU once; write events and a changed inventory. ``keep``: whether to keep the samples."""
        rows = self._reader.read_gpus()
        if rows and keep:
            self._samples.add({"samples": samples_table(rows, self._node, self._channels)})
        self._note()
        self.write()

    def write(self, *, with_samples: bool = False) -> None:
        """Write pending events and inventory, and samples once a minute; failed writes are retried later."""
        excess = max(0, len(self._reader.events) - MAX_EVENTS)
        self.accounting.take("events", excess, {DROPPED: excess})
        events = self._reader.events = self._reader.events[excess:]
        try:
            if events or self._inventory or self._state != self._outbox.position:
                self._outbox.commit(self._state, events=events, inventory=self._inventory)
                self._reader.events, self._inventory = [], []
            self._outbox.flush()
            if with_samples or self._failing or self._monotonic() - self._written_at_s >= WRITE_EVERY_S:
                self._written_at_s = self._monotonic()
                self._samples.write()
                self._trim()
        except (InputError, OSError) as error:
            self._failing.failed("writing", error, level=logging.ERROR)
        else:
            self._failing.recovered("writing")

    def close(self) -> None:
        """Stop reading, and write everything pending."""
        self._reader.close()
        self.write(with_samples=True)
        self._outbox.close()

    def _note(self) -> None:
        """Update the saved state after a reading, and queue inventory rows if they changed or are due."""
        driver, present, now_ms = self._reader.driver, self._reader.present, to_ms(self._clock())
        self._state = self._state | {
            "known": [asdict(identity) for identity in self._reader.known.values()],
            "troubles": dict(self._reader.open_faults),
        }
        signature = json.dumps([driver, *(asdict(identity) for identity in present)], sort_keys=True)
        # A clock set back must not delay the next inventory.
        is_recent = 0 <= now_ms - self._state["inventory_at"] < INVENTORY_EVERY.total_seconds() * 1000
        if driver is None or not present or (signature == self._state["inventory"] and is_recent):
            return
        self._inventory = [
            asdict(identity)
            | {"node": self._node, "slot": str(identity.index), "pci_bus_id": identity.address}
            | {"driver": driver, "seen_at": now_ms}
            for identity in present
        ]
        self._state = self._state | {"inventory": signature, "inventory_at": now_ms}


def samples_table(rows: Sequence[Row], node: str, channels: Mapping[str, Channel]) -> pa.Table:
    """Return samples in the staging layout: a row per reading, a column per channel that any row has."""
    values = [(row, channels[name], value) for row in rows for name, value in row.values.items() if name in channels]
    return assemble(
        [Series(channel.name, channel.kind, row.identity.gpu, node) for row, channel, _ in values],
        np.arange(len(values), dtype=np.int32),
        np.array([to_ms(row.read_at) for row, _, _ in values], np.int64),
        np.array([value for _, _, value in values], np.float64),
        problems=Counter(),
    )
