"""The rungs of the ladder: what each action costs a node, what it saves, and the risk from which it pays."""

import math
from collections.abc import Iterable
from datetime import timedelta
from typing import Final, Literal

from policy.ladder.cost_benefit import CostBenefitConfig, JobHours, Price, drain_price
from policy.ladder.probes import ProbeConfig

Rung = Literal["publish", "avoid", "probe", "checkpoint", "swap", "drain"]
RUNGS: Final[tuple[Rung, ...]] = ("publish", "avoid", "probe", "checkpoint", "swap", "drain")
"""In ascending order of cost: label the node; new jobs prefer others; run a diagnostic while it is idle; ask its jobs
for a checkpoint; take it out when its jobs stop by themselves; take its jobs off it."""

_HOUR = timedelta(hours=1)


def prices(gpus: float, jobs: JobHours, costs: CostBenefitConfig, probes: ProbeConfig) -> dict[Rung, Price]:
    """Return the price of each rung on a node with these jobs.

    A checkpoint is worth it when the work since the last one exceeds C/p, C being what a checkpoint costs and p the
    risk that the node fails before the job's own next one (Aupy, Robert and Vivien, "Checkpointing algorithms and fault
    prediction", 2014).
    """
    energy = gpus * (probes.duration / _HOUR) * probes.idle_cost
    swap, averted = drain_price(gpus, jobs.fail, 0.0, costs, probes.mean_found)
    drain, _ = drain_price(gpus, jobs.fail, jobs.stop, costs, probes.mean_found)
    return {
        "publish": Price(0.0, 0.0),
        "avoid": Price(0.0, jobs.fail),
        "probe": Price(energy, averted - energy),
        "checkpoint": Price(jobs.checkpoint, jobs.unsaved - jobs.checkpoint),
        "swap": swap,
        "drain": drain,
    }


def pooled_break_even(
    rung: Rung, nodes: Iterable[tuple[int, JobHours]], costs: CostBenefitConfig, probes: ProbeConfig
) -> float:
    """Return the break-even of a rung on nodes together, each with its GPUs and jobs; 1: it never pays."""
    priced = [prices(gpus, jobs, costs, probes)[rung] for gpus, jobs in nodes]
    pooled = Price(math.fsum(price.unneeded for price in priced), math.fsum(price.saved for price in priced))
    return 1.0 if pooled.break_even is None else pooled.break_even
