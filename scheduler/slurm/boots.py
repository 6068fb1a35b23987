"""Telling one boot from another by a boot time that wavers."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

SAME: Final = timedelta(seconds=120)
"""slurmd works its boot time out from the uptime whenever it registers; it differs by seconds each time."""


class Boots:
    """Names each node's boot by the first boot time that was seen of it; within one process."""

    def __init__(self) -> None:
        self._known: dict[str, datetime] = {}

    def of(self, node: str, booted_at: datetime | None) -> str | None:
        """Name the boot.

        ``booted_at``: Aware. None: Slurm does not know it, as for a minute after each UNDRAIN; then it is taken for the
        boot that was seen last.
        Returns: None: none was ever seen.
        """
        known = self._known.get(node)
        if booted_at is None:
            return None if known is None else known.isoformat()
        if known is None or abs(booted_at - known) > SAME:
            self._known[node] = known = booted_at
        return known.isoformat()
