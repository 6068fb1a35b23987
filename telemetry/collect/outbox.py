"""Staging of collected rows: samples through a bounded buffer, events together with the source position.

An :class:`Outbox` delivers exactly once, even if killed. Rows and the position after them are first written to the
collector's state file; then the rows are staged under a unique name, which the staging folder accepts once. After a
kill between the two, the next start stages the rows from the state file under the same name.
"""

import contextlib
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import pyarrow as pa
from pydantic import BaseModel, ValidationError

from foundation.errors import InputError
from foundation.files import take_lock, write_bytes
from telemetry.accounting import Accounting
from telemetry.dataset.event import Event
from telemetry.staging.folder import Kind, Rows, StagingFolder, rows_table

_log = logging.getLogger(__name__)


class _State(BaseModel):
    version: Literal[2] = 2
    name: str
    batch: int = 0
    position: dict[str, Any] = {}
    pending: dict[Kind, list[dict[str, Any]]] = {}


class Outbox(contextlib.AbstractContextManager["Outbox"]):
    """State of one collector, locked by one process at a time.

    ``name``: of the state file. ``staged``: rows written by this process, by kind. ``accounting`` counts committed
    rows.
    Raises ``InputError`` if another process holds the lock, or the state file is corrupt.
    """

    def __init__(self, staging: StagingFolder, name: str, accounting: Accounting | None = None) -> None:
        self._staging = staging
        self.accounting = Accounting() if accounting is None else accounting
        self._path = staging.state(f"{name}.json")
        lock_path = self._path.with_name(f"{name}.lock")
        problem = f"another collector {name!r} is running on this dataset"
        self._lock = take_lock(lock_path, problem, str(lock_path), "Stop it first, or let it run.").lock
        self.staged: Counter[Kind] = Counter()
        try:
            self._state = self._read(name)
            self.flush()
        except BaseException:
            self.close()
            raise

    @property
    def position(self) -> dict[str, Any]:
        """Last committed position; empty at first."""
        return self._state.position

    def commit(
        self, position: Mapping[str, Any], *, events: Sequence[Event] = (), inventory: Rows = (), jobs: Rows = ()
    ) -> None:
        """Save a position with the rows before it, and stage the rows.

        Raises ``InputError`` if the disk is full or not writable; nothing is saved then, and the commit can be retried.
        If only staging fails, the rows are saved: :meth:`flush`, the next commit or the next process stages them.
        """
        self.flush()
        rows_of: dict[Kind, Rows] = {"events": [event.row() for event in events], "inventory": inventory, "jobs": jobs}
        pending = {kind: [dict(row) for row in rows] for kind, rows in rows_of.items() if rows}
        batch = self._state.batch + bool(pending)
        state = _State(name=self._state.name, batch=batch, position=dict(position), pending=pending)
        write_bytes(self._path, state.model_dump_json().encode())
        self._state = state
        for kind, rows in pending.items():
            self.accounting.take(kind, len(rows), {})
        with contextlib.suppress(InputError):
            self.flush()

    def flush(self) -> None:
        """Stage committed rows that are not staged yet; raises ``InputError`` if the disk is full."""
        for kind, rows in self._state.pending.items():
            name = f"{self._state.name}.{self._state.batch:08d}"
            if self._staging.stage(kind, rows_table(kind, rows), name=name) is not None:
                self.staged[kind] += len(rows)
        self._state.pending = {}

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __exit__(self, *_error: object) -> None:
        if self._state.batch and not self._state.pending:
            # a staged file may be pushed and deleted before the next start, which would stage it again
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


DROPPED: Final = "the buffer is full, because the disk is not writable"
UNWRITTEN: Final = "being written"


class RowBuffer:
    """Buffers up to ``max_rows`` rows of each kind, then drops the oldest; thread-safe."""

    def __init__(self, staging: StagingFolder, accounting: Accounting, *, max_rows: int) -> None:
        self.staging = staging
        self.accounting = accounting
        self._max_rows = max_rows
        self._tables: dict[Kind, list[pa.Table]] = {"events": [], "inventory": [], "samples": []}
        self._lock = threading.Lock()

    @property
    def rows(self) -> int:
        """Number of buffered rows."""
        with self._lock:
            return sum(table.num_rows for tables in self._tables.values() for table in tables)

    def add(self, batch: Mapping[Kind, pa.Table]) -> None:
        """Buffer rows."""
        for kind, table in batch.items():
            if table.num_rows:
                self.accounting.read(kind, table.num_rows)
                with self._lock:
                    self._tables[kind].append(table)
                    self._drop_oldest(kind)

    def write(self) -> None:
        """Stage the buffered rows, a file per kind; on failure keep them and raise ``InputError`` or ``OSError``."""
        errors: list[Exception] = []
        for kind in self._tables:
            with self._lock:
                tables, self._tables[kind] = self._tables[kind], []
            if not tables:
                continue
            table = pa.concat_tables(tables, promote_options="default").combine_chunks()
            try:
                self.staging.stage(kind, table)
            except (InputError, OSError) as error:
                errors.append(error)
                with self._lock:
                    self._tables[kind].insert(0, table)
                    self._drop_oldest(kind)
            else:
                self.accounting.used(kind, table.num_rows)
            self._count_waiting(kind)
        if errors:
            raise errors[0]

    def _drop_oldest(self, kind: Kind) -> None:
        """Drop the oldest rows above the limit, plus a tenth of the limit, so that drops are rare."""
        excess = sum(table.num_rows for table in self._tables[kind]) - self._max_rows
        if excess > 0:
            excess += self._max_rows // 10
            _log.error("%d rows of %s are dropped: %s", excess, kind, DROPPED)
            self.accounting.left_out(kind, DROPPED, excess)
            buffered = pa.concat_tables(self._tables[kind], promote_options="default")
            self._tables[kind] = [buffered.slice(excess)]
        self._count_waiting(kind)

    def _count_waiting(self, kind: Kind) -> None:
        self.accounting.holds(kind, UNWRITTEN, sum(table.num_rows for table in self._tables[kind]))
