"""What keeps a node from what its tier asks for: each limit lowers the target, none can raise it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from policy.assess import Assessment
from policy.breaker import BreakerState
from policy.config import PolicyConfig
from policy.cost_benefit import Worth, worth_of
from policy.fleet import Level, NodeView, Signals
from policy.stages import StageState, allowed_level, held_out


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
    def ordered_reasons(self) -> tuple[str, ...]:
        """All reasons in words, the weightiest first.

        Where something stands above the target, a limit that was the last to lower it is what decided, and comes before
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
        """Let nothing new stand on the node, but what is published where ``publish`` says so."""
        marks = self.node.marks
        self.lower(max(marks.level, Level.PUBLISHED) if publish else marks.level, why)
        if self.target is Level.SOFT and not marks.soft:  # a hard mark may not be exchanged for a soft one either
            self.lower(Level.PUBLISHED if publish or marks.published is not None else Level.NONE, why)


def limit(
    case: Case,
    stages: Mapping[str, StageState],
    breaker: BreakerState,
    signals: Signals,
    config: PolicyConfig,
    now: datetime,
) -> None:
    """Lower a node's target by all but the budget and what a drain is worth."""
    node, assessment = case.node, case.assessment
    level = node.marks.level
    if signals.release_all:
        case.lower(Level.NONE, "everything is to be released")
    if node.opt_out is not None:
        case.lower(Level.NONE, f"it opted out ({node.opt_out})")
    stage = stages[node.group_key].stage
    case.lower(allowed_level(stage), f"group {node.group_key} is in stage {stage}")
    if assessment.state.episode is not None and not assessment.ruled and case.target.hard and not level.hard:
        case.held_out = held_out(node.name, assessment.state.episode, config.stages.holdout)
        if case.held_out:
            case.lower(Level.SOFT, "held out: left undrained, to measure")
    if node.foreign is not None:
        case.keep(f"nothing new on it but what is published: {node.foreign}", publish=True)
    if assessment.undone:
        case.keep("a person took our mark off: not again in this episode", publish=True)
    if node.uncordoned:
        case.lower(Level.PUBLISHED, "a person undid our cordon, so the rest goes with it")
    _freeze(case, signals, config, now)
    if assessment.calm:
        case.lower(max(level, Level.PUBLISHED), "its risk is calm or unknown now: nothing new on it")
    if case.target.hard and case.target > level:
        frozen = breaker.frozen(node.group_key)
        if frozen:
            case.lower(max(level, Level.SOFT), f"the breaker is open: {'; '.join(frozen)}")
        if not assessment.ruled and assessment.changed_within(config.breaker.settle, now):
            case.lower(max(level, Level.SOFT), "its driver or exporter changed lately, and the model knows the old one")
        if not assessment.urgent:
            case.lower(max(level, Level.SOFT), "its risk is below the threshold of high now: nothing hard that is new")
    case.asks = case.target.hard and not level.hard


def _freeze(case: Case, signals: Signals, config: PolicyConfig, now: datetime) -> None:
    published = case.node.marks.published
    blind = signals.read_at is None or now - signals.read_at > config.breaker.max_read_age
    case.mute = signals.kill or blind or case.node.opt_out is not None or not case.node.readable
    if signals.kill:
        case.keep("the kill switch is on", publish=False)
        if published is not None and now >= published.expires_at:
            case.lower(Level.NONE, "what was published has expired, and the kill switch lets nothing be renewed")
    if blind:
        case.keep("the scheduler was not read lately", publish=False)


def weigh(case: Case, config: PolicyConfig, now: datetime) -> None:
    """Say what a drain of a node at risk is worth, and lower its target where a drain is not worth it now."""
    node = case.node
    if case.assessment.tier not in ("elevated", "high"):
        return
    risk = 1.0 if case.assessment.ruled else case.assessment.risk or 0.0
    case.worth = worth_of(len(node.units), node.jobs, risk, config.horizon, config.cost_benefit, now)
    if case.target is not Level.DRAINED or node.marks.drained:
        return
    if case.worth.choice == "wait":
        case.lower(Level.TAINTED, f"waiting for its jobs to end: {case.worth.words}")
    elif case.worth.choice == "leave":
        case.lower(Level.TAINTED, f"its jobs are left to end by themselves: {case.worth.words}")
    else:
        case.reasons.append(case.worth.words)


def urgency(case: Case) -> float:
    """Give what nodes are ordered by, the highest first: their risk, and before all risks a fault that is there."""
    if case.assessment.ruled:
        return 2.0
    return case.assessment.risk or 0.0
