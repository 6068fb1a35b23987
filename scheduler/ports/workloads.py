"""Protocols of the evacuation's dependencies: workloads of a scheduler, diagnostics and the operator's hooks.

All calls must be idempotent: a process may die after a call before it has recorded the outcome, and the next process,
possibly on another machine, repeats it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, Protocol

from foundation.durations import Duration
from policy.fleet import JobView
from policy.ladder.remedies import Remedy
from scheduler.ports.readings import StoredState, Write, WriteResult

CheckpointKind = Literal["acknowledged", "waiting", "failed", "gone", "unknown"]
DiagnosticKind = Literal["passed", "failed", "inconclusive", "running", "missing"]


@dataclass(frozen=True, slots=True)
class Fence:
    """The lease under which a call may be made.

    ``until``: the call must be sent by then, the expiry of the lease; aware.
    """

    holder: str
    until: datetime


@dataclass(frozen=True, slots=True)
class CheckpointAsk:
    """A checkpoint request.

    ``key``: idempotency key, for one recipient in one drain; 32 hexadecimal digits.
    ``deadline``: after it the workload may be evicted without an acknowledgement; aware.
    """

    key: str
    deadline: datetime
    why: str


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """State of a checkpoint request.

    ``kind``: ``acknowledged``: written; ``waiting``: not yet; ``failed``: the workload cannot write one; ``gone``: the
    workload no longer exists, or has another uid; ``unknown``: it cannot be read.
    """

    kind: CheckpointKind
    message: str = ""


class Workloads(Protocol):
    """The workloads of a scheduler.

    Reads raise :class:`scheduler.ports.errors.SchedulerError`, also instead of an incomplete list, because a missing
    workload would look like an empty node. Writes return errors of the scheduler in the result and do not raise.
    """

    def on_node(self, node: str) -> "tuple[Workload, ...]":
        """List the workloads on a node, uncached; finished ones may be missing."""

    def ask_checkpoint(self, workload: "Workload", ask: CheckpointAsk, fence: Fence) -> WriteResult:
        """Request a checkpoint through the scheduler.

        A repetition with the same key writes nothing (``already``); a signal is sent at least once, as the scheduler
        keeps no record of it. ``conflict`` if the workload has another uid.
        """

    def checkpoint_state(self, workload: "Workload", key: str) -> CheckpointState:
        """Return the state of the request with this key."""

    def evict(self, workload: "Workload", fence: Fence) -> WriteResult:
        """Evict exactly this uid with its grace period, never by force or against a disruption budget.

        ``already`` if it is terminating.
        """

    def preview(self, workload: "Workload") -> tuple[Write, ...]:
        """Return the writes of :meth:`evict`."""

    def load_progress(self) -> StoredState:
        """Read the progress of the evacuations, stored in the scheduler separately from the safety state."""

    def save_progress(self, text: str, version: str) -> WriteResult:
        """Replace the progress if it still has this version; the result has the new version."""


@dataclass(frozen=True, slots=True)
class DiagnosticResult:
    """State of a diagnostic.

    ``kind``: ``passed`` and ``failed``: it completed and reported so; ``inconclusive``: it ended without a verdict
    (aborted, evicted, no output, output for another node), which releases no node and yields no label; ``running``;
    ``missing``: none with this key.
    ``failed_units``: failed GPUs, named as in the scores; empty if unknown.
    """

    kind: DiagnosticKind
    message: str = ""
    failed_units: tuple[str, ...] = ()
    at: datetime | None = None


class Verification(Protocol):
    """Runner of the operator's procedure on a node: an optional remedy, and a diagnostic."""

    def start(
        self, node: str, units: Sequence[str], key: str, fence: Fence, remedy: Remedy | None, *, probe: bool
    ) -> WriteResult:
        """Start the diagnostic despite predrain's taint; ``already`` if one with this key was started before.

        ``probe``: the node is idle and in service; run at the lowest priority, so that any job preempts it.
        """

    def result(self, node: str, key: str) -> DiagnosticResult:
        """Return the state; raises ``SchedulerError`` if it cannot be read."""

    def drop(self, node: str, key: str) -> None:
        """Stop the diagnostic and clean up; failures are ignored, because it has its own time limit."""


