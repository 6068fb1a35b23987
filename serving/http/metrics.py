"""The service's own numbers, in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from typing import Final

from telemetry.exposition.writer import family

BOUNDS_S: Final[tuple[float, ...]] = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the latency buckets, seconds: the extender's 200 ms and a look-up's 5 ms lie among them."""


class RequestCounts:
    """Requests answered and how long they took; lives in the event loop.

    Labels are bounded: routes are those of the service (others count as ``unmatched``), statuses those it answers.

    ``passed_through``: extender answers that left every node in because of trouble of ours.
    ``removed``: nodes that the extender's filter has taken out of answers.
    """

    def __init__(self) -> None:
        self.active = 0
        self.passed_through = 0
        self.removed = 0
        self._requests: Counter[tuple[str, int]] = Counter()
        self._buckets: dict[str, list[int]] = {}
        self._totals: dict[str, float] = {}

    def note(self, route: str, status: int, seconds: float) -> None:
        """Count one answer."""
        self._requests[route, status] += 1
        buckets = self._buckets.setdefault(route, [0] * (len(BOUNDS_S) + 1))
        buckets[bisect_left(BOUNDS_S, seconds)] += 1
        self._totals[route] = self._totals.get(route, 0.0) + seconds

    def exposition(self) -> str:
        """Return the lines of these numbers."""
        lines = [
            "# HELP predrain_http_request_seconds Time from a request's head to its answer.",
            "# TYPE predrain_http_request_seconds histogram",
        ]
        name = "predrain_http_request_seconds"
        for route, buckets in sorted(self._buckets.items()):
            sums = list(accumulate(buckets))
            for bound, count in zip((*map(repr, BOUNDS_S), "+Inf"), sums, strict=True):
                lines.append(f'{name}_bucket{{route="{route}",le="{bound}"}} {count}')
            lines.append(f'{name}_sum{{route="{route}"}} {self._totals[route]!r}')
            lines.append(f'{name}_count{{route="{route}"}} {sums[-1]}')
        requests = {
            f'{{route="{route}",status="{status}"}}': float(count)
            for (route, status), count in sorted(self._requests.items())
        }
        return (
            "\n".join(lines)
            + "\n"
            + family("http_requests_total", "counter", "Requests answered.", requests)
            + family("http_active_requests", "gauge", "Requests being answered.", {"": self.active})
            + family(
                "extender_passed_through_total",
                "counter",
                "Extender answers that left every node in because of trouble.",
                {"": self.passed_through},
            )
            + family(
                "extender_removed_nodes_total", "counter", "Nodes that the filter has taken out.", {"": self.removed}
            )
        )
