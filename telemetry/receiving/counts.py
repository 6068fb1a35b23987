"""The receiver's own numbers, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """What the receiver has done since it started.

    Parameters
    ----------
    requests : Counter
        Requests by (route, status).
    dropped : Counter
        Samples and values that did not land, by reason.
    samples, rows, bytes_received, files : int
        Samples taken, rows landed, bytes of bodies, groups and pushes landed.
    last_landed_s : float
        When something last landed, seconds since 1970, 0 if never.
    held : int
        Samples in memory.
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
        lines: list[str] = []

        def family(name: str, kind: str, text: str, values: dict[str, float]) -> None:
            full = f"predrain_receiver_{name}"
            lines.extend((f"# HELP {full} {text}", f"# TYPE {full} {kind}"))
            lines.extend(f"{full}{labels} {value!r}" for labels, value in values.items())

        requests = {
            f'{{route="{route}",status="{status}"}}': float(count)
            for (route, status), count in sorted(self.requests.items())
        }
        dropped = {
            f'{{reason="{reason.replace(" ", "_")}"}}': float(count) for reason, count in sorted(self.dropped.items())
        }
        family("requests_total", "counter", "Requests answered.", requests)
        family("dropped_total", "counter", "Samples and values that did not land.", dropped)
        family("samples_total", "counter", "Samples of ours that landed.", {"": float(self.samples)})
        family("rows_total", "counter", "Rows that landed.", {"": float(self.rows)})
        family("landings_total", "counter", "Groups of requests and pushes that landed.", {"": float(self.files)})
        family("bytes_total", "counter", "Bytes of bodies received.", {"": float(self.bytes_received)})
        family("held_samples", "gauge", "Samples in memory.", {"": float(self.held)})
        family("last_landed_seconds", "gauge", "When something last landed, since 1970.", {"": self.last_landed_s})
        return "\n".join(lines) + "\n"
