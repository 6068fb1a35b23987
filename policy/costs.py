"""Thresholds from what a drain and a failure cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from policy.bounds import Bools, Ints, PrecisionBound, precision_bound
from policy.evidence import Evidence, drains_begun
from policy.thresholds import Decision


@dataclass(frozen=True, slots=True)
class Costs:
    """What things cost, all in one unit of the operator's choice (such as GPU-hours).

    ``unneeded_drain``: draining a unit that would not have failed; positive.
    ``missed_failure``: a failure that met no drain: repair in a hurry, and all that is not the job.
    ``lost_job``: what the jobs on the unit lose on average when it fails under them.
    ``needed_drain``: draining a unit that would have failed.
    """

    unneeded_drain: float
    missed_failure: float
    lost_job: float = 0.0
    needed_drain: float = 0.0

    def __post_init__(self) -> None:
        if not self.unneeded_drain > 0:
            raise ValueError(f"unneeded_drain is {self.unneeded_drain}: give a positive number")
        if not self.saved > 0:
            raise ValueError(
                f"a drain saves {self.saved} (missed_failure + lost_job - needed_drain): no drain can ever be worth it"
            )

    @property
    def saved(self) -> float:
        """What a drain before a failure saves."""
        return self.missed_failure + self.lost_job - self.needed_drain

    @property
    def break_even(self) -> float:
        """The risk from which on a drain is worth it: where ``risk * saved = (1 - risk) * unneeded_drain``."""
        return self.unneeded_drain / (self.unneeded_drain + self.saved)


def for_costs(evidence: Evidence, costs: Costs, confidence: float, *, repeat_ms: int) -> Decision:
    """Choose the threshold of least expected cost, and tell what it would have saved.

    ``evidence``: earlier decisions, scored out of time; ``risk`` must be a calibrated probability.
    ``confidence``: One-sided, between 0 and 1 exclusive.
    ``repeat_ms``: alerts of a unit within this time (milliseconds) of the one that began a drain belong to that drain:
    the horizon.
    Returns: the threshold is :attr:`Costs.break_even`, which no search has touched; ``promised`` says whether the lower
    bound of the saving is above zero. ``saving`` is a decision time's, against draining nothing.
    Raises ``ValueError`` if the confidence is out of range.

    A failure is saved once, however many alerts it had; a false drain counts each time it begins. The bound of the
    saving is normal over units, which may depend on nothing but themselves.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}: give a number between 0 and 1")
    threshold = costs.break_even
    alert = evidence.risk >= threshold
    bound = precision_bound(evidence.hit[alert], evidence.unit[alert], confidence)
    if not len(evidence.risk):
        return no_threshold(costs, confidence, "there are no earlier decisions")
    chosen = np.flatnonzero(alert)
    caught = np.unique(evidence.incident[alert & evidence.hit & (evidence.incident >= 0)], return_index=True)[1]
    saved_by = evidence.unit[np.flatnonzero(alert & evidence.hit & (evidence.incident >= 0))[caught]]
    false_by = evidence.unit[chosen[false_drains(evidence, chosen, repeat_ms)]]
    _, unit = np.unique(evidence.unit, return_inverse=True)
    number = dict(zip(evidence.unit.tolist(), unit.tolist(), strict=True))
    of_unit = np.zeros(int(unit.max()) + 1)
    np.add.at(of_unit, [number[each] for each in saved_by.tolist()], costs.saved)
    np.add.at(of_unit, [number[each] for each in false_by.tolist()], -costs.unneeded_drain)
    total, times = float(of_unit.sum()), evidence.times
    spread = float(of_unit.std(ddof=1)) * math.sqrt(len(of_unit)) if len(of_unit) > 1 else math.inf
    lower = (total - NormalDist().inv_cdf(confidence) * spread) / times if math.isfinite(spread) else -math.inf
    if not alert.any():
        why = f"no earlier decision had a risk of {threshold:.1%}, from which on a drain is worth its cost"
    else:
        why = (
            f"{len(caught)} failures saved and {len(false_by)} unneeded drains in {times} decision times: "
            f"{total / times:.3g} a decision time, with {confidence:.0%} confidence at least {lower:.3g}"
        )
    return Decision(
        kind="cost",
        asked=costs.unneeded_drain / costs.saved,
        confidence=confidence,
        promised=bool(alert.any() and lower > 0),
        threshold=threshold,
        bound=bound,
        drains_per_decision=_drains(evidence, chosen, repeat_ms) / times,
        recall=evidence.recall(alert),
        saving=total / times,
        saving_lower=lower if math.isfinite(lower) else None,
        why=why,
    )


def no_threshold(costs: Costs, confidence: float, why: str) -> Decision:
    """Give the decision where costs set no threshold, with the reason in words."""
    nothing = PrecisionBound(0, 0, 0, 0.0, math.nan, 0.0)
    asked = costs.unneeded_drain / costs.saved
    return Decision("cost", asked, confidence, False, None, nothing, 0.0, math.nan, why=why)


def _drains(evidence: Evidence, chosen: Ints, repeat_ms: int) -> int:
    rows = chosen[np.lexsort((evidence.time[chosen], evidence.unit[chosen]))]
    return int(drains_begun(evidence.unit[rows], evidence.time[rows], repeat_ms).sum())


def false_drains(evidence: Evidence, chosen: Ints, repeat_ms: int) -> Bools:
    """Tell which alerts begin a drain that nothing followed.

    ``chosen``: positions of the alerts; shape (alerts,).
    Returns: true for the first alert of each drain none of whose alerts was a hit; shape (alerts,).
    """
    out = np.zeros(len(chosen), dtype=np.bool_)
    order = np.lexsort((evidence.time[chosen], evidence.unit[chosen]))
    rows = chosen[order]
    begun = drains_begun(evidence.unit[rows], evidence.time[rows], repeat_ms)
    needed = np.bincount(np.cumsum(begun) - 1, weights=evidence.hit[rows], minlength=int(begun.sum())) > 0
    out[order[begun]] = ~needed
    return out
