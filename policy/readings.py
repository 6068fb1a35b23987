"""What is known of a node's units at one moment, and the node's risk from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from policy.fleet import NodeView
from policy.tiers import node_risk


@dataclass(frozen=True, slots=True)
class Known:
    """A risk of one unit that is still valid."""

    unit: str
    risk: float
    decided_at: datetime
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class NodeRiskConfig:
    """How the risks of units become that of a node.

    ``basis``: ``any``: that any unit fails, ``1 - prod(1 - risk)``. ``worst``: that of the worst unit, which keeps to
    the letter thresholds that were promised on units.
    ``slope``, ``intercept``: a recalibration on nodes: the log-odds are multiplied and shifted. Units of a node share
    power and cooling, so that ``any`` tends to be too high.
    """

    basis: Literal["any", "worst"] = "any"
    slope: float = 1.0
    intercept: float = 0.0

    def __post_init__(self) -> None:
        if self.basis not in ("any", "worst"):
            raise ValueError(f"basis is {self.basis!r}: give any or worst")
        if not (self.slope > 0 and math.isfinite(self.slope)):
            raise ValueError(f"slope is {self.slope}: give a positive number")
        if not math.isfinite(self.intercept):
            raise ValueError(f"intercept is {self.intercept}: give a number")

    def combine(self, risks: Iterable[float]) -> float | None:
        """Give the risk of a node from those known of its units; None where none is known."""
        listed = list(risks)
        raw = max(listed, default=None) if self.basis == "worst" else node_risk(listed)
        if raw is None or raw <= 0 or raw >= 1 or (self.slope == 1 and self.intercept == 0):
            return raw
        odds = self.slope * math.log(raw / (1 - raw)) + self.intercept
        return 1 / (1 + math.exp(-odds)) if odds >= 0 else math.exp(odds) / (1 + math.exp(odds))


@dataclass(frozen=True, slots=True)
class Reading:
    """What is known of a node now.

    ``known``: by unit; others are unknown, expired, void or from the future.
    ``present``: all units of the node, with the time before which nothing counts.
    ``unknown``: why each of the other units has no risk, in words.
    ``decided_at``: the newest decision time among the known.
    """

    known: Mapping[str, Known]
    present: Mapping[str, datetime | None]
    unknown: tuple[str, ...]
    decided_at: datetime | None


def read_node(node: NodeView, now: datetime) -> Reading:
    """Sort the scores of a node into what is known now and what is not."""
    known: dict[str, Known] = {}
    unknown: list[str] = []
    for unit in node.units:
        score = unit.score
        if score is None:
            unknown.append(f"{unit.name}: no score")
        elif score.risk is None:
            unknown.append(f"{unit.name}: the score says unknown")
        elif now >= score.expires_at:
            unknown.append(f"{unit.name}: the prediction expired at {score.expires_at:%Y-%m-%d %H:%M} UTC")
        elif score.decided_at > now:
            unknown.append(f"{unit.name}: the score is from the future ({score.decided_at:%Y-%m-%d %H:%M} UTC)")
        elif unit.valid_from is not None and score.decided_at < unit.valid_from:
            unknown.append(f"{unit.name}: the score is from before it came, was repaired or passed a diagnostic")
        else:
            known[unit.name] = Known(unit.name, score.risk, score.decided_at, score.expires_at)
    return Reading(
        known=known,
        present={unit.name: unit.valid_from for unit in node.units},
        unknown=tuple(unknown),
        decided_at=max((each.decided_at for each in known.values()), default=None),
    )
