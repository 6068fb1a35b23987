"""Clocks: that of the machine, and one that is set by hand."""

from datetime import UTC, datetime, timedelta


class SystemClock:
    """The machine's clock."""

    def now(self) -> datetime:
        """Return the time, aware, UTC."""
        return datetime.now(UTC)


class ManualClock:
    """A clock that is moved by hand; for benchmarks and tests."""

    def __init__(self, start: datetime) -> None:
        self._now = start

    def now(self) -> datetime:
        """Return the time, aware."""
        return self._now

    def move(self, by: timedelta) -> None:
        """Move it, back where ``by`` is negative."""
        self._now += by
