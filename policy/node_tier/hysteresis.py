"""A node's tier over time: up on repeated evidence, down on repeated calm, gone with its evidence."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Any, TypeVar

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass as checked

from policy.fleet import NodeView, UnitView
from policy.tiers import TIERS, Basis, Tier, TierThresholds, node_risk

_SLOW: tuple[Tier, Tier] = ("elevated", "high")

_State = TypeVar("_State")


def changed(state: _State, **fields: Any) -> _State:
    """Give a dataclass with some fields replaced, and the same object where nothing changes: most nodes are quiet."""
    for name, value in fields.items():
        had = getattr(state, name)
        if had is not value and had != value:
            return replace(state, **fields)  # type: ignore[type-var]  # any dataclass
    return state


@checked(frozen=True, slots=True)
class HysteresisConfig:
    """How slowly a tier follows the risk.

    ``rise_after``: consecutive decisions at or above a threshold before ``elevated`` or ``high``; ``watch`` comes at
    once.
    ``fall_after``: consecutive decisions below the lower threshold before a tier falls.
    ``fall_share``: the lower threshold of a tier as a share of its threshold, above 0 and at most 1.
    """

    rise_after: PositiveInt = 2
    fall_after: PositiveInt = 3
    fall_share: Annotated[float, Field(gt=0, le=1)] = 0.5


@dataclass(frozen=True, slots=True)
class Streak:
    """Consecutive decisions at or above a tier's threshold, and the decision time of the first."""

    count: int = 0
    since: datetime | None = None


NO_STREAK = Streak()


