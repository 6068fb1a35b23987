"""Promotion gate: criteria that a challenger must meet, out of sample, to replace the champion.

Pure: compares two sets of predictions of the same rows. Each criterion is *passed*, *failed*, or *undecided* (too few
data). The challenger is promoted if no criterion failed and precision passed.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy.stats import binom

from evaluation.metrics.estimates import precision_of
from evaluation.metrics.lead_time import incident_table
from evaluation.metrics.metrics import CONFIDENCE_LEVEL, Floats, interval, ratio, resample
from evaluation.metrics.scored import Scored
from foundation.instants import from_ms
from foundation.text import quantity
from models.config import PromotionSection

Outcome = Literal["passed", "failed", "undecided"]

_BASE_RATE = "constant base rate"


@dataclass(frozen=True, slots=True)
class Criterion:
    """One criterion of the verdict.

    ``against``: name of the reference model; empty for an absolute limit.
    ``champion``, ``challenger``: values of the two sides; None if undefined.
    """

    name: str
    against: str
    champion: float | None
    challenger: float | None
    limit: str
    outcome: Outcome
    why: str


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """Verdict of the gate.

    ``champion``: name of the champion, or names of the baselines if there is none.
    ``rows``: labelled decisions about nodes; ``nodes``, ``times``: distinct ones among them.
    """

    challenger: str
    champion: str
    criteria: tuple[Criterion, ...]
    rows: int
    nodes: int
    times: int
    incidents: int
    k: int
    first_time: datetime
    last_time: datetime

    @property
    def passed(self) -> bool:
        """Whether the challenger may be promoted."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons against promotion: failed criteria, and undecided precision."""
        return tuple(
            f"{criterion.name}: {criterion.why}"
            for criterion in self.criteria
            if criterion.outcome == "failed"
            or (criterion.outcome == "undecided" and criterion.name.startswith("precision"))
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to a JSON object."""
        content = asdict(self) | {"first_time": self.first_time.isoformat(), "last_time": self.last_time.isoformat()}
        return content | {"passed": self.passed, "reasons": list(self.reasons)}


def evaluate_gate(
    challenger: Scored, rivals: Sequence[Scored], section: PromotionSection, *, seed: int, champion: bool
) -> GateVerdict:
    """Compare a challenger with the champion, or with baselines if there is no champion yet.

    ``rivals``: the champion alone, or the baselines. Recall is compared with the most precise baseline only.
    ``champion``: whether ``rivals`` is the champion.
    Raises ``ValueError`` if the sides were not scored on the same rows.
    """
    for rival in rivals:
        if challenger.rows is not rival.rows:
            raise ValueError(f"{challenger.model} and {rival.model} were not scored on the same rows")
    clusters = challenger.shared.n_clusters
    # The first row of weights gives the point estimate, the others the resamples.
    weights = np.concatenate([np.ones((1, clusters)), resample(clusters, section.bootstrap, seed)])
    incidents = incident_table(challenger)
    criteria = [_precision(challenger, rival, section, weights, len(incidents)) for rival in rivals]
    reference = rivals[0] if champion else _best(rivals, weights)
    criteria.append(_risk_ratio(challenger, rivals[0] if champion else None, section, weights))
    criteria.append(_brier(challenger, rivals[0] if champion else None, section, weights))
    criteria += _recalls(reference, incidents, section)
    times = challenger.shared.times_ms[np.unique(challenger.rows.time[challenger.known])]
    return GateVerdict(
        challenger=challenger.model,
        champion=", ".join(rival.model for rival in rivals),
        criteria=tuple(criteria),
        rows=int(challenger.known.sum()),
        nodes=len(np.unique(challenger.rows.node[challenger.known])),
        times=len(times),
        incidents=len(incidents),
        k=challenger.shared.k,
        first_time=from_ms(times[0]),
        last_time=from_ms(times[-1]),
    )


def _precision(
    challenger: Scored, rival: Scored, section: PromotionSection, weights: Floats, incidents: int
) -> Criterion:
    precision, other_precision = (precision_of(side, side.alert, weights) for side in (challenger, rival))
    difference = precision - other_precision
    bounds = interval(difference[1:])
    # Where failures are rare, a fixed margin alone could exceed the whole precision.
    margin = min(section.precision_margin, section.margin_share * float(np.nan_to_num(other_precision[0])))
    limit = f"lower bound of the difference at least {_points(-margin)}, upper bound at least 0"
    hits = int((challenger.alert & challenger.positive).sum())
    spread = f"{_points(difference[0])} [{_points(bounds.low)}, {_points(bounds.high)}] at 95 %"
    outcome: Outcome
    if incidents < section.min_incidents:
        outcome, why = "undecided", f"{quantity(incidents, 'incident')}, at least {section.min_incidents} are needed"
    elif not np.isfinite(bounds.low):
        outcome, why = "undecided", "too few labelled alerts for an interval"
    elif hits == 0:
        outcome, why = "failed", f"no alert of the challenger preceded any of {quantity(incidents, 'incident')}"
    elif bounds.high < 0:
        outcome, why = "failed", f"worse: {spread}"
    elif bounds.low >= -margin:
        outcome, why = "passed", spread
    else:
        outcome, why = "failed", f"non-inferiority not significant: {spread}"
    values = _number(other_precision[0]), _number(precision[0])
    return Criterion("precision at K", rival.model, *values, limit, outcome, f"{why}, {hits} hits")


def _risk_ratio(challenger: Scored, champion: Scored | None, section: PromotionSection, weights: Floats) -> Criterion:
    ratios = _ratios(challenger, weights)
    low, high = section.risk_ratio
    bounds = interval(ratios[1:])
    value, spread = ratios[0], f"{ratios[0]:.2f} [{bounds.low:.2f}, {bounds.high:.2f}]"
    outcome: Outcome
    if not np.isfinite(value):
        outcome, why = "undecided", "no incidents: no rate to compare the risk with"
    elif low <= value <= high:
        outcome, why = "passed", spread
    elif bounds.high < low or bounds.low > high:
        outcome, why = "failed", f"risks are {'too low' if value < low else 'too high'}: {spread}"
    else:
        outcome, why = "undecided", f"outside the limits, but not significantly: {spread}"
    champion_ratio = None if champion is None else _number(_ratios(champion, weights[:1])[0])
    return Criterion(
        "mean risk over base rate", "", champion_ratio, _number(value), f"between {low:g} and {high:g}", outcome, why
    )


def _brier(challenger: Scored, champion: Scored | None, section: PromotionSection, weights: Floats) -> Criterion:
    skill = _skills(challenger, weights)
    other_skill = np.zeros(len(skill)) if champion is None else _skills(champion, weights)
    difference = skill - other_skill
    bounds = interval(difference[1:])
    spread = f"{difference[0]:+.3f} [{bounds.low:+.3f}, {bounds.high:+.3f}]"
    outcome: Outcome
    if not np.isfinite(difference[0]):
        outcome, why = "undecided", "no incident: skill is undefined"
    elif difference[0] >= -section.brier_margin:
        outcome, why = "passed", spread
    elif bounds.high < 0:
        outcome, why = "failed", f"worse: {spread}"
    else:
        outcome, why = "undecided", f"worse, but not significantly: {spread}"
    name = _BASE_RATE if champion is None else champion.model
    limit = f"at most {section.brier_margin:g} below the other"
    return Criterion("Brier skill", name, _number(other_skill[0]), _number(skill[0]), limit, outcome, why)


def _recalls(rival: Scored, incidents: pd.DataFrame, section: PromotionSection) -> list[Criterion]:
    table = incidents.set_index("incident")
    caught = incident_table(rival).set_index("incident")["caught"]
    table = table.assign(other=caught.reindex(table.index).to_numpy(dtype=bool))
    rows = [_recall("recall of incidents", rival, table, section)]
    by_family = table.assign(family=table["failure_class"].str.split(", ")).explode("family")
    rows += [_recall(f"recall of {name}", rival, part, section) for name, part in by_family.groupby("family")]
    return rows


def _recall(name: str, rival: Scored, incidents: pd.DataFrame, section: PromotionSection) -> Criterion:
    caught, by_other = incidents["caught"].to_numpy(dtype=bool), incidents["other"].to_numpy(dtype=bool)
    n, gained, lost = len(caught), int((caught & ~by_other).sum()), int((by_other & ~caught).sum())
    margin = min(section.recall_margin, section.margin_share * float(by_other.mean())) if n else section.recall_margin
    limit = f"at most {_points(margin)} below the other"
    counts = f"{int(caught.sum())} against {int(by_other.sum())} of {n}"
    values = (_number(by_other.mean()), _number(caught.mean())) if n else (None, None)
    # exact one-sided McNemar test on the incidents that only one side caught
    chance = float(binom.cdf(gained, gained + lost, 0.5))
    outcome: Outcome
    if n < section.min_incidents:
        outcome, why = "undecided", f"{counts}: fewer than {section.min_incidents} incidents"
    elif (lost - gained) / n <= margin:
        outcome, why = "passed", counts
    elif chance < 1 - CONFIDENCE_LEVEL:
        outcome, why = "failed", f"{counts}: {lost} lost, {gained} gained (exact p {chance:.3f})"
    else:
        outcome, why = "undecided", f"{counts}: {lost} lost, {gained} gained, not significant"
    return Criterion(name, rival.model, *values, limit, outcome, why)


def _best(rivals: Sequence[Scored], weights: Floats) -> Scored:
    reached = [np.nan_to_num(precision_of(rival, rival.alert, weights[:1])[0], nan=-1.0) for rival in rivals]
    return rivals[int(np.argmax(reached))]


def _ratios(scored: Scored, weights: Floats) -> Floats:
    return ratio(weights @ scored.units.risk, weights @ scored.units.positive)


def _skills(scored: Scored, weights: Floats) -> Floats:
    error, rows, positives = (
        weights @ sums for sums in (scored.units.error, scored.units.known, scored.units.positive)
    )
    rate = ratio(positives, rows)
    return 1 - ratio(ratio(error, rows), rate * (1 - rate))


def _points(share: float) -> str:
    if not np.isfinite(share):
        return "undefined"
    return f"{100 * share:+.1f} points".replace("-0.0 ", "0.0 ").replace("+0.0 ", "0.0 ")


def _number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
