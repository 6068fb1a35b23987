"""How far a collector has read, and what it read there: written in one step, so that a kill neither loses nor repeats.

Rows and the position after them are first written to the collector's state file, then the rows are written to the
landing folder under a name of their own, which it takes once. A process that dies between the two finds the rows in
its state when it comes back and writes them under the same name.
"""

import contextlib
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from foundation.errors import InputError
from foundation.files import take_lock, write_bytes
from telemetry.accounting import Accounting
from telemetry.dataset.schema import Event
from telemetry.landing.folder import Kind, Landing, Rows, rows_table


class _State(BaseModel):
    version: Literal[2] = 2
    name: str
    batch: int = 0
    position: dict[str, Any] = {}
    pending: dict[Kind, list[dict[str, Any]]] = {}


class Outbox(contextlib.AbstractContextManager["Outbox"]):
    """The state of one collector; only one process at a time may hold it.

    ``name``: of the state file. ``landed``: rows written by this process, by kind. ``accounting`` counts what is
    committed.
    Raises ``InputError`` if another process holds it, or the state file is damaged.
    """

    def __init__(self, landing: Landing, name: str, accounting: Accounting | None = None) -> None:
        self._landing = landing
        self.accounting = Accounting() if accounting is None else accounting
        self._path = landing.state(f"{name}.json")
        lock_path = self._path.with_name(f"{name}.lock")
        what = f"another collector {name!r} is running on this dataset"
        self._lock = take_lock(lock_path, what, str(lock_path), "Stop it first, or leave it to work.").lock
        self.landed: Counter[Kind] = Counter()
        try:
            self._state = self._read(name)
            self.flush()
        except BaseException:
            self.close()
            raise

    @property
    def position(self) -> dict[str, Any]:
        """What was last committed; empty at first."""
        return self._state.position

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
        pending = {kind: [dict(row) for row in rows] for kind, rows in given.items() if rows}
        batch = self._state.batch + bool(pending)
        state = _State(name=self._state.name, batch=batch, position=dict(position), pending=pending)
        write_bytes(self._path, state.model_dump_json().encode())
        self._state = state
        for kind, rows in pending.items():
            self.accounting.take(kind, len(rows), {})
        with contextlib.suppress(InputError):
            self.flush()

    def flush(self) -> None:
        """Write what was committed and is not in the landing folder yet; raises ``InputError`` if the disk is full."""
        for kind, rows in self._state.pending.items():
            name = f"{self._state.name}.{self._state.batch:08d}"
            if self._landing.stage(kind, rows_table(kind, rows), name=name) is not None:
                self.landed[kind] += len(rows)
        self._state.pending = {}

    def close(self) -> None:
        """Let another process have it."""
        self._lock.release()

    def __exit__(self, *_error: object) -> None:
        if self._state.batch and not self._state.pending:
            # what was written may be sent on and gone by the next start, which would write it again
            with contextlib.suppress(InputError):
                write_bytes(self._path, self._state.model_dump_json().encode())
        self.close()

    def _read(self, name: str) -> _State:
        try:
            return _State.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return _State(name=f"{name[:140]}.{secrets.token_hex(6)}")
        except ValidationError as error:
            raise InputError(
                f"the collector's state cannot be read: {error.errors()[0]['msg']}",
                str(self._path),
                "Remove it: the collector then starts from scratch; duplicates are ignored.",
            ) from None
