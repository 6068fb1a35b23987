"""Progress of each evacuation, stored in the scheduler, so that a new leader on another machine continues it."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from policy.ladder.rungs import Rung
from policy.plan import RungRequest, not_after
from scheduler.evacuation.settings import EvacuationSettings
from scheduler.ports.stored_state import StoredValue
from scheduler.ports.workloads import DiagnosticKind, Workloads

RequestState = Literal["planned", "asked", "acknowledged", "failed", "none"]
Phase = Literal["evacuating", "asking", "verifying", "passed", "failed", "inconclusive", "done"]
SETTLED: tuple[Phase, ...] = ("passed", "failed", "inconclusive", "done")
"""Final phases."""


@dataclass(frozen=True, slots=True)
class LeavingWorkload:
    """Progress of one workload that must leave.

    ``key``: key of its checkpoint request.
    ``asked``: ``planned``: not sent yet, or unknown; ``asked``; ``acknowledged``; ``failed``: the workload cannot write
    a checkpoint; ``none``: no request.
    ``deadline``: deadline of the acknowledgement, set once, so that a restart does not extend it. None: no request.
    ``origin``: what starts its successor. ``returned``: earlier evictions of work of this origin from the node.
    ``gone_by``: when it should be gone; set when an eviction is first accepted, or it is first seen terminating.
    ``tries``: consecutive evictions that were not accepted.
    """

    name: str
    uid: str
    key: str
    asked: RequestState
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
    """Progress of one node: its evacuation, or a cheaper rung of the ladder.

    ``began_at``: when its drain marker was first seen; part of all keys, so that each drain has its own.
    ``phase``: ``evacuating``; ``asking``: jobs are asked for a checkpoint and stay; ``verifying``: the node is empty,
    and the diagnostic is due or running; then its result, or ``done`` without a diagnostic.
    ``request``: the cheaper rung; None: a drain.
    ``mark_since``: start that the drain marker states; another value means another drain. It may come from another
    machine's clock, and is only compared for equality.
    ``waiting_since``: start of the wait that is reported as stuck after a while.
    ``evicted``: number of evictions, by origin of the work.
    ``first_attempt``: first attempt of this series: inconclusive ones are repeated immediately, up to a limit.
    ``started_at``: start of this attempt; None: not started.
    """

    began_at: datetime
    phase: Phase = "evacuating"
    leaving: Mapping[str, LeavingWorkload] = field(default_factory=dict)
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
        """The rung in progress."""
        return "drain" if self.request is None else self.request.rung

    def verify_key(self, node: str) -> str:
        """Return the key of this attempt of the diagnostic."""
        return key_of(node, self.began_at, f"verify {self.attempt}")


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a diagnostic.

    ``kind``: ``passed``, ``failed`` or ``inconclusive``.
    ``failed_units``: empty if unknown.
    ``rung``: ``drain`` or ``probe``. ``remedy``: the requested remedy.
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
    """The stored state of all evacuations.

    ``nodes``: nodes with a drain marker or a cheaper rung in progress, by name.
    ``results``: results within the retention, oldest first.
    """

    nodes: Mapping[str, Evacuating] = field(default_factory=dict)
    results: tuple[Result, ...] = ()

    def passed_at(self, node: str) -> datetime | None:
        """When a diagnostic last passed on the drained node; None if never, or if one failed since."""
        of_node = [
            result for result in self.results
            if result.node == node and (result.kind == "failed" or (result.kind, result.rung) == ("passed", "drain"))
        ]  # fmt: skip
        return of_node[-1].at if of_node and of_node[-1].kind == "passed" else None

    def with_results(self, new: Iterable[Result], oldest: datetime) -> "EvacuationProgress":
        """Add results, each once, and drop those before ``oldest``."""
        known = {result.key: result for result in self.results}
        for result in new:
            known.setdefault(result.key, result)
        return replace(self, results=tuple(result for result in known.values() if result.at >= oldest))


_DATES_KEPT = frozenset({"began_at", "mark_since", "deadline", "gone_by", "again_at", "request"})
# Fields that are part of keys, or of another clock, or lie ahead.


def bounded_waits(progress: EvacuationProgress, settings: EvacuationSettings, now: datetime) -> EvacuationProgress:
    """Return the progress without waits longer than the settings allow, which a clock that was ahead recorded."""
    bounded: EvacuationProgress = not_after(progress, now, _DATES_KEPT)
    nodes = {
        name: replace(
            entry,
            waiting_since=now if entry.waiting_since is None and entry.began_at > now else entry.waiting_since,
            leaving={uid: _bounded(part, settings, now) for uid, part in entry.leaving.items()},
        )
        for name, entry in bounded.nodes.items()
    }
    return replace(bounded, nodes=nodes)


def _bounded(leaving: LeavingWorkload, settings: EvacuationSettings, now: datetime) -> LeavingWorkload:
    retry = now + settings.retry_max_delay
    ended = retry + settings.stuck_after
    deadline, gone_by, again_at = leaving.deadline, leaving.gone_by, leaving.again_at
    return replace(
        leaving,
        deadline=None if deadline is None else min(deadline, now + settings.checkpoint.max_timeout),
        gone_by=None if gone_by is None else min(gone_by, ended),
        again_at=None if again_at is None else min(again_at, retry if leaving.tries else ended),
    )


def key_of(node: str, began_at: datetime, subject: str) -> str:
    """Return the idempotency key of a call about ``subject`` in one drain of one node."""
    text = f"{node}|{began_at.timestamp():.3f}|{subject}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def stored_progress(workloads: Workloads) -> StoredValue[EvacuationProgress]:
    """Return the progress stored in the scheduler; if it is corrupt, requests and deadlines start over."""
    return StoredValue(
        EvacuationProgress(), "predrain-evacuations 1", "the evacuation state", "verification.retention",
        workloads.load_progress, workloads.save_progress,
    )  # fmt: skip
