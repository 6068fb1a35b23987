"""Reader of a node's GPUs through a child process; it continues if a GPU is lost or hangs the driver."""

import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Final, Literal

from foundation.errors import InputError
from foundation.running import backoff_s
from telemetry.accounting import Accounting
from telemetry.collect.nvml.child import Message
from telemetry.collect.nvml.library import ABSENT, LOST, RELOADED, Identity, NvmlFault
from telemetry.dataset.event import Event

_LOG = logging.getLogger(__name__)

SOURCE: Final = "nvml"

GPU_DEADLINE_S: Final = 10.0
"""Timeout of reading one GPU, after which the driver is considered hung; a healthy GPU takes a few ms."""

OPEN_DEADLINE_S: Final = 60.0
"""Timeout of opening the driver or first reading a GPU, which takes seconds without persistence mode."""

ALIVE_DEADLINE_S: Final = 30.0
"""A child silent for this long hangs in the driver; it sends a heartbeat every second."""

MAX_STUCK: Final = 4
"""A GPU that hung is not retried while this many killed children still hang in the kernel."""

READINGS: Final = "GPU readings"
VALUES: Final = "sample values"
DRIVER: Final = "driver"
"""Key in ``open_faults`` of the driver as a whole."""

ROOT: Final = Path(__file__).resolve().parents[3]
_REAP_S: Final = 2.0
_NO_DRIVER: Final = (
    "Install or load the driver (`nvidia-smi` must work for this user), or collect from elsewhere: "
    "`predrain collect exporters` scrapes nodes that run an exporter."
)

FaultCode = Literal["gpu_lost", "nvml_hang"]


@dataclass(frozen=True, slots=True)
class Row:
    """One reading of a GPU; ``read_at`` is its start, ``values`` has only the channels that were reported."""

    read_at: datetime
    identity: Identity
    values: dict[str, float]


class Silent(Exception):
    """A child did not respond in time: it hangs in a driver call."""


class Ended(Exception):
    """A child exited: it crashed inside the library or was killed."""


