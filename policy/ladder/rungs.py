"""Rungs of the ladder: cost, saving and break-even risk of each action on a node."""

import math
from collections.abc import Iterable
from datetime import timedelta
from typing import Final, Literal

from policy.ladder.cost_benefit import CostBenefitConfig, JobHours, Price, drain_price
from policy.ladder.probes import ProbeConfig

Rung = Literal["publish", "avoid", "probe", "checkpoint", "swap", "drain"]
RUNGS: Final[tuple[Rung, ...]] = ("publish", "avoid", "probe", "checkpoint", "swap", "drain")
"""In ascending order of cost: label the node; steer new jobs to other nodes; run a diagnostic while idle; request
checkpoints from its jobs; accept no new jobs and take it out when the current ones end; evict its jobs."""

_HOUR = timedelta(hours=1)


def prices(gpus: float, jobs: JobHours, costs: CostBenefitConfig, probes: ProbeConfig) -> dict[Rung, Price]:
    """Return the price of each rung on a node with these jobs.

    A checkpoint pays if the work since the last one exceeds C/p, where C is the cost of a checkpoint and p the risk
    that the node fails before the job's next one (Aupy, Robert and Vivien, "Checkpointing algorithms and fault
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
    """Return the pooled break-even risk of a rung over nodes, given as GPUs and jobs; 1 if it never pays."""
    priced = [prices(gpus, jobs, costs, probes)[rung] for gpus, jobs in nodes]
    pooled = Price(math.fsum(price.unneeded for price in priced), math.fsum(price.saved for price in priced))
    return 1.0 if pooled.break_even is None else pooled.break_even
