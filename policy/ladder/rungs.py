"""Rungs of the ladder: cost, saving and break-even risk of each action on a node."""

from collections.abc import Iterable
from datetime import timedelta
from statistics import fmean
from typing import Final, Literal

from policy.ladder.cost_benefit import CostBenefitConfig, JobHours, Price, drain_price, swap_price
from policy.ladder.probes import ProbeConfig

Rung = Literal["publish", "avoid", "probe", "checkpoint", "swap", "drain"]
RUNGS: Final[tuple[Rung, ...]] = ("publish", "avoid", "probe", "checkpoint", "swap", "drain")
"""In ascending order of cost: label the node; steer new jobs to other nodes; run a diagnostic while idle; request
checkpoints from its jobs; accept no new jobs and take it out when the current ones end; evict its jobs."""

_HOUR = timedelta(hours=1)


def prices(gpus: int, jobs: JobHours, costs: CostBenefitConfig, probes: ProbeConfig) -> dict[Rung, Price]:
    """Return the price of each rung on a node with these jobs.

    A checkpoint pays if the work since the last one exceeds C/p, where C is the cost of a checkpoint and p the risk
    that the node fails before the job's next one (Aupy, Robert and Vivien, "Checkpointing algorithms and fault
    prediction", 2014).
    """
    energy = gpus * (probes.duration / _HOUR) * probes.idle_cost
    drain = drain_price(gpus, jobs, costs, probes.mean_found)
    return {
        "publish": Price(0.0, 0.0),
        "avoid": Price(0.0, jobs.fail),
        "probe": Price(energy, drain.saved + drain.unneeded - energy),
        "checkpoint": Price(jobs.checkpoint, jobs.unsaved - jobs.checkpoint),
        "swap": swap_price(gpus, jobs, costs, probes.mean_found),
        "drain": drain,
    }


def mean_prices(
    nodes: Iterable[tuple[int, JobHours]], costs: CostBenefitConfig, probes: ProbeConfig
) -> dict[Rung, Price]:
    """Return the mean price of each rung over nodes, given as GPUs and jobs."""
    priced = [prices(gpus, jobs, costs, probes) for gpus, jobs in nodes]
    return {
        rung: Price(fmean(price[rung].unneeded for price in priced), fmean(price[rung].saved for price in priced))
        for rung in RUNGS
    }
