"""Assessment of a node: its tier by prediction and by hard rules, with the evidence."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from foundation.text import percent
from policy.fleet import Level, NodeView
from policy.ladder.remedies import Remedy, hardest
from policy.node_tier.hard_rules import REMEDIED, HardRulesConfig, RuleHit, rule_hits
from policy.node_tier.hysteresis import (
    NodeRiskConfig,
    RiskReading,
    Thresholds,
    TierState,
    adopt,
    advance,
    changed,
    explain_tier,
)
from policy.plan import NodeState
from policy.tiers import TIERS, Tier

_MAX_UNKNOWN_SHOWN = 3
_NEW_NODE = NodeState()
_QUICK = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Assessment:
    """Tier of a node and its evidence.

    ``tier``: the higher of the tiers by prediction and by rule, after hysteresis.
    ``instant``: the same before hysteresis, from currently valid scores and facts only.
    ``by_risk``: ``instant`` without rules.
    ``risk``: node risk, including retained risks of units whose score became unknown.
    ``state``: state to remember, without ``seen`` and ``target`` of this decision.
    ``marker_removed``: another client removed a predrain taint in this episode, and no new fault was reported since.
    ``calm``: only hysteresis sustains the tier, so the only new action is the test of an empty node in swap.
    ``expires_at``: expiry of the evidence behind the tier; None while ``clear``.
    ``repeated``: a fault behind tier ``high`` recurred soon after its remedy.
    """

    tier: Tier
    instant: Tier
    by_risk: Tier
    reading: RiskReading
    rules: tuple[RuleHit, ...]
    risk: float | None
    state: NodeState
    marker_removed: bool
    calm: bool
    expires_at: datetime | None
    reasons: tuple[str, ...]
    explanations: tuple[str, ...]
    repeated: bool = False

    @property
    def ruled(self) -> bool:
        """Whether a rule sets ``high``."""
        return bool(self.rules) and self.rules[0].rule.tier == "high"

    def changed_within(self, settle: timedelta, now: datetime) -> bool:
        """Return whether driver or exporter changed within ``settle``."""
        changed_at = self.state.changed_at
        return changed_at is not None and now - changed_at < settle

    @property
    def remedy(self) -> Remedy | None:
        """Remedy of the faults behind tier ``high``; None without faults."""
        if self.repeated:
            return "replace"
        return hardest(hit.rule.remedy for hit in self.rules if hit.rule.tier == "high")

    @property
    def blamed(self) -> tuple[str, bool]:
        """Unit that caused the tier, and whether by a rule."""
        support = self.state.tier.support
        if self.rules and (self.rules[0].rule.tier == self.tier or not support):
            return self.rules[0].unit, True
        return support[0].unit, False


def assess(
    node: NodeView,
    reading: RiskReading,
    remembered: NodeState | None,
    thresholds: Thresholds,
    risks: NodeRiskConfig,
    rules: HardRulesConfig,
    now: datetime,
    *,
    releases_all: bool,
) -> Assessment:
    """Assess one node; ``remembered`` is None for a new node or after the state was lost."""
    fresh = reading.risk
    previous = remembered or _NEW_NODE
    if remembered is None and node.readable and node.marks.level >= Level.AVOID:
        at_most: Tier = "high" if node.marks.level.hard else "elevated"
        previous = replace(previous, tier=adopt(at_most, reading, thresholds, risks))
    by_risk: Tier = "clear" if fresh is None else thresholds.rise.tier(fresh)
    tiered = advance(previous.tier, reading, thresholds, risks, now)
    hits = rule_hits(node, rules, now)
    by_rule: Tier = hits[0].rule.tier if hits else "clear"
    tier = max(tiered.tier, by_rule, key=TIERS.index)
    carried = [prediction for prediction in tiered.support if prediction.unit not in reading.known]
    risk = risks.combine([prediction.risk for prediction in (*reading.known.values(), *carried)]) if carried else fresh
    state, marker_removed = _remember(node, previous, hits, tier, tiered, now, releases_all=releases_all)
    ends = [hit.expires_at for hit in hits if hit.rule.tier == tier]
    if tiered.tier == tier and (end := tiered.expires_at) is not None:
        ends.append(end)
    explained = tier != "clear" or bool(node.marks.level)
    reasons = explain_tier(tiered, fresh, thresholds) if explained else ()
    explanations = _explain(node, reading, hits, state, risk) if explained else ()
    if tiered.tier != tier:  # the risk alone would not explain the tier
        reasons = (f"hard rule: {explanations[0]}", *(f"by risk alone, {reason}" for reason in reasons))
        explanations = explanations[1:]
    return Assessment(
        tier=tier, instant=max(by_risk, by_rule, key=TIERS.index), by_risk=by_risk, reading=reading, rules=hits,
        risk=risk, state=state, marker_removed=marker_removed, calm=not hits and (fresh is None or tiered.calm > 0),
        expires_at=max(ends) if ends and tier != "clear" else None,
        reasons=reasons, explanations=explanations,
        repeated=_is_repeated(node, hits, rules.repeat),
    )  # fmt: skip


def _is_repeated(node: NodeView, hits: tuple[RuleHit, ...], window: timedelta) -> bool:
    remedied = {
        (unit.name, fact.name): fact.seen_at for unit in node.units for fact in unit.facts if fact.name in REMEDIED
    }
    return any(
        hit.rule.tier == "high" and remedied_at is not None and remedied_at <= hit.seen_at < remedied_at + window
        for hit in hits
        for remedied_at in [remedied.get((hit.unit, f"remedied {hit.rule.remedy}"))]
    )


def _remember(
    node: NodeView, previous: NodeState, hits: tuple[RuleHit, ...], tier: Tier, tiered: TierState, now: datetime,
    *, releases_all: bool,
) -> tuple[NodeState, bool]:  # fmt: skip
    if tier == "clear":
        state = changed(previous, tier=tiered, absent_since=None, episode=None, alerted="clear", marker_removed_at=None)
    else:
        state = changed(previous, tier=tiered, absent_since=None)
    if node.software is not None and node.software != previous.software:
        changed_at = now if previous.software is not None else previous.changed_at
        state = replace(state, software=node.software, changed_at=changed_at)
    if tier == "clear":
        return state, False
    if state.episode is None:
        state = replace(state, episode=now)
    level = node.marks.level
    lowered = previous.seen >= Level.AVOID and level < previous.seen and previous.target >= previous.seen
    # A marker that is due for a release, and left no record, was released without the lease.
    end = previous.seen_until
    due = level is Level.NONE and (releases_all or (end is not None and end <= now))
    if (node.readable and lowered and not due) or (node.marker_removed and state.marker_removed_at is None):
        state = replace(state, marker_removed_at=now)
    since = state.marker_removed_at
    if since is None:
        return state, False
    # A fault event after the removal is new evidence; a state that is read again is not.
    return state, not any(hit.rule.event and hit.seen_at > since for hit in hits)


def removals_of(removed: Iterable[tuple[NodeView, Assessment]]) -> dict[str, str]:
    """Return a message by node about taints that another client removed.

    Taints that disappear soon after they were set, on several nodes, are removed by a program, not by an operator.
    """
    ages: dict[str, timedelta | None] = {}
    for node, assessment in removed:
        marker_removed_at, marked_at = assessment.state.marker_removed_at, node.marked_at
        ages[node.name] = (
            None if marker_removed_at is None or marked_at is None else max(marker_removed_at - marked_at, timedelta())
        )
    quick = sum(age is not None and age <= _QUICK for age in ages.values())
    removals: dict[str, str] = {}
    for name, age in ages.items():
        removals[name] = "an operator or another tool removed predrain's marker"
        if age is not None and age <= _QUICK:
            removal = f"predrain's marker was removed within {age.total_seconds():.0f} s"
            actor = (
                f", on {quick} nodes: another controller or an admission webhook" if quick > 1 else " by another client"
            )
            removals[name] = f"{removal}{actor}"
    return removals


def _explain(
    node: NodeView, reading: RiskReading, hits: tuple[RuleHit, ...], state: NodeState, risk: float | None
) -> tuple[str, ...]:
    explanations = [hit.reason for hit in hits]
    support = state.tier.support
    if support and risk is not None:
        units = ", ".join(f"{prediction.unit} {percent(prediction.risk)}" for prediction in support)
        explanations.append(f"a node risk of {percent(risk)}, mostly of {units}")
        scores = {unit.name: unit.score for unit in node.units}
        for prediction in support:
            if prediction.unit in reading.known and (score := scores[prediction.unit]) is not None:
                explanations += [f"{prediction.unit}: {reason}" for reason in score.reasons]
    elif not hits:
        explanations.append("no valid risk" if risk is None else f"a node risk of {percent(risk)}")
    unknown = reading.unknown
    explanations += unknown[:_MAX_UNKNOWN_SHOWN]
    if len(unknown) > _MAX_UNKNOWN_SHOWN:
        explanations.append(f"and {len(unknown) - _MAX_UNKNOWN_SHOWN} more units without a valid score")
    return tuple(explanations)
