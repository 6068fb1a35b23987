"""What the controller saw of a fleet: units with their scores and facts, jobs, and the owners of the marks on a node.

All times are aware.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from functools import lru_cache

from pydantic_core import core_schema

from policy.episodes import AlertOutcome


class Level(IntEnum):
    """Which predrain marks are on a node, each level with all below it."""

    NONE = 0
    PUBLISH = 1
    AVOID = 2
    SWAP = 3
    DRAIN = 4

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> core_schema.CoreSchema:
        """Read and write it by its name."""
        by_name = core_schema.plain_serializer_function_ser_schema(lambda level: level.name.lower())
        return core_schema.no_info_plain_validator_function(cls._named, serialization=by_name)

    @classmethod
    def _named(cls, value: object) -> "Level":
        if isinstance(value, Level):
            return value
        for level in cls:
            if level.name.lower() == value:
                return level
        raise ValueError(f"give one of {', '.join(level.name.lower() for level in cls)}")

    @property
    def hard(self) -> bool:
        """Whether the node takes no new work because of us."""
        return self >= Level.SWAP


@dataclass(frozen=True, slots=True)
class Score:
    """What the model says of one unit.

    ``risk``: Calibrated, 0 to 1; None: unknown, from which nothing follows.
    ``expires_at``: from then on it says nothing.
    ``reasons``: in plain words, the weightiest first.
    """

    risk: float | None
    decided_at: datetime
    expires_at: datetime
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.risk is not None and not 0 <= self.risk <= 1:
            raise ValueError(f"risk is {self.risk}: give a number from 0 to 1, or None")


@dataclass(frozen=True, slots=True)
class Fact:
    """Something a unit reported that may bypass the model.

    ``name``: as in :data:`policy.node_tier.hard_rules.RULES`: ``xid 79``, ``row_remap_failure``.
    ``seen_at``: when it happened (an event) or was last read (a state such as a pending remap); aware. Never the time
    at which a gauge that keeps its last XID for ever was scraped: such a fact would never end.
    """

    name: str
    seen_at: datetime


@dataclass(frozen=True, slots=True)
class UnitView:
    """One GPU of a node; the node itself in a fleet without GPUs.

    ``name``: UUID or serial: another device in the same slot is another unit.
    ``score``: the newest one, unknown or not.
    ``valid_from``: what was scored or seen before is void: the device came, was repaired, or passed a diagnostic then.
    ``probed_at``: when it last passed a probe, which lowers its risk for a while.
    """

    name: str
    score: Score | None = None
    facts: tuple[Fact, ...] = ()
    valid_from: datetime | None = None
    probed_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class JobView:
    """A job that runs on a node.

    ``gpus``: of the whole job, on all its nodes.
    ``started_at``, ``checkpointed_at``, ``ends_at``: Aware; ``ends_at`` is when it is expected to end, such as its time
    limit. None: not known.
    ``can_checkpoint``: whether it writes a checkpoint when asked to.
    ``can_shrink``: whether it continues with its other nodes when it loses this one.
    """

    name: str
    gpus: int
    started_at: datetime | None = None
    checkpointed_at: datetime | None = None
    ends_at: datetime | None = None
    can_checkpoint: bool = False
    can_shrink: bool = False

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"gpus of job {self.name} is {self.gpus}: give a positive number")


@dataclass(frozen=True, slots=True)
class Published:
    """What is published on a node: the tier and its expiry."""

    tier: str
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class Marks:
    """The predrain marks on a node now, as read from the scheduler.

    ``soft``, ``tainted``, ``drained``: the soft taint; the hard taint (Slurm: DRAIN); a drain, finished or not.
    ``hard_since``: when we first took the node out of service; what a rate limit needs when the state is lost.
    """

    published: Published | None = None
    soft: bool = False
    tainted: bool = False
    drained: bool = False
    hard_since: datetime | None = None

    @property
    def level(self) -> Level:
        """The highest active level."""
        if self.drained:
            return Level.DRAIN
        if self.tainted:
            return Level.SWAP
        if self.soft:
            return Level.AVOID
        return Level.PUBLISH if self.published else Level.NONE


NO_MARKS = Marks()


@lru_cache(maxsize=65_536)
def _scopes(
    cluster: str, group: str, rack: str | None, domain: str | None, jobs: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    """Give the scopes of a node; a fleet has few different ones, and a decision asks for those of every node."""
    scopes = [("fleet", ""), ("cluster", cluster), ("group", f"{cluster}/{group}")]
    scopes += [(scope, f"{cluster}/{name}") for scope, name in (("rack", rack), ("domain", domain)) if name is not None]
    scopes += [("job", f"{cluster}/{name}") for name in sorted({*jobs})]
    return tuple(scopes)


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node, as read just now.

    ``name``, ``cluster``, ``group``: the name is unique in the fleet.
    ``rack``, ``domain``: rack and NVLink domain; None: not known, no budget of that scope.
    ``units``: from the inventory, not from what answers now. A node without units is no part of the fleet: it is
    neither counted nor touched.
    ``opt_out``: words of the label or annotation that tells us to keep off.
    ``owner``: another tool that has taken the node over.
    ``cordoned_by``: who else took it out of service: a person, another tool. None: no one else.
    ``down``: not ready, for whatever reason.
    ``readable``: False: state, reason or owner could not be read; then nothing at all is done, for it might be undoing
    a human.
    ``undone``: the adapter knows that somebody else removed a mark of predrain in this episode.
    ``marked_at``: when predrain set the highest mark that it recorded, aware; None: not known.
    ``uncordoned``: it was our cordon: then what else keeps work off the node goes with it.
    ``resting``: why the node is out of service as planned, such as power saving: no failure, and no capacity.
    ``unwritable``: why nothing may be written to the node now, releases included, such as a reboot under way.
    ``notice``: what an operator should look at, such as a mark of predrain that somebody edited.
    ``software``: versions of driver and exporter in one text.
    ``maintenance``: words of the maintenance that it is in; None: in none.
    ``planned``: begin and end of each maintenance that events tell of, as far as it may matter.
    ``since``: since when there is a node under this name, aware; None: not known. Where the scheduler does not say
    which units are in it, what was said of units of that name before may be about another machine.
    """

    name: str
    cluster: str
    group: str
    rack: str | None = None
    domain: str | None = None
    units: tuple[UnitView, ...] = ()
    jobs: tuple[JobView, ...] = ()
    marks: Marks = NO_MARKS
    opt_out: str | None = None
    owner: str | None = None
    cordoned_by: str | None = None
    down: bool = False
    readable: bool = True
    undone: bool = False
    marked_at: datetime | None = None
    uncordoned: bool = False
    resting: str | None = None
    unwritable: str | None = None
    notice: str | None = None
    software: str | None = None
    since: datetime | None = None
    maintenance: str | None = None
    planned: tuple[tuple[datetime, datetime], ...] = ()

    @property
    def group_key(self) -> str:
        """The group with its cluster, as stages, budgets and outcomes name it."""
        return f"{self.cluster}/{self.group}"

    @property
    def scopes(self) -> tuple[tuple[str, str], ...]:
        """The scopes that the node counts in, each with its name."""
        return _scopes(self.cluster, self.group, self.rack, self.domain, tuple([job.name for job in self.jobs]))

    @property
    def foreign(self) -> str | None:
        """Why the node is not ours to act on, in words; None: it is."""
        if not self.readable:
            return "its state cannot be read"
        if self.opt_out is not None:
            return f"it opted out ({self.opt_out})"
        if self.owner is not None:
            return f"{self.owner} owns it"
        if self.maintenance is not None:
            return f"it is in {self.maintenance}"
        if self.cordoned_by is not None:
            return f"{self.cordoned_by} took it out of service"
        return None

    @property
    def lost(self) -> str | None:
        """Reason why the node is out of service; None if it is in service or at planned rest."""
        if not self.readable:
            return "unreadable"
        if self.marks.level.hard or self.resting is not None:
            return "drained by predrain" if self.marks.level.hard else None
        if self.down:
            return "down"
        if self.cordoned_by is not None:
            return f"cordoned by {self.cordoned_by}"
        if self.owner is not None:
            return f"owned by {self.owner}"
        return None

    @property
    def counted(self) -> bool:
        """Whether limits count the node.

        One that rests is neither out of service nor spare capacity: a share of the fleet is
        a share of the nodes that are not at rest.
        """
        return self.resting is None or self.lost is not None


