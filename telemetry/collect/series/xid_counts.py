"""XID events from counts of XIDs; that of dcgm-exporter is within a sliding window.

An increase is an event. The series of an XID appears with its first occurrence, so its first value is an increase from
zero if the GPU was observed just before; otherwise the XID may be older, and is no event. A series disappears when its
XID leaves the window (5 minutes by default); when it reappears, its baseline is zero if the GPU was observed just
before, else its last count.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from operator import itemgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from telemetry.collect.series.identity import XidCount
from telemetry.staging.folder import rows_table

FORGOTTEN_AFTER_MS: Final = 600_000
"""Staleness limit: a count absent for longer starts again; twice the exporter's default window."""

_SEEN_KEPT: Final = 10_000

Key = tuple[str, str, str, int, str]


class XidCounts:
    """Tracks the counts across time spans, which must come in order.

    ``delay``: between an event and the time when it is known (``known_at``).
    ``state``: result of :meth:`as_state`.
    """

    def __init__(self, delay: timedelta, state: Mapping[str, Any] | None = None) -> None:
        self._delay_ms = delay // timedelta(milliseconds=1)
        stored = state or {}
        self._last: dict[Key, tuple[int, float]] = {
            (str(gpu), str(node), str(instance), int(xid), str(metric)): (int(ms), float(count))
            for gpu, node, instance, xid, metric, ms, count in stored.get("counts", [])
        }
        self._last_ms: dict[str, int] = {str(gpu): int(ms) for gpu, ms in stored.get("seen", {}).items()}

    def as_state(self) -> dict[str, Any]:
        """Return the state that the next span needs, in JSON types."""
        counts = [[*key, ms, count] for key, (ms, count) in sorted(self._last.items())]
        return {"counts": counts, "seen": dict(sorted(self._last_ms.items()))}

    def follow(
        self,
        counts: Sequence[XidCount],
        index: npt.NDArray[np.int32],
        ms: npt.NDArray[np.int64],
        values: npt.NDArray[np.float64],
        *,
        watched: Mapping[str, tuple[int, int]],
    ) -> pa.Table:
        """Process the next span's samples; return rows of ``STAGED_EVENTS``, sorted by (timestamp, gpu, code).

        ``watched``: times (Unix ms) of each GPU's first and last sample of any channel in this span.
        """
        rows: list[dict[str, Any]] = []
        # Some exporters send a count for XID 0, meaning no XID, with every scrape.
        chosen = np.array([series.xid > 0 for series in counts], np.bool_)[index]
        index, ms, values = index[chosen], ms[chosen], values[chosen]
        order = np.lexsort((index, ms))
        for number, when_ms, count in zip(
            index[order].tolist(), ms[order].tolist(), values[order].tolist(), strict=True
        ):
            series = counts[number]
            key = (series.gpu, series.node, series.mig_instance or "", series.xid, series.metric)
            previous = self._previous_count(key, when_ms, watched)
            if previous is not None and count > previous:
                detail = f"count rose from {previous:g} to {count:g}"
                rows.append(
                    {"timestamp": when_ms, "known_at": when_ms + self._delay_ms, "node": series.node, "gpu": series.gpu}
                    | {"type": "xid", "code": str(series.xid), "detail": detail}
                    | {"source": f"exporter:{series.metric}"}
                )
            self._last[key] = (when_ms, count)
        for gpu, (_, last) in watched.items():
            self._last_ms[gpu] = max(last, self._last_ms.get(gpu, last))
        if len(self._last_ms) > _SEEN_KEPT:  # bounds memory if a page keeps naming new GPUs
            newest = max(self._last_ms.values())
            self._last_ms = {gpu: last for gpu, last in self._last_ms.items() if newest - last <= FORGOTTEN_AFTER_MS}
        return rows_table("events", sorted(rows, key=itemgetter("timestamp", "gpu", "code")))

    def _previous_count(self, key: Key, when_ms: int, watched: Mapping[str, tuple[int, int]]) -> float | None:
        last = self._last.get(key)
        if last is not None and when_ms - last[0] <= FORGOTTEN_AFTER_MS:
            return last[1]
        first = watched.get(key[0], (when_ms, when_ms))[0]
        was_watched = (
            first < when_ms
            or when_ms - self._last_ms.get(key[0], when_ms - FORGOTTEN_AFTER_MS - 1) <= FORGOTTEN_AFTER_MS
        )
        if was_watched:
            return 0.0
        return None if last is None else last[1]
