"""One node on its way in one round: what was read of it, and what of its progress changes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime

from policy.plan import NodeDecision
from scheduler.evacuation.progress import Evacuating, Leaving
from scheduler.ports.readings import NodeReading
from scheduler.ports.workloads import Workload


@dataclass(slots=True)
class Case:
    """A node with a drain mark of ours.

    ``reading``: as re-read in this round.
    ``entry``: its progress, replaced as it moves on.
    ``held``: why nothing new may be done at all.
    ``frozen``: why no workload may be asked or moved; a diagnostic on an empty node harms nobody, and may begin.
    ``going``: what has to go, as listed in this round; None: not listed.
    ``waits``: workloads that are left to end by themselves, by uid, with why.
    """

    reading: NodeReading
    decision: NodeDecision | None
    units: tuple[str, ...]
    entry: Evacuating
    held: str | None = None
    frozen: str | None = None
    going: tuple[Workload, ...] | None = None
    waits: dict[str, str] = field(default_factory=dict)

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

    def leaving(self, uid: str) -> Leaving:
        """Give what is remembered of a workload."""
        return self.entry.leaving[uid]

    def move(self, uid: str, **fields: object) -> None:
        """Move a workload on."""
        known = self.entry.leaving
        self.change(leaving={**known, uid: replace(known[uid], **fields)})  # type: ignore[arg-type]

    def told(self, what: str) -> bool:
        """Whether something was told to people already."""
        return what in self.entry.told

    def tell(self, what: str) -> None:
        """Note that it was told."""
        self.change(told=(*self.entry.told, what))

    def stuck_at(self, now: datetime) -> datetime:
        """Give the time up to which it had reason to wait: asked checkpoints, and jobs whose end was cheaper."""
        return max(self.entry.began_at, min(self.entry.due_at or now, now))
