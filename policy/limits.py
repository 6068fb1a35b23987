"""Limits on the action for one node: opt-outs, stages, the breaker, configured rungs and the cost-benefit."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from policy.breaker import BreakerState
from policy.config import PolicyConfig
from policy.fleet import Level, NodeView, Signals
from policy.ladder.cost_benefit import CostBenefit, evaluate_drain
from policy.node_tier.node_assessment import Assessment
from policy.stages import ALLOWED_LEVELS, StageState, held_out


@dataclass(slots=True)
class Case:
    """Working state of one node during a decision.

    ``wanted``: level that corresponds to its tier.
    ``target``: level it gets; limits only lower it.
    ``reasons``: reasons of the tier, then of each limit that applied.
    ``mute``: nothing is published.
    """

    node: NodeView
    assessment: Assessment
    wanted: Level
    target: Level
    reasons: list[str]
    mute: bool = False
    held_out: bool = False
    cost_benefit: CostBenefit | None = None

    @property
    def level(self) -> Level:
        """Level of predrain's taints on the node."""
        return self.node.marks.level

    @property
    def emptied(self) -> bool:
        """Whether the last job of a node in swap has ended, so that a diagnostic disrupts nothing."""
        is_testable = not self.node.down and self.assessment.reading.risk is not None
        return self.level is Level.SWAP and not self.node.jobs and is_testable

    @property
    def asks(self) -> bool:
        """Whether it is to be newly taken out of service, subject to the budget."""
        return self.target.hard and not self.level.hard

    @property
    def ordered_reasons(self) -> tuple[str, ...]:
        """All reasons, most important first.

        For a release, the limit that lowered the target last comes first: "from clear to high" does not explain a
        release.
        """
        of_tier, limits = self.reasons[: len(self.assessment.reasons)], self.reasons[len(self.assessment.reasons) :]
        explained = self.assessment.explanations
        if not limits or self.target >= self.node.marks.level:
            return (*self.reasons, *explained)
        tier = f"its tier is {self.assessment.tier}: {of_tier[0]}" if of_tier else f"its tier is {self.assessment.tier}"
        return (limits[-1], *limits[:-1], tier, *of_tier[1:], *explained)

    def lower(self, level: Level, reason: str) -> None:
        """Cap the target at a level."""
        if self.target > level:
            self.target = level
            self.reasons.append(reason)

    def keep(self, reason: str, *, publish: bool) -> None:
        """Block new actions on the node, except publishing if ``publish`` is set."""
        marks = self.node.marks
        self.lower(max(marks.level, Level.PUBLISH) if publish else marks.level, reason)
        if self.target is Level.AVOID and not marks.soft:  # a hard taint may not be replaced by a soft one either
            self.lower(Level.PUBLISH if publish or marks.published is not None else Level.NONE, reason)

    @property
    def urgency(self) -> float:
        """Sort key of actions, highest first: the risk; existing faults precede all risks."""
        return 2.0 if self.assessment.ruled else self.assessment.risk or 0.0

    @property
    def precedence(self) -> float:
        """Priority in the budgets, highest first: expected net GPU-hours of a drain; faults precede all."""
        if self.assessment.ruled or self.cost_benefit is None:
            return math.inf
        return self.cost_benefit.saved - self.cost_benefit.lost


def limit(
    case: Case,
    stages: Mapping[str, StageState],
    breaker: BreakerState,
    signals: Signals,
    config: PolicyConfig,
    now: datetime,
    removed: str = "",
) -> None:
    """Lower a node's target by all limits except the budget and the cost-benefit.

    ``removed``: message about a predrain taint that another client removed.
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
    if assessment.marker_removed:
        case.keep(f"{removed}: not re-applied during this episode", publish=True)
    if node.uncordoned:
        case.lower(Level.PUBLISH, "an operator uncordoned the node: the other predrain markers are removed")
    _freeze(case, signals, config, now)
    if assessment.calm and not case.emptied:
        case.lower(max(level, Level.PUBLISH), "risk is low or unknown: no new action")
    if case.target.hard and case.target > level:
        soft = max(level, Level.AVOID)
        frozen = breaker.frozen(node.group_key, node.name)
        if frozen:
            case.lower(soft, f"the breaker is open: {'; '.join(frozen)}")
        if not assessment.ruled and assessment.changed_within(config.breaker.settle, now):
            case.lower(soft, "its driver or exporter changed after the model was fitted")
        if assessment.instant != "high" and not case.emptied:
            case.lower(soft, "risk is below the threshold of tier high: no new drain")


def cap(case: Case, config: PolicyConfig) -> None:
    """Lower the target of a prediction to the configured rungs."""
    rungs, rules = config.rungs, case.assessment.rules
    if rules and rules[0].rule.tier == case.assessment.tier:  # a reported fault, not a prediction
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


def limit_by_cost_benefit(case: Case, config: PolicyConfig, now: datetime) -> None:
    """Evaluate a drain and a swap of a node at risk, and lower its target if they do not pay now."""
    if case.assessment.tier not in ("elevated", "high"):
        return
    node, ruled, costs = case.node, case.assessment.ruled, config.cost_benefit
    risk, share = (1.0, 1.0) if ruled else (case.assessment.risk or 0.0, config.probes.mean_found)
    worth = evaluate_drain(len(node.units), node.jobs, risk, config.horizon, costs, now, share)
    case.cost_benefit = worth
    if not case.target.hard or node.marks.drained:
        return
    if case.target is Level.DRAIN and (worth.choice == "drain" or case.emptied):
        case.reasons.append("its last job has ended: a drain disrupts nothing" if case.emptied else worth.message)
    elif case.target is Level.DRAIN and worth.choice == "wait":
        case.lower(Level.SWAP, f"drain postponed: {worth.message}")
    else:
        case.lower(Level.SWAP, f"swap instead of drain: {worth.message}")
        if case.asks and worth.swap <= 0 and not (ruled or costs.always):
            case.lower(
                Level.AVOID,
                f"a swap is expected to lose {-worth.swap:,.1f} GPU-hours, including GPUs that idle until jobs end",
            )
