"""Tiers: thresholds of watch, elevated and high and their sources, tiers of risks, and the risk of a node."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Tier = Literal["clear", "watch", "elevated", "high", "unknown"]

TIERS: tuple[Tier, ...] = ("clear", "watch", "elevated", "high")
"""The tiers of a known risk, in ascending order."""

UNKNOWN: Tier = "unknown"
"""Tier of a unit without a risk. It is not ordered: it neither raises nor lowers a tier."""

RAISED: tuple[Literal["watch", "elevated", "high"], ...] = ("watch", "elevated", "high")
"""Tiers with a threshold, in ascending order."""

PROMISED: Mapping[str, float] = {"elevated": 0.5, "high": 0.85}
"""Precision that a derived threshold must promise: 50 % to keep new work off a node, 85 % (the paper's figure) to
drain it."""


SMALL_JOB_GPUS: Final = 8
"""Maximum number of GPUs of a small job, which fits on one node."""

GIVEN: Final = "given"
"""Source of a threshold that an operator set."""

Basis = Literal["any", "worst"]
"""Definition of a node's risk: that any unit fails, ``1 - prod(1 - risk)``, or the risk of the worst unit."""


def may_use_risk(gpus: Any, *, high: Any, preemptible: bool = False) -> Any:
    """Return whether a new job may use a node at risk; elementwise for arrays.

    ``gpus``: number of GPUs of the job, over all its nodes; ``high``: whether the tier of the node is ``high``.
    """
    return ((gpus <= SMALL_JOB_GPUS) | preemptible) & (high ^ True)  # without NumPy, which the service does not import


@dataclass(frozen=True, slots=True)
class TierThresholds:
    """Lowest risk of each tier.

    ``watch``, ``elevated``, ``high``: above 0, at most 1, not descending; None: the tier is never reached.
    Raises ``ValueError`` if a threshold is out of range or below that of a lower tier.
    """

    watch: float | None = None
    elevated: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        lower: tuple[str, float] | None = None
        for name, value in self.items():
            if value is None:
                continue
            if not 0 < value <= 1:
                raise ValueError(f"{name} is {value}: give a risk above 0 and at most 1")
            if lower is not None and value < lower[1]:
                raise ValueError(f"{name} is {value}, below {lower[0]} ({lower[1]}): a higher tier needs a higher risk")
            lower = name, value

    def items(self) -> tuple[tuple[Literal["watch", "elevated", "high"], float | None], ...]:
        """Return the tiers with their thresholds, in ascending order."""
        return (("watch", self.watch), ("elevated", self.elevated), ("high", self.high))

    def tier(self, risk: float | None) -> Tier:
        """Return the highest tier whose threshold a risk reaches; ``clear`` if it reaches none.

        ``risk``: between 0 and 1; None or NaN: unknown.
        """
        if risk is None or math.isnan(risk):
            return UNKNOWN
        tier: Tier = "clear"
        for name, value in self.items():
            if value is not None and risk >= value:
                tier = name
        return tier


@dataclass(frozen=True, slots=True)
class ChosenThresholds:
    """Thresholds with their sources.

    ``sources``: text for each tier: given, derived from which promise, or why there is none.
    """

    thresholds: TierThresholds
    sources: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_summary(cls, summary: Mapping[str, Any]) -> "ChosenThresholds | None":
        """Parse the thresholds in the ``summary.json`` of scores; None if it has none.

        Raises ``ValueError`` if they are malformed.
        """
        given, sources = summary.get("thresholds"), summary.get("threshold_sources")
        if given is None:
            return None
        values = [given.get(name) for name in RAISED] if isinstance(given, dict) else [""]
        if not all(value is None or type(value) in (int, float) for value in values):
            raise ValueError(f"thresholds is {given!r}: expected an object with a number or null for each tier")
        reasons = {name: str(why) for name, why in sources.items()} if isinstance(sources, dict) else {}
        return cls(TierThresholds(*values), reasons)

    @property
    def basis(self) -> Basis:
        """Node risk that the thresholds apply to: ``any`` if all are the operator's, otherwise ``worst``."""
        named = [self.sources.get(name) for name, value in self.thresholds.items() if value is not None]
        return "any" if named and all(source == GIVEN for source in named) else "worst"

    def tier(self, risks: Iterable[float]) -> Tier:
        """Return the tier of a node from the risks of its GPUs, as the controller does before hysteresis."""
        known = list(risks)
        return self.thresholds.tier(node_risk(known) if self.basis == "any" else max(known, default=None))


def choose_thresholds(
    given: TierThresholds, decisions: Sequence[Mapping[str, Any]] | None, *, why_none: str = ""
) -> ChosenThresholds:
    """Keep the given thresholds, and derive the others from a bundle's threshold choices.

    ``given``: the operator's thresholds, never changed.
    ``decisions``: as ``evaluation.backtest.threshold_choice`` writes them; None: the bundle has none.
    Returns: ``watch`` is the threshold of the alert budget; ``elevated`` and ``high`` are those of the precisions in
    :data:`PROMISED`, and absent without a promise. A derived threshold above that of a higher tier is lowered to it;
    one below a given lower tier is raised to it.
    """
    given_values = dict(given.items())
    values: dict[str, float | None] = {}
    sources: dict[str, str] = {}
    for i in reversed(range(len(RAISED))):
        name = RAISED[i]
        values[name], sources[name] = given_values[name], GIVEN
        if given_values[name] is not None:
            continue
        derived, sources[name] = _derive(name, decisions, why_none)
        if derived is None:
            continue
        low = max((value for tier in RAISED[:i] if (value := given_values[tier]) is not None), default=0.0)
        high = min((value for tier in RAISED[i + 1 :] if (value := values[tier]) is not None), default=1.0)
        values[name] = min(max(derived, low), high)
        if values[name] != derived:
            other = "lower" if low > derived else "higher"
            sources[name] += f"; moved from {derived:.6g} to the threshold of a {other} tier"
    return ChosenThresholds(TierThresholds(**values), {name: sources[name] for name in RAISED})


def worst_tier(tiers: Iterable[Tier]) -> Tier:
    """Return the highest tier; :data:`UNKNOWN` only if all are unknown."""
    return max(tiers, key=(UNKNOWN, *TIERS).index, default=UNKNOWN)


def node_risk(risks: Iterable[float | None]) -> float | None:
    """Return the risk that any GPU of a node fails: ``1 - prod(1 - risk)``.

    Assumes independent failures of the GPUs. They share power and cooling, so the true risk is somewhat lower. Summed
    in logarithms, so that many small risks are not lost to rounding.

    ``risks``: risks of its GPUs; None or NaN: unknown, ignored.
    Returns: None if no risk is known.
    Raises ``ValueError`` if a risk is not between 0 and 1.
    """
    known = [risk for risk in risks if risk is not None and not math.isnan(risk)]
    if not known:
        return None
    for risk in (min(known), max(known)):
        if not 0 <= risk <= 1:
            raise ValueError(f"a risk of {risk}: give one between 0 and 1")
    if 1.0 in known:
        return 1.0
    return -math.expm1(math.fsum([math.log1p(-risk) for risk in known]))


def _derive(name: str, decisions: Sequence[Mapping[str, Any]] | None, why_none: str) -> tuple[float | None, str]:
    if decisions is None:
        return None, f"none: {why_none}" if why_none else "none: the bundle has no decisions"
    target = PROMISED.get(name)
    kind, description = ("budget", "budget") if target is None else ("precision", f"precision of {target:.0%}")
    for decision in decisions:
        if decision["kind"] != kind or (target is not None and not math.isclose(decision["asked"], target)):
            continue
        if target is None:
            source = f"the budget of {decision['asked']:g} alerts per decision time"
            refusal = f"{source} gives no threshold"
        else:
            source, refusal = f"a promised {description}", f"a {description} is not promised"
        value = decision["threshold"]
        if not decision["promised"] or value is None or not 0 < value <= 1:
            return None, f"none: {refusal} ({decision.get('why') or 'no evidence'})"
        return float(value), source
    return None, f"none: the backtest did not evaluate a {description}"
