"""Hysteresis of a node's tier: rises and falls after consecutive decisions, and drops when its evidence expires."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Any, TypeVar

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass as checked

from foundation.text import percent
from policy.fleet import NodeView, UnitView
from policy.tiers import TIERS, Basis, Tier, TierThresholds, node_risk

_SLOW: tuple[Tier, Tier] = ("elevated", "high")

_State = TypeVar("_State")


def changed(state: _State, **fields: Any) -> _State:
    """Replace fields of a dataclass with slots; return the same object if nothing changes, as for most nodes."""
    for name, value in fields.items():
        old_value = getattr(state, name)
        if old_value is not value and old_value != value:
            names: tuple[str, ...] = state.__slots__  # type: ignore[attr-defined]
            return type(state)(**{name: getattr(state, name) for name in names} | fields)  # faster than `replace`
    return state


@checked(frozen=True, slots=True)
class HysteresisConfig:
    """Settings of the hysteresis.

    ``rise_after``: consecutive decisions at or above a threshold before ``elevated`` or ``high``; ``watch`` is
    immediate.
    ``fall_after``: consecutive decisions below the lower threshold before a tier falls.
    ``fall_share``: lower threshold of a tier, as a share of its threshold.
    """

    rise_after: PositiveInt = 2
    fall_after: PositiveInt = 3
    fall_share: Annotated[float, Field(gt=0, le=1)] = 0.5


@dataclass(frozen=True, slots=True)
class TierState:
    """Tier state of a node between decisions.

    ``tier``: never ``unknown``: a node without valid scores is ``clear``.
    ``counted``: latest decision time counted; reading the same score again is no new evidence.
    ``counted_until``: expiry of that decision's scores; later evidence does not continue a streak.
    ``elevated``, ``high``: consecutive decisions at or above the tier's threshold.
    ``calm``: consecutive decisions below the tier's lower threshold.
    ``support``: smallest set of unit risks that sustains the tier.
    """

    tier: Tier = "clear"
    counted: datetime | None = None
    counted_until: datetime | None = None
    elevated: int = 0
    high: int = 0
    calm: int = 0
    calm_worst: float = 0.0
    support: "tuple[ValidRisk, ...]" = ()
    moved: str = ""

    @property
    def expires_at(self) -> datetime | None:
        """Expiry of the first risk in ``support``; None while ``clear``."""
        return min([prediction.expires_at for prediction in self.support], default=None)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Thresholds of one decision, with hysteresis."""

    rise: TierThresholds
    config: HysteresisConfig

    def lower(self, tier: Tier) -> float:
        """Return the lower threshold of a tier: 0 for ``clear``, infinite for a tier without a threshold."""
        if tier == "clear":
            return 0.0
        value = next((value for name, value in self.rise.items() if name == tier), None)
        return float("inf") if value is None else value * self.config.fall_share

    def fall_to(self, risk: float, at_most: Tier) -> Tier:
        """Return the highest tier up to ``at_most`` whose lower threshold a risk reaches."""
        for tier in reversed(TIERS[: TIERS.index(at_most) + 1]):
            if risk >= self.lower(tier):
                return tier
        return "clear"


def advance(
    state: TierState, reading: "RiskReading", thresholds: Thresholds, risks: "NodeRiskConfig", now: datetime
) -> TierState:
    """Advance a node's tier by one decision; idempotent without a new decision time.

    A unit whose score becomes unknown keeps its last risk until that expires, so that a lost sample does not flap a
    taint. A retained risk never raises a tier. Once it expires, or the unit is removed or repaired, the tier falls at
    once to what the other units reach, without waiting for ``fall_after``.
    """
    if state.tier != "clear" and not state.support:
        state = replace(state, tier="clear")  # external state: no step leaves a tier without support
    if state.counted is not None and state.counted > now:  # the clock went backwards
        state = replace(state, counted=None, counted_until=None, elevated=0, high=0)
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
            state = _moved_to(state, tier, "; ".join(ended.values()))
        state = changed(state, calm=0, calm_worst=0.0)
    if supported_risk is None:
        return changed(state, tier="clear", elevated=0, high=0, calm=0, support=())
    if fresh is not None and reading.decided_at is not None:
        if state.counted is None or reading.decided_at > state.counted:
            state = _count(state, reading, fresh, supported_risk, thresholds)
    else:
        state = changed(state, elevated=0, high=0)
    return changed(state, support=_support(state, reading, alive, thresholds, risks))


def adopt(at_most: Tier, reading: "RiskReading", thresholds: Thresholds, risks: "NodeRiskConfig") -> TierState:
    """Restore the tier of a tainted node without stored state, for example after the state was lost.

    Returns: the highest tier up to ``at_most`` whose lower threshold the risk reaches now, without waiting for
    ``rise_after``.
    """
    fresh = reading.risk
    tier = "clear" if fresh is None else thresholds.fall_to(fresh, at_most)
    if fresh is None or tier == "clear":
        return TierState()
    state = TierState(tier=tier, moved=f"{tier} restored from the marker, no other state: risk {percent(fresh)}")
    return replace(state, support=_support(state, reading, (), thresholds, risks))