@dataclass(frozen=True, slots=True)
class TierState:
    """What is remembered of a node between decisions.

    ``tier``: never ``unknown``: a node of which nothing is known is ``clear``.
    ``counted``: newest decision time that was counted: a score that is read again is no new evidence.
    ``counted_until``: when the scores of that decision expire; evidence after that does not continue a streak.
    ``calm``: consecutive decisions below the tier's lower threshold.
    ``calm_worst``: the highest risk among them.
    ``support``: the fewest units whose risks hold the tier up.
    ``moved``: why the tier last moved, in words.
    """

    tier: Tier = "clear"
    counted: datetime | None = None
    counted_until: datetime | None = None
    elevated: Streak = NO_STREAK
    high: Streak = NO_STREAK
    calm: int = 0
    calm_worst: float = 0.0
    support: "tuple[ValidRisk, ...]" = ()
    moved: str = ""

    @property
    def expires_at(self) -> datetime | None:
        """When the first of the risks that hold the tier up expires; None while ``clear``."""
        return min([prediction.expires_at for prediction in self.support], default=None)

    def at_rest(self, now: datetime) -> bool:
        """Tell whether it is ``clear``, rests on nothing, and was counted under a clock that did not go back since."""
        return self.tier == "clear" and not self.support and (self.counted is None or self.counted <= now)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds of one decision with how they are followed."""

    rise: TierThresholds
    config: HysteresisConfig

    def lower(self, tier: Tier) -> float:
        """Give the lower threshold of a tier: 0 for ``clear``, infinite for a tier that is not reached any more."""
        if tier == "clear":
            return 0.0
        value = next((value for name, value in self.rise.items() if name == tier), None)
        return float("inf") if value is None else value * self.config.fall_share

    def held(self, risk: float, at_most: Tier) -> Tier:
        """Give the highest tier, none above ``at_most``, whose lower threshold a risk reaches."""
        for tier in reversed(TIERS[: TIERS.index(at_most) + 1]):
            if risk >= self.lower(tier):
                return tier
        return "clear"


def advance(
    state: TierState, reading: "RiskReading", thresholds: Thresholds, risks: "NodeRiskConfig", now: datetime
) -> TierState:
    """Take a node's tier one step on.

    Returns: the same again when nothing new was read.

    Each decision time counts once. A unit that turns unknown keeps its last risk until that expires, so that a lost
    sample does not flap a taint; once it has expired, or the unit is gone or was repaired, the tier falls immediately
    to what the other units reach by themselves, without waiting for the calm. Such a kept risk never raises a tier.
    """
    if state.tier != "clear" and not state.support:
        state = replace(state, tier="clear")  # from outside, for no step of ours leaves a tier that rests on nothing
    if state.counted is not None and state.counted > now:  # counted under a clock that went back since
        state = replace(state, counted=None, counted_until=None, elevated=NO_STREAK, high=NO_STREAK)
    older = [prediction for prediction in state.support if prediction.unit not in reading.known]
    ended = {prediction.unit: why for prediction in older if (why := _why_ended(prediction, reading, now))}
    alive = [prediction for prediction in older if prediction.unit not in ended]
    fresh = supported_risk = reading.risk
    if alive:
        supported_risk = risks.combine([prediction.risk for prediction in (*reading.known.values(), *alive)])
    if ended:
        tier = (
            "clear"
            if supported_risk is None
            else min(state.tier, thresholds.rise.tier(supported_risk), key=TIERS.index)
        )
        if tier != state.tier:
            state = _moved(state, tier, "; ".join(ended.values()))
        state = changed(state, calm=0, calm_worst=0.0)
    if supported_risk is None:
        return changed(state, tier="clear", elevated=NO_STREAK, high=NO_STREAK, calm=0, support=())
    if fresh is not None and reading.decided_at is not None:
        if state.counted is None or reading.decided_at > state.counted:
            state = _count(state, reading, fresh, supported_risk, thresholds)
    else:
        state = changed(state, elevated=NO_STREAK, high=NO_STREAK)
    return changed(state, support=_support(state, reading, alive, thresholds, risks))


def rested(state: TierState, reading: "RiskReading") -> TierState:
    """Give what :func:`advance` gives of a state at rest when all that is known stays below ``watch``."""
    at = reading.decided_at
    if at is None or (state.counted is not None and at <= state.counted):
        return state
    until = max([prediction.expires_at for prediction in reading.known.values()])
    return TierState(counted=at, counted_until=until, moved=state.moved)


def adopt(at_most: Tier, reading: "RiskReading", thresholds: Thresholds, risks: "NodeRiskConfig") -> TierState:
    """Take over a marked node without a stored state, such as after a lost state.

    Returns: the highest tier up to that one whose lower threshold is reached now: what is well founded is kept without
    having to rise again, and the rest is not.
    """
    fresh = reading.risk
    tier = "clear" if fresh is None else thresholds.held(fresh, at_most)
    if fresh is None or tier == "clear":
        return TierState()
    state = TierState(tier=tier, moved=f"{tier} restored from the marker, no other state: risk {fresh:.1%}")
    return replace(state, support=_support(state, reading, (), thresholds, risks))


def explain_tier(state: TierState, fresh: float | None, thresholds: Thresholds) -> tuple[str, ...]:
    """Say why a tier is what it is: why it last moved, and what keeps it from moving."""
    config = thresholds.config
    reasons = [state.moved] if state.moved else []
    instant: Tier = "clear" if fresh is None else thresholds.rise.tier(fresh)
    if TIERS.index(instant) > TIERS.index(state.tier):
        count = (state.high if instant == "high" else state.elevated).count
        consecutive = f"only {count} of {config.rise_after} consecutive decisions agree"
        reasons.append(f"a risk of {fresh:.1%} is {instant}, but {consecutive}")
    if state.calm:
        lower = thresholds.lower(state.tier)
        reasons.append(f"stays {state.tier}: {state.calm} of {config.fall_after} decisions below {lower:.1%}")
    return tuple(reasons)


def _count(state: TierState, reading: "RiskReading", fresh: float, valid: float, thresholds: Thresholds) -> TierState:
    decided_at = reading.decided_at
    assert decided_at is not None
    instant = thresholds.rise.tier(fresh)
    broken = state.counted_until is not None and decided_at > state.counted_until
    elevated, high = (
        _longer(NO_STREAK if broken else streak, TIERS.index(instant) >= TIERS.index(tier), decided_at)
        for tier, streak in zip(_SLOW, (state.elevated, state.high), strict=True)
    )
    until = max([prediction.expires_at for prediction in reading.known.values()])
    state = replace(state, counted=decided_at, counted_until=until, elevated=elevated, high=high)
    tier: Tier = state.tier
    if TIERS.index(instant) > TIERS.index(tier):
        tier = "watch" if tier == "clear" else tier
        for name, streak in zip(_SLOW, (elevated, high), strict=True):
            if TIERS.index(name) > TIERS.index(tier) and streak.count >= thresholds.config.rise_after:
                tier = name
        if tier != state.tier:
            state = _moved(state, tier, f"a risk of {fresh:.1%} at {decided_at:%Y-%m-%d %H:%M} UTC")
    if tier == "clear" or valid >= thresholds.lower(tier):
        return changed(state, calm=0, calm_worst=0.0)
    calm, worst = state.calm + 1, max(state.calm_worst, valid)
    if calm < thresholds.config.fall_after:
        return replace(state, calm=calm, calm_worst=worst)
    fallen = thresholds.held(worst, tier)
    why = f"{calm} consecutive decisions of at most {worst:.1%}"
    return replace(_moved(state, fallen, why), calm=0, calm_worst=0.0)


def _moved(state: TierState, tier: Tier, why: str) -> TierState:
    return replace(state, tier=tier, moved=f"from {state.tier} to {tier}: {why}")


def _longer(streak: Streak, reached: bool, at: datetime) -> Streak:
    return Streak(streak.count + 1, streak.since or at) if reached else NO_STREAK


def _why_ended(prediction: "ValidRisk", reading: "RiskReading", now: datetime) -> str | None:
    """Say why a risk holds nothing up any more; None: it still does."""
    unit = prediction.unit
    present = next((view for view in reading.units if view.name == unit), None)
    if present is None:
        return f"{unit} was removed from the node"
    if present.valid_from is not None and prediction.decided_at < present.valid_from:
        return f"{unit} was repaired or passed a diagnostic"
    if now >= prediction.expires_at:
        return f"the prediction on {unit} expired at {prediction.expires_at:%Y-%m-%d %H:%M} UTC"
    return None


def _support(
    state: TierState,
    reading: "RiskReading",
    alive: "Iterable[ValidRisk]",
    thresholds: Thresholds,
    risks: "NodeRiskConfig",
) -> "tuple[ValidRisk, ...]":
    if state.tier == "clear":
        return ()
    needed = thresholds.lower(state.tier)
    predictions = sorted([*reading.known.values(), *alive], key=lambda prediction: (-prediction.risk, prediction.unit))
    for count in range(1, len(predictions) + 1):
        risk = risks.combine([prediction.risk for prediction in predictions[:count]])
        if risk is not None and risk >= needed:
            return tuple(predictions[:count])
    # Calm, but the tier has not fallen yet: it continues resting on the units that raised it.
    before = {prediction.unit for prediction in state.support}
    return tuple(prediction for prediction in predictions if prediction.unit in before)


@dataclass(frozen=True, slots=True)
class ValidRisk:
    """A risk of one unit that is still valid."""

    unit: str
    risk: float
    decided_at: datetime
    expires_at: datetime


@checked(frozen=True, slots=True)
class NodeRiskConfig:
    """How the risks of units become that of a node.

    ``basis``: ``worst`` keeps to the letter thresholds that were promised on units.
    """

    basis: Basis = "any"

    def combine(self, risks: Iterable[float]) -> float | None:
        """Give the risk of a node from those known of its units; None where none is known."""
        return max(risks, default=None) if self.basis == "worst" else node_risk(risks)


@dataclass(frozen=True, slots=True)
class RiskReading:
    """What is known of a node at a time.

    ``units``: all of the node.
    ``known``: by unit; others are unknown, expired, void or from the future.
    ``decided_at``: the newest decision time among the known.
    ``risk``: of the node, by the known alone.
    """

    now: datetime
    units: tuple[UnitView, ...]
    known: Mapping[str, ValidRisk]
    decided_at: datetime | None
    risk: float | None

    @property
    def unknown(self) -> tuple[str, ...]:
        """Why each of the other units has no risk, in words."""
        return tuple(_why_unknown(unit, self.now) for unit in self.units if unit.name not in self.known)


def read_node(node: NodeView, risks: NodeRiskConfig, now: datetime) -> RiskReading:
    """Sort the scores of a node into what is known now and what is not."""
    known: dict[str, ValidRisk] = {}
    newest: datetime | None = None
    for unit in node.units:
        score = unit.score
        if score is None or score.risk is None:
            continue
        at, until = score.decided_at, score.expires_at
        if at <= now < until and (unit.valid_from is None or at >= unit.valid_from):
            known[unit.name] = ValidRisk(unit.name, score.risk, at, until)
            newest = at if newest is None else max(newest, at)
    risk = risks.combine([prediction.risk for prediction in known.values()])
    return RiskReading(now, node.units, known, newest, risk)


def _why_unknown(unit: UnitView, now: datetime) -> str:
    score = unit.score
    if score is None:
        return f"{unit.name}: no score"
    if score.risk is None:
        return f"{unit.name}: the score is unknown"
    if now >= score.expires_at:
        return f"{unit.name}: the prediction expired at {score.expires_at:%Y-%m-%d %H:%M} UTC"
    if score.decided_at > now:
        return f"{unit.name}: the score is from the future ({score.decided_at:%Y-%m-%d %H:%M} UTC)"
    return f"{unit.name}: the score is older than its installation, repair or passed diagnostic"
