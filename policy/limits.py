"""What limits an action on one node: opt-outs, stages, the breaker, the rungs of the settings and what it is worth."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from policy.breaker import BreakerState
from policy.config import PolicyConfig
from policy.fleet import Level, NodeView, Signals
from policy.ladder.cost_benefit import Worth, worth_of
from policy.node_tier.node_assessment import Assessment
from policy.stages import ALLOWED_LEVELS, StageState, held_out


@dataclass(slots=True)
class Case:
    """One node on its way through a decision.

    ``wanted``: what its tier asks for.
    ``target``: what it gets; only ever lowered.
    ``reasons``: of each lowering.
    ``asks``: it is newly taken out of service, if the budget gives it.
    """

    node: NodeView
    assessment: Assessment
    wanted: Level
    target: Level
    reasons: list[str]
    mute: bool = False
    asks: bool = False
    held_out: bool = False
    worth: Worth | None = None

    @property
    def level(self) -> Level:
        """Which predrain marks are on the node."""
        return self.node.marks.level

    @property
    def ordered_reasons(self) -> tuple[str, ...]:
        """All reasons in words, the weightiest first.

        Where a mark exceeds the target, a limit that was the last to lower it is what decided, and comes before
        the tier: "from clear to high" is no reason for a release.
        """
        of_tier, limits = self.reasons[: len(self.assessment.reasons)], self.reasons[len(self.assessment.reasons) :]
        explained = self.assessment.explanations
        if not limits or self.target >= self.node.marks.level:
            return (*self.reasons, *explained)
        tier = f"its tier is {self.assessment.tier}: {of_tier[0]}" if of_tier else f"its tier is {self.assessment.tier}"
        return (limits[-1], *limits[:-1], tier, *of_tier[1:], *explained)

    def lower(self, level: Level, why: str) -> None:
        """Take the target down to a level, if it is above."""
        if self.target > level:
            self.target = level
            self.reasons.append(why)

    def keep(self, why: str, *, publish: bool) -> None:
        """Allow nothing new on the node, except publishing if ``publish`` is set."""
        marks = self.node.marks
        self.lower(max(marks.level, Level.PUBLISH) if publish else marks.level, why)
        if self.target is Level.AVOID and not marks.soft:  # a hard mark may not be exchanged for a soft one either
            self.lower(Level.PUBLISH if publish or marks.published is not None else Level.NONE, why)

    @property
    def urgency(self) -> float:
        """What actions are ordered by, the highest first: their risk, and before all risks an existing fault."""
        return 2.0 if self.assessment.ruled else self.assessment.risk or 0.0

    @property
    def precedence(self) -> float:
        """Priority in the budgets, highest first: expected GPU-hours saved by a drain; faults precede all."""
        if self.assessment.ruled or self.worth is None:
            return math.inf
        return self.worth.saved - self.worth.lost


def limit(
    case: Case,
    stages: Mapping[str, StageState],
    breaker: BreakerState,
    signals: Signals,
    config: PolicyConfig,
    now: datetime,
    removed: str = "",
) -> None:
    """Lower a node's target by all but the budget and what a drain is worth.

    ``removed``: how a mark of predrain went that somebody else removed.
    """
    node, assessment = case.node, case.assessment
    level = node.marks.level
    if signals.release_all:
        case.lower(Level.NONE, "release-all is set")
    if node.opt_out is not None:
        case.lower(Level.NONE, f"it opted out ({node.opt_out})")
    stage = stages[node.group_key].stage
    case.lower(ALLOWED_LEVELS[stage], f"group {node.group_key} is in stage {stage}")
    cap(case, config)
    if assessment.state.episode is not None and not assessment.ruled and case.target.hard and not level.hard:
        case.held_out = held_out(node.name, assessment.state.episode, config.stages.holdout)
        if case.held_out:
            case.lower(Level.AVOID, "hold-out: not drained, to measure precision")
    if node.foreign is not None:
        case.keep(f"no new action except publish: {node.foreign}", publish=True)
    if assessment.undone:
        case.keep(f"{removed}: not re-applied during this episode", publish=True)
    if node.uncordoned:
        case.lower(Level.PUBLISH, "an operator uncordoned the node: the other predrain markers are removed")
    _freeze(case, signals, config, now)
    if assessment.calm:
        case.lower(max(level, Level.PUBLISH), "risk is low or unknown: no new action")
    if case.target.hard and case.target > level:
        soft = max(level, Level.AVOID)
        frozen = breaker.frozen(node.group_key, node.name)
        if frozen:
            case.lower(soft, f"the breaker is open: {'; '.join(frozen)}")
        if not assessment.ruled and assessment.changed_within(config.breaker.settle, now):
            case.lower(soft, "its driver or exporter changed after the model was fitted")
        if assessment.instant != "high":
            case.lower(soft, "risk is below the threshold of tier high: no new drain")
    case.asks = case.target.hard and not level.hard


def cap(case: Case, config: PolicyConfig) -> None:
    """Lower a prediction's target to the rungs of the settings."""
    rungs, rules = config.rungs, case.assessment.rules
    if rules and rules[0].rule.tier == case.assessment.tier:  # a fault that was reported, not a prediction
        return
    if "drain" not in rungs and case.node.jobs:
        case.lower(Level.SWAP, "jobs are not moved: drain is not in policy.rungs")
    if "drain" not in rungs and "swap" not in rungs:
        case.lower(Level.AVOID, "neither swap nor drain is in policy.rungs")
    if "avoid" not in rungs and not case.target.hard:
        case.lower(Level.PUBLISH, "avoid is not in policy.rungs")


def _freeze(case: Case, signals: Signals, config: PolicyConfig, now: datetime) -> None:
    published, unwritable = case.node.marks.published, case.node.unwritable
    blind = is_blind(signals, config, now)
    case.mute = signals.kill or blind or case.node.opt_out is not None or not case.node.readable
    if unwritable is not None:
        case.reasons += [f"writes are suspended, releases included: {unwritable}"]
    if signals.kill:
        case.keep("the kill switch is set", publish=False)
        if published is not None and now >= published.expires_at:
            case.lower(Level.NONE, "the prediction has expired, and the kill switch blocks its renewal")
    if blind:
        case.keep("the state of the scheduler is stale", publish=False)


def is_blind(signals: Signals, config: PolicyConfig, now: datetime) -> bool:
    """Whether the state of the scheduler is stale."""
    return signals.read_at is None or now - signals.read_at > config.breaker.max_read_age


def value(case: Case, config: PolicyConfig, now: datetime) -> None:
    """Say what a drain of a node at risk is worth."""
    if case.assessment.tier in ("elevated", "high"):
        node, ruled = case.node, case.assessment.ruled
        risk, found = (1.0, 1.0) if ruled else (case.assessment.risk or 0.0, config.probes.mean_found)
        case.worth = worth_of(len(node.units), node.jobs, risk, config.horizon, config.cost_benefit, now, found)


def weigh(case: Case) -> None:
    """Lower a node's target where a drain is not worth it now."""
    if case.worth is None or case.target is not Level.DRAIN or case.node.marks.drained:
        return
    if case.worth.choice == "wait":
        case.lower(Level.SWAP, f"drain postponed: {case.worth.message}")
    elif case.worth.choice == "leave":
        case.lower(Level.SWAP, f"swap instead of drain: {case.worth.message}")
    else:
        case.reasons.append(case.worth.message)
