"""Records one round in the ledger and the report, and keeps it safe from everything that is not the scheduler."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.errors import described
from scheduler.ports.protocols import Clock, Lease, LeaseLostError
from scheduler.ports.readings import Write, WriteResult
from scheduler.ports.records import FindingKind, Intent, PendingCall, Settled
from scheduler.ports.report import RoundReport, WorkStep
from scheduler.ports.workloads import Fence


@dataclass(slots=True)
class RoundLog:
    """The ledger and the report of one round, and the lease that it runs under.

    ``forward``: whether anything new may be done; false once any source of the round has failed.
    ``until``: nothing is started after it; see :meth:`begin`.
    """

    lease: Lease
    ledger: SqliteLedger
    clock: Clock
    report: RoundReport
    forward: bool = True
    until: datetime | None = None

    def begin(self, duration: timedelta) -> None:
        """Begin a part of the round that may take so long."""
        self.until = self.clock.now() + duration

    def over(self, reserve: timedelta = timedelta(0)) -> bool:
        """Whether nothing more may be started; ``reserve``: time to stop before the end."""
        return not self.forward or (self.until is not None and self.clock.now() >= self.until - reserve)

    def fence(self) -> Fence:
        """Make sure of the lease; raises ``LeaseLostError`` if it is not held any more."""
        return Fence(self.lease.holder, self.lease.hold())

    @contextlib.contextmanager
    def boundary(self, source: str, *, blocks: bool = True) -> Iterator[None]:
        """Turn any exception within into an error of the round, after which nothing new is done.

        The round continues: a mark must be released when it expires, whatever else is broken.

        ``source``: what is used within, as the error names it.
        ``blocks``: False: nothing rests on it, so that new actions may follow.
        """
        try:
            yield
        except LeaseLostError:  # no fault of the source: nothing at all may be written any more
            raise
        except Exception as error:
            self.forward = self.forward and not blocks
            message = described(error)
            self.error(message if message.startswith(source) else f"{source}: {message}")

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Use the ledger within: what cannot be recorded must not be done."""
        return self.boundary("the ledger")

    def intend(self, call: Intent | PendingCall) -> int | None:
        """Record a call; None: it could not be recorded, and nothing new may be done by it."""
        number = None
        with self.recording():
            number = self.ledger.call(call)
        return number

    def settle(self, number: int | None, settled: Settled) -> None:
        """Record the outcome of a call, if that was recorded."""
        if number is not None:
            with self.recording():
                self.ledger.settle(number, settled)

    def answered(self, number: int, answer: WriteResult) -> None:
        """Record the answer to a call of an evacuation."""
        confirmed = answer.confirmed or answer.kind == "gone"  # a workload that is gone is where it should be
        self.settle(number, Settled(self.clock.now(), answer.kind, confirmed, answer.message, answer.writes))

    def find(self, node: str, kind: FindingKind, message: str, content: Mapping[str, Any] | None = None) -> None:
        """Record a finding."""
        with self.recording():
            self.ledger.find(self.clock.now(), node, kind, message, content or {})

    def step(
        self,
        node: str,
        verb: str,
        outcome: str,
        workload: str | None = None,
        message: str = "",
        writes: tuple[Write, ...] = (),
    ) -> None:
        """Add a step to the report."""
        self.report.work.append(WorkStep(node, verb, outcome, workload, message, writes))

    def error(self, message: str) -> None:
        """Report an error once."""
        if message not in self.report.errors:
            self.report.errors.append(message)
