"""What was read from a scheduler: nodes with their versions, and the switches that people set."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from policy.fleet import Marks, NodeView
from policy.plan import Action


@dataclass(frozen=True, slots=True)
class NodeReading:
    """One node, as read just now.

    ``view``: units without scores: those that the scheduler knows to be in the node now; none where it does not know.
    ``version``: changes with every change of the node.
    ``boot_id``: changes with every boot; None: not known.
    ``jobs_known``: False: its jobs could not be read, so that it may only be released.
    """

    view: NodeView
    version: str
    boot_id: str | None = None
    jobs_known: bool = True


@dataclass(frozen=True, slots=True)
class Switches:
    """What the operator ordered, stored in the scheduler so that every replica sees it.

    ``kill``: no new marks anywhere; releases continue.
    ``release_all``: all of predrain's marks are removed, and none is set.
    ``reset_breaker_at``: when the breaker was last closed by hand; aware.
    """

    kill: bool = False
    release_all: bool = False
    reset_breaker_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class FleetReading:
    """Everything that a decision needs from the scheduler, read at one time.

    ``nodes``: of one listing from the scheduler itself, not from a cache that may lag behind our own writes. Their jobs
    may be followed by a watch.
    ``read_at``: when the listing was asked for; aware.
    ``trouble``: what could not be read, in words; the breaker stays open as long as it is so.
    ``partial``: more than the nodes' marks could not be read: nodes are released, and nothing new is done.
    """

    nodes: tuple[NodeReading, ...]
    read_at: datetime
    switches: Switches = Switches()
    trouble: str | None = None
    partial: bool = False


@dataclass(frozen=True, slots=True)
class StoredState:
    """A text as it is stored in the scheduler; None: there is none yet.

    ``version``: to be given with the next write, which fails if another process wrote in between.
    """

    text: str | None
    version: str


AnswerKind = Literal["done", "already", "blocked", "conflict", "timeout", "refused", "gone"]


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
    def message(self) -> str:
        """The change in one line."""
        before, after = ("(none)" if text is None else text for text in (self.before, self.after))
        return f"{self.target}: {self.path}: {before} -> {after}"


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The outcome of a write, or of a call about a workload or a diagnostic.

    ``kind``: ``done``: written or accepted (an accepted eviction is not yet a workload that is gone: only a listing
    shows that); ``already``: no change was needed; ``blocked``: not now, perhaps later (a disruption budget:
    Kubernetes' 429 to an eviction); ``conflict``: another client wrote in between, or the name has another uid;
    ``timeout``: no answer, so that it is not known whether it was done; ``refused``: by the scheduler (rights, a
    quota, a fault of its own), or accepted and answered with something else than was written (an admission webhook);
    ``gone``: there is no such node or workload. Other kinds than these and ``done`` and ``timeout`` changed nothing.
    ``version``: of what was written to, afterwards.
    ``again_at``: not before this, where the scheduler said so (``Retry-After``); aware.
    """

    kind: AnswerKind
    message: str = ""
    writes: tuple[Write, ...] = ()
    version: str | None = None
    again_at: datetime | None = None

    @property
    def confirmed(self) -> bool:
        """Whether the request is fulfilled now."""
        return self.kind in ("done", "already")


@dataclass(frozen=True, slots=True)
class Precondition:
    """What must still be true of a node when it is written to.

    ``version``: of the node as it was re-read just before: Kubernetes' resourceVersion; for Slurm, which has none, a
    digest of all that people and tools write to a node.
    ``boot_id``: a node that booted since is another node.
    ``holder``: who holds the lease; an adapter that can, lets the scheduler compare.
    ``until``: the write must have been sent by then: the end of the lease. Aware.
    """

    version: str
    boot_id: str | None
    holder: str
    until: datetime

    def conflict(self, reading: NodeReading) -> WriteResult | None:
        """Return in which way a node is not, as read now, what it must be; None: it is."""
        conflicts = {
            "its state cannot be read": not reading.view.readable,
            "it booted since": reading.boot_id != self.boot_id,
            f"version {reading.version}, expected {self.version}": reading.version != self.version,
        }
        return next((WriteResult("conflict", message) for message, differs in conflicts.items() if differs), None)


def has_marks(action: Action, marks: Marks) -> bool:
    """Whether a node carries the marks that an action asks for."""
    if action.verb == "release":
        return marks.level <= action.to
    if action.verb == "publish":
        published = marks.published
        return published is not None and (published.tier, published.expires_at) == (action.tier, action.expires_at)
    return {"avoid": marks.soft, "swap": marks.tainted, "drain": marks.drained}[action.verb]
