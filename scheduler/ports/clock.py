"""Clocks: the system clock, and a manual one for tests."""

from datetime import UTC, datetime, timedelta


class SystemClock:
    """The system clock."""

    def now(self) -> datetime:
        """Return the time, aware, UTC."""
        return datetime.now(UTC)


class ManualClock:
    """A manual clock for benchmarks and tests."""

    def __init__(self, start: datetime) -> None:
        self._now = start

    def now(self) -> datetime:
        """Return the time, aware."""
        return self._now

    def move(self, by: timedelta) -> None:
        """Advance the clock, or set it back if ``by`` is negative."""
        self._now += by
