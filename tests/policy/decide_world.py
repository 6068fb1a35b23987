"""A small fleet to decide about, and a scheduler that does what it is told."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from policy.budget import BudgetConfig
from policy.config import PolicyConfig
from policy.decide import decide
from policy.fleet import NO_MARKS, Fact, Level, NodeView, Published, Score, Signals, UnitView
from policy.node_tier.hysteresis import HysteresisConfig
from policy.plan import Action, Plan, PolicyState
from policy.stages import Stage, StagesConfig
from policy.tiers import TierThresholds

T0 = datetime(2026, 3, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
STEP = 6 * HOUR
THRESHOLDS = TierThresholds(0.1, 0.3, 0.6)


def config(
    *groups: str, stage: Stage = "hard", rise_after: int = 1, free: bool = False, **others: object
) -> PolicyConfig:
    """Settings with the stages of the groups pinned; ``free``: no budget at all."""
    settings: dict[str, object] = {
        "hysteresis": HysteresisConfig(rise_after=rise_after, fall_after=2),
        "stages": StagesConfig(pinned=dict.fromkeys([f"c/{group}" for group in groups or ("g",)], stage)),
        **({"budget": BudgetConfig((), ())} if free else {}),
        **others,
    }
    return PolicyConfig(THRESHOLDS, **settings)


def score(risk: float | None, at: datetime = T0, duration: timedelta = 2 * STEP) -> Score:
    """A score made at a time, which says nothing any more some time later."""
    return Score(risk, at, at + duration, ("its errors rise",) if risk else ())


def node(name: str, *risks: float | None, at: datetime = T0, facts: Iterable[str] = (), **others: object) -> NodeView:
    """A node of cluster c and group g with a GPU for each risk; the facts are the first GPU's, seen at that time."""
    listed = risks or (0.01,)
    units = tuple(
        UnitView(f"{name}-{slot}", score(risk, at), tuple(Fact(fact, at) for fact in facts) if slot == 0 else ())
        for slot, risk in enumerate(listed)
    )
    return NodeView(name, "c", **{"group": "g", "units": units, **others})


def healthy(count: int, at: datetime = T0, start: int = 0) -> list[NodeView]:
    """Nodes without any risk to speak of."""
    return [node(f"h{i:04}", 0.01, at=at) for i in range(start, start + count)]


def signals(now: datetime = T0, **others: object) -> Signals:
    """A scheduler just read and a fresh model."""
    return Signals(**{"read_at": now, "model_fitted_at": now - timedelta(days=1), **others})


def once(
    fleet: Sequence[NodeView],
    settings: PolicyConfig,
    now: datetime = T0,
    state: PolicyState | None = None,
    **others: object,
) -> Plan:
    return decide(fleet, state or PolicyState(), signals(now, **others), settings, now)


def verbs(plan: Plan, name: str) -> list[str]:
    """What is to be done to a node, in order."""
    return [action.verb for action in plan.actions if action.node == name]


def why(plan: Plan, name: str) -> str:
    return "; ".join(plan.nodes[name].reasons)


def carry_out(fleet: Sequence[NodeView], actions: Iterable[Action], now: datetime) -> list[NodeView]:
    """Do what a plan wants, as an adapter would."""
    marks = {node.name: node.marks for node in fleet}
    for action in actions:
        old = marks[action.node]
        if action.verb == "release":
            new = replace(
                old,
                drained=old.drained and action.to >= Level.DRAIN,
                tainted=old.tainted and action.to >= Level.SWAP,
                soft=old.soft and action.to >= Level.AVOID,
                published=old.published if action.to >= Level.PUBLISH else None,
            )
            new = NO_MARKS if action.to is Level.NONE else new if new.level.hard else replace(new, hard_since=None)
        else:
            assert action.expires_at is not None
            new = replace(old, published=Published(action.tier, action.expires_at))
        if action.verb == "avoid":
            new = replace(new, soft=True)
        elif action.verb == "swap":
            new = replace(new, tainted=True, hard_since=old.hard_since or now)
        elif action.verb == "drain":
            new = replace(new, drained=True, hard_since=old.hard_since or now)
        marks[action.node] = new
    return [
        node if node.marks is marks[node.name] else replace(node, marks=marks[node.name]) for node in fleet
    ]  # fmt: skip
