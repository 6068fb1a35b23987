"""One node on its way in one round, and what is written down of it: in the ledger and in the report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from policy.plan import NodeDecision
from scheduler.evacuation.progress import Evacuating
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.errors import LedgerError
from scheduler.ports.protocols import Clock, Lease
from scheduler.ports.readings import Answer, NodeReading, Write
from scheduler.ports.records import Call, Finding, FindingKind, Settled
from scheduler.ports.report import RoundReport, WorkStep
from scheduler.ports.workloads import Fence, Workload

OUTCOMES: Mapping[str, str] = {
    "done": "done", "already": "already", "gone": "gone", "blocked": "blocked", "conflict": "gone",
    "refused": "failed", "timeout": "unknown",
}  # fmt: skip
"""How the report says what an answer came to."""


@dataclass(slots=True)
class Case:
    """A node with a drain mark of predrain.

    ``reading``: as re-read in this round.
    ``entry``: its progress, replaced as it moves on.
    ``held``: why nothing new may be done at all.
    ``frozen``: why no workload may be asked or moved; a diagnostic on an empty node harms no workload, and may begin.
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

    def wait_until(self, at: datetime | None) -> None:
        """Note that there is reason to wait, up to a time."""
        if at is not None and (self.entry.due_at is None or at > self.entry.due_at):
            self.change(due_at=at)

    def first_time(self, what: str) -> bool:
        """Note that something was reported to people; false where it was before."""
        if what in self.entry.told:
            return False
        self.change(told=(*self.entry.told, what))
        return True


@dataclass(slots=True)
class Turn:
    """One round: the lease it runs under, and the ledger and the report that it is written down in.

    ``until``: nothing is begun after it.
    ``still``: re-reads a node and the switches just before a call: why it must not be made, or None.
    ``forward``: whether anything new may be done; false once the ledger could not be written.
    """

    lease: Lease
    ledger: SqliteLedger
    clock: Clock
    report: RoundReport
    until: datetime
    still: Callable[[Case], str | None]
    forward: bool = True

    def fence(self) -> Fence:
        """Make sure of the lease; raises ``LeaseLostError`` if it is not held any more."""
        return Fence(self.lease.holder, self.lease.hold())

    def over(self, until: datetime | None = None) -> bool:
        """Whether nothing more is to be begun."""
        return self.clock.now() >= (until or self.until) or not self.forward

    def intend(self, call: Call) -> int | None:
        """Record a call; None: it could not be recorded, and must not be made."""
        number = None
        with self._recording():
            number = self.ledger.call(call)
        return number

    def settle(self, number: int, answer: Answer) -> None:
        """Record what a call came to."""
        with self._recording():
            settled = answer.confirmed or answer.kind == "gone"  # a workload that is gone is where it should be
            self.ledger.settle_call(
                number, Settled(self.clock.now(), answer.kind, settled, answer.words, answer.writes)
            )

    def find(self, node: str, kind: FindingKind, words: str, content: Mapping[str, Any] | None = None) -> None:
        """Record what was found."""
        with self._recording():
            self.ledger.find(Finding(self.clock.now(), node, kind, words, content or {}))

    def tell(self, case: Case, what: str, kind: FindingKind, words: str, content: Mapping[str, Any]) -> None:
        """Tell people once, in the ledger and the report, what a program must not settle by itself."""
        if case.first_time(what):
            self.find(case.node, kind, words, content)
            self.step(case.node, "tell", "done", None, words)

    def step(
        self, node: str, verb: str, outcome: str, workload: str | None = None, words: str = "",
        writes: tuple[Write, ...] = (),
    ) -> None:  # fmt: skip
        """Add a step to the report."""
        self.report.work.append(WorkStep(node, verb, outcome, workload, words, writes))

    def trouble(self, words: str) -> None:
        """Say once what went wrong."""
        if words not in self.report.errors:
            self.report.errors.append(words)

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        try:
            yield
        except LedgerError as error:
            self.forward = False
            self.trouble(str(error))
