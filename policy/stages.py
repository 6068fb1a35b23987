"""Rollout stages: a group of nodes earns its actions by the precision that was measured on it, and loses them by it."""

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
from policy.bounds import PrecisionBound, bound_of_sizes
from policy.episodes import AlertOutcome, opens_episode
from policy.fleet import Level
from policy.tiers import TIERS

Stage = Literal["shadow", "soft", "hard"]
STAGES: tuple[Stage, ...] = ("shadow", "soft", "hard")

ALLOWED_LEVELS: Mapping[Stage, Level] = {"shadow": Level.NONE, "soft": Level.AVOID, "hard": Level.DRAIN}
"""The highest level allowed on a node of a group in a stage."""


FIXED: Mapping[Stage, float] = {"soft": 0.3, "hard": 0.7}
"""Precision that a stage requires where the jobs of a group, or its risks, are not known."""


@checked(frozen=True, slots=True)
class Bar:
    """The precision that a stage requires.

    ``min_precision``: a fixed share; None: of ``hard`` the break-even of a drain with the group's own jobs, of
    ``soft``, which costs nothing, the share that would be right by chance.
    """

    min_precision: Annotated[float, Field(gt=0, lt=1)] | None = None


@checked(frozen=True, slots=True)
class StagesConfig:
    """How groups move between stages.

    ``soft``, ``hard``: of ``soft`` by the alerts of tier ``elevated`` and above, of ``hard`` by those of ``high``.
    ``min_outcomes``: conclusive outcomes since the group came into its stage, before it may move.
    ``max_inconclusive``: no promotion while a larger share of the finished alerts is inconclusive.
    ``window``: older alerts do not count.
    ``min_time``: no promotion before a group was so long in its stage.
    ``ceiling``: the highest stage of a group; a group above it comes down to it. Only ``pinned`` leads beyond it.
    ``pinned``: stages that a person set, by ``cluster/group``; they do not move.
    ``holdout``: share of the nodes that would be taken out on a prediction and are only softly tainted, to measure
    without bias.
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
    """Stage of a group, and since when."""

    stage: Stage
    since: datetime


@dataclass(frozen=True, slots=True)
class TrackRecord:
    """How a group's alerts have done in its stage.

    ``bound``: of the conclusive ones; alerts of one node share their fate.
    ``upper``: One-sided upper bound; 1 without alerts.
    """

    bound: PrecisionBound
    upper: float
    inconclusive: int
    open: int

    @property
    def inconclusive_share(self) -> float:
        """Share of the finished alerts that are inconclusive; 0 without any."""
        finished = self.bound.alerts + self.inconclusive
        return self.inconclusive / finished if finished else 0.0

    @property
    def summary(self) -> str:
        """The record in one line."""
        if not self.bound.alerts:
            return f"no conclusive alert yet ({self.inconclusive} inconclusive, {self.open} open)"
        return (
            f"{self.bound.hits} of {self.bound.alerts} alerts right, precision {self.bound.precision:.0%}"
            f" ({self.bound.lower:.0%} to {self.upper:.0%}), {self.inconclusive} inconclusive, {self.open} open"
        )


def record_of(outcomes: Iterable[AlertOutcome], least: str, confidence: float, now: datetime) -> TrackRecord:
    """Count outcomes and bound their precision.

    ``outcomes``: those of hard rules are passed over: they say nothing of the model. Alerts of one episode, such as
    those of a node that came and went within the horizon, count as the one that opened it.
    Returns: an alert counts only when two horizons have passed since: right ones are known sooner than wrong ones (a
    drained unit that passes a diagnostic is watched for a further horizon), so that a young record would look too good.
    """
    size: Counter[str] = Counter()
    right: Counter[str] = Counter()
    inconclusive = still_open = 0
    counted = [
        outcome
        for outcome in outcomes
        if not outcome.alert.by_rule and TIERS.index(outcome.alert.tier) >= TIERS.index(least)
    ]
    for outcome in compress(counted, opens_episode([outcome.alert for outcome in counted])):
        alert = outcome.alert
        if outcome.verdict == "open" or now < alert.at + 2 * alert.horizon:
            still_open += 1
        elif outcome.verdict == "inconclusive":
            inconclusive += 1
        else:
            size[alert.node] += 1
            right[alert.node] += outcome.verdict == "right"
    alerts = np.array(list(size.values()), dtype=np.int64)
    hits = np.array([right[node] for node in size], dtype=np.int64)
    bound = bound_of_sizes(alerts, hits, confidence)
    wrong = bound_of_sizes(alerts, alerts - hits, confidence)
    return TrackRecord(bound, 1 - wrong.lower, inconclusive, still_open)


def advance_stage(
    group: str,
    state: StageState | None,
    outcomes: Iterable[AlertOutcome],
    config: StagesConfig,
    now: datetime,
    needed: Mapping[Stage, float] = FIXED,
) -> tuple[StageState, tuple[str, ...]]:
    """Move a group one stage up or down, down to the ceiling, or leave it.

    A group comes into a stage when the lower bound of its precision exceeds what the stage requires, and falls out of
    it when the upper bound is below that.

    ``group``: as ``cluster/group``.
    ``state``: None: a new group, which begins in ``shadow``.
    ``outcomes``: of the group's alerts; only those after it came into its stage count, so that a record is not used
    twice.
    ``needed``: precision that each stage requires, where the settings fix none.
    Returns ``reasons``: why it moved; why it did not where only one thing was missing.
    """
    pinned = config.pinned.get(group)
    if pinned is not None and (state is None or state.stage != pinned):
        return StageState(pinned, now), (f"group {group} is pinned to {pinned}",)
    if state is None:
        return StageState("shadow", now), (f"group {group} is new and starts in shadow",)
    if pinned is not None:
        return state, ()
    if STAGES.index(state.stage) > STAGES.index(config.ceiling):
        why = f"group {group} moves down from {state.stage} to {config.ceiling}, the ceiling of the settings"
        return StageState(config.ceiling, now), (why,)
    if state.since > now:  # a clock went back
        state = StageState(state.stage, now)
    since = max(state.since, now - config.window)
    counted = [outcome for outcome in outcomes if outcome.alert.at >= since]
    position = STAGES.index(state.stage)
    if position > 0:
        record, least = _record_for(state.stage, counted, config, now, needed)
        if record.bound.alerts >= config.min_outcomes and record.upper < least:
            down = STAGES[position - 1]
            why = f"group {group} moves down from {state.stage} to {down}: {record.summary}, below {least:.1%}"
            return StageState(down, now), (why,)
    return (state, ()) if state.stage == config.ceiling else _promoted(group, state, counted, config, now, needed)


def _promoted(
    group: str,
    state: StageState,
    counted: list[AlertOutcome],
    config: StagesConfig,
    now: datetime,
    needed: Mapping[Stage, float],
) -> tuple[StageState, tuple[str, ...]]:
    up = STAGES[STAGES.index(state.stage) + 1]
    record, least = _record_for(up, counted, config, now, needed)
    if record.bound.alerts < config.min_outcomes or not record.bound.lower > least:
        return state, ()
    if now - state.since < config.min_time:
        since = f"{state.since:%Y-%m-%d}"
        return state, (f"group {group} qualifies for {up}, but has been in {state.stage} only since {since}",)
    share, limit = record.inconclusive_share, config.max_inconclusive
    if share > limit:
        why = f"group {group} qualifies for {up}, but {share:.0%} of its alerts are inconclusive, above {limit:.0%}"
        return state, (why,)
    why = f"group {group} moves up from {state.stage} to {up}: {record.summary}, above {least:.1%}"
    return StageState(up, now), (why,)


def _record_for(
    stage: Stage, outcomes: list[AlertOutcome], config: StagesConfig, now: datetime, needed: Mapping[Stage, float]
) -> tuple[TrackRecord, float]:
    tier, bar = ("high", config.hard) if stage == "hard" else ("elevated", config.soft)
    least = needed[stage] if bar.min_precision is None else bar.min_precision
    return record_of(outcomes, tier, config.confidence, now), least


def held_out(node: str, episode: datetime, share: float) -> bool:
    """Tell whether a node is left undrained in an episode, to measure: always the same answer, at random over nodes."""
    digest = hashlib.sha256(f"{node}|{episode.timestamp():.3f}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64
