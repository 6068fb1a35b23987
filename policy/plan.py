"""What a decision comes to: intended actions with their reasons, all that led to them, and what is remembered."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from policy.breaker import BreakerCause, BreakerState
from policy.budget import Start, Use
from policy.episodes import Alert
from policy.fleet import Level, Marks, Published
from policy.ladder.cost_benefit import Worth
from policy.ladder.remedies import Remedy
from policy.maintenance import Period
from policy.node_tier.hysteresis import TierState
from policy.stages import StageState
from policy.tiers import Tier

Verb = Literal["release", "publish", "avoid", "swap", "drain"]
VERBS: tuple[Verb, ...] = ("release", "swap", "drain", "avoid", "publish")
"""In the order in which they are carried out: what is given back comes first, and no taint waits for renewals."""


@dataclass(frozen=True, slots=True)
class RungRequest:
    """One cheap rung for one node, which leaves it in service.

    ``saves``: expected GPU-hours, net of what it costs; ``costs``: GPU-hours.
    ``expires_at``: not started after it.
    ``jobs``: those asked for a checkpoint; none of a probe.
    """

    rung: Literal["probe", "checkpoint"]
    node: str
    risk: float
    expires_at: datetime
    saves: float
    costs: float
    reasons: tuple[str, ...]
    jobs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LastRequest:
    """When a cheap rung was last requested.

    ``risk``: what the request rested on, of the decision at ``decided_at``.
    """

    at: datetime
    risk: float
    decided_at: datetime


@dataclass(frozen=True, slots=True)
class NodeState:
    """What is remembered of one node.

    ``episode``: when it last left ``clear``, by prediction or rule.
    ``alerted``: the highest tier that was reported as an alert in this episode.
    ``seen``: the predrain marks on it at the last decision.
    ``undone_at``: when it was first noticed that somebody else removed a mark of predrain in this episode.
    ``software``: versions of driver and exporter.
    ``changed_at``: when they were first seen to be others than before.
    ``absent_since``: when it was first missing from the listing.
    ``maintenance``: the last one that it was in.
    ``released_at``: when its hard mark was last to be taken off: whatever was decided then has still counted it.
    ``probed``: the last request for a probe.
    """

    tier: TierState = field(default_factory=TierState)
    episode: datetime | None = None
    alerted: Tier = "clear"
    seen: Level = Level.NONE
    target: Level = Level.NONE
    undone_at: datetime | None = None
    software: str | None = None
    changed_at: datetime | None = None
    absent_since: datetime | None = None
    maintenance: Period | None = None
    released_at: datetime | None = None
    probed: LastRequest | None = None


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What is remembered of the fleet. An empty one is always safe to begin with.

    ``starts``: nodes newly taken out of service, as far back as a rate looks.
    ``stages``: by ``cluster/group``.
    ``checkpoints``: the last request for a checkpoint, by ``cluster/job``.
    """

    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    starts: tuple[Start, ...] = ()
    stages: Mapping[str, StageState] = field(default_factory=dict)
    breaker: BreakerState = field(default_factory=BreakerState)
    checkpoints: Mapping[str, LastRequest] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do to one node.

    ``verb``: ``publish`` writes tier and prediction; so do ``avoid`` and ``swap``, with the taints, and
    ``drain``, which empties the node; ``release`` removes the marks above ``to``.
    ``tier``: ``unknown`` where it was released because nothing is known any more.
    ``expires_at``: until when what is written holds; None for a release.
    ``reasons``: in words, the weightiest first.
    ``worth``: of a drain, for a node of tier ``high``.
    ``units``: GPUs that its tier is due to, the weightiest first; none for a release.
    """

    verb: Verb
    node: str
    tier: Tier
    to: Level
    risk: float | None
    expires_at: datetime | None
    reasons: tuple[str, ...]
    worth: Worth | None = None
    units: tuple[str, ...] = ()

    def after(self, marks: Marks, now: datetime) -> Marks:
        """Return the marks of its node after the action."""
        release = self.verb == "release"
        soft, tainted, drained = (
            stood and self.to >= level if release else stood or self.to is level
            for stood, level in (
                (marks.soft, Level.AVOID), (marks.tainted, Level.SWAP), (marks.drained, Level.DRAIN),
            )
        )  # fmt: skip
        published = None if self.to < Level.PUBLISH else marks.published
        if not release:
            assert self.expires_at is not None
            published = Published(self.tier, self.expires_at)
        since = (marks.hard_since or now) if tainted or drained else None
        return Marks(published, soft, tainted, drained, since)


@dataclass(frozen=True, slots=True)
class NodeDecision:
    """What was decided about one node, and why.

    ``rules``: hard rules that hold, in words; ``remedy``: what ends the fault, where one of them asks for ``high``.
    ``wanted``: what its tier asks for.
    ``reasons``: all of them: of the tier, and of each thing that lowered the target.
    ``expires_at``: until when the tier holds.
    ``request``: the cheap rung that is requested for it in this decision.
    """

    node: str
    group: str
    tier: Tier
    risk: float | None
    rules: tuple[str, ...]
    wanted: Level
    target: Level
    reasons: tuple[str, ...]
    worth: Worth | None
    held_out: bool
    expires_at: datetime | None
    remedy: Remedy | None = None
    request: RungRequest | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a decision comes to.

    ``actions``: in the order to carry them out: releases first, then the riskiest first.
    ``nodes``: of every node that is not simply ``clear`` and unmarked, or for which a cheap rung is requested.
    ``over_budget``: nodes that were not taken out of service for lack of budget, with why.
    ``open_causes``: what holds the breaker open.
    ``alerts``: those that begin now, for the ledger to evaluate later.
    ``reasons``: of the fleet as a whole: breaker, stages, switches.
    ``state``: to be kept, and given to the next decision.
    ``requests``: probes and checkpoints to begin, the riskiest node first.
    ``stopped``: probes to end immediately, by node, with the reason.
    """

    now: datetime
    actions: tuple[Action, ...]
    nodes: Mapping[str, NodeDecision]
    over_budget: Mapping[str, str]
    uses: tuple[Use, ...]
    open_causes: Mapping[str, BreakerCause]
    stages: Mapping[str, StageState]
    alerts: tuple[Alert, ...]
    reasons: tuple[str, ...]
    state: PolicyState
    requests: tuple[RungRequest, ...] = ()
    stopped: Mapping[str, str] = field(default_factory=dict)
