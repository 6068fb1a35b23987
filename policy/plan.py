"""Result of a decision: planned actions with reasons, decisions per node, and the state to remember."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import datetime
from typing import Any, Literal

from policy.breaker import BreakerCause, BreakerState
from policy.budget import Start, Use
from policy.episodes import Alert
from policy.fleet import Level, Marks, Published
from policy.ladder.cost_benefit import CostBenefit
from policy.ladder.remedies import Remedy
from policy.maintenance import Period
from policy.node_tier.hysteresis import TierState
from policy.stages import StageState
from policy.tiers import Tier

Verb = Literal["release", "publish", "avoid", "swap", "drain"]
VERBS: tuple[Verb, ...] = ("release", "swap", "drain", "avoid", "publish")
"""In order of execution: releases come first, and taints do not wait for renewals."""


@dataclass(frozen=True, slots=True)
class RungRequest:
    """Request for a probe or a checkpoint on a node that stays in service.

    ``saves``: expected GPU-hours saved, net of the cost; ``costs``: GPU-hours.
    ``expires_at``: latest start.
    ``jobs``: jobs to checkpoint; empty for a probe.
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
    """The last request for a probe or checkpoint.

    ``risk``: risk behind the request, from the decision at ``decided_at``.
    """

    at: datetime
    risk: float
    decided_at: datetime


@dataclass(frozen=True, slots=True)
class NodeState:
    """Remembered state of one node.

    ``episode``: when it last left ``clear``, by prediction or rule.
    ``alerted``: highest tier reported as an alert in this episode.
    ``seen``, ``seen_until``: level and expiry of predrain's taints at the last decision.
    ``marker_removed_at``: when another client's removal of a predrain taint was first noticed in this episode.
    ``released_at``: time of the last decision to release its hard taint; that decision still counted it as out.
    """

    tier: TierState = field(default_factory=TierState)
    episode: datetime | None = None
    alerted: Tier = "clear"
    seen: Level = Level.NONE
    target: Level = Level.NONE
    marker_removed_at: datetime | None = None
    software: str | None = None
    changed_at: datetime | None = None
    absent_since: datetime | None = None
    maintenance: Period | None = None
    released_at: datetime | None = None
    probed: LastRequest | None = None
    seen_until: datetime | None = None

    @property
    def at_rest(self) -> bool:
        """Whether the state has no effect on the next decision about an untainted node below ``watch``."""
        tier, marked = self.tier, self.seen or self.target or self.released_at
        risen = tier.tier != "clear" or tier.support or tier.elevated or tier.high
        return not (risen or marked or self.maintenance or self.probed or self.software)


@dataclass(frozen=True, slots=True)
class PolicyState:
    """Remembered state of the fleet; starting with an empty one is always safe.

    ``starts``: nodes newly taken out of service within the longest rate limit window.
    ``stages``: by ``cluster/group``.
    ``checkpoints``: last request for a checkpoint, by ``cluster/job``.
    """

    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    starts: tuple[Start, ...] = ()
    stages: Mapping[str, StageState] = field(default_factory=dict)
    breaker: BreakerState = field(default_factory=BreakerState)
    checkpoints: Mapping[str, LastRequest] = field(default_factory=dict)


def not_after(value: Any, latest: datetime, unchanged: Collection[str]) -> Any:
    """Move remembered instants after ``latest`` to it: the clock was ahead when they were recorded.

    Otherwise every wait that counts from them would last longer by as much as the clock was ahead.

    ``unchanged``: fields to leave unchanged, such as expiries.
    """
    if isinstance(value, datetime):
        return min(value, latest)
    if isinstance(value, tuple):
        return tuple(not_after(item, latest, unchanged) for item in value)
    if isinstance(value, Mapping):
        return {name: not_after(item, latest, unchanged) for name, item in value.items()}
    if not is_dataclass(value) or isinstance(value, type):
        return value
    names = [field.name for field in fields(value) if field.name not in unchanged]
    return replace(value, **{name: not_after(getattr(value, name), latest, unchanged) for name in names})


@dataclass(frozen=True, slots=True)
class Action:
    """One action on one node.

    ``verb``: ``publish`` writes tier and prediction; ``avoid`` and ``swap`` also set the taints; ``drain`` also evicts
    the jobs; ``release`` removes levels above ``to``.
    ``tier``: ``unknown`` if it is released because no valid score is left.
    ``expires_at``: expiry of what is written; None for a release.
    ``reasons``: most important first.
    """

    verb: Verb
    node: str
    tier: Tier
    to: Level
    risk: float | None
    expires_at: datetime | None
    reasons: tuple[str, ...]

    def after(self, marks: Marks, now: datetime) -> Marks:
        """Return the node's taints after the action."""
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
    """Decision about one node, with reasons.

    ``rules``: hard rules that apply, as text; ``remedy``: recovery action, if one of them sets ``high``.
    ``wanted``: level that corresponds to its tier.
    ``worth``: cost-benefit of a drain; the ledger stores it under this name.
    """

    node: str
    group: str
    tier: Tier
    risk: float | None
    rules: tuple[str, ...]
    wanted: Level
    target: Level
    reasons: tuple[str, ...]
    worth: CostBenefit | None
    held_out: bool
    expires_at: datetime | None
    remedy: Remedy | None = None
    request: RungRequest | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Complete result of a decision.

    ``actions``: in order of execution: by verb (:data:`VERBS`), then riskiest first.
    ``nodes``: decisions on nodes that are not ``clear``, are tainted, or have a request.
    ``over_budget``: nodes kept in service by the budget, with the reason.
    ``open_causes``: causes that keep the breaker open.
    ``reasons``: fleet-wide messages: breaker, stages, switches.
    ``requests``: probes and checkpoints to start, each by descending risk.
    ``stopped``: probes to stop now, by node, with the reason.
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
