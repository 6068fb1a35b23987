"""Reads all GPUs of a node through a child process, and goes on where one of them is lost or blocks the driver."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Literal

from telemetry.collect.event import Event
from telemetry.collect.nvml.child import Message
from telemetry.collect.nvml.library import ABSENT, LOST, Identity, NvmlFault
from telemetry.collect.running import backoff_s
from telemetry.errors import InputError

_LOG = logging.getLogger(__name__)

SOURCE: Final = "nvml"

GPU_DEADLINE_S: Final = 10.0
"""A GPU that takes longer than this for its reading (a few ms when well) blocks the driver."""

OPEN_DEADLINE_S: Final = 60.0
"""Opening the driver, and a GPU for the first time, wakes sleeping boards: seconds where persistence mode is off."""

ALIVE_DEADLINE_S: Final = 30.0
"""The child sends a message every second; one that is silent for this long hangs in the driver."""

MAX_STUCK: Final = 4
"""A GPU that hangs is left alone while this many killed children still hang in the kernel."""

DRIVER: Final = "driver"
"""Key of a trouble of the driver as a whole."""

ROOT: Final = Path(__file__).resolve().parents[3]
_READ_BYTES: Final = 65536
_REAP_S: Final = 2.0
_NO_DRIVER: Final = (
    "Install or load the driver (`nvidia-smi` must work for this user), or collect from elsewhere: "
    "`predrain collect exporters` scrapes nodes that run an exporter."
)

TroubleCode = Literal["gpu_lost", "nvml_hang"]


@dataclass(frozen=True, slots=True)
class Row:
    """One reading of one GPU; ``at`` is when it began, ``values`` lacks channels that were not reported."""

    at: datetime
    identity: Identity
    values: dict[str, float]


class Silent(Exception):
    """A child did not answer in time: the driver holds it in a call."""


class Ended(Exception):
    """A child is gone: it crashed inside the library, or was killed."""


class Process:
    """A child in a process of its own."""

    def __init__(self) -> None:
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            # -P: a folder named telemetry in the working directory is not ours.
            [sys.executable, "-P", "-m", "telemetry.collect.nvml.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )
        self._buffer = b""

    def ask(self, skip: Iterable[int]) -> None:
        """Ask for a reading of all GPUs but some; raises :class:`Ended` where nobody listens."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"skip": sorted(skip)}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise Ended(str(error)) from error

    def hear(self, timeout_s: float) -> Message:
        """Return the next message; raises :class:`Silent` or :class:`Ended` where there is none."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while b"\n" not in self._buffer:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise Silent
            got = os.read(descriptor, _READ_BYTES)
            if not got:
                raise Ended(f"exit status {self._process.poll()}")
            self._buffer += got
        line, self._buffer = self._buffer.split(b"\n", 1)
        message: Message = json.loads(line)
        return message

    def end(self) -> None:
        """Kill the process, whatever it is doing."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was left to send to a process that is gone
                    pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)

    def is_gone(self) -> bool:
        """Whether the process has ended; the kernel may hold a killed one in a driver call."""
        return self._process.poll() is not None


