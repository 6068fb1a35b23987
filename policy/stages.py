"""Rollout stages: the measured precision of a group of nodes determines which actions are allowed on it."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import compress
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass as checked

from foundation.settings import NonNegativeTime, PositiveTime, Share
from foundation.text import percent
from policy.bounds import PrecisionBound, bound_of_sizes
from policy.episodes import AlertOutcome, opens_episode
from policy.fleet import Level
from policy.tiers import TIERS

Stage = Literal["shadow", "soft", "hard"]
STAGES: tuple[Stage, ...] = ("shadow", "soft", "hard")

ALLOWED_LEVELS: Mapping[Stage, Level] = {"shadow": Level.NONE, "soft": Level.AVOID, "hard": Level.DRAIN}
"""Highest level allowed on the nodes of a group in each stage."""


FIXED: Mapping[Stage, float] = {"soft": 0.3, "hard": 0.7}
"""Precision that a stage requires if the jobs of a group, or its risks, are unknown."""


@checked(frozen=True, slots=True)
class Bar:
    """Precision that a stage requires.

    ``min_precision``: a fixed share. None: for ``hard``, the break-even of a drain with the group's jobs; for ``soft``,
    which is free, the precision by chance (the mean risk).
    """

    min_precision: Annotated[float, Field(gt=0, lt=1)] | None = None


@checked(frozen=True, slots=True)
class StagesConfig:
    """Settings of promotion and demotion between stages.

    ``soft``, ``hard``: required precision, of alerts of tier ``elevated`` and above, and of tier ``high``.
    ``confidence``: confidence of the bounds of the precision.
    ``min_outcomes``: minimum number of conclusive outcomes in the current stage before a change.
    ``max_inconclusive``: maximum share of inconclusive alerts for a promotion.
    ``window``: maximum age of alerts that count.
    ``min_time``: minimum time in a stage before a promotion.
    ``ceiling``: highest stage; groups above it are demoted. ``pinned`` overrides it.
    ``pinned``: fixed stages, by ``cluster/group``.
    ``holdout``: share of nodes that only get a soft taint instead of being taken out on a prediction, to measure
    precision without bias.
    """

    soft: Bar = field(default_factory=Bar)
    hard: Bar = field(default_factory=Bar)
    confidence: Annotated[float, Field(ge=0.5, lt=1)] = 0.9
    min_outcomes: PositiveInt = 20
    max_inconclusive: Share = 0.5
    window: PositiveTime = timedelta(days=60)
    min_time: NonNegativeTime = timedelta(days=7)
    ceiling: Stage = "shadow"
    pinned: Mapping[str, Stage] = field(default_factory=dict)
    holdout: Share = 0.0


@dataclass(frozen=True, slots=True)
class StageState:
    """Stage of a group, with the time it was entered."""

    stage: Stage
    since: datetime


@dataclass(frozen=True, slots=True)
class TrackRecord:
    """Outcomes of a group's alerts in its stage.

    ``bound``: precision of the conclusive alerts, clustered by node.
    ``upper``: one-sided upper bound of the precision; 1 without alerts.
    """

    bound: PrecisionBound
    upper: float
    inconclusive: int
    open: int

    @property
    def summary(self) -> str:
        """The record in one line."""
        if not self.bound.alerts:
            return f"no conclusive alert yet ({self.inconclusive} inconclusive, {self.open} open)"
        return (
            f"{self.bound.hits} of {self.bound.alerts} alerts right, precision {percent(self.bound.precision)}"
            f" ({percent(self.bound.lower)} to {percent(self.upper)}), "
            f"{self.inconclusive} inconclusive, {self.open} open"
        )


def record_of(outcomes: Iterable[AlertOutcome], min_tier: str, confidence: float, now: datetime) -> TrackRecord:
    """Count outcomes and bound the precision.

    An alert counts only after two horizons: true positives are known sooner than false positives (a drained unit that
    passes a diagnostic is observed for a further horizon), so a young record would be biased upward.

    ``outcomes``: those of hard rules are ignored. Alerts within one episode count as the alert that opened it.
    """
    size: Counter[str] = Counter()
    correct: Counter[str] = Counter()
    inconclusive = still_open = 0
    counted = [
        outcome
        for outcome in outcomes
        if not outcome.alert.by_rule and TIERS.index(outcome.alert.tier) >= TIERS.index(min_tier)
    ]
    for outcome in compress(counted, opens_episode([outcome.alert for outcome in counted])):
        alert = outcome.alert
        if outcome.verdict == "open" or now < alert.at + 2 * alert.horizon:
            still_open += 1
        elif outcome.verdict == "inconclusive":
            inconclusive += 1
        else:
            size[alert.node] += 1
            correct[alert.node] += outcome.verdict == "right"
    alerts = np.array(list(size.values()), dtype=np.int64)
    hits = np.array([correct[node] for node in size], dtype=np.int64)
    bound = bound_of_sizes(alerts, hits, confidence)
    miss_bound = bound_of_sizes(alerts, alerts - hits, confidence)
    return TrackRecord(bound, 1 - miss_bound.lower, inconclusive, still_open)


def advance_stage(
    group: str,
    state: StageState | None,
    outcomes: Iterable[AlertOutcome],
    config: StagesConfig,
    now: datetime,
    needed: Mapping[Stage, float] = FIXED,
) -> tuple[StageState, tuple[str, ...]]:
    """Promote or demote a group by one stage, demote it to the ceiling, or keep its stage.

    A group enters a stage if the lower bound of its precision exceeds the stage's requirement, and leaves it if the
    upper bound is below the requirement.

    ``group``: ``cluster/group``.
    ``state``: None: a new group, which starts in ``shadow``.
    ``outcomes``: outcomes of the group's alerts; only alerts since it entered its stage count, so that no outcome is
    used twice.
    ``needed``: precision that each stage requires, unless fixed by the settings.
    Returns: the state, and why the stage changed, or why an otherwise qualified group was not promoted.
    """
    pinned = config.pinned.get(group)
    if pinned is not None and (state is None or state.stage != pinned):
        return StageState(pinned, now), (f"group {group} is pinned to {pinned}",)
    if state is None:
        return StageState("shadow", now), (f"group {group} is new and starts in shadow",)
    if pinned is not None:
        return state, ()
    if STAGES.index(state.stage) > STAGES.index(config.ceiling):
        reason = f"group {group} moves down from {state.stage} to {config.ceiling}, the ceiling of the settings"
        return StageState(config.ceiling, now), (reason,)
    since = max(state.since, now - config.window)
    counted = [outcome for outcome in outcomes if outcome.alert.at >= since]
    position = STAGES.index(state.stage)
    if position > 0:
        record, min_precision = _record_for(state.stage, counted, config, now, needed)
        if record.bound.alerts >= config.min_outcomes and record.upper < min_precision:
            down = STAGES[position - 1]
            below = f"{record.summary}, below {percent(min_precision)}"
            return StageState(down, now), (f"group {group} moves down from {state.stage} to {down}: {below}",)
    return (state, ()) if state.stage == config.ceiling else _promoted(group, state, counted, config, now, needed)


def _promoted(
    group: str,
    state: StageState,
    counted: list[AlertOutcome],
    config: StagesConfig,
    now: datetime,
    needed: Mapping[Stage, float],
) -> tuple[StageState, tuple[str, ...]]:
    upper = STAGES[STAGES.index(state.stage) + 1]
    record, min_precision = _record_for(upper, counted, config, now, needed)
    if record.bound.alerts < config.min_outcomes or not record.bound.lower > min_precision:
        return state, ()
    if now - state.since < config.min_time:
        since = f"{state.since:%Y-%m-%d}"
        return state, (f"group {group} qualifies for {upper}, but has been in {state.stage} only since {since}",)
    share, limit = record.inconclusive / (record.bound.alerts + record.inconclusive), config.max_inconclusive
    if share > limit:
        inconclusive = f"{percent(share)} of its alerts are inconclusive, above {percent(limit)}"
        return state, (f"group {group} qualifies for {upper}, but {inconclusive}",)
    reason = f"group {group} moves up from {state.stage} to {upper}: {record.summary}, above {percent(min_precision)}"
    return StageState(upper, now), (reason,)


def _record_for(
    stage: Stage, outcomes: list[AlertOutcome], config: StagesConfig, now: datetime, needed: Mapping[Stage, float]
) -> tuple[TrackRecord, float]:
    tier, bar = ("high", config.hard) if stage == "hard" else ("elevated", config.soft)
    min_precision = needed[stage] if bar.min_precision is None else bar.min_precision
    return record_of(outcomes, tier, config.confidence, now), min_precision


def held_out(node: str, episode: datetime, share: float) -> bool:
    """Return whether a node is in the hold-out during an episode: a deterministic pseudo-random choice."""
    digest = hashlib.sha256(f"{node}|{episode.timestamp():.3f}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64
