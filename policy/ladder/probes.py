"""Settings of probes: diagnostics on idle nodes."""

import math
from collections.abc import Mapping
from dataclasses import field
from datetime import timedelta
from typing import Annotated, Any, Final

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass as checked

from foundation.settings import NonNegativeTime, PositiveTime, Share
from policy.episodes import NEW_EVIDENCE

FOUND: Final[Mapping[str, float]] = {
    "memory": 0.6, "interconnect": 0.6, "thermal_power": 0.5, "bus": 0.4, "firmware": 0.3, "other": 0.3,
}  # fmt: skip
"""Share of a family's failures that a diagnostic in the three days before them finds. Assumptions: stress tests cover
memory and links well, but rarely reveal the sudden loss of a device."""


@checked(frozen=True, slots=True)
class ProbeConfig:
    """Settings of probes.

    ``duration``: duration of a diagnostic.
    ``every``, ``base_every``: minimum interval between probes of a node at risk, and of other nodes.
    ``max_concurrent``, ``max_idle_share``: maximum number of concurrent probes, and as a share of idle nodes (at least
    one).
    ``min_lift``: a node is at risk from this multiple of the fleet's mean risk.
    ``found``: share of failures that a probe finds, by failure family.
    ``idle_cost``: energy and wear of a GPU under test, as a share of a GPU-hour.
    ``preemption``: delay of a job that preempts a probe.
    ``lowers_for``: how long a passed probe lowers the risk of its unit.
    """

    duration: PositiveTime = timedelta(minutes=15)
    every: PositiveTime = timedelta(days=1)
    base_every: PositiveTime = timedelta(days=7)
    max_concurrent: PositiveInt = 16
    max_idle_share: Share = 0.5
    min_lift: Annotated[float, Field(ge=0)] = 1.0
    found: Mapping[str, Share] = field(default_factory=lambda: dict(FOUND))
    idle_cost: Share = 0.05
    preemption: NonNegativeTime = timedelta(minutes=1)
    lowers_for: PositiveTime = timedelta(days=3)

    @property
    def mean_found(self) -> float:
        """Mean of ``found`` over families."""
        return math.fsum(self.found.values()) / len(self.found) if self.found else 0.0

    def is_due(self, risk: Any, rested: Any, mean_risk: float) -> Any:
        """Return whether nodes may be probed again, for one node or arrays; ``mean_risk``: mean risk of the fleet."""
        floor = self.min_lift * mean_risk
        return (risk >= floor) & (rested >= self.every) | (risk < floor) & (rested >= self.base_every)

    def is_new(self, risk: Any, last_risk: Any, mean_risk: float) -> Any:
        """Return whether nodes at risk may be probed early: their risk has doubled since the last probe."""
        return (risk >= self.min_lift * mean_risk) & (risk >= NEW_EVIDENCE * last_risk)

    def room(self, running: int, idle: int) -> int:
        """Return how many probes may start; ``idle``: number of idle nodes, including those being probed."""
        return max(0, min(self.max_concurrent, max(1, math.floor(self.max_idle_share * idle))) - running)
