"""Sends the files of a landing folder, a bounded spool, one after the other, and waits while nobody takes them."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from telemetry.collect.pushing.targets import Later, Refused, Target
from telemetry.collect.running import Backoff
from telemetry.landing.folder import Landing
from telemetry.landing.tables import Kind

_UNITS: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*\Z")


def parse_bytes(text: str) -> int:
    """Read a size such as ``1GiB`` or ``500 MB``; a number alone is bytes.

    Raises ``ValueError`` if the text is no size, or is no more than 0.
    """
    match = _SIZE.match(text)
    if match is None or match[2].lower() not in _UNITS or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size: write a number and a unit (KiB, MiB, GiB, TiB), such as '1GiB'")
    return int(float(match[1]) * _UNITS[match[2].lower()])


_LOG = logging.getLogger(__name__)
_NAMED: Final = "named-"
_DROP_ORDER: Final[tuple[Kind, ...]] = ("samples", "inventory", "jobs", "events")
REFUSED_BYTES: Final = 64 * 2**20
"""Refused files are kept for a look up to this size; beyond it the oldest go."""

REFUSED_FILES: Final = 1000
"""… and up to this number."""


@dataclass(frozen=True, slots=True)
class SpoolFile:
    """A landed file."""

    kind: Kind
    path: Path
    name: str


class Spool:
    """The files of one writer in a landing folder.

    ``landing``: where the collector lands; files of other writers in it are left alone.
    ``limit_bytes``: size beyond which the oldest samples are dropped, and only when there are none left anything else;
    None: never.
    """

    def __init__(self, landing: Landing, writer: str, limit_bytes: int | None) -> None:
        self._landing = landing
        self._limit_bytes = limit_bytes
        own = re.escape(writer)
        self._own = re.compile(rf"(?:\d{{13}}-{own}-\d+-\d{{6,}}-[0-9a-f]{{8}}|{_NAMED}{own}\..*)\Z")
        self._over = False
        self.dropped: int = 0
        self.refused: int = 0

    @property
    def root(self) -> Path:
        """The landing folder."""
        return self._landing.root

    def files(self) -> list[SpoolFile]:
        """Return the files that wait, oldest first."""
        return [
            # The kind is the folder's name, as Landing lays it out.
            SpoolFile(_kind(path), path, path.stem.removeprefix(_NAMED))
            for path in self._landing.waiting()
            if self._own.match(path.stem)
        ]

    def trim(self) -> int:
        """Drop the oldest files while the spool is over its limit; return how many went."""
        if self._limit_bytes is None:
            return 0
        sized = [(each, size) for each in self.files() if (size := _size(each.path)) is not None]
        over_bytes = sum(size for _, size in sized) - self._limit_bytes
        if over_bytes <= 0:
            self._over = False
            return 0
        went = 0
        for kind in _DROP_ORDER:
            for each, size in sized:
                if over_bytes <= 0:
                    break
                if each.kind == kind:
                    each.path.unlink(missing_ok=True)
                    over_bytes -= size
                    went += 1
        self.dropped += went
        if not self._over:
            self._over = True
            _LOG.error(
                "the spool %s is over its limit of %d bytes: the oldest samples go (said once; %d so far)",
                self.root,
                self._limit_bytes,
                self.dropped,
            )
        return went

    def refuse(self, file: SpoolFile, why: str) -> None:
        """Put a file aside that the other side will never take, with the reason beside it."""
        folder = self.root / "refused"
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f"{file.kind}-{file.path.name}"
        # The reason first: killed between the two, the file is sent again and refused again.
        aside.with_suffix(".json").write_text(json.dumps({"kind": file.kind, "name": file.name, "why": why}) + "\n")
        file.path.replace(aside)
        self.refused += 1
        _LOG.error("refused for good, put aside as %s: %s", aside, why)
        self._bound_refused(folder)

    def _bound_refused(self, folder: Path) -> None:
        kept = sorted(
            ((stat.st_mtime_ns, path, stat.st_size) for path in folder.glob("*.parquet") if (stat := path.stat())),
            reverse=True,
        )
        total = 0
        for place, (_, path, size) in enumerate(kept):
            total += size
            if total > REFUSED_BYTES or place >= REFUSED_FILES:
                path.unlink(missing_ok=True)
                path.with_suffix(".json").unlink(missing_ok=True)


def _kind(path: Path) -> Kind:
    kind: Kind = next(each for each in _DROP_ORDER if each == path.parent.name)
    return kind


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # sent just now
        return None


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
