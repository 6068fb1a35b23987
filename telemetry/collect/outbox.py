"""How far a collector has read, and what it read there: written in one step, so that a kill neither loses nor repeats.

A batch of events and the position after them are first written to the collector's state file, then the events land
under a name of their own, which a landing folder takes once. A process that dies between the two finds the batch in its
state when it comes back and lands it under the same name.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from filelock import FileLock, Timeout

from telemetry.atomic import disk_errors, write_bytes
from telemetry.collect.event import Event, rows_table
from telemetry.errors import InputError
from telemetry.landing.folder import Landing

_VERSION: Final = 1


class Outbox:
    """The state of one collector; only one process at a time may hold it.

    ``name``: of the state file: letters, digits, ``-``, ``.`` and ``_``.
    Raises ``InputError`` if another process holds it, or the state file is damaged.
    """

    def __init__(self, landing: Landing, name: str) -> None:
        self._landing = landing
        self._path = landing.state(f"{name}.json")
        self._lock: FileLock | None = locked(self._path.with_name(f"{name}.lock"), name)
        try:
            content = self._read()
        except BaseException:
            self.close()
            raise
        self.is_new = content is None
        content = content or {"version": _VERSION, "token": secrets.token_hex(6), "batch": 0, "position": {}}
        self._name = f"{name}-{content['token']}"[-160:].lstrip("-._")
        self._token: str = content["token"]
        self._batch: int = content["batch"]
        self.position: dict[str, Any] = content["position"]
        self.landed = 0
        self._pending: list[dict[str, Any]] = content.get("pending") or []
        self._land()

    def commit(self, position: Mapping[str, Any], events: Sequence[Event] = ()) -> None:
        """Note a position, and land the events that lie before it.

        Raises ``InputError`` if the disk is full or not writable. What was noted before lands first, at the next commit
        or by the next process.
        """
        self._land()
        rows = [event.row() for event in events]
        batch = self._batch + 1 if rows else self._batch
        content = {
            "version": _VERSION,
            "token": self._token,
            "batch": batch,
            "position": dict(position),
            "pending": rows,
        }
        write_bytes(self._path, json.dumps(content, separators=(",", ":")).encode())
        self._batch, self.position, self.is_new = batch, dict(position), False
        self._pending = rows
        self._land()

    def close(self) -> None:
        """Let another process have it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Outbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _land(self) -> None:
        if not self._pending:
            return
        if self._landing.land("events", rows_table(self._pending), name=f"{self._name}-{self._batch:08d}") is not None:
            self.landed += len(self._pending)
        self._pending = []

    def _read(self) -> dict[str, Any] | None:
        try:
            content = json.loads(self._path.read_bytes())
            if content["version"] != _VERSION or not isinstance(content["position"], dict):
                raise ValueError(f"version {content['version']}")
            _ = (str(content["token"]), int(content["batch"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise unreadable(self._path, error) from None
        return dict(content)


def locked(path: Path, name: str) -> FileLock:
    """Hold the lock of a collector's state.

    Raises ``InputError`` if another process holds it, or the disk is full or not writable.
    """
    lock = FileLock(path, fallback_to_soft=False)
    with disk_errors(path):
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise InputError(
                f"another collector {name!r} is running on this dataset",
                str(path),
                "Stop it first, or leave it to work.",
            ) from None
    return lock


def unreadable(path: Path, error: Exception) -> InputError:
    """Return the error of a damaged state file."""
    return InputError(
        f"the collector's state cannot be read: {error}",
        str(path),
        "Remove it: the collector then starts anew, and what it lands twice counts once.",
    )
