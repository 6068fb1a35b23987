"""The right to write, as one process holds it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from scheduler.ports.errors import SchedulerError
from scheduler.ports.protocols import Clock, SchedulerAdapter


class LeaseLostError(Exception):
    """Another replica is active, or nobody knows: nothing more may be written."""


@dataclass(slots=True)
class Lease:
    """The right to write, as this process holds it.

    ``until``: None: not held.
    """

    scheduler: SchedulerAdapter
    clock: Clock
    holder: str
    lasts: timedelta
    until: datetime | None = None

    def take(self) -> bool:
        """Take or prolong it; False: another replica holds it.

        Raises ``SchedulerError`` if it is not known.
        """
        self.until = None
        self.until = self.scheduler.hold_lease(self.holder, self.lasts)
        return self.until is not None

    def hold(self) -> datetime:
        """Give its end, prolonged where half of it is over.

        Raises ``LeaseLostError`` if it is not held any more, or it is not known whether it is.
        """
        try:
            if self.until is None or self.until - self.clock.now() < self.lasts / 2:
                self.take()
        except SchedulerError as error:
            raise LeaseLostError(f"it is not known whether the lease is held: {error}") from error
        if self.until is None:
            raise LeaseLostError("another replica holds the lease")
        return self.until
