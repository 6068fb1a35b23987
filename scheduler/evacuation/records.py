"""What the ledger is given of an evacuation: each call before it is made, and what was found on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from scheduler.answers import Write
from scheduler.evacuation.workload import Workload

CallKind = Literal["checkpoint", "evict", "verify", "escalate"]
FindingKind = Literal[
    "began", "acknowledged", "no_answer", "waits", "stuck", "empty", "verified", "escalated", "ended", "called_off"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is about to be made.

    ``kind``: ``checkpoint``, ``evict``, ``verify``, ``escalate``.
    ``key``: the idempotency key: the same for each repetition.
    ``means``: through what: ``scheduler``, ``webhook``, ``command``.
    ``workload``: as it was listed just before; None: the call is about the node.
    ``writes``: what is to be written, where that is known.
    """

    at: datetime
    node: str
    kind: CallKind
    key: str
    means: str
    workload: Workload | None = None
    why: str = ""
    writes: tuple[Write, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that was found out about a node on its way.

    ``kind``: ``began``: a drain mark stands and is followed; ``acknowledged``, ``no_answer``: of a checkpoint;
    ``waits``: for a workload's own end; ``stuck``; ``empty``; ``verified``: a diagnostic ended; ``escalated``: people
    were told; ``ended``: the mark is gone; ``called_off``: the mark stands and nothing more is done.
    ``content``: what belongs to it, as plain JSON.
    """

    at: datetime
    node: str
    kind: FindingKind
    words: str
    content: Mapping[str, Any] = field(default_factory=dict)
