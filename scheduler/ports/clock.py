"""The time, injected: that of the machine, and one that is set by hand."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class SystemClock:
    """The machine's clock."""

    def now(self) -> datetime:
        """Give the time, aware, UTC."""
        return datetime.now(UTC)


class ManualClock:
    """A clock that stands until it is moved; for rehearsals and tests."""

    def __init__(self, start: datetime) -> None:
        if start.tzinfo is None:
            raise ValueError(f"start is {start}: give a time with a zone")
        self._now = start

    def now(self) -> datetime:
        """Give the time, aware."""
        return self._now

    def move(self, by: timedelta) -> None:
        """Move on, or back where ``by`` is negative, as a clock that is set."""
        self._now += by
