"""Which idle nodes are probed: a diagnostic on a node that has no job, riskiest first, within a budget."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Final

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass as checked

from foundation.settings import NonNegativeTime, PositiveTime, Share

FOUND: Final[Mapping[str, float]] = {
    "memory": 0.6, "interconnect": 0.6, "thermal_power": 0.5, "bus": 0.4, "firmware": 0.3, "other": 0.3,
}  # fmt: skip
"""Share of the failures of a family that a diagnostic finds within three days before they begin. Assumptions: stress
tests reach memory and links well, and sudden losses of a device hardly."""


@checked(frozen=True, slots=True)
class ProbeConfig:
    """How idle nodes are probed.

    ``duration``: of one diagnostic.
    ``every``: a node is not probed again before. ``base_every``: the same for nodes below ``min_lift``.
    ``max_concurrent``, ``max_idle_share``: probes at the same time, and as a share of the idle nodes; at least one.
    ``min_lift``: nodes are at risk from this multiple of the fleet's mean risk on.
    ``found``: by failure family, the share that a probe finds.
    ``idle_cost``: energy and wear of an idle GPU under test, as a share of a GPU-hour.
    ``preemption``: for how long a probe that is preempted delays the job.
    ``lowers_for``: how long a probe that passed lowers the risk of its node.
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
        """The share found, as the mean over families."""
        return math.fsum(self.found.values()) / len(self.found) if self.found else 0.0


@dataclass(frozen=True, slots=True)
class IdleNode:
    """A node without a job that may be probed.

    ``rested``: since its last probe; None: never probed, or its risk has doubled since.
    """

    name: str
    risk: float
    rested: timedelta | None = None


def choose_probes(
    nodes: Iterable[IdleNode], *, running: int, idle: int, mean_risk: float, config: ProbeConfig
) -> list[str]:
    """Return the nodes to probe now, riskiest first; of equal risks, the one that rested longest.

    ``running``: probes under way; ``idle``: all idle nodes, those under a probe included.
    ``mean_risk``: of the fleet.
    """
    least = config.min_lift * mean_risk
    due = [
        node
        for node in nodes
        if node.rested is None or node.rested >= (config.every if node.risk >= least else config.base_every)
    ]
    due.sort(key=lambda node: (-node.risk, node.rested is not None, -(node.rested or timedelta()), node.name))
    room = min(config.max_concurrent, max(1, math.floor(config.max_idle_share * idle))) - running
    return [node.name for node in due[: max(0, room)]]
