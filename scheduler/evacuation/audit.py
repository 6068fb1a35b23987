"""What is written down of an evacuation: each call before it is made, its outcome, and what was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scheduler.ports.errors import LedgerError
from scheduler.ports.protocols import Clock, Ledger
from scheduler.ports.readings import Write
from scheduler.ports.records import Call, Finding, FindingKind, Settled
from scheduler.ports.report import RoundReport, WorkStep
from scheduler.ports.workloads import WorkAnswer


@dataclass(slots=True)
class Audit:
    """The ledger and the report of one round.

    ``forward``: whether anything new may be done; false once the ledger could not be written.
    """

    ledger: Ledger
    clock: Clock
    report: RoundReport
    forward: bool = True

    def intend(self, call: Call) -> int | None:
        """Record a call; None: it could not be recorded, and must not be made."""
        try:
            return self.ledger.call(call)
        except LedgerError as error:
            self._failed(error)
            return None

    def settle(self, number: int, answer: WorkAnswer) -> None:
        """Record what it came to."""
        settled = Settled(self.clock.now(), answer.kind, answer.confirmed, answer.words, answer.writes)
        try:
            self.ledger.settle_call(number, settled)
        except LedgerError as error:
            self._failed(error)

    def find(self, node: str, kind: FindingKind, words: str, content: Mapping[str, Any] | None = None) -> None:
        """Record what was found."""
        try:
            self.ledger.find(Finding(self.clock.now(), node, kind, words, content or {}))
        except LedgerError as error:
            self._failed(error)

    def step(
        self,
        node: str,
        verb: str,
        came_to: str,
        workload: str | None = None,
        words: str = "",
        writes: tuple[Write, ...] = (),
    ) -> None:
        """Say it in the report."""
        self.report.work.append(WorkStep(node, verb, came_to, workload, words, writes))

    def trouble(self, words: str) -> None:
        """Say once what went wrong."""
        if words not in self.report.errors:
            self.report.errors.append(words)

    def _failed(self, error: LedgerError) -> None:
        self.forward = False
        self.trouble(str(error))


CAME_TO: Mapping[str, str] = {
    "done": "done", "already": "already", "gone": "gone", "blocked": "blocked", "conflict": "gone",
    "refused": "failed", "timeout": "unknown",
}  # fmt: skip
"""How the report says what an answer came to."""
