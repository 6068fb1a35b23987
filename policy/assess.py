"""What a node is found to be: its tier by prediction and rule, what holds it, and whether a person undid our mark."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from policy.fleet import Level, NodeView
from policy.hard_rules import HardRulesConfig, RuleHit, rule_hits
from policy.hysteresis import NodeRiskConfig, Reading, Thresholds, adopt, advance, explain_tier, read_node
from policy.state import NodeState
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

    @property
    def urgent(self) -> bool:
        """Whether ``high`` is true now, and not only held."""
        return self.instant == "high"

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

    def alerted_at(self, now: datetime) -> datetime:
        """Give the time from which an alert that begins now looks ahead."""
        return now if self.blamed[1] else self.state.tier.counted or now


def assess(
    node: NodeView,
    remembered: NodeState | None,
    thresholds: Thresholds,
    risks: NodeRiskConfig,
    rules: HardRulesConfig,
    now: datetime,
) -> Assessment:
    """Assess one node.

    ``remembered``: None: nothing is.
    """
    reading = read_node(node, now)
    before = remembered or NodeState()
    if remembered is None and node.readable and node.marks.level >= Level.SOFT:
        at_most: Tier = "high" if node.marks.level.hard else "elevated"
        before = replace(before, tier=adopt(at_most, reading, thresholds, risks))
    tiered = advance(before.tier, reading, thresholds, risks, now)
    hits = rule_hits(node, rules, now)
    by_rule: Tier = hits[0].rule.tier if hits else "clear"
    fresh = risks.combine(prediction.risk for prediction in reading.known.values())
    by_risk: Tier = "clear" if fresh is None else thresholds.rise.tier(fresh)
    tier = _higher(tiered.tier, by_rule)
    kept = [prediction for prediction in tiered.support if prediction.unit not in reading.known]
    known = [prediction.risk for prediction in reading.known.values()]
    risk = risks.combine([*known, *(prediction.risk for prediction in kept)]) if kept else fresh
    state, undone = _remember(node, before, hits, tier, now)
    state = replace(state, tier=tiered)
    sources = [(tiered.tier, tiered.expires_at), *((hit.rule.tier, hit.expires_at) for hit in hits)]
    ends = [end for name, end in sources if name == tier and end is not None]
    return Assessment(
        tier=tier,
        instant=_higher(by_risk, by_rule),
        reading=reading,
        rules=hits,
        risk=risk,
        state=state,
        undone=undone,
        calm=not hits and (fresh is None or tiered.calm > 0),
        expires_at=max(ends) if ends and tier != "clear" else None,
        reasons=explain_tier(tiered, fresh, thresholds) if tier != "clear" or node.marks.level else (),
        explanations=_explain(node, reading, hits, state, risk) if tier != "clear" or node.marks.level else (),
    )


def _higher(one: Tier, other: Tier) -> Tier:
    return one if TIERS.index(one) >= TIERS.index(other) else other


def _remember(
    node: NodeView, before: NodeState, hits: tuple[RuleHit, ...], tier: Tier, now: datetime
) -> tuple[NodeState, bool]:
    state = before if before.absent_since is None else replace(before, absent_since=None)
    if node.software is not None:
        if before.software is not None and node.software != before.software:
            state = replace(state, changed_at=now)
        if before.software != node.software:
            state = replace(state, software=node.software)
    if tier == "clear":
        if (state.episode, state.alerted, state.undone_at) != (None, "clear", None):
            state = replace(state, episode=None, alerted="clear", undone_at=None)
        return state, False
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
            score = scores.get(prediction.unit)
            if score is not None and prediction.unit in reading.known:
                explanations += [f"{prediction.unit}: {reason}" for reason in score.reasons]
    elif not hits:
        explanations.append("nothing valid is known of it" if risk is None else f"a node risk of {risk:.1%}")
    explanations += reading.unknown[:_UNKNOWN_SHOWN]
    if len(reading.unknown) > _UNKNOWN_SHOWN:
        explanations.append(f"and {len(reading.unknown) - _UNKNOWN_SHOWN} more units without a valid score")
    return tuple(explanations)
