"""What the evacuation needs of a scheduler, of diagnostics and of the operator's hooks, as protocols.

Everything here may be called again with the same arguments: a process may die after a call and before it took note of
it, and the next one, perhaps on another machine, calls again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, Protocol

from foundation.durations import Duration
from policy.fleet import JobView
from policy.ladder.remedies import Remedy
from scheduler.ports.readings import StoredState, Write, WriteResult

CheckpointKind = Literal["acknowledged", "waiting", "failed", "gone"]
DiagnosticKind = Literal["passed", "failed", "inconclusive", "running", "missing"]


@dataclass(frozen=True, slots=True)
class Fence:
    """Under which condition a call may be made.

    ``holder``: who holds the lease; an adapter that can, lets the scheduler compare.
    ``until``: the call must have been sent by then: the end of the lease. Aware.
    """

    holder: str
    until: datetime


@dataclass(frozen=True, slots=True)
class CheckpointAsk:
    """A request for a checkpoint.

    ``key``: idempotency key: of one workload (its uid) in one drain; 32 hexadecimal digits.
    ``deadline``: from then on the workload may be evicted without an acknowledgement; aware.
    ``why``: for people: why the node is drained.
    """

    key: str
    deadline: datetime
    why: str


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """State of a requested checkpoint.

    ``kind``: ``acknowledged``: written; ``waiting``: not yet, or not known; ``failed``: the workload reports that it
    cannot; ``gone``: the workload is not there any more (or has another uid).
    ``at``: when it was acknowledged, if known; aware.
    """

    kind: CheckpointKind
    message: str = ""
    at: datetime | None = None


class Workloads(Protocol):
    """What runs on the nodes of a scheduler, and how it is asked to go.

    Reads raise :class:`scheduler.ports.errors.SchedulerError`: what cannot be listed wholly is not listed at all, for a
    missing workload would look like an empty node. Writes never raise for what the scheduler reports; they answer.
    """

    def on_node(self, node: str) -> "tuple[Workload, ...]":
        """List what runs on a node now, from the scheduler itself (no cache); a finished workload may be left out."""

    def ask_checkpoint(self, workload: "Workload", ask: CheckpointAsk, fence: Fence) -> WriteResult:
        """Ask for a checkpoint through the scheduler, where its offer says so.

        A repetition with the same key writes nothing (``already``); a signal, of which the scheduler keeps no trace,
        is sent at least once. Only to the uid that is named, else ``conflict``.
        """

    def checkpoint_state(self, workload: "Workload", key: str) -> CheckpointState:
        """Read whether the request with this key was acknowledged."""

    def evict(self, workload: "Workload", fence: Fence) -> WriteResult:
        """Ask the scheduler to move the very uid that is named, with its grace time; never by force or past a budget.

        What is ``ending`` already is answered by ``already``.
        """

    def preview(self, workload: "Workload") -> tuple[Write, ...]:
        """Return what :meth:`evict` would send, for a rehearsal; sends nothing."""

    def load_progress(self) -> StoredState:
        """Read the progress of the evacuations, as stored in the scheduler (apart from the safety state)."""

    def save_progress(self, text: str, version: str) -> WriteResult:
        """Replace it, if it still has this version; the answer holds the new one. As ``save_state`` of the adapter."""


@dataclass(frozen=True, slots=True)
class DiagnosticResult:
    """State of a diagnostic.

    ``kind``: ``passed`` and ``failed``: it ran to its end and reports so itself; ``inconclusive``: it ended and reports
    neither (aborted, evicted, no output, output of another node): no node is freed and no label made of it;
    ``running``; ``missing``: there is none of this key.
    ``failed_units``: which GPUs failed, as the scores name them; none: not known which.
    """

    kind: DiagnosticKind
    message: str = ""
    failed_units: tuple[str, ...] = ()
    at: datetime | None = None


class Verification(Protocol):
    """The operator's procedure on a node: the remedy of a fault, if there is one, and a diagnostic."""

    def start(
        self,
        node: str,
        units: Sequence[str],
        key: str,
        fence: Fence,
        remedy: Remedy | None = None,
        *,
        probe: bool = False,
    ) -> WriteResult:
        """Start it, past predrain's taint; ``already`` where one of this key was started before, with any outcome.

        ``probe``: the node is idle and in service. It runs at the lowest priority, and any job preempts it.
        """

    def result(self, node: str, key: str) -> DiagnosticResult:
        """Read the state; raises ``SchedulerError`` if that cannot be read."""

    def drop(self, node: str, key: str) -> None:
        """Stop it and remove what it left; failures are ignored, for it ends by itself."""