CheckpointMeans = Literal["scheduler", "webhook", "command"]


@dataclass(frozen=True, slots=True)
class CheckpointOffer:
    """How to request a checkpoint from a workload.

    ``means``: ``scheduler``: through the scheduler (Kubernetes: an annotation; Slurm: a signal); ``webhook``: a POST;
    ``command``: a command of the operator.
    ``takes``: duration stated by the workload, limited by the settings; None: unknown.
    """

    means: CheckpointMeans
    takes: Duration | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Whether a workload can run on another node.

    ``elsewhere``: None: undecidable.
    ``reason``: why it is tied to its node, or why it is undecidable; empty if it can run elsewhere.
    """

    elsewhere: bool | None = True
    reason: str = ""


UNRESTRICTED: Final = Placement()

WorkState = Literal["running", "suspended", "held", "ending"]


@dataclass(frozen=True, slots=True)
class Workload:
    """The smallest unit that a scheduler moves, on one node: a pod, a job, an array task, a heterogeneous component.

    ``name``: key in the scheduler: ``namespace/pod``; on Slurm ``7``, ``7_3`` in an array, ``7+1`` in a heterogeneous
    job.
    ``uid``: identifies one run: a pod's UID; a Slurm job's id with restart count and submit time.
    ``origin``: what starts its successor, the same for both. None: ``name``.
    ``job``: the policy's view. None: it does no work that could be lost.
    ``gang``: the job that stops as a whole if any part stops. None: it stops alone.
    ``stays``: why it need not leave an empty node: a DaemonSet's pod, a mirror pod, a finished pod.
    ``state``: ``suspended`` and ``held`` workloads cannot take a request; ``ending``: terminating, by any client.
    ``opt_out``: opt-out from eviction by its owner or another tool.
    ``loss``: what an eviction would destroy: nothing restarts it, or its data is only on this node.
    ``grace``: its own grace period, which evictions respect; None: unknown or none.
    """

    name: str
    uid: str
    kind: Literal["pod", "job"]
    node: str
    owner: str | None = None
    origin: str | None = None
    job: JobView | None = None
    gang: str | None = None
    stays: str | None = None
    state: WorkState = "running"
    placement: Placement = UNRESTRICTED
    opt_out: str | None = None
    loss: str | None = None
    grace: Duration | None = None
    finalizers: tuple[str, ...] = ()
    checkpoint: CheckpointOffer | None = None

    @property
    def ends_at(self) -> datetime | None:
        """Its latest end; None: unknown."""
        return None if self.job is None else self.job.ends_at

    @property
    def ending(self) -> bool:
        """Whether it is terminating."""
        return self.state == "ending"

    @property
    def immovable(self) -> str | None:
        """Why it must not be moved, or None; the only place where this is decided, for all schedulers."""
        if self.opt_out is not None:
            return self.opt_out
        if self.state == "suspended":
            return "it is suspended: it cannot take a request, and a move would lose its work"
        if self.state == "held":
            return "it is held: after a requeue it would stay pending"
        if self.placement.elsewhere is False:
            return f"it can run on this node only: {self.placement.reason}"
        if self.placement.elsewhere is None:
            return f"cannot determine whether it can run elsewhere: {self.placement.reason}"
        return self.loss


HookKind = Literal["done", "waiting", "failed", "refused", "timeout"]


@dataclass(frozen=True, slots=True)
class HookReply:
    """Reply of a hook.

    ``kind``: ``done``; ``waiting``: accepted, call again with the same key; ``failed``: it reports a failure;
    ``refused``: it rejected the request; ``timeout``: unknown.
    """

    kind: HookKind
    message: str = ""
    content: Mapping[str, Any] = field(default_factory=dict)


class Hook(Protocol):
    """A hook of the operator; must be thread-safe."""

    def tell(self, payload: Mapping[str, Any], key: str) -> HookReply:
        """Call the hook and return its reply, errors included; repetitions have the same ``key``."""