_NOTICES_SHOWN = 20


def notices_of(fleet: Sequence[NodeView]) -> list[str]:
    """Return what an operator should look at, on nodes without units too; of many nodes the first."""
    notices = sorted(f"{node.name}: {node.notice}" for node in fleet if node.notice is not None)
    more = len(notices) - _NOTICES_SHOWN
    return [*notices[:_NOTICES_SHOWN], *([f"and {more} more nodes with this notice"] if more > 0 else [])]


@dataclass(frozen=True, slots=True)
class Signals:
    """What a decision needs to know of the fleet as a whole.

    ``read_at``: when the scheduler was read; None: it could not be.
    ``scheduler_error``: why it could not be read, or not wholly.
    ``model_fitted_at``: until when the model's training data reach; None: not known.
    ``missing_channels``: channels that the model was trained on and that no longer arrive.
    ``outcomes``: what became of the alerts so far, as the ledger has evaluated them.
    ``kill``: the kill switch: nothing new on any node.
    ``release_all``: all predrain marks are removed.
    ``reset_breaker_at``: when a person last closed the breaker by hand.
    ``probes``: nodes that are being probed; None: no probe can be started.
    ``checkpoints``: whether jobs can be asked for a checkpoint.
    """

    read_at: datetime | None
    scheduler_error: str | None = None
    model_fitted_at: datetime | None = None
    missing_channels: tuple[str, ...] = ()
    outcomes: tuple[AlertOutcome, ...] = ()
    kill: bool = False
    release_all: bool = False
    reset_breaker_at: datetime | None = None
    probes: tuple[str, ...] | None = None
    checkpoints: bool = False
