"""XID events from the counts that dcgm-exporter keeps of its last minutes (``DCGM_EXP_XID_ERRORS_COUNT``).

A count rises with an XID and falls when one has left the exporter's window (5 minutes by default); a series is there
only while its count is not zero. So a rise is an event, a fall is none, and a series that appears is a rise from zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Final

import pyarrow as pa

from telemetry.collect.series.xid_counts import SOURCE
from telemetry.landing.tables import LANDED_EVENTS

_MAX_KNOWN: Final = 10_000


class XidRises:
    """The XID counts of one target's GPUs, from page to page."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], float] = {}
        self._gpus: set[str] = set()

    def events(self, counts: Iterable[tuple[str, str, int, float]], gpus: Iterable[str], at: datetime) -> pa.Table:
        """Return the events that a page tells.

        ``at``: when the page was fetched, aware: the events' time, and when they became known.
        Returns: rows of ``LANDED_EVENTS``, one for each count that rose. A GPU's first page tells none: its XIDs may be
        older than this process, and another collector may have told them.
        """
        now: dict[tuple[str, int], float] = {}
        nodes: dict[str, str] = {}
        for gpu, node, xid, count in counts:  # a GPU's MIG instances have counts of their own
            now[(gpu, xid)] = now.get((gpu, xid), 0.0) + count
            nodes[gpu] = node
        rows = []
        for (gpu, xid), count in now.items():
            before = self._counts.get((gpu, xid), 0.0)
            if gpu in self._gpus and count > before:
                detail = f"the exporter's count of XID {xid} rose by {count - before:g} to {count:g}"
                rows.append(
                    {
                        "timestamp": at,
                        "node": nodes[gpu],
                        "gpu": gpu,
                        "type": "xid",
                        "code": str(xid),
                        "detail": detail,
                        "source": SOURCE,
                        "known_at": at,
                    }
                )
        self._counts = now
        here = {*gpus, *nodes}
        # A GPU that comes back is known; pages with ever new GPUs must not fill the memory.
        self._gpus = here if len(self._gpus) > _MAX_KNOWN else self._gpus | here
        return pa.Table.from_pylist(rows, schema=LANDED_EVENTS) if rows else LANDED_EVENTS.empty_table()
