"""A clock for tests."""

from datetime import UTC, datetime, timedelta

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Clock:
    """A wall clock, when it is called, and a monotonic one. Both stand still until they are moved or slept on."""

    def __init__(self, now: datetime = NOW) -> None:
        self.now, self.seconds = now, 0.0
        self.slept: list[float] = []

    def __call__(self) -> datetime:
        return self.now

    def monotonic(self) -> float:
        return self.seconds

    def move(self, **by: float) -> None:
        span = timedelta(**by)
        self.now, self.seconds = self.now + span, self.seconds + span.total_seconds()

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.move(seconds=seconds)
