"""The receiver's own numbers, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from telemetry.exposition.writer import family, labels


@dataclass(slots=True)
class Counts:
    """What the receiver has done since it started.

    ``dropped``: samples and values that did not land, by reason.
    ``samples``, ``rows``, ``bytes_received``, ``files``: samples taken, rows landed, bytes of bodies, groups and pushes
    landed.
    ``last_landed_s``: when something last landed, seconds since 1970, 0 if never.
    """

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    rows: int = 0
    bytes_received: int = 0
    files: int = 0
    last_landed_s: float = 0.0
    held: int = 0

    def exposition(self) -> str:
        """Return the page of ``GET /metrics``."""
        requests = {
            labels(route=route, status=str(status)): count for (route, status), count in sorted(self.requests.items())
        }
        dropped = {labels(reason=reason.replace(" ", "_")): count for reason, count in sorted(self.dropped.items())}
        at, files = self.last_landed_s, self.files
        return (
            family("receiver_requests_total", "counter", "Requests answered.", requests)
            + family("receiver_dropped_total", "counter", "Samples and values that did not land.", dropped)
            + family("receiver_samples_total", "counter", "Samples of ours that landed.", {"": self.samples})
            + family("receiver_rows_total", "counter", "Rows that landed.", {"": self.rows})
            + family("receiver_landings_total", "counter", "Groups of requests and pushes that landed.", {"": files})
            + family("receiver_bytes_total", "counter", "Bytes of bodies received.", {"": self.bytes_received})
            + family("receiver_held_samples", "gauge", "Samples in memory.", {"": self.held})
            + family("receiver_last_landed_seconds", "gauge", "When something last landed, since 1970.", {"": at})
        )
