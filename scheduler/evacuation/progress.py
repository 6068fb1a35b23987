"""Progress of each evacuation, stored in the scheduler, so that a new leader on another machine continues it."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from policy.ladder.rungs import Rung
from policy.plan import RungRequest
from scheduler.ports.stored_state import StoredValue
from scheduler.ports.workloads import DiagnosticKind, Workloads

Asked = Literal["planned", "asked", "acknowledged", "failed", "none"]
Phase = Literal["evacuating", "asking", "verifying", "passed", "failed", "inconclusive", "done"]
SETTLED: tuple[Phase, ...] = ("passed", "failed", "inconclusive", "done")
"""Phases in which nothing more is done about a node."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """One workload that has to go.

    ``key``: of the request for a checkpoint.
    ``asked``: ``planned``: to be asked, or it is unknown whether it was; ``asked``; ``acknowledged``; ``failed``: it
    says that it cannot; ``none``: it names no way.
    ``deadline``: until when the acknowledgement is waited for; set once, so that a restart does not begin the wait
    again. None: nothing is asked.
    ``origin``: what starts its successor. ``returned``: how often work of this origin was evicted from the node before.
    ``gone_by``: when it should be gone: set when an eviction is first accepted, or it is first seen on its way out.
    ``accepted``: evictions that were accepted.
    ``again_at``: nothing more is tried before.
    ``tries``: consecutive evictions that were not accepted.
    ``message``: why it is still there.
    """

    name: str
    uid: str
    key: str
    asked: Asked
    deadline: datetime | None = None
    origin: str = ""
    returned: int = 0
    gone_by: datetime | None = None
    accepted: int = 0
    again_at: datetime | None = None
    tries: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True)
class Evacuating:
    """One node on its way: it is emptied, or a cheaper rung of the ladder is carried out on it.

    ``began_at``: when its drain mark was first seen here; part of all keys, so that another drain has others.
    ``phase``: ``evacuating``; ``asking``: jobs are asked for a checkpoint and stay; ``verifying``: empty, a diagnostic
    runs or is to; then what it came to, or ``done`` where none follows.
    ``request``: the cheap rung that is carried out; None: its drain.
    ``mark_since``: what the drain mark says about its own begin: another value means another drain. It may come from
    the clock of another machine, and is only compared with itself.
    ``waiting_since``: when the wait began that is reported as stuck after a while, whatever a workload names.
    ``evicted``: how often work of one origin was evicted, by origin.
    ``attempt``: of the diagnostic, counted through.
    ``first_attempt``: the first of this series: an inconclusive one is repeated immediately, up to a limit.
    ``started_at``: start of this attempt; None: not yet.
    ``ended_at``: when the last diagnostic came to something.
    ``remedy``: what the last attempt was asked to carry out.
    ``reported``: what was reported to people about it, each once.
    """

    began_at: datetime
    phase: Phase = "evacuating"
    leaving: Mapping[str, Leaving] = field(default_factory=dict)
    mark_since: datetime | None = None
    waiting_since: datetime | None = None
    evicted: Mapping[str, int] = field(default_factory=dict)
    empty_at: datetime | None = None
    attempt: int = 1
    first_attempt: int = 1
    started_at: datetime | None = None
    ended_at: datetime | None = None
    boot_id: str | None = None
    units: tuple[str, ...] = ()
    remedy: str | None = None
    reported: tuple[str, ...] = ()
    message: str = ""
    request: RungRequest | None = None

    @property
    def rung(self) -> Rung:
        """What is carried out."""
        return "drain" if self.request is None else self.request.rung

    def verify_key(self, node: str) -> str:
        """Name this attempt of the diagnostic."""
        return key_of(node, self.began_at, f"verify {self.attempt}")


@dataclass(frozen=True, slots=True)
class Result:
    """What a diagnostic came to.

    ``units``: GPUs that were in the node.
    ``kind``: ``passed``, ``failed`` or ``inconclusive``.
    ``failed_units``: none named: not known which.
    ``rung``: what it was started for. ``remedy``: what it was asked to carry out.
    """

    node: str
    key: str
    units: tuple[str, ...]
    kind: DiagnosticKind
    at: datetime
    failed_units: tuple[str, ...] = ()
    message: str = ""
    rung: Rung = "drain"
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class EvacuationProgress:
    """All of it.

    ``nodes``: nodes with a drain mark of predrain, or on which a cheaper rung is carried out, by name.
    ``results``: those of the last days, oldest first.
    """

    nodes: Mapping[str, Evacuating] = field(default_factory=dict)
    results: tuple[Result, ...] = ()

    def passed_at(self, node: str) -> datetime | None:
        """When a diagnostic last passed on the emptied node; None: never, or one failed since."""
        mine = [
            result for result in self.results
            if result.node == node and (result.kind == "failed" or (result.kind, result.rung) == ("passed", "drain"))
        ]  # fmt: skip
        return mine[-1].at if mine and mine[-1].kind == "passed" else None

    def with_results(self, new: Iterable[Result], oldest: datetime) -> "EvacuationProgress":
        """Take note of results, each once, and forget those from before a time."""
        known = {result.key: result for result in self.results}
        for result in new:
            known.setdefault(result.key, result)
        return replace(self, results=tuple(result for result in known.values() if result.at >= oldest))


def key_of(node: str, began_at: datetime, what: str) -> str:
    """Name a call: about one thing, in one drain of one node."""
    text = f"{node}|{began_at.timestamp():.3f}|{what}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def stored_progress(workloads: Workloads) -> StoredValue[EvacuationProgress]:
    """Return the progress as the scheduler keeps it.

    Where it is damaged, checkpoints are asked for again, and no deadline is over.
    """
    return StoredValue(
        EvacuationProgress(), "predrain-evacuations 1", "the evacuation state", "verification.retention",
        workloads.load_progress, workloads.save_progress,
    )  # fmt: skip
