"""Values read from a scheduler (nodes, switches, stored state), and writes with their preconditions and results."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from policy.fleet import Marks, NodeView
from policy.plan import Action


@dataclass(frozen=True, slots=True)
class NodeReading:
    """One node as read.

    ``view``: its units have no scores; empty if the scheduler does not know the GPUs of the node.
    ``version``: changes with every change of the node.
    ``boot_id``: changes with every boot; None: unknown.
    ``jobs_known``: False if its jobs could not be read; then it may only be released.
    """

    view: NodeView
    version: str
    boot_id: str | None = None
    jobs_known: bool = True


@dataclass(frozen=True, slots=True)
class Switches:
    """The operator's switches, stored in the scheduler so that every replica sees them.

    ``kill``: block all new actions; releases continue.
    ``release_all``: remove all predrain markers, and set none.
    """

    kill: bool = False
    release_all: bool = False
    reset_breaker_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class FleetReading:
    """All inputs of a decision from the scheduler.

    ``nodes``: from one uncached list, because a cache may lag behind our own writes; their jobs may come from a watch.
    ``error``: message about what could not be read; keeps the breaker open unless ``partial``.
    ``partial``: jobs or switches could not be read: nodes are only released.
    """

    nodes: tuple[NodeReading, ...]
    read_at: datetime
    switches: Switches = Switches()
    error: str | None = None
    partial: bool = False


@dataclass(frozen=True, slots=True)
class StoredState:
    """A text stored in the scheduler; None: none yet.

    ``version``: passed to the next write, which fails if another process has written in between.
    """

    text: str | None
    version: str


ResultKind = Literal["done", "already", "blocked", "conflict", "timeout", "refused", "gone"]


@dataclass(frozen=True, slots=True)
class Write:
    """One change of one field in a scheduler, exactly as sent.

    ``path``: the field, e.g. ``metadata.annotations[predrain.io/prediction]`` or ``Reason``.
    ``before``, ``after``: content as text; None: absent.
    """

    target: str
    path: str
    before: str | None
    after: str | None

    @property
    def message(self) -> str:
        """The change in one line."""
        before, after = ("(none)" if text is None else text for text in (self.before, self.after))
        return f"{self.target}: {self.path}: {before} -> {after}"


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The outcome of a write, or of a call about a workload or a diagnostic.

    ``kind``: ``done``: written or accepted (after an accepted eviction the workload may still be there); ``already``:
    no change was needed; ``blocked``: retry later (Kubernetes' 429 for a disruption budget); ``conflict``: another
    client wrote in between, or the name has another uid; ``timeout``: no response, so the outcome is unknown;
    ``refused``: rejected by the scheduler (permissions, quota, internal error), or accepted but stored differently
    (admission webhook); ``gone``: the node or workload does not exist.
    ``again_at``: earliest retry, if the scheduler stated it (``Retry-After``); aware.
    """

    kind: ResultKind
    message: str = ""
    writes: tuple[Write, ...] = ()
    version: str | None = None
    again_at: datetime | None = None

    @property
    def confirmed(self) -> bool:
        """Whether the desired state is reached."""
        return self.kind in ("done", "already")


@dataclass(frozen=True, slots=True)
class Precondition:
    """Conditions that must still hold when a node is written to.

    ``version``: of the node as just re-read: Kubernetes' resourceVersion, or for Slurm a digest of everything that
    operators and tools write to a node.
    ``boot_id``: a node that has rebooted counts as another node.
    ``holder``: holder of the lease, checked by the adapter.
    ``until``: the write must be sent by then, the expiry of the lease; aware. None: the state of the lease is unknown,
    and the write only releases an overdue marker.
    """

    version: str
    boot_id: str | None
    holder: str
    until: datetime | None

    def conflict(self, reading: NodeReading) -> WriteResult | None:
        """Return the conflict of a node with this precondition, or None."""
        conflicts = {
            "its state cannot be read": not reading.view.readable,
            "it booted since": reading.boot_id != self.boot_id,
            f"version {reading.version}, expected {self.version}": reading.version != self.version,
        }
        return next((WriteResult("conflict", message) for message, differs in conflicts.items() if differs), None)


def has_marks(action: Action, marks: Marks) -> bool:
    """Whether a node has the markers that an action requests."""
    if action.verb == "release":
        return marks.level <= action.to
    if action.verb == "publish":
        published = marks.published
        return published is not None and (published.tier, published.expires_at) == (action.tier, action.expires_at)
    return {"avoid": marks.soft, "swap": marks.tainted, "drain": marks.drained}[action.verb]
