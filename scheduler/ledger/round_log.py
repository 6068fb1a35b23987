"""Records one round in the ledger and the report, and isolates it from failures outside the scheduler."""

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
    """Ledger, report and lease of one round.

    ``forward``: whether new actions are allowed; False once any source of the round has failed.
    ``until``: deadline for starting work; see :meth:`begin`.
    """

    lease: Lease
    ledger: SqliteLedger
    clock: Clock
    report: RoundReport
    forward: bool = True
    until: datetime | None = None

    def begin(self, duration: timedelta) -> None:
        """Start a phase of the round with a time limit."""
        self.until = self.clock.now() + duration

    def over(self, reserve: timedelta = timedelta(0)) -> bool:
        """Whether no more work may be started; ``reserve``: margin before the deadline."""
        return not self.forward or (self.until is not None and self.clock.now() >= self.until - reserve)

    def fence(self) -> Fence:
        """Confirm the lease; raises ``LeaseLostError`` if it is no longer held."""
        return Fence(self.lease.holder, self.lease.hold())

    @contextlib.contextmanager
    def boundary(self, source: str, *, blocks: bool = True) -> Iterator[None]:
        """Turn any exception in the block into an error of the round, and block new actions.

        The round continues, because expired markers must be released whatever else fails.

        ``blocks``: False if no action depends on it, so that new actions remain allowed.
        """
        try:
            yield
        except (LeaseLostError, KeyboardInterrupt, GeneratorExit):  # not a failure of the source: no further writes
            raise
        except BaseException as error:  # a panic of a native extension is no Exception
            self.forward = self.forward and not blocks
            message = described(error)
            self.error(message if message.startswith(source) else f"{source}: {message}")

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Return the boundary for ledger writes: an action that cannot be recorded must not be made."""
        return self.boundary("the ledger")

    def intend(self, call: Intent | PendingCall) -> int | None:
        """Record a call; None if it could not be recorded, and so must not be made unless it is a release."""
        number = None
        with self.recording():
            number = self.ledger.call(call)
        return number

    def settle(self, number: int | None, settled: Settled) -> None:
        """Record the result of a call; no-op if its intent was not recorded."""
        if number is not None:
            with self.recording():
                self.ledger.settle(number, settled)

    def answered(self, number: int, answer: WriteResult) -> None:
        """Record the result of an evacuation call."""
        confirmed = answer.confirmed or answer.kind == "gone"  # a workload that is gone needs no eviction
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
