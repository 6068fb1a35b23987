"""An event before it is placed on a GPU or node. Imports no pandas: the controller reads it."""

from datetime import datetime
from typing import Any, Final, NamedTuple

from foundation.instants import to_ms

EVENT_TYPES: Final = (
    "xid", "failure", "repair", "replacement", "driver", "diagnostic", "drain", "maintenance", "other"
)  # fmt: skip
"""Every value of the ``type`` column of events."""


class Event(NamedTuple):
    """Something that happened.

    ``timestamp``: Aware; when it happened.
    ``type``: one of :data:`EVENT_TYPES`.
    ``known_at``: Aware; when a collector could first have reported it.
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

    def row(self) -> dict[str, Any]:
        """Return the event as JSON types, instants in whole milliseconds since 1970 UTC."""
        # A clock that runs behind the source's would otherwise report the future.
        known_at = max(self.known_at, self.timestamp)
        return self._asdict() | {"timestamp": to_ms(self.timestamp), "known_at": to_ms(known_at)}