CheckpointMeans = Literal["scheduler", "webhook", "command"]


@dataclass(frozen=True, slots=True)
class CheckpointOffer:
    """How a workload can be asked to write a checkpoint.

    ``means``: ``scheduler``: through the scheduler itself (Kubernetes: an annotation that it watches; Slurm: a signal);
    ``webhook``: a POST; ``command``: the operator's own command.
    ``takes``: how long the workload says it needs; None: not known. The settings bound it.
    """

    means: CheckpointMeans
    takes: Duration | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Whether a workload can run on another node.

    ``elsewhere``: True, False, or None where it cannot be decided.
    ``reason``: what ties it to its node, or what is missing to decide; empty where it can run elsewhere.
    """

    elsewhere: bool | None = True
    reason: str = ""


ANYWHERE: Final = Placement()

WorkState = Literal["running", "suspended", "held", "ending"]


@dataclass(frozen=True, slots=True)
class Workload:
    """The smallest unit that a scheduler moves, on one node: a pod, a job, a task of an array, a component.

    ``name``: for people and as the scheduler's key: ``namespace/pod``; on Slurm ``7``, ``7_3`` in an array, ``7+1`` in
    a heterogeneous job.
    ``uid``: identifies one run: a pod's UID; a Slurm job's id with its restart count and submission.
    ``owner``: what it belongs to, for people: ``Job team-a/train``, ``user ann``.
    ``origin``: what starts its successor; the successor has the same one. None: as ``name``.
    ``job``: as the policy sees it. None: it does no work that could be lost.
    ``gang``: the job whose parts stop together; a stop of one part stops all. None: it stops alone.
    ``stays``: why it neither has to leave nor counts for emptiness: a daemon set's pod, a mirror pod, a finished one.
    ``state``: ``suspended`` and ``held`` work cannot take a request; ``ending``: it is terminating, by any client.
    ``placement``: whether it can run on another node.
    ``opt_out``: the wish of its owner, or of another tool, that it is not moved.
    ``loss``: what a move would destroy: nothing starts it again, or its data is on this node only.
    ``grace``: its own grace period, which an eviction leaves it; None: not known, or none.
    ``finalizers``: what has to let it go before it is gone.
    ``checkpoint``: None: it names no way.
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
    placement: Placement = ANYWHERE
    opt_out: str | None = None
    loss: str | None = None
    grace: Duration | None = None
    finalizers: tuple[str, ...] = ()
    checkpoint: CheckpointOffer | None = None

    @property
    def ends_at(self) -> datetime | None:
        """When it ends by itself at the latest; None: not known."""
        return None if self.job is None else self.job.ends_at

    @property
    def ending(self) -> bool:
        """Whether it is terminating."""
        return self.state == "ending"

    @property
    def immovable(self) -> str | None:
        """Why it must not be moved; None: it may be. Decided here for every scheduler, and nowhere else."""
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
    """What a hook answered.

    ``kind``: ``done``; ``waiting``: accepted, and to be called again with the same key; ``failed``: it reports that it
    cannot; ``refused``: it did not take the request; ``timeout``: not known.
    ``content``: the JSON object that it answered with, if any.
    """

    kind: HookKind
    message: str = ""
    content: Mapping[str, Any] = field(default_factory=dict)


class Hook(Protocol):
    """A hook of the operator. It may be called from several threads concurrently."""

    def tell(self, payload: Mapping[str, Any], key: str) -> HookReply:
        """Call it and return its reply; never raises for what it reports. Each repetition has the same ``key``."""
