"""How far a collector has read, and what it read there: written in one step, so that a kill neither loses nor repeats.

Rows and the position after them are first written to the collector's state file, then the rows are written to the
landing folder under a name of their own, which it takes once. A process that dies between the two finds the rows in
its state when it comes back and writes them under the same name.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from filelock import FileLock, Timeout

from telemetry.atomic import disk_errors, write_bytes
from telemetry.collect.event import Event
from telemetry.errors import InputError
from telemetry.landing.folder import Landing
from telemetry.landing.tables import Kind, Rows, rows_table

_VERSION: Final = 2


class Outbox:
    """The state of one collector; only one process at a time may hold it.

    ``name``: of the state file: letters, digits, ``-``, ``.`` and ``_``.
    ``position``: what was last committed; empty at first.
    ``landed``: rows written by this process, by kind.
    Raises ``InputError`` if another process holds it, or the state file is damaged.
    """

    def __init__(self, landing: Landing, name: str) -> None:
        self._landing = landing
        self._path = landing.state(f"{name}.json")
        self._lock = _locked(self._path.with_name(f"{name}.lock"), name)
        self.landed: Counter[Kind] = Counter()
        try:
            content = self._read() or {"name": f"{name[:140]}.{secrets.token_hex(6)}"}
            self._name: str = content["name"]
            self._batch = int(content.get("batch", 0))
            self._pending: Mapping[Kind, Rows] = content.get("pending", {})
            self.position: dict[str, Any] = content.get("position", {})
            self.flush()
        except BaseException:
            self.close()
            raise

    def commit(
        self, position: Mapping[str, Any], *, events: Sequence[Event] = (), inventory: Rows = (), jobs: Rows = ()
    ) -> None:
        """Remember a position and the rows that lie before it, and write those rows.

        Raises ``InputError`` if the disk is full or not writable; then nothing was taken in, and the same commit may be
        tried again. Where only the landing folder fails, the rows are taken in: :meth:`flush`, the next commit or the
        next process writes them.
        """
        self.flush()
        given: dict[Kind, Rows] = {"events": [event.row() for event in events], "inventory": inventory, "jobs": jobs}
        rows = {kind: list(some) for kind, some in given.items() if some}
        batch = self._batch + 1 if rows else self._batch
        content = {"version": _VERSION, "name": self._name, "batch": batch, "position": position, "pending": rows}
        write_bytes(self._path, json.dumps(content, separators=(",", ":")).encode())
        self._batch, self.position, self._pending = batch, dict(position), rows
        with contextlib.suppress(InputError):
            self.flush()

    def flush(self) -> None:
        """Write what was committed and is not in the landing folder yet.

        Raises ``InputError`` if the disk is full or not writable.
        """
        for kind, rows in self._pending.items():
            if self._landing.stage(kind, rows_table(kind, rows), name=f"{self._name}.{self._batch:08d}") is not None:
                self.landed[kind] += len(rows)
        self._pending = {}

    def close(self) -> None:
        """Let another process have it."""
        self._lock.release()

    def __enter__(self) -> Outbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> dict[str, Any] | None:
        try:
            content = json.loads(self._path.read_bytes())
            if content["version"] != _VERSION:
                raise ValueError(f"version {content['version']}")
            _ = (content["name"] + "", content["batch"] + 0, {**content["position"]}, {**content["pending"]})
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"the collector's state cannot be read: {error}",
                str(self._path),
                "Remove it: the collector then starts from scratch, and what it writes twice counts once.",
            ) from None
        return dict(content)


def _locked(path: Path, name: str) -> FileLock:
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
