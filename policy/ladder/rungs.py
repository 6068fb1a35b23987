"""The rungs of the ladder: what each action costs a node, what it saves, and the risk from which it pays."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal

from policy.ladder.cost_benefit import CostBenefitConfig, JobHours
from policy.ladder.probes import ProbeConfig

Rung = Literal["publish", "avoid", "probe", "checkpoint", "swap", "drain"]
RUNGS: Final[tuple[Rung, ...]] = ("publish", "avoid", "probe", "checkpoint", "swap", "drain")
"""In ascending order of cost: label the node; new jobs prefer others; run a diagnostic while it is idle; ask its jobs
for a checkpoint; take it out when its jobs stop by themselves; take its jobs off it."""

_HOUR = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Price:
    """Cost and benefit of one action on one node, in GPU-hours.

    ``unneeded``: cost where no failure follows.
    ``saved``: what is saved, net of the action's own cost, where one does; 0 or less: never worth it.
    """

    unneeded: float
    saved: float

    @property
    def break_even(self) -> float | None:
        """The risk from which the action pays; 0: it is free; None: it never pays."""
        if self.unneeded <= 0:
            return 0.0
        return None if self.saved <= 0 else self.unneeded / (self.unneeded + self.saved)


def prices(gpus: float, jobs: JobHours, costs: CostBenefitConfig, probes: ProbeConfig) -> dict[Rung, Price]:
    """Return the price of each rung on a node with these jobs.

    A checkpoint is worth it when the work since the last one exceeds C/p, C being what a checkpoint costs and p the
    risk that the node fails before the job's own next one (Aupy, Robert and Vivien, "Checkpointing algorithms and fault
    prediction", 2014). What a diagnostic does not find comes back into service, and fails.
    """
    verify, planned, unplanned, probe = (
        gpus * (duration / _HOUR)
        for duration in (costs.verify, costs.planned_repair, costs.unplanned_repair, probes.duration)
    )
    failure, found = unplanned + jobs.fail, probes.mean_found
    energy = probe * probes.idle_cost
    return {
        "publish": Price(0.0, 0.0),
        "avoid": Price(0.0, jobs.fail),
        "probe": Price(energy, found * (failure - planned) - energy),
        "checkpoint": Price(jobs.checkpoint, jobs.unsaved - jobs.checkpoint),
        "swap": Price(verify, found * (failure - planned) - (1 - found) * verify),
        "drain": Price(jobs.stop + verify, found * (failure - planned) - (1 - found) * verify - jobs.stop),
    }


def pooled_break_even(
    rung: Rung, nodes: Iterable[tuple[int, JobHours]], costs: CostBenefitConfig, probes: ProbeConfig
) -> float:
    """Return the break-even of a rung on nodes together, each with its GPUs and jobs; 1: it never pays."""
    priced = [prices(gpus, jobs, costs, probes)[rung] for gpus, jobs in nodes]
    pooled = Price(math.fsum(price.unneeded for price in priced), math.fsum(price.saved for price in priced))
    return 1.0 if pooled.break_even is None else pooled.break_even
