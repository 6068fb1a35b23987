"""One node that is being emptied, in one round."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from policy.plan import NodeDecision
from scheduler.evacuation.progress import Evacuating
from scheduler.ledger.round_log import RoundLog
from scheduler.ports.codec import plain_of
from scheduler.ports.readings import NodeReading
from scheduler.ports.records import FindingKind
from scheduler.ports.workloads import CheckpointAsk, CheckpointOffer, Workload

OUTCOMES: Mapping[str, str] = {
    "done": "done", "already": "already", "gone": "gone", "blocked": "blocked", "conflict": "gone",
    "refused": "failed", "timeout": "unknown",
}  # fmt: skip
"""The outcome in the report, by the kind of answer."""


@dataclass(slots=True)
class DrainCase:
    """A node with a drain mark of predrain, or on which a cheaper rung is carried out.

    ``reading``: as re-read in this round.
    ``entry``: its progress, replaced as it moves on.
    ``held``: why nothing new may be done at all.
    ``frozen``: why no workload may be asked or moved; a diagnostic on an empty node harms no workload, and may begin.
    ``going``: what has to go, as listed in this round; None: not listed, ``unlisted`` says why.
    """

    reading: NodeReading
    decision: NodeDecision | None
    units: tuple[str, ...]
    entry: Evacuating
    held: str | None = None
    frozen: str | None = None
    going: tuple[Workload, ...] | None = None
    unlisted: str = ""

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
        """Why it is drained, probed or asked for checkpoints."""
        if self.entry.request is not None:
            return "; ".join(self.entry.request.reasons)
        return "; ".join(self.decision.reasons[:3]) if self.decision is not None else ""

    def concerns(self, workload: Workload) -> bool:
        """Whether a workload has to leave, or is one of those that a request for checkpoints is about."""
        request, job = self.entry.request, workload.job
        if request is None or workload.stays is not None:
            return workload.stays is None
        return workload.opt_out is None and job is not None and job.name in request.jobs

    def change(self, **fields: Any) -> None:
        """Move its progress on."""
        self.entry = replace(self.entry, **fields)

    def move(self, uid: str, **fields: Any) -> None:
        """Move a workload on."""
        known = self.entry.leaving
        self.change(leaving={**known, uid: replace(known[uid], **fields)})

    def first_time(self, what: str) -> bool:
        """Note that something was reported to people; false where it was before."""
        if what in self.entry.reported:
            return False
        self.change(reported=(*self.entry.reported, what))
        return True

    def notify(self, log: RoundLog, what: str, kind: FindingKind, message: str, content: Mapping[str, Any]) -> None:
        """Report to people once, in the ledger and the report, what a program must not settle by itself."""
        if self.first_time(what):
            log.find(self.node, kind, message, content)
            log.step(self.node, "report", "done", None, message)


@dataclass(frozen=True, slots=True)
class Request:
    """A request for a checkpoint.

    ``first``: whether it is to be asked; else only whether it was written.
    ``others``: case and uid of further parts: a run of a job on several nodes is asked once, and a gang by its hook.
    """

    case: DrainCase
    workload: Workload
    offer: CheckpointOffer
    ask: CheckpointAsk
    first: bool
    others: tuple[tuple[DrainCase, str], ...] = ()

    def payload(self) -> dict[str, Any]:
        """Return what a hook is sent."""
        workload = self.workload
        return {
            "kind": "checkpoint", "key": self.ask.key, "node": workload.node, "reason": self.ask.why,
            "deadline": plain_of(self.ask.deadline),
            "workload": {
                "name": workload.name, "uid": workload.uid, "kind": workload.kind, "owner": workload.owner,
                "job": plain_of(workload.job),
            },
        }  # fmt: skip


Still = Callable[[DrainCase], str | None]
"""Reads a node and the switches again, right before a call: why it must not be made; None: it may."""
