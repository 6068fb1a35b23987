"""One event as a collector hears of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from foundation.instants import to_ms


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    ``timestamp``: Aware; when it happened.
    ``type``: one of :data:`telemetry.dataset.schema.EVENT_TYPES`.
    ``known_at``: Aware; when a collector could first have reported it, never before ``timestamp``.
    ``code``, ``detail``, ``gpu``, ``pci_bus_id``: ``gpu`` and ``pci_bus_id`` null: the whole node.
    """

    timestamp: datetime
    node: str
    type: str
    source: str
    known_at: datetime
    code: str | None = None
    detail: str | None = None
    gpu: str | None = None
    pci_bus_id: str | None = None

    def __post_init__(self) -> None:
        # A clock that runs behind the source's would otherwise report the future.
        if self.known_at < self.timestamp:
            object.__setattr__(self, "known_at", self.timestamp)

    def row(self) -> dict[str, Any]:
        """Return the event as JSON types, instants in whole milliseconds since 1970 UTC."""
        return asdict(self) | {"timestamp": to_ms(self.timestamp), "known_at": to_ms(self.known_at)}
