"""One node on its way in one round, and what is written down of it: in the ledger and in the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from policy.plan import NodeDecision
from scheduler.evacuation.progress import Evacuating
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.errors import LedgerError
from scheduler.ports.lease import Lease
from scheduler.ports.protocols import Clock
from scheduler.ports.readings import NodeReading, Write
from scheduler.ports.records import Call, Finding, FindingKind, Settled
from scheduler.ports.report import RoundReport, WorkStep
from scheduler.ports.workloads import Fence, WorkAnswer, Workload

OUTCOMES: Mapping[str, str] = {
    "done": "done", "already": "already", "gone": "gone", "blocked": "blocked", "conflict": "gone",
    "refused": "failed", "timeout": "unknown",
}  # fmt: skip
"""How the report says what an answer came to."""


@dataclass(slots=True)
class Case:
    """A node with a drain mark of ours.

    ``reading``: as re-read in this round.
    ``entry``: its progress, replaced as it moves on.
    ``held``: why nothing new may be done at all.
    ``frozen``: why no workload may be asked or moved; a diagnostic on an empty node harms nobody, and may begin.
    ``going``: what has to go, as listed in this round; None: not listed.
    """

    reading: NodeReading
    decision: NodeDecision | None
    units: tuple[str, ...]
    entry: Evacuating
    held: str | None = None
    frozen: str | None = None
    going: tuple[Workload, ...] | None = None

    @property
    def node(self) -> str:
        """Its name."""
        return self.reading.view.name

    @property
    def stopped(self) -> str | None:
        """Why no workload may be asked or moved, for whichever reason."""
        return self.held or self.frozen

    @property
    def why(self) -> str:
        """Why it is drained, in words."""
        return "; ".join(self.decision.reasons[:3]) if self.decision is not None else ""

    def change(self, **fields: object) -> None:
        """Move its progress on."""
        self.entry = replace(self.entry, **fields)  # type: ignore[arg-type]

    def move(self, uid: str, **fields: object) -> None:
        """Move a workload on."""
        known = self.entry.leaving
        self.change(leaving={**known, uid: replace(known[uid], **fields)})  # type: ignore[arg-type]

    def first_time(self, what: str) -> bool:
        """Note that something was told to people; false where it was before."""
        if what in self.entry.told:
            return False
        self.change(told=(*self.entry.told, what))
        return True


@dataclass(slots=True)
class Audit:
    """The ledger and the report of one round.

    ``forward``: whether anything new may be done; false once the ledger could not be written.
    """

    ledger: SqliteLedger
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
        """Record what a call came to."""
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
        outcome: str,
        workload: str | None = None,
        words: str = "",
        writes: tuple[Write, ...] = (),
    ) -> None:
        """Add a step to the report."""
        self.report.work.append(WorkStep(node, verb, outcome, workload, words, writes))

    def tell(self, case: Case, what: str, kind: FindingKind, words: str, content: Mapping[str, Any]) -> None:
        """Tell people once, in the ledger and the report, what a program must not settle by itself."""
        if case.first_time(what):
            self.find(case.node, kind, words, content)
            self.step(case.node, "tell", "done", None, words)

    def trouble(self, words: str) -> None:
        """Say once what went wrong."""
        if words not in self.report.errors:
            self.report.errors.append(words)

    def _failed(self, error: LedgerError) -> None:
        self.forward = False
        self.trouble(str(error))


@dataclass(frozen=True, slots=True)
class Turn:
    """What one round gives to whoever acts in it.

    ``until``: nothing is begun after it.
    ``still``: re-reads a node and the switches just before a call: why it must not be made, or None.
    """

    lease: Lease
    audit: Audit
    until: datetime
    still: Callable[[Case], str | None]

    def fence(self) -> Fence:
        """Make sure of the lease; raises ``LeaseLostError`` if it is not held any more."""
        return Fence(self.lease.holder, self.lease.hold())

    def over(self) -> bool:
        """Whether nothing more is to be begun."""
        return self.audit.clock.now() >= self.until or not self.audit.forward
