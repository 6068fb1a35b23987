"""What a node is found to be: its tier by prediction and rule, what holds it, and whether a person undid our mark."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from policy.fleet import Level, NodeView
from policy.hard_rules import HardRulesConfig, RuleHit, rule_hits
from policy.hysteresis import NodeRiskConfig, Reading, Thresholds, adopt, advance, explain_tier, read_node
from policy.plan import NodeState
from policy.tiers import TIERS, Tier

_UNKNOWN_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Assessment:
    """A node as it is found.

    ``tier``: the higher of prediction and rule, after hysteresis.
    ``instant``: the same before hysteresis, of what is known now only.
    ``risk``: of the node, with risks that still hold of units that turned unknown.
    ``state``: to be remembered, but for what is seen and wanted now.
    ``undone``: a person took our mark off in this episode, and no new fault was reported since.
    ``calm``: neither a rule nor a risk at hand holds the tier, only hysteresis: nothing new follows from it.
    ``expires_at``: until when what holds the tier does; None while ``clear``.
    ``reasons``: why the tier moved or stayed, in words.
    ``explanations``: what the tier rests on, in words.
    """

    tier: Tier
    instant: Tier
    reading: Reading
    rules: tuple[RuleHit, ...]
    risk: float | None
    state: NodeState
    undone: bool
    calm: bool
    expires_at: datetime | None
    reasons: tuple[str, ...]
    explanations: tuple[str, ...]

    @property
    def ruled(self) -> bool:
        """Whether a rule asks for ``high``."""
        return bool(self.rules) and self.rules[0].rule.tier == "high"

    def changed_within(self, settle: timedelta, now: datetime) -> bool:
        """Tell whether driver or exporter changed so lately."""
        at = self.state.changed_at
        return at is not None and now - at < settle

    @property
    def blamed(self) -> tuple[str, bool]:
        """The unit that the tier is due to, and whether by a rule."""
        support = self.state.tier.support
        if self.rules and (self.rules[0].rule.tier == self.tier or not support):
            return self.rules[0].unit, True
        return support[0].unit, False

    @property
    def units(self) -> tuple[str, ...]:
        """The units that the tier is due to: those of rules that ask for it, then those whose risks hold it up."""
        by_rule = [hit.unit for hit in self.rules if hit.rule.tier == self.tier]
        by_risk = [each.unit for each in sorted(self.state.tier.support, key=lambda each: -each.risk)]
        return tuple(dict.fromkeys((*by_rule, *by_risk)))


def assess(
    node: NodeView,
    remembered: NodeState | None,
    thresholds: Thresholds,
    risks: NodeRiskConfig,
    rules: HardRulesConfig,
    now: datetime,
) -> Assessment:
    """Assess one node; nothing may be remembered of it."""
    reading = read_node(node, now)
    before = remembered or NodeState()
    if remembered is None and node.readable and node.marks.level >= Level.SOFT:
        at_most: Tier = "high" if node.marks.level.hard else "elevated"
        before = replace(before, tier=adopt(at_most, reading, thresholds, risks))
    tiered = advance(before.tier, reading, thresholds, risks, now)
    hits = rule_hits(node, rules, now)
    by_rule: Tier = hits[0].rule.tier if hits else "clear"
    known = [prediction.risk for prediction in reading.known.values()]
    fresh = risks.combine(known)
    by_risk: Tier = "clear" if fresh is None else thresholds.rise.tier(fresh)
    tier = max(tiered.tier, by_rule, key=TIERS.index)
    kept = [prediction.risk for prediction in tiered.support if prediction.unit not in reading.known]
    risk = risks.combine([*known, *kept]) if kept else fresh
    state, undone = _remember(node, before, hits, tier, now)
    state = replace(state, tier=tiered)
    sources = [(tiered.tier, tiered.expires_at), *((hit.rule.tier, hit.expires_at) for hit in hits)]
    ends = [end for name, end in sources if name == tier and end is not None]
    explained = tier != "clear" or bool(node.marks.level)
    return Assessment(
        tier=tier,
        instant=max(by_risk, by_rule, key=TIERS.index),
        reading=reading,
        rules=hits,
        risk=risk,
        state=state,
        undone=undone,
        calm=not hits and (fresh is None or tiered.calm > 0),
        expires_at=max(ends) if ends and tier != "clear" else None,
        reasons=explain_tier(tiered, fresh, thresholds) if explained else (),
        explanations=_explain(node, reading, hits, state, risk) if explained else (),
    )


def _remember(
    node: NodeView, before: NodeState, hits: tuple[RuleHit, ...], tier: Tier, now: datetime
) -> tuple[NodeState, bool]:
    state = replace(before, absent_since=None)
    if node.software is not None and node.software != before.software:
        changed_at = now if before.software is not None else before.changed_at
        state = replace(state, software=node.software, changed_at=changed_at)
    if tier == "clear":
        return replace(state, episode=None, alerted="clear", undone_at=None), False
    if state.episode is None or state.episode > now:
        state = replace(state, episode=now)
    level = node.marks.level
    lowered = before.seen >= Level.SOFT and level < before.seen and before.target >= before.seen
    if (node.readable and lowered) or (node.undone and state.undone_at is None):
        state = replace(state, undone_at=now)
    since = state.undone_at
    if since is None:
        return state, False
    # A fault that was reported after the person looked is news; a state that is only read again is not.
    return state, not any(hit.rule.event and hit.seen_at > since for hit in hits)


def _explain(
    node: NodeView, reading: Reading, hits: tuple[RuleHit, ...], state: NodeState, risk: float | None
) -> tuple[str, ...]:
    explanations = [hit.words for hit in hits]
    support = state.tier.support
    if support and risk is not None:
        units = ", ".join(f"{prediction.unit} {prediction.risk:.1%}" for prediction in support)
        explanations.append(f"a node risk of {risk:.1%}, mostly of {units}")
        scores = {unit.name: unit.score for unit in node.units}
        for prediction in support:
            if prediction.unit in reading.known and (score := scores[prediction.unit]) is not None:
                explanations += [f"{prediction.unit}: {reason}" for reason in score.reasons]
    elif not hits:
        explanations.append("nothing valid is known of it" if risk is None else f"a node risk of {risk:.1%}")
    explanations += reading.unknown[:_UNKNOWN_SHOWN]
    if len(reading.unknown) > _UNKNOWN_SHOWN:
        explanations.append(f"and {len(reading.unknown) - _UNKNOWN_SHOWN} more units without a valid score")
    return tuple(explanations)
