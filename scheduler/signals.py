"""What stands on the nodes after a round, with the units that it is due to: for those who follow it in other ways."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from policy.config import PolicyConfig
from policy.fleet import Level, NodeView
from policy.hard_rules import rule_hits
from policy.plan import Plan


@dataclass(frozen=True, slots=True)
class NodeSignal:
    """A node that carries marks of ours.

    ``level``: what stands, as the scheduler has confirmed it.
    ``until``: until when what it rests on holds; aware.
    ``units``: the GPUs that it is due to, the weightiest first; none: nothing is remembered of it.
    """

    node: str
    tier: str
    level: Level
    risk: float | None
    until: datetime | None
    units: tuple[str, ...]
    reasons: tuple[str, ...]


def signals_of(
    plan: Plan, views: Iterable[NodeView], levels: Mapping[str, Level], policy: PolicyConfig
) -> tuple[NodeSignal, ...]:
    """Give what stands on each node that carries anything of ours.

    ``levels``: what of ours stands on each node now.
    """
    made = []
    for view in views:
        level, decision = levels.get(view.name, Level.NONE), plan.nodes.get(view.name)
        if level is Level.NONE or decision is None or not view.readable:
            continue
        known = plan.state.nodes.get(view.name)
        support = known.tier.support if known is not None else ()
        hits = rule_hits(view, policy.rules, plan.now)
        units = dict.fromkeys(
            [hit.unit for hit in hits if hit.rule.tier == decision.tier]
            + [each.unit for each in sorted(support, key=lambda each: -each.risk)]
        )
        made.append(
            NodeSignal(
                view.name, decision.tier, level, decision.risk, decision.expires_at, tuple(units), decision.reasons
            )
        )
    return tuple(sorted(made, key=lambda each: each.node))
