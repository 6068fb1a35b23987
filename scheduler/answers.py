"""What is about to be written to a scheduler, under which condition, and what it answered."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from policy.fleet import Marks

AnswerKind = Literal["done", "already", "conflict", "timeout", "refused", "gone"]


@dataclass(frozen=True, slots=True)
class Write:
    """One change of one thing in a scheduler, exactly as it is sent.

    ``target``: what is changed: ``node n17``.
    ``path``: which part of it, such as ``metadata.annotations[predrain.io/prediction]`` or ``Reason``.
    ``before``, ``after``: its content as texts; None: not there.
    """

    target: str
    path: str
    before: str | None
    after: str | None

    @property
    def words(self) -> str:
        """The change in one line."""
        return f"{self.target}: {self.path}: {_shown(self.before)} -> {_shown(self.after)}"


def _shown(text: str | None) -> str:
    return "(none)" if text is None else text


@dataclass(frozen=True, slots=True)
class Precondition:
    """What must still be true of a node when it is written to.

    ``version``: of the node as it was re-read just before: Kubernetes' resourceVersion; for Slurm, which has none, a
    digest of state, reason and the time of the reason.
    ``boot_id``: a node that booted anew is another node.
    ``marks``: what of ours stood on it.
    ``holder``: who holds the lease; an adapter that can, lets the scheduler compare.
    ``until``: the write must have been sent by then: the end of the lease. Aware.
    """

    version: str
    boot_id: str | None
    marks: Marks
    holder: str
    until: datetime


@dataclass(frozen=True, slots=True)
class Answer:
    """What a scheduler answered to a write.

    ``kind``: ``done``; ``already``: it stood so before, nothing was written; ``conflict``: somebody else wrote in
    between, nothing was written; ``timeout``: no answer, and nobody knows whether it was written; ``refused``: the
    scheduler will not (rights, a quota, a fault of its own), nothing was written; ``gone``: there is no such node.
    ``version``: of what was written to, afterwards.
    """

    kind: AnswerKind
    words: str = ""
    writes: tuple[Write, ...] = ()
    version: str | None = None

    @property
    def confirmed(self) -> bool:
        """Whether what was asked for stands now."""
        return self.kind in ("done", "already")
