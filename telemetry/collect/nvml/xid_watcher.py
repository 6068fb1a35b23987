"""Hears the driver's XID events, in a thread and a child process of their own.

The driver only keeps XIDs for those who wait, so the waiting must not stop while a sick GPU blocks the readings.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from telemetry.collect.nvml.child import Ended, Process, Silent
from telemetry.collect.nvml.library import NvmlFault
from telemetry.collect.nvml.node_reader import OPEN_DEADLINE_S
from telemetry.collect.running import Backoff

_LOG = logging.getLogger(__name__)

ALIVE_DEADLINE_S: Final = 30.0
"""The child sends a message every second; one that is silent for this long hangs in the driver."""

LEFT_OUT_S: Final = 600.0
"""A GPU over which registering hung is left out for this long."""


@dataclass(frozen=True, slots=True)
class Xid:
    """An XID that the driver reported, at the time when the wait returned.

    ``gpu``: UUID; None where the driver named a GPU that it does not list.
    ``instance``: GPU instance (MIG) that it is about; None is the whole GPU.
    """

    at: datetime
    gpu: str | None
    xid: int
    instance: int | None


class XidWatcher:
    """Calls back for each XID until it is stopped.

    ``report``: takes each :class:`Xid`, in the watcher's thread.
    ``sleep``: default: a wait that ends early when the watcher is stopped.
    """

    def __init__(
        self,
        spawn: Callable[[], Process],
        report: Callable[[Xid], None],
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._spawn = spawn
        self._report = report
        self._monotonic = monotonic
        self._stopped = threading.Event()
        self._sleep = sleep or self._stopped.wait
        self._left_out: dict[int, float] = {}
        self._renew = threading.Event()
        self._backoff = Backoff(1.0, 60.0)
        self._watching: tuple[int, ...] | None = None
        self._thread = threading.Thread(target=self.run, name="nvml-xids", daemon=True)

    def start(self) -> None:
        """Begin in a thread of its own."""
        self._thread.start()

    def renew(self) -> None:
        """Register all GPUs again, as one that was lost is back."""
        self._renew.set()

    def stop(self) -> None:
        """End the child and the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def run(self) -> None:
        """Watch until stopped; each failure is followed by a pause."""
        while not self._stopped.is_set():
            why = self._watch()
            if why is not None and not self._stopped.is_set():
                self._watching = None  # so that it is logged when they are heard again
                pause_s = self._backoff.pause_s()
                if self._backoff.failures == 1:
                    _LOG.warning("XID events stopped (%s); listening again, with pauses up to a minute", why)
                self._sleep(pause_s)

    def _watch(self) -> str | None:
        """Listen through one child; return why that ended, None where it was meant to."""
        now_s = self._monotonic()
        self._left_out = {index: until_s for index, until_s in self._left_out.items() if until_s > now_s}
        skip = sorted(self._left_out)
        self._renew.clear()
        child = self._spawn()
        at: int | None = None
        try:
            child.ask({"do": "watch", "skip": skip})
            deadline_s = OPEN_DEADLINE_S
            while not self._stopped.is_set():
                message = child.hear(deadline_s)
                if "failed" in message:
                    return str(NvmlFault(message["failed"]))
                if "at" in message:
                    at = message["at"]
                elif "watching" in message:
                    at, deadline_s = None, ALIVE_DEADLINE_S
                    self._heard(tuple(message["watching"]))
                elif "xid" in message:
                    at_time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=message["at_ms"])
                    self._report(Xid(at_time, message["gpu"], message["xid"], message["instance"]))
                if self._renew.is_set() or (self._left_out and self._monotonic() > min(self._left_out.values())):
                    return None
        except Silent:
            if at is not None:
                self._left_out[at] = self._monotonic() + LEFT_OUT_S
                return None
            return "the driver does not answer"
        except Ended as error:
            return f"the process that listens ended ({error})"
        finally:
            child.end()
        return None

    def _heard(self, watching: tuple[int, ...]) -> None:
        self._backoff.succeeded()
        if watching != self._watching:
            self._watching = watching
            _LOG.info("listening for XIDs of %d GPUs", len(watching))
