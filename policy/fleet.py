"""Snapshot of a fleet as read by the controller: nodes, units with scores and facts, jobs, taints and their owners.

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
    """Level of predrain's taints and labels on a node; each includes the levels below."""

    NONE = 0
    PUBLISH = 1
    AVOID = 2
    SWAP = 3
    DRAIN = 4

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> core_schema.CoreSchema:
        """Serialize by lowercase name."""
        by_name = core_schema.plain_serializer_function_ser_schema(lambda level: level.name.lower())
        return core_schema.no_info_plain_validator_function(cls._parse_level, serialization=by_name)

    @classmethod
    def _parse_level(cls, value: object) -> "Level":
        if isinstance(value, Level):
            return value
        for level in cls:
            if level.name.lower() == value:
                return level
        raise ValueError(f"give one of {', '.join(level.name.lower() for level in cls)}")

    @property
    def hard(self) -> bool:
        """Whether the level keeps all new work off the node."""
        return self >= Level.SWAP


@dataclass(frozen=True, slots=True)
class Score:
    """The model's prediction for one unit.

    ``risk``: calibrated probability; None: unknown, which triggers nothing.
    ``expires_at``: the prediction is invalid from this time on.
    ``reasons``: as text, most important first.
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
    """A reported fault that hard rules may act on, without the model.

    ``name``: as in :data:`policy.node_tier.hard_rules.RULES`: ``xid 79``, ``diagnostic_failed``.
    ``seen_at``: when it happened (an event) or was last read (a state such as a pending remap). Never the scrape time
    of a gauge that keeps the last XID forever: such a fact would never expire.
    """

    name: str
    seen_at: datetime


@dataclass(frozen=True, slots=True)
class UnitView:
    """One GPU of a node, or the node itself in a fleet without GPUs.

    ``name``: UUID or serial, so a replacement in the same slot is another unit.
    ``score``: the latest one, even if its risk is unknown.
    ``valid_from``: time of installation, repair or passed diagnostic; earlier scores and facts are void.
    ``probed_at``: when it last passed a probe, which temporarily lowers its risk.
    """

    name: str
    score: Score | None = None
    facts: tuple[Fact, ...] = ()
    valid_from: datetime | None = None
    probed_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class JobView:
    """A job that runs on a node.

    ``gpus``: number of GPUs of the job, over all its nodes.
    ``ends_at``: expected end, for example its time limit. Times are None if unknown.
    ``can_checkpoint``: whether it writes a checkpoint on demand.
    ``can_shrink``: whether it continues on its other nodes after losing this one (elastic).
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
    """Tier and expiry published on a node."""

    tier: str
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class Marks:
    """Predrain's taints and labels on a node, as read from the scheduler.

    ``soft``, ``tainted``, ``drained``: soft taint; hard taint (Slurm: DRAIN); drain, in progress or finished.
    ``hard_since``: when predrain took the node out of service; rate limits need it if the state is lost.
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
    """Return the scopes of a node; cached, because nodes share few distinct combinations."""
    scopes = [("fleet", ""), ("cluster", cluster), ("group", f"{cluster}/{group}")]
    scopes += [(scope, f"{cluster}/{name}") for scope, name in (("rack", rack), ("domain", domain)) if name is not None]
    scopes += [("job", f"{cluster}/{name}") for name in sorted({*jobs})]
    return tuple(scopes)


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node, as read just now.

    ``name``: unique in the fleet.
    ``rack``, ``domain``: rack and NVLink domain; None: unknown, budgets of that scope do not apply.
    ``units``: from the inventory, not from live telemetry. Nodes without units are ignored: never counted, never
    changed.
    ``cordoned_by``: operator or other tool that took it out of service; None: only predrain, if anyone.
    ``down``: not ready, for any reason.
    ``readable``: False: state, reason or owner could not be read. The node is then left alone, since any action might
    override an operator.
    ``marker_removed``: the adapter knows that another client removed a predrain taint or label in this episode.
    ``marked_at``: when predrain set the highest recorded level; None: unknown.
    ``uncordoned``: an operator removed predrain's cordon, so its other taints are removed too.
    ``resting``: why the node is out of service as planned, for example power saving; neither failed nor capacity.
    ``unwritable``: why writes to the node are suspended, releases included, for example during a reboot.
    ``notice``: message for operators, for example about a predrain taint that someone edited.
    ``planned``: start and end of each relevant maintenance known from events.
    ``since``: when a node of this name first existed; None: unknown. If the scheduler does not report the units of a
    node, earlier reports under that name may be about another machine.
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
    marker_removed: bool = False
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
        """Group qualified by its cluster: ``cluster/group``."""
        return f"{self.cluster}/{self.group}"

    @property
    def scopes(self) -> tuple[tuple[str, str], ...]:
        """Scopes that the node counts in."""
        return _scopes(self.cluster, self.group, self.rack, self.domain, tuple([job.name for job in self.jobs]))

    @property
    def foreign(self) -> str | None:
        """Why predrain must not act on the node; None if it may."""
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
    def why_out_of_service(self) -> str | None:
        """Reason why the node is out of service; None if it is in service or at planned rest."""
        if not self.readable:
            return "unreadable"
        if self.marks.level.hard:
            return "drained by predrain"
        if self.resting is not None:
            return None
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

        A node at planned rest is neither out of service nor spare capacity, so shares of the fleet exclude it.
        """
        return self.resting is None or self.why_out_of_service is not None


_MAX_NOTICES_SHOWN = 20


def notices_of(fleet: Sequence[NodeView]) -> list[str]:
    """Return the first notices of all nodes, including nodes without units."""
    notices = sorted(f"{node.name}: {node.notice}" for node in fleet if node.notice is not None)
    further = len(notices) - _MAX_NOTICES_SHOWN
    return [*notices[:_MAX_NOTICES_SHOWN], *([f"and {further} more nodes with a notice"] if further > 0 else [])]


@dataclass(frozen=True, slots=True)
class Signals:
    """Fleet-wide inputs of a decision.

    ``read_at``: when the scheduler was read; None: reading failed.
    ``missing_channels``: channels that the model was trained on and that are missing now.
    ``probes``: nodes with a running probe; None: probes cannot be started.
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