class NodeReader:
    """All GPUs of a node.

    ``known``: GPUs seen before by index; ``troubles``: those in trouble that were reported, by UUID or place.
    ``events``: XIDs, and a GPU that stopped answering, once each time; the collector takes them away.
    """

    def __init__(
        self,
        spawn: Callable[[], Process],
        node: str,
        *,
        clock: Callable[[], datetime],
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        known: Mapping[int, Identity] | None = None,
        troubles: Mapping[str, TroubleCode] | None = None,
    ) -> None:
        self._spawn = spawn
        self._node = node
        self._clock = clock
        self._monotonic = monotonic
        self._sleep = sleep
        self.known = dict(known or {})
        self.troubles = dict(troubles or {})
        self.driver: str | None = None
        self.errors: Counter[str] = Counter()
        self.events: list[Event] = []
        self._failures: Counter[str] = Counter()
        self._child: Process | None = None
        self._killed: list[Process] = []
        self._heard_at_s = 0.0
        self._at: int | None = None
        self._began = (clock(), monotonic())
        self._present: dict[int, Identity] = {}
        self._rows: list[Row] = []
        self._done: set[int] = set()
        self._hangs: dict[int, tuple[int, float]] = {}  # how often in a row, and until when it is left alone
        self._watched: int | None = -1  # None: the driver refuses to report XIDs
        self._open_failures = 0
        self._reopen_at_s = float("-inf")

    @property
    def present(self) -> list[Identity]:
        """The GPUs that answer, in the driver's order."""
        return [self._present[index] for index in sorted(self._present)]

    def turn(self) -> list[Row]:
        """Read every GPU once.

        Raises ``InputError`` if this node has no driver; only before it was first opened: later on, one that is gone is
        waited for.
        """
        left_alone = set(self._hangs)
        rows = self._read(left_alone)
        for index in sorted(left_alone):
            # After all others, so that a GPU that still hangs delays nobody.
            stuck = sum(not child.is_gone() for child in self._killed)
            if self._monotonic() >= self._hangs[index][1] and stuck < MAX_STUCK and self._child:
                rows += self._read((set(self.known) | left_alone) - {index})
        answered = {row.identity.gpu for row in rows}
        self._failures.update(identity.gpu for identity in self.known.values() if identity.gpu not in answered)
        return rows

    def listen(self, timeout_s: float) -> None:
        """Wait for a further event."""
        deadline_s, before = self._monotonic() + timeout_s, len(self.events)
        while len(self.events) == before and (left_s := deadline_s - self._monotonic()) > 0:
            if self._child is None:
                self._sleep(left_s)
                break
            try:
                self._take(self._child.hear(left_s))
            except Silent:
                if self._monotonic() - self._heard_at_s > ALIVE_DEADLINE_S:
                    self._later("the driver does not answer")
            except Ended as error:
                self._later(f"the process that reads the driver ended ({error})")

    def close(self) -> None:
        """Let go of the driver."""
        if self._child is not None:
            self._child.end()
            self._killed = [child for child in (*self._killed, self._child) if not child.is_gone()]
            self._child, self._watched = None, -1

    def _read(self, skip: set[int]) -> list[Row]:
        """Read all GPUs but those of ``skip``, with a new child for the rest after each one that hangs."""
        self._rows, self._done = [], set(skip)
        while self._child is not None or self._monotonic() >= self._reopen_at_s:
            before = {index: identity for index, identity in self.known.items() if index not in self._done}
            if self._child is None:
                self._child, self._heard_at_s = self._spawn(), self._monotonic()
            try:
                self._at, self._began = None, (self._clock(), self._monotonic())
                self._child.ask(self._done)
                while not self._take(self._child.hear(self._began[1] + self._deadline_s() - self._monotonic())):
                    pass
                listed = {self.known[index].gpu for index in self._done if index in self.known}
                for index, identity in before.items():
                    if identity.gpu not in listed:
                        self._report("gpu_lost", index, "is no longer listed by the driver", identity)
                break
            except NvmlFault as fault:
                if self.driver is None and fault.code in ABSENT:
                    self.close()
                    raise InputError(ABSENT[fault.code], "this node", _NO_DRIVER) from None
                self._later(str(fault))
            except (Silent, Ended) as error:
                if self._at is None:
                    if isinstance(error, Silent):
                        self._report("nvml_hang", None, f"did not answer in {OPEN_DEADLINE_S:g} s")
                    self._later(f"the driver does not answer ({type(error).__name__.lower()} {error})")
                    break
                self.close()
                self._done.add(self._at)
                times = self._hangs.get(self._at, (0, 0.0))[0] + 1
                self._hangs[self._at] = times, self._monotonic() + backoff_s(times, first_s=60.0, max_s=3600.0)
                self._present.pop(self._at, None)
                if isinstance(error, Silent):
                    self._report("nvml_hang", self._at, f"did not answer in {self._deadline_s():g} s")
                else:
                    _LOG.warning("the process that reads the driver ended at GPU %d: %s", self._at, error)
        return self._rows

    def _deadline_s(self) -> float:
        return GPU_DEADLINE_S if self._at in self._present or self._at in self._hangs else OPEN_DEADLINE_S

    def _take(self, message: Message) -> bool:
        """Take a message of the child; return whether a reading is done.

        Raises ``NvmlFault`` if the library has to be opened again.
        """
        match message:
            case {"at": index}:
                self._at, self._began = index, (self._clock(), self._monotonic())
            case {"driver": driver, "count": count}:
                if self._open_failures or driver != self.driver:
                    _LOG.info("driver %s opened, %d GPUs listed", driver, count)
                self._open_failures, self.driver = 0, driver
                self._recovered(DRIVER)
            case {"device": device}:
                identity = Identity(**device)
                self.known = {index: known for index, known in self.known.items() if known.gpu != identity.gpu}
                self._present[identity.index] = self.known[identity.index] = identity
            case {"row": index, "values": values, "errors": errors}:
                self._done.add(index)
                self._rows.append(self._row(self._present[index], values))
                for name, times in errors.items():
                    self._count(name, times)
            case {"fault": index, "code": code}:
                self._done.add(index)
                if code in LOST:
                    self._report("gpu_lost", index, f"is lost: {NvmlFault(code).name}")
                else:
                    self._count(NvmlFault(code).name)
            case {"failed": code}:
                raise NvmlFault(code)
            case _:
                self._take_news(message)
        return "done" in message

    def _take_news(self, message: Message) -> None:
        """Take a message of the thread that listens for XIDs."""
        match message:
            case {"xid": xid, "gpu": gpu, "instance": instance, "at_ms": at_ms}:
                at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms)
                # An instance is of a GPU that is split (MIG).
                detail = None if instance is None else f"GPU instance {instance}"
                self.events.append(Event(at, self._node, "xid", SOURCE, at, str(xid), detail, gpu))
            case {"watching": count}:
                if count != self._watched:
                    _LOG.info("listening for XIDs of %d GPUs", count)
                self._watched = count
            case {"deaf": code}:
                if self._watched is not None:
                    _LOG.warning("XID events stopped (%s); listening again", NvmlFault(code))
                self._watched = None
        if "done" not in message:
            self._heard_at_s = self._monotonic()

    def _row(self, identity: Identity, values: dict[str, float]) -> Row:
        self._recovered(identity.gpu)
        self._recovered(_place(identity.index))
        self._hangs.pop(identity.index, None)
        at, began_s = self._began
        scrape = {
            "scrape_duration_s": self._monotonic() - began_s,
            "scrape_failures_total": float(self._failures[identity.gpu]),
            "channels_reported": float(len(values)),
        }
        return Row(at, identity, values | scrape)

    def _report(self, code: TroubleCode, index: int | None, what: str, identity: Identity | None = None) -> None:
        if index is not None:
            identity = identity or self.known.get(index)
            if self._present.get(index) == identity:
                self._present.pop(index, None)
        key = DRIVER if index is None else _place(index) if identity is None else identity.gpu
        if key in self.troubles:
            return
        self.troubles[key] = code
        detail = f"{'the driver' if index is None else f'GPU {index} of this node'} {what}"
        _LOG.warning("%s: %s", key, detail)
        gpu, address = (None, None) if identity is None else (identity.gpu, identity.address)
        now = self._clock()
        self.events.append(Event(now, self._node, "other", SOURCE, now, code, detail, gpu, address))

    def _recovered(self, key: str) -> None:
        if self.troubles.pop(key, None) is not None:
            _LOG.info("%s answers again", key)

    def _later(self, reason: str) -> None:
        """Give the child up, and open the driver again after a pause."""
        self.close()
        self._present = {}
        self._open_failures += 1
        self._reopen_at_s = self._monotonic() + backoff_s(self._open_failures)
        if self._open_failures == 1:
            _LOG.warning("%s; opening it again, with pauses up to a minute", reason)

    def _count(self, name: str, times: int = 1) -> None:
        if name not in self.errors:
            _LOG.warning("readings of single channels fail: %s (logged once, counted from now on)", name)
        self.errors[name] += times


def _place(index: int) -> str:
    return f"index {index}"
