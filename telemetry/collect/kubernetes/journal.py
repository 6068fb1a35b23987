"""What a collector has to remember across a kill, and the rows on their way into the landing folder.

Rows and the knowledge after them are written to the state file in one step, and land afterwards under a name of their
own, which a landing folder takes once. A process that dies between the two lands them when it comes back.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final

import pyarrow as pa

from telemetry.atomic import write_bytes
from telemetry.collect.outbox import locked, unreadable
from telemetry.dataset.schema import JOBS
from telemetry.errors import InputError
from telemetry.landing.folder import Landing
from telemetry.landing.tables import LANDED_EVENTS, LANDED_INVENTORY, Kind

_VERSION: Final = 1
_SCHEMAS: Final[Mapping[Kind, pa.Schema]] = {"events": LANDED_EVENTS, "inventory": LANDED_INVENTORY, "jobs": JOBS}

Rows = Mapping[Kind, Sequence[Mapping[str, Any]]]
"""Rows by kind: JSON types, instants in milliseconds since 1970 UTC."""


class Journal:
    """The state of one collector; one process at a time may hold it.

    ``name``: of the state file: letters, digits, ``-``, ``.`` and ``_``.
    ``content``: what was last committed; empty at first.
    ``landed``: rows landed by this process, by kind.
    Raises ``InputError`` if another process holds it, or its file is damaged.
    """

    def __init__(self, landing: Landing, name: str) -> None:
        self._landing = landing
        self._path = landing.state(f"{name}.json")
        self._lock = locked(self._path.with_name(f"{name}.lock"), name)
        self.landed: dict[str, int] = dict.fromkeys(_SCHEMAS, 0)
        try:
            saved = self._read() or {"token": secrets.token_hex(6), "batch": 0, "content": {}, "rows": {}}
            self._name = f"{name}-{saved['token']}"
            self._token: str = saved["token"]
            self._batch: int = saved["batch"]
            self.content: dict[str, Any] = saved["content"]
            self._waiting: Rows = saved["rows"]
            self.flush()
        except BaseException:
            self.close()
            raise

    def commit(self, content: Mapping[str, Any], rows: Rows) -> None:
        """Remember ``content`` and land ``rows``; rows of an earlier commit that could not land yet go first.

        Raises ``InputError`` if the disk is full or not writable; then nothing was taken in, and the same commit may be
        tried again. Where only the landing fails, the rows are taken in: :meth:`flush`, the next commit or the next
        process lands them.
        """
        self.flush()
        told = {kind: list(each) for kind, each in rows.items() if each}
        batch = self._batch + 1 if told else self._batch
        saved = {"version": _VERSION, "token": self._token, "batch": batch, "content": dict(content), "rows": told}
        write_bytes(self._path, json.dumps(saved, separators=(",", ":")).encode())
        self._batch, self.content, self._waiting = batch, dict(content), told
        with contextlib.suppress(InputError):
            self.flush()

    def flush(self) -> None:
        """Land what was committed and has not landed.

        Raises ``InputError`` if the disk is full or not writable.
        """
        self._land(self._waiting)
        self._waiting = {}

    def close(self) -> None:
        """Let another process have it."""
        self._lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _land(self, rows: Rows) -> None:
        for kind, each in rows.items():
            table = table_of(kind, each)
            if self._landing.land(kind, table, name=f"{self._name}-{self._batch:08d}") is not None:
                self.landed[kind] += table.num_rows

    def _read(self) -> dict[str, Any] | None:
        try:
            saved = json.loads(self._path.read_bytes())
            if saved["version"] != _VERSION:
                raise ValueError(f"version {saved['version']}")
            _ = (saved["token"] + "", saved["batch"] + 0, {**saved["content"]}, {**saved["rows"]})
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise unreadable(self._path, error) from None
        return dict(saved)


def table_of(kind: Kind, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return rows as a landing table; keys that a row lacks are null."""
    schema = _SCHEMAS[kind]
    arrays = [pa.array([row.get(field.name) for row in rows], type=field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)
