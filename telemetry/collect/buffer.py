"""Tables that wait to be staged: bounded while a disk is full or hangs, and accounted for."""

import logging
import threading
from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from foundation.errors import InputError
from telemetry.accounting import Accounting
from telemetry.landing.folder import Kind, Landing

_log = logging.getLogger(__name__)

DROPPED: Final = "nothing could be written for too long"
"""Reason of rows that are left out."""

UNWRITTEN: Final = "being written"
"""What rows in memory wait for."""


class RowBuffer:
    """Holds tables of each kind up to ``max_rows``, then drops the oldest; safe to use from two threads."""

    def __init__(self, landing: Landing, accounting: Accounting, *, max_rows: int) -> None:
        self.landing = landing
        self.accounting = accounting
        self._max_rows = max_rows
        self._tables: dict[Kind, list[pa.Table]] = {"events": [], "inventory": [], "samples": []}
        self._lock = threading.Lock()

    @property
    def rows(self) -> int:
        """Rows that wait."""
        with self._lock:
            return sum(table.num_rows for tables in self._tables.values() for table in tables)

    def add(self, batch: Mapping[Kind, pa.Table]) -> None:
        """Take rows."""
        for kind, table in batch.items():
            if table.num_rows:
                self.accounting.read(kind, table.num_rows)
                with self._lock:
                    self._tables[kind].append(table)
                    self._drop_oldest(kind)

    def write(self) -> None:
        """Stage what waits, a file a kind; raises ``InputError`` or ``OSError`` after keeping what was not staged."""
        errors: list[Exception] = []
        for kind in self._tables:
            with self._lock:
                tables, self._tables[kind] = self._tables[kind], []
            if not tables:
                continue
            table = pa.concat_tables(tables, promote_options="default").combine_chunks()
            try:
                self.landing.stage(kind, table)
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
        """Drop a tenth more than necessary, not a table at a time."""
        over = sum(table.num_rows for table in self._tables[kind]) - self._max_rows
        if over > 0:
            over += self._max_rows // 10
            _log.error("%d rows of %s are dropped: %s", over, kind, DROPPED)
            self.accounting.left_out(kind, DROPPED, over)
            whole = pa.concat_tables(self._tables[kind], promote_options="default")
            self._tables[kind] = [whole.slice(over)]
        self._count_waiting(kind)

    def _count_waiting(self, kind: Kind) -> None:
        self.accounting.holds(kind, UNWRITTEN, sum(table.num_rows for table in self._tables[kind]))
