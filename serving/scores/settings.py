"""What batch scoring is told: when a unit is unknown, how much is explained, how long decisions are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from policy.tiers import TierThresholds


@dataclass(frozen=True, slots=True)
class ScoringSettings:
    """Settings of ``predrain score``: the sections ``serving`` and ``policy.tiers`` of the parameters.

    ``stale_after``: a unit whose newest usable sample is older than this at the decision time is unknown. A dataset of
    long steps is given two steps and the delay at least, or nothing in it would ever be fresh.
    ``least_completeness``: a unit with less than this share of the samples expected in the last decision interval is
    unknown; 0: never.
    ``explained``: units explained at most, the riskiest first: half a millisecond each and tree learner.
    ``reasons``: reasons a unit at most.
    """

    stale_after: timedelta = timedelta(hours=1)
    least_completeness: float = 0.5
    explained: int = 200
    reasons: int = 3
    retention: timedelta = timedelta(days=35)
    tiers: TierThresholds = field(default_factory=TierThresholds)
