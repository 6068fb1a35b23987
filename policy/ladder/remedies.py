"""Remedies: recovery actions for faults named by hard rules, and how long each keeps a drained node out of service.

The names are NVIDIA's recovery actions, in ascending order of effort. ``reset`` and ``reboot`` need no spare part, so
the node may return as soon as they are done. ``replace`` is a planned repair.
"""

from collections.abc import Iterable
from datetime import timedelta
from typing import Literal

from policy.ladder.cost_benefit import CostBenefitConfig

Remedy = Literal["reset", "reboot", "diagnose", "replace"]
REMEDIES: tuple[Remedy, ...] = ("reset", "reboot", "diagnose", "replace")

INSTRUCTIONS: dict[Remedy, str] = {
    "reset": "reset the GPU",
    "reboot": "reboot the node",
    "diagnose": "run a diagnostic on the node",
    "replace": "repair or replace the GPU",
}


def hardest(remedies: Iterable[Remedy]) -> Remedy | None:
    """Return the remedy that covers all others; None if there are none."""
    return max(remedies, key=REMEDIES.index, default=None)


def duration_of(remedy: Remedy, costs: CostBenefitConfig) -> timedelta:
    """Return how long a remedy takes on an empty node."""
    durations: dict[Remedy, timedelta] = {
        "reset": costs.reset, "reboot": costs.reboot, "diagnose": costs.verify, "replace": costs.planned_repair,
    }  # fmt: skip
    return durations[remedy]