def explain_tier(state: TierState, fresh: float | None, thresholds: Thresholds) -> tuple[str, ...]:
    """Explain a tier: why it last changed, and what keeps it from changing."""
    config = thresholds.config
    reasons = [state.moved] if state.moved else []
    instant: Tier = "clear" if fresh is None else thresholds.rise.tier(fresh)
    if TIERS.index(instant) > TIERS.index(state.tier):
        count = state.high if instant == "high" else state.elevated
        consecutive = f"only {count} of {config.rise_after} consecutive decisions agree"
        reasons.append(f"a risk of {percent(fresh)} is {instant}, but {consecutive}")
    if state.calm:
        lower = thresholds.lower(state.tier)
        reasons.append(f"stays {state.tier}: {state.calm} of {config.fall_after} decisions below {percent(lower)}")
    return tuple(reasons)


def _count(state: TierState, reading: "RiskReading", fresh: float, valid: float, thresholds: Thresholds) -> TierState:
    decided_at = reading.decided_at
    assert decided_at is not None
    instant = thresholds.rise.tier(fresh)
    broken = state.counted_until is not None and decided_at > state.counted_until
    elevated, high = (
        (0 if broken else streak) + 1 if TIERS.index(instant) >= TIERS.index(tier) else 0
        for tier, streak in zip(_SLOW, (state.elevated, state.high), strict=True)
    )
    until = max([prediction.expires_at for prediction in reading.known.values()])
    state = replace(state, counted=decided_at, counted_until=until, elevated=elevated, high=high)
    tier: Tier = state.tier
    if TIERS.index(instant) > TIERS.index(tier):
        tier = "watch" if tier == "clear" else tier
        for name, streak in zip(_SLOW, (elevated, high), strict=True):
            if TIERS.index(name) > TIERS.index(tier) and streak >= thresholds.config.rise_after:
                tier = name
        if tier != state.tier:
            state = _moved_to(state, tier, f"a risk of {percent(fresh)} at {decided_at:%Y-%m-%d %H:%M} UTC")
    if tier == "clear" or valid >= thresholds.lower(tier):
        return changed(state, calm=0, calm_worst=0.0)
    calm, worst = state.calm + 1, max(state.calm_worst, valid)
    if calm < thresholds.config.fall_after:
        return replace(state, calm=calm, calm_worst=worst)
    fallen = thresholds.fall_to(worst, tier)
    why = f"a risk of at most {percent(worst)} in {calm} consecutive decisions"
    return replace(_moved_to(state, fallen, why), calm=0, calm_worst=0.0)


def _moved_to(state: TierState, tier: Tier, reason: str) -> TierState:
    return replace(state, tier=tier, moved=f"from {state.tier} to {tier}: {reason}")


def _why_ended(prediction: "ValidRisk", reading: "RiskReading", now: datetime) -> str | None:
    """Return why a risk no longer supports the tier; None if it does."""
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
    # Below the lower threshold, but the tier has not fallen yet: keep the units that raised it.
    previous = {prediction.unit for prediction in state.support}
    return tuple(prediction for prediction in predictions if prediction.unit in previous)


@dataclass(frozen=True, slots=True)
class ValidRisk:
    """A risk of one unit with its validity."""

    unit: str
    risk: float
    decided_at: datetime
    expires_at: datetime


@checked(frozen=True, slots=True)
class NodeRiskConfig:
    """How the risks of units combine to that of a node.

    ``basis``: ``any``: the risk that any unit fails. ``worst``: the highest risk, for thresholds promised per unit.
    """

    basis: Basis = "any"

    def combine(self, risks: Iterable[float]) -> float | None:
        """Return the risk of a node from the known risks of its units; None if none is known."""
        return max(risks, default=None) if self.basis == "worst" else node_risk(risks)


@dataclass(frozen=True, slots=True)
class RiskReading:
    """Valid risks of a node at one time.

    ``known``: valid risks by unit; the other units' scores are unknown, expired, void or from the future.
    """

    now: datetime
    units: tuple[UnitView, ...]
    known: Mapping[str, ValidRisk]
    decided_at: datetime | None
    risk: float | None

    @property
    def unknown(self) -> tuple[str, ...]:
        """Why each of the other units has no valid risk."""
        return tuple(_why_unknown(unit, self.now) for unit in self.units if unit.name not in self.known)


def read_node(node: NodeView, risks: NodeRiskConfig, now: datetime) -> RiskReading:
    """Select the valid scores of a node and combine their risks."""
    known: dict[str, ValidRisk] = {}
    newest: datetime | None = None
    for unit in node.units:
        score = unit.score
        if score is None or score.risk is None:
            continue
        decided_at, until = score.decided_at, score.expires_at
        if decided_at <= now < until and (unit.valid_from is None or decided_at >= unit.valid_from):
            known[unit.name] = ValidRisk(unit.name, score.risk, decided_at, until)
            newest = decided_at if newest is None else max(newest, decided_at)
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