class Process:
    """Handle of a child process."""

    def __init__(self) -> None:
        self._connection, other_end = Pipe()
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            # -P: do not import a folder named telemetry from the working directory.
            [sys.executable, "-P", "-m", "telemetry.collect.nvml.child", str(other_end.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[other_end.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )
        other_end.close()

    def send(self, index: int | None) -> None:
        """Send a request; raises :class:`Ended` if the child has exited."""
        try:
            self._connection.send(index)
        except OSError as error:
            raise Ended(str(error)) from error

    def receive(self, timeout_s: float) -> Message:
        """Return the next message; raises :class:`Silent` on timeout, :class:`Ended` if the child has exited."""
        try:
            if not self._connection.poll(max(0.0, timeout_s)):
                raise Silent
            message: Message = self._connection.recv()
        except (EOFError, OSError) as error:
            raise Ended(f"exit status {self._process.poll()}") from error
        return message

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)

    def is_gone(self) -> bool:
        """Return whether the process has exited; a killed one may still hang in a driver call."""
        return self._process.poll() is not None


class NodeReader:
    """Reads all GPUs of a node.

    ``known``: GPUs seen before, by index; ``open_faults``: reported open faults, by UUID, index or :data:`DRIVER`.
    ``events``: XIDs, and a GPU or driver fault once per occurrence; the collector drains the list.
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
        open_faults: Mapping[str, FaultCode] | None = None,
        accounting: Accounting | None = None,
    ) -> None:
        self._spawn, self._node = spawn, node
        self._clock, self._monotonic, self._sleep = clock, monotonic, sleep
        self.known = dict(known or {})
        self.open_faults = dict(open_faults or {})
        self.driver: str | None = None
        self.accounting = Accounting() if accounting is None else accounting
        self.events: list[Event] = []
        self._failures: Counter[str] = Counter()
        self._child: Process | None = None
        self._killed: list[Process] = []
        self._heard_at_s = 0.0
        self._count = 0
        self._present: dict[int, Identity] = {}
        self._hangs: dict[int, tuple[int, float]] = {}  # consecutive hangs, and earliest retry (monotonic)
        self._watched: int | None = -1  # None: the driver refuses to report XIDs
        self._open_failures = 0
        self._reopen_at_s = float("-inf")

    @property
    def present(self) -> list[Identity]:
        """GPUs that respond, in the driver's order."""
        return [self._present[index] for index in sorted(self._present)]

    def read_gpus(self) -> list[Row]:
        """Read every GPU once; raises ``InputError`` if there is no driver and none was ever opened."""
        rows: list[Row] = []
        read, left_alone = set[int](), set(self._hangs)
        listed_before = {index: identity for index, identity in self.known.items() if index not in left_alone}
        while (count := self._open()) is not None:
            waiting = [index for index in range(count) if index not in read | left_alone]
            # GPUs that hung come last, so that they do not delay the others.
            waiting += [index for index in sorted(left_alone - read) if index < count and self._is_due(index)]
            if not waiting:
                listed = {self.known[index].gpu for index in read | left_alone if index in self.known}
                for index, identity in listed_before.items():
                    if identity.gpu not in listed:
                        self._report("gpu_lost", index, "is no longer listed by the driver", identity)
                break
            read.add(waiting[0])
            rows += self._read(waiting[0])
        answered = {row.identity.gpu for row in rows}
        self._failures.update(identity.gpu for identity in self.known.values() if identity.gpu not in answered)
        return rows

    def listen(self, timeout_s: float) -> None:
        """Wait for the next event, at most ``timeout_s``."""
        deadline_s, events_before = self._monotonic() + timeout_s, len(self.events)
        while len(self.events) == events_before and (left_s := deadline_s - self._monotonic()) > 0:
            if self._child is None:
                self._sleep(left_s)
                break
            try:
                self._take_news(self._child.receive(left_s))
            except Silent:
                if self._monotonic() - self._heard_at_s > ALIVE_DEADLINE_S:
                    self._reopen_later("the driver does not answer")
            except Ended as error:
                self._reopen_later(f"the reader of the driver exited ({error})")

    def close(self) -> None:
        """Stop the child."""
        if self._child is not None:
            self._child.end()
            self._killed = [child for child in (*self._killed, self._child) if not child.is_gone()]
            self._child, self._watched = None, -1

    def _open(self) -> int | None:
        """Open the driver if needed; return the number of GPUs, or None while it cannot be opened."""
        if self._child is None and self._monotonic() >= self._reopen_at_s:
            self._child, self._heard_at_s = self._spawn(), self._monotonic()
            try:
                driver, self._count = self._ask(None, OPEN_DEADLINE_S)
            except NvmlFault as fault:
                if self.driver is None and fault.code in ABSENT:
                    self.close()
                    raise InputError(ABSENT[fault.code], "this node", _NO_DRIVER) from None
                self._reopen_later(str(fault))
            except Silent:
                self._report("nvml_hang", None, f"did not answer in {OPEN_DEADLINE_S:g} s")
                self._reopen_later("the driver does not answer")
            except Ended as error:
                self._reopen_later(f"the reader of the driver exited ({error})")
            else:
                if self._open_failures or driver != self.driver:
                    _LOG.info("driver %s opened, %d GPUs listed", driver, self._count)
                self._open_failures, self.driver = 0, driver
                self._recovered(DRIVER)
        return None if self._child is None else self._count

    def _is_due(self, index: int) -> bool:
        stuck = sum(not child.is_gone() for child in self._killed)
        return stuck < MAX_STUCK and self._monotonic() >= self._hangs[index][1]

    def _read(self, index: int) -> list[Row]:
        """Return the row of one GPU, none if it does not respond; if it hangs, the child is killed."""
        started, started_s = self._clock(), self._monotonic()
        timeout_s = GPU_DEADLINE_S if index in self._present or index in self._hangs else OPEN_DEADLINE_S
        try:
            identity, values, errors = self._ask(index, timeout_s)
        except NvmlFault as fault:
            self.accounting.take(READINGS, 1, {fault.name: 1}, f"GPU {index}")
            if fault.code in RELOADED:
                self._reopen_later(str(fault))
            elif fault.code in LOST:
                self._report("gpu_lost", index, f"is lost: {fault.name}")
            return []
        except (Silent, Ended) as error:
            self.close()
            reason = "no answer in time" if isinstance(error, Silent) else "the reader of the driver exited"
            self.accounting.take(READINGS, 1, {reason: 1}, f"GPU {index}")
            times = self._hangs.get(index, (0, 0.0))[0] + 1
            self._hangs[index] = times, self._monotonic() + backoff_s(times, first_s=60.0, max_s=3600.0)
            self._present.pop(index, None)
            if isinstance(error, Silent):
                self._report("nvml_hang", index, f"did not answer in {timeout_s:g} s")
            else:
                _LOG.warning("the reader of the driver exited at GPU %d: %s", index, error)
            return []
        self.known = {other: known for other, known in self.known.items() if known.gpu != identity.gpu}
        self._present[index] = self.known[index] = identity
        self.accounting.take(READINGS, 1, {})
        known_errors = self.accounting.tables[VALUES].left_out
        for name in errors.keys() - known_errors.keys():
            _LOG.warning("cannot read some channels: %s (logged once, then counted)", name)
        self.accounting.take(VALUES, len(values) + sum(errors.values()), errors, identity.gpu)
        self._recovered(identity.gpu)
        self._recovered(_place(index))
        self._hangs.pop(index, None)
        scrape = {
            "scrape_duration_s": self._monotonic() - started_s,
            "scrape_failures_total": float(self._failures[identity.gpu]),
            "channels_reported": float(len(values)),
        }
        return [Row(started, identity, values | scrape)]

    def _ask(self, index: int | None, timeout_s: float) -> Any:
        """Send a request and return the child's answer; raises NvmlFault, Silent or Ended."""
        assert self._child is not None
        deadline_s = self._monotonic() + timeout_s
        self._child.send(index)
        while True:
            message = self._child.receive(deadline_s - self._monotonic())
            match message:
                case "answer", answer:
                    return answer
                case "fault", code:
                    raise NvmlFault(code)
            self._take_news(message)

    def _take_news(self, message: Message) -> None:
        self._heard_at_s = self._monotonic()
        match message:
            case "xid", (at, xid, gpu, instance):
                # a MIG GPU instance
                detail = None if instance is None else f"GPU instance {instance}"
                self.events.append(Event(at, self._node, "xid", SOURCE, at, str(xid), detail, gpu))
            case "watching", count:
                if count != self._watched:
                    _LOG.info("listening for XIDs of %d GPUs", count)
                self._watched = count
            case "deaf", code:
                if self._watched is not None:
                    _LOG.warning("XID events stopped (%s); listening again", NvmlFault(code))
                self._watched = None

    def _report(self, code: FaultCode, index: int | None, problem: str, identity: Identity | None = None) -> None:
        if index is not None:
            identity = identity or self.known.get(index)
            if self._present.get(index) == identity:
                self._present.pop(index, None)
        key = DRIVER if index is None else _place(index) if identity is None else identity.gpu
        if key in self.open_faults:
            return
        self.open_faults[key] = code
        detail = f"{'the driver' if index is None else f'GPU {index} of this node'} {problem}"
        _LOG.warning("%s: %s", key, detail)
        gpu, address = (None, None) if identity is None else (identity.gpu, identity.address)
        now = self._clock()
        self.events.append(Event(now, self._node, "other", SOURCE, now, code, detail, gpu, address))

    def _recovered(self, key: str) -> None:
        if self.open_faults.pop(key, None) is not None:
            _LOG.info("%s responds again", key)

    def _reopen_later(self, reason: str) -> None:
        """Stop the child; the driver is reopened after a backoff."""
        self.close()
        self._present = {}
        self._open_failures += 1
        self._reopen_at_s = self._monotonic() + backoff_s(self._open_failures)
        if self._open_failures == 1:
            _LOG.warning("%s; retrying at intervals of up to a minute", reason)


def _place(index: int) -> str:
    return f"index {index}"
