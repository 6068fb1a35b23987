"""Rules that bypass the model: what a unit reports itself, each with its own tier, reason and end."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from policy.fleet import NodeView
from policy.tiers import TIERS

_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class HardRule:
    """What follows from a fact.

    ``tier``: which tier the node has at once, whatever its risk; not ``clear``.
    ``holds``: for how long after the fact was last seen.
    ``words``: the reason, in plain words.
    ``event``: whether the fact is something that happened, and not a state that is read again and again.
    """

    fact: str
    tier: Literal["watch", "elevated", "high"]
    holds: timedelta
    words: str
    event: bool = False

    def __post_init__(self) -> None:
        if self.holds <= timedelta(0):
            raise ValueError(f"holds of the rule on {self.fact} is {self.holds}: give a positive time")


RULES: tuple[HardRule, ...] = (
    HardRule("row_remap_failure", "high", _DAY, "a memory row could not be remapped: the spare rows are used up"),
    HardRule("row_remap_pending", "elevated", _DAY, "a memory row waits for a reset to be remapped"),
    HardRule("xid 64", "high", 7 * _DAY, "XID 64: a row remap or page retirement failed", event=True),
    HardRule("xid 79", "high", 2 * _DAY, "XID 79: the GPU has fallen off the bus", event=True),
    HardRule("xid 95", "high", _DAY, "XID 95: an uncontained memory error", event=True),
    HardRule("recovery_action reset", "high", _DAY, "the driver asks for a GPU reset"),
    HardRule("recovery_action reboot", "high", _DAY, "the driver asks for a reboot of the node"),
    HardRule("recovery_action drain_p2p", "high", _DAY, "the driver asks to end all peer traffic of the GPU"),
    HardRule("recovery_action drain_and_reset", "high", _DAY, "the driver asks for a drain and a GPU reset"),
    HardRule("diagnostic_failed", "high", 7 * _DAY, "a diagnostic failed", event=True),
)
"""NVIDIA's XID catalogue (64: reset and support; 79: restart of the machine; 95: reset) and its driver's recovery
action (NVML field 230, also announced by XID 154). A pending remap harms no running work and takes effect at the next
reset, so it only keeps new work away. The lengths are ours: a state (remap, recovery action) is read again and again
and needs no more than a day; an event speaks once, and a part that failed for good is not better after a day."""


@dataclass(frozen=True, slots=True)
class HardRulesConfig:
    """Which rules apply.

    ``rules``: each fact at most once.
    """

    rules: tuple[HardRule, ...] = RULES

    def __post_init__(self) -> None:
        names = [rule.fact for rule in self.rules]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"rules holds more than one rule on {', '.join(twice)}: give one rule a fact")


@dataclass(frozen=True, slots=True)
class RuleHit:
    """A rule that holds on a node now."""

    unit: str
    rule: HardRule
    seen_at: datetime
    expires_at: datetime

    @property
    def words(self) -> str:
        """The reason with the unit and both times."""
        seen, end = (f"{when:%Y-%m-%d %H:%M} UTC" for when in (self.seen_at, self.expires_at))
        return f"{self.unit}: {self.rule.words} (seen {seen}, holds until {end})"


def rule_hits(node: NodeView, config: HardRulesConfig, now: datetime) -> tuple[RuleHit, ...]:
    """Find the rules that hold on a node.

    ``node``: facts that no rule names are passed over, so are those from before a unit's ``valid_from`` and those from
    the future, which only a wrong clock can have seen.
    """
    hits: dict[tuple[str, str], RuleHit] = {}
    for unit in node.units:
        for fact in unit.facts:
            rule = next((rule for rule in config.rules if rule.fact == fact.name), None)
            if rule is None or fact.seen_at > now or now >= fact.seen_at + rule.holds:
                continue
            if unit.valid_from is not None and fact.seen_at < unit.valid_from:
                continue
            hit = RuleHit(unit.name, rule, fact.seen_at, fact.seen_at + rule.holds)
            earlier = hits.get((unit.name, fact.name))
            if earlier is None or earlier.seen_at < hit.seen_at:
                hits[unit.name, fact.name] = hit

    def worst_first(hit: RuleHit) -> tuple[int, float, str, str]:
        return -TIERS.index(hit.rule.tier), -hit.expires_at.timestamp(), hit.unit, hit.rule.fact

    return tuple(sorted(hits.values(), key=worst_first))
