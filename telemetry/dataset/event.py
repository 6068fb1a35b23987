"""An event before it is assigned to a GPU. Does not import pandas, because the controller imports it."""

from datetime import datetime
from typing import Any, Final, NamedTuple

from foundation.instants import to_ms

EVENT_TYPES: Final = (
    "xid", "failure", "repair", "replacement", "driver", "diagnostic", "drain", "maintenance", "other"
)  # fmt: skip


class Event(NamedTuple):
    """An event on a GPU or node.

    ``timestamp``: when it happened; aware.
    ``type``: one of :data:`EVENT_TYPES`.
    ``known_at``: when a collector could first have reported it; aware.
    ``gpu``, ``pci_bus_id``: both None: the whole node.
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

    def row(self) -> dict[str, Any]:
        """Return the event as JSON types, times in milliseconds since 1970 UTC."""
        # Our clock may be behind the source's: an event cannot be known before it happens.
        known_at = max(self.known_at, self.timestamp)
        return self._asdict() | {"timestamp": to_ms(self.timestamp), "known_at": to_ms(known_at)}
