"""Sends a spool's files one after the other, and waits while the other side is down."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from telemetry.collect.pushing.spool import Spool, SpoolFile
from telemetry.collect.pushing.targets import Later, Refused, Target
from telemetry.collect.running import Backoff

_LOG = logging.getLogger(__name__)

LONGEST_PAUSE_S: Final = 300.0
"""Longest pause between two tries, where the other side does not ask for a longer one."""

MAX_STUMBLES: Final = 10
"""After so many server errors over one file the next is tried; if that is taken, the first is put aside."""

IDLE_S: Final = 5.0
"""How often an empty spool is looked at again."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """What one round sent.

    ``pause_s``: how long to wait before the next round; None: everything is sent.
    """

    sent: int
    refused: int
    pause_s: float | None
    why: str | None


class Pusher:
    """Moves files from a spool to a target, in the order in which they landed.

    A file leaves the spool only after the target has said that it is safe. Killed in between, it is sent again under
    the same name, and the target takes a name once.
    """

    def __init__(self, spool: Spool, target: Target, backoff: Backoff | None = None) -> None:
        self._spool = spool
        self._target = target
        self._backoff = backoff or Backoff(1.0, LONGEST_PAUSE_S)
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.run, name="push", daemon=True)
        self._stumbled: tuple[str, int] = ("", 0)
        self.sent: int = 0

    def round(self, go_on: Callable[[], bool] = lambda: True) -> Pushed:
        """Send what waits until it is all sent, the target is down, or ``go_on`` says no."""
        with self._lock:
            return self._round(go_on)

    def _round(self, go_on: Callable[[], bool]) -> Pushed:
        sent = refused = 0
        stumbled: tuple[SpoolFile, str] | None = None
        self._spool.trim()
        for file in self._spool.files():
            if not go_on():
                return Pushed(sent, refused, None, "stopped")
            try:
                self._target.send(file.kind, file.path, file.name)
            except FileNotFoundError:  # dropped for the spool's limit, or taken by another process
                continue
            except Refused as error:
                self._spool.refuse(file, error.why)
                refused += 1
                continue
            except Later as error:
                if error.poison and self._stumbles(file.name) and stumbled is None:
                    stumbled = (file, error.why)  # whether it is the file or the target, the next one tells
                    continue
                pause_s = self._backoff.pause_s()
                if self._backoff.failures == 1:
                    _LOG.warning("pushing waits (said once): %s", error.why)
                return Pushed(sent, refused, max(pause_s, error.after_s or 0.0), error.why)
            file.path.unlink(missing_ok=True)
            if stumbled is not None:
                self._spool.refuse(stumbled[0], f"{stumbled[1]}, {MAX_STUMBLES} times, while others were taken")
                stumbled, refused = None, refused + 1
            sent += 1
            self.sent += 1
            if self._backoff.failures:
                _LOG.info("pushing to %s goes on", self._target)
                self._backoff.succeeded()
        if stumbled is not None:
            return Pushed(sent, refused, self._backoff.pause_s(), stumbled[1])
        return Pushed(sent, refused, None, None)

    def _stumbles(self, name: str) -> bool:
        """Whether the target has failed over this file often enough to try the next one."""
        self._stumbled = (name, self._stumbled[1] + 1 if self._stumbled[0] == name else 1)
        return self._stumbled[1] >= MAX_STUMBLES

    def start(self) -> None:
        """Push in a thread of its own until stopped."""
        self._thread.start()

    def wake(self) -> None:
        """Say that something has landed."""
        self._wake.set()

    def run(self) -> None:
        """Push whenever something waits."""
        while not self._stopped.is_set():
            self._wake.clear()
            try:
                pause_s = self.round(lambda: not self._stopped.is_set()).pause_s
            except OSError as error:  # the spool itself: a full disk while putting a file aside, say
                pause_s = self._backoff.pause_s()
                if self._backoff.failures == 1:
                    _LOG.exception("the spool %s cannot be used: %s", self._spool.root, error.strerror)
            if pause_s is None:
                self._wake.wait(IDLE_S)
            else:
                self._stopped.wait(pause_s)

    def stop(self, timeout_s: float) -> None:
        """End the thread; what is not sent stays in the spool for the next start."""
        self._stopped.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
