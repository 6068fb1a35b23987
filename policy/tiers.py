"""Where the thresholds of watch, elevated and high come from, risk to tier by them, and the risk of a node."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Tier = Literal["clear", "watch", "elevated", "high", "unknown"]

TIERS: tuple[Tier, ...] = ("clear", "watch", "elevated", "high")
"""The tiers of a known risk, in ascending order."""

UNKNOWN: Tier = "unknown"
"""The tier of a unit without a risk. It is outside the order: it neither raises nor lowers anything."""

RAISED: tuple[Literal["watch", "elevated", "high"], ...] = ("watch", "elevated", "high")
"""The tiers that a threshold leads to, in ascending order."""

PROMISED: Mapping[str, float] = {"elevated": 0.5, "high": 0.85}
"""The precision that a derived threshold must promise: half of the drains right before a node is kept from new work,
85 % (the paper's figure) before it is emptied."""


SMALL_JOB_GPUS: Final = 8
"""GPUs up to which a job is small: it fits on one node."""

GIVEN: Final = "given"
"""The source of a threshold that a person set."""

Basis = Literal["any", "worst"]
"""What the risk of a node is: that any of its units fails, ``1 - prod(1 - risk)``, or that of the worst unit."""


def may_use_risk(gpus: Any, *, high: Any, preemptible: bool = False) -> Any:
    """Return whether new jobs may use a node at risk; the others prefer other nodes. Arrays give an array.

    ``gpus``: of the whole job, on all its nodes; ``high``: whether the tier of the node is ``high``.
    """
    return ((gpus <= SMALL_JOB_GPUS) | preemptible) & (high ^ True)  # without NumPy, which the service does not import


@dataclass(frozen=True, slots=True)
class TierThresholds:
    """The lowest risk of each tier.

    ``watch``, ``elevated``, ``high``: a risk of at least this has the tier; above 0, at most 1, not descending. None:
    the tier is never reached.
    Raises ``ValueError`` if a threshold is out of range or lower than that of a lower tier.
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
        """Give the tiers with their thresholds, in ascending order."""
        return (("watch", self.watch), ("elevated", self.elevated), ("high", self.high))

    def tier(self, risk: float | None) -> Tier:
        """Give the tier of a risk.

        ``risk``: between 0 and 1; None or NaN: not known.
        Returns: the highest tier whose threshold the risk reaches; ``clear`` where it reaches none.
        """
        if risk is None or math.isnan(risk):
            return UNKNOWN
        tier: Tier = "clear"
        for name, value in self.items():
            if value is not None and risk >= value:
                tier = name
        return tier

    def to_json(self) -> dict[str, float | None]:
        """Give the thresholds as a JSON object."""
        return dict(self.items())


@dataclass(frozen=True, slots=True)
class ChosenThresholds:
    """Thresholds, and where each comes from.

    ``sources``: for each tier in words: given, from which promise, or why there is none.
    """

    thresholds: TierThresholds
    sources: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_summary(cls, summary: Mapping[str, Any]) -> "ChosenThresholds | None":
        """Read those of a folder of scores from its ``summary.json``; None where it names none.

        Raises ``ValueError`` if they are damaged.
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
        """Which risk of a node they are for: numbers of a person's are for that of the node, promises for a GPU's."""
        named = [self.sources.get(name) for name, value in self.thresholds.items() if value is not None]
        return "any" if named and all(source == GIVEN for source in named) else "worst"

    def tier(self, risks: Iterable[float]) -> Tier:
        """Give the tier of a node with these risks of its GPUs, as the controller sees it before any hysteresis."""
        known = list(risks)
        return self.thresholds.tier(node_risk(known) if self.basis == "any" else max(known, default=None))


def choose_thresholds(
    given: TierThresholds, decisions: Sequence[Mapping[str, Any]] | None, *, why_none: str = ""
) -> ChosenThresholds:
    """Take the thresholds that were given, and derive the others from the decisions that a bundle carries.

    ``given``: the operator's own; they are never changed.
    ``decisions``: as ``evaluation.backtest.threshold_choice`` writes them. None: the bundle carries none.
    Returns: ``watch`` is where the budget's alerts begin, ``elevated`` and ``high`` where the precisions of
    :data:`PROMISED` can be promised. A promise that is not made gives no threshold. A derived threshold that would
    is above that of a higher tier is lowered to it, and one below a given lower tier raised to it.
    """
    own = dict(given.items())
    values: dict[str, float | None] = {}
    sources: dict[str, str] = {}
    for i in reversed(range(len(RAISED))):
        name = RAISED[i]
        values[name], sources[name] = own[name], GIVEN
        if own[name] is not None:
            continue
        derived, sources[name] = _derive(name, decisions, why_none)
        if derived is None:
            continue
        low = max((value for tier in RAISED[:i] if (value := own[tier]) is not None), default=0.0)
        high = min((value for tier in RAISED[i + 1 :] if (value := values[tier]) is not None), default=1.0)
        values[name] = min(max(derived, low), high)
        if values[name] != derived:
            other = "lower" if low > derived else "higher"
            sources[name] += f"; moved from {derived:.6g} to the threshold of a {other} tier"
    return ChosenThresholds(TierThresholds(**values), {name: sources[name] for name in RAISED})


def worst_tier(tiers: Iterable[Tier]) -> Tier:
    """Give the highest of some tiers, :data:`UNKNOWN` only where no other is among them."""
    return max(tiers, key=(UNKNOWN, *TIERS).index, default=UNKNOWN)


def node_risk(risks: Iterable[float | None]) -> float | None:
    """Give the risk that any GPU of a node has: ``1 - prod(1 - risk)``.

    ``risks``: of its GPUs; None or NaN: not known, which neither raises nor lowers the node's.
    Returns: none where no GPU's risk is known.
    Raises ``ValueError`` if a risk is not between 0 and 1.

    The GPUs of a node are taken to fail independently of each other. They share power and cooling, so that the true
    risk of a node is somewhat lower. Summed as logarithms, so that many tiny risks are not lost to rounding.
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
    wanted = PROMISED.get(name)
    kind, asked = ("budget", "budget") if wanted is None else ("precision", f"precision of {wanted:.0%}")
    for decision in decisions:
        if decision["kind"] != kind or (wanted is not None and not math.isclose(decision["asked"], wanted)):
            continue
        if wanted is None:
            source = f"the budget of {decision['asked']:g} alerts per decision time"
            refusal = f"{source} gives no threshold"
        else:
            source, refusal = f"a promised {asked}", f"a {asked} is not promised"
        value = decision["threshold"]
        if not decision["promised"] or value is None or not 0 < value <= 1:
            return None, f"none: {refusal} ({decision.get('why') or 'no evidence'})"
        return float(value), source
    return None, f"none: no {asked} was requested of the backtest"
