"""One node under evacuation, in one round."""

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
"""The outcome in the report, by kind of result."""


@dataclass(slots=True)
class DrainCase:
    """A node with a drain marker, or with a cheaper rung in progress.

    ``hold_reason``: why no new action at all is allowed.
    ``freeze_reason``: why no workload may be asked or moved; a diagnostic on an empty node is still allowed.
    ``departing``: workloads that must leave, as listed in this round; None: not listed, see ``unlisted``.
    """

    reading: NodeReading
    decision: NodeDecision | None
    units: tuple[str, ...]
    entry: Evacuating
    hold_reason: str | None = None
    freeze_reason: str | None = None
    departing: tuple[Workload, ...] | None = None
    unlisted: str = ""

    @property
    def node(self) -> str:
        """Name of the node."""
        return self.reading.view.name

    @property
    def stop_reason(self) -> str | None:
        """Why no workload may be asked or moved: ``hold_reason`` or ``freeze_reason``."""
        return self.hold_reason or self.freeze_reason

    @property
    def why(self) -> str:
        """Why the node is drained or probed, or its jobs are asked for checkpoints."""
        if self.entry.request is not None:
            return "; ".join(self.entry.request.reasons)
        return "; ".join(self.decision.reasons[:3]) if self.decision is not None else ""

    def concerns(self, workload: Workload) -> bool:
        """Whether a workload must leave, or belongs to the checkpoint request."""
        request, job = self.entry.request, workload.job
        if request is None or workload.stays is not None:
            return workload.stays is None
        return workload.opt_out is None and job is not None and job.name in request.jobs

    def change(self, **fields: Any) -> None:
        """Update its progress."""
        self.entry = replace(self.entry, **fields)

    def move(self, uid: str, **fields: Any) -> None:
        """Update the progress of a workload."""
        known = self.entry.leaving
        self.change(leaving={**known, uid: replace(known[uid], **fields)})

    def first_time(self, topic: str) -> bool:
        """Record that ``topic`` was reported; False if it was reported before."""
        if topic in self.entry.reported:
            return False
        self.change(reported=(*self.entry.reported, topic))
        return True

    def notify(self, log: RoundLog, topic: str, kind: FindingKind, message: str, content: Mapping[str, Any]) -> None:
        """Report once, in the ledger and the round report, a problem that an operator must resolve."""
        if self.first_time(topic):
            log.find(self.node, kind, message, content)
            log.step(self.node, "report", "done", None, message)


@dataclass(frozen=True, slots=True)
class Request:
    """A checkpoint request.

    ``first``: send the request; otherwise only check for the acknowledgement.
    ``others``: case and uid of further parts: a job on several nodes, or a gang asked by hook, gets one request.
    """

    case: DrainCase
    workload: Workload
    offer: CheckpointOffer
    ask: CheckpointAsk
    first: bool
    others: tuple[tuple[DrainCase, str], ...] = ()

    def payload(self) -> dict[str, Any]:
        """Return the payload for a hook."""
        workload = self.workload
        return {
            "kind": "checkpoint", "key": self.ask.key, "node": workload.node, "reason": self.ask.why,
            "deadline": plain_of(self.ask.deadline),
            "workload": {
                "name": workload.name, "uid": workload.uid, "kind": workload.kind, "owner": workload.owner,
                "job": plain_of(workload.job),
            },
        }  # fmt: skip


StopCheck = Callable[[DrainCase], str | None]
"""Re-reads a node and the switches right before a call; returns why it is not allowed, or None."""
