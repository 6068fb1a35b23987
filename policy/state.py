"""What the policy remembers between decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from policy.breaker import BreakerState
from policy.budget import Start
from policy.fleet import Level
from policy.hysteresis import TierState
from policy.stages import StageState
from policy.tiers import TIERS, Tier


@dataclass(frozen=True, slots=True)
class NodeState:
    """What is remembered of one node.

    ``episode``: when it last left ``clear``, by prediction or rule.
    ``alerted``: the highest tier that was reported as an alert in this episode.
    ``seen``: what of ours stood on it at the last decision.
    ``undone_at``: when it was first noticed that a person took our mark off in this episode.
    ``software``: versions of driver and exporter.
    ``changed_at``: when they were first seen to be others than before.
    ``absent_since``: when it was first missing from the listing.
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

    def __post_init__(self) -> None:
        if self.alerted not in TIERS:
            raise ValueError(f"alerted is {self.alerted!r}: give one of {', '.join(TIERS)}")


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What is remembered of the fleet. An empty one is always safe to begin with.

    ``starts``: nodes newly taken out of service, as far back as a rate looks.
    ``stages``: by ``cluster/group``.
    """

    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    starts: tuple[Start, ...] = ()
    stages: Mapping[str, StageState] = field(default_factory=dict)
    breaker: BreakerState = field(default_factory=BreakerState)
