"""What a bundle's profile says of the units that may be scored: risks, ranks, alerts, and reasons in plain words."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from features.times import instant_ms
from models.bundle.store import Bundle
from models.explanation.members import attribute_score, members_of, weights_in
from models.explanation.reasons import Telling, largest
from models.rows.ranking import name_hashes
from models.training.fitted import FittedModels
from policy.risk_record import RiskReason
from policy.tiers import RAISED, TierThresholds

if TYPE_CHECKING:  # the service explains rows without the kernels that compute them
    from serving.scores.decision_times import ScoringSettings
    from serving.scores.fleet_rows import FleetRows

FLEET_UNITS = 2048
"""Units that a value is placed among at most, spread evenly: percentiles need no more."""


def score_units(
    bundle: Bundle, rows: FleetRows, thresholds: TierThresholds, settings: ScoringSettings, t: datetime
) -> tuple[dict[int, dict[str, Any]], int]:
    """Score the rows that may be scored, with reasons for those that alert or whose tier is raised.

    Ranks and alerts are taken among the rows without a ``why``: a unit that is unknown takes nobody's place.
    Returns by row what a :class:`policy.risk_record.RiskRecord` says of a score, and how many units were to be
    explained and are not, because there are too many.
    """
    known = np.flatnonzero([why is None for why in rows.why])
    if not known.size:
        return {}, 0
    fitted, profile = bundle.fitted, bundle.profile
    values = rows.values[known]
    times = np.full(len(values), instant_ms(t), dtype=np.int64)
    tie = name_hashes(rows.keys["unit"].to_numpy(dtype=object)[known])
    scored = fitted.score_arrays(values, times, tie)[profile]
    risk = fitted.risk(profile, scored.score)
    risks = fitted.risks(profile, scored.score)
    raised = np.array([thresholds.tier(plain(value)) in RAISED for value in risk], dtype=np.bool_)
    wanted = np.flatnonzero(raised | scored.alert)
    explained = wanted[np.lexsort((scored.rank[wanted], -risk[wanted]))][: settings.max_explained]
    noun = "GPUs" if rows.keys["gpu"].notna().any() else "nodes"
    unit_reasons = top_reasons(fitted, profile, values, explained, top=settings.max_reasons, noun=noun)
    reasons = dict(zip(explained.tolist(), unit_reasons, strict=True))
    scores = {
        row: {
            "risk": plain(risk[at]),
            "risks": {name.removeprefix("risk_"): plain(values[at]) for name, values in risks.items()},
            "score": plain(scored.score[at]),
            "rank": int(scored.rank[at]),
            "alert": bool(scored.alert[at]),
            "reasons": reasons.get(at, ()),
        }
        for at, row in enumerate(known.tolist())
    }
    return scores, len(wanted) - len(explained)


def top_reasons(
    fitted: FittedModels, profile: str, values: np.ndarray, rows: NDArray[np.int64], *, top: int, noun: str
) -> list[tuple[RiskReason, ...]]:
    """Explain some units by the model that scored them, compared with the fleet at the same time.

    ``values`` holds all units of the decision time, ``rows`` the positions of those to explain. One tuple for each of
    ``rows``, the weightiest reason first; empty where nothing raised the score. ``share`` is of all that raised it.
    """
    if len(rows) == 0 or top < 1:
        return [()] * len(rows)
    attributed, _ = attribute_score(members_of(fitted, profile), values[rows], weights_in(fitted, profile))
    sampled = len(values) > FLEET_UNITS
    sample = np.unique(np.append(np.linspace(0, len(values) - 1, FLEET_UNITS).astype(np.int64), rows))
    fleet = values[sample] if sampled else values
    called = f"{noun} sampled" if sampled else noun
    telling = Telling.of_columns(fitted.columns)
    group = {column.name: column.group for column in fitted.columns}
    reasons = []
    for number, row in enumerate(rows.tolist()):
        weightiest, raised = largest(attributed[number], values[row], telling, top, fleet, called)
        reasons.append(
            tuple(
                RiskReason(reason.text, group[reason.column], round(reason.contribution / raised, 4))
                for reason in weightiest
            )
        )
    return reasons


def plain(value: Any) -> float:
    """Give a float32 as the shortest double that names it: nine digits do, and read better than seventeen."""
    return float(f"{float(value):.9g}")
