"""What a bundle says of the units that may be scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from features.service import instant_ms
from models.bundle import Bundle
from models.ranking import name_hashes
from policy.risk_record import RiskReason
from policy.tiers import RAISED, TierThresholds
from serving.config import ScoringSettings
from serving.fleet_rows import FleetRows
from serving.model_source import profile_alone
from serving.reasons import top_reasons


@dataclass(frozen=True, slots=True)
class UnitScore:
    """What a bundle says of one unit; see :class:`policy.risk_record.RiskRecord`."""

    risk: float
    risks: Mapping[str, float]
    score: float
    rank: int
    alert: bool
    reasons: tuple[RiskReason, ...]


def score_units(
    bundle: Bundle,
    rows: FleetRows,
    thresholds: TierThresholds,
    settings: ScoringSettings,
    t: datetime,
) -> tuple[dict[int, UnitScore], int]:
    """Score the rows that may be scored, with reasons for those that alert or whose tier is raised.

    Parameters
    ----------
    bundle : Bundle
        Its profile scores.
    rows : FleetRows
        Ranks and alerts are taken among those without a ``why``: who is unknown takes nobody's place.
    thresholds : TierThresholds
    settings : ScoringSettings
        How many units are explained, and by how many reasons.
    t : datetime
        Decision time, aware.

    Returns
    -------
    scores : dict of int to UnitScore
        By row.
    unexplained : int
        Units that alert or whose tier is raised, and that were left without reasons because there are too many.
    """
    known = np.flatnonzero([why is None for why in rows.why])
    if not known.size:
        return {}, 0
    fitted, profile = profile_alone(bundle), bundle.profile
    values = rows.values[known]
    units = rows.keys["unit"].to_numpy(dtype=object)[known]
    found = fitted.score_arrays(values, np.full(known.size, instant_ms(t), dtype=np.int64), name_hashes(units))[profile]
    risk = fitted.risk(profile, found.score)
    risks = {name.removeprefix("risk_"): each for name, each in fitted.risks(profile, found.score).items()}
    raised = np.array([thresholds.tier(plain(each)) in RAISED for each in risk], dtype=np.bool_) | found.alert
    asked = np.flatnonzero(raised)
    explained = asked[np.lexsort((found.rank[asked], -risk[asked]))][: settings.explained]
    noun = "GPUs" if rows.keys["gpu"].notna().any() else "nodes"
    told = top_reasons(fitted, profile, values, explained, top=settings.reasons, noun=noun)
    reasons = dict(zip(explained.tolist(), told, strict=True))
    scores = {
        row: UnitScore(
            risk=plain(risk[at]),
            risks={name: plain(each[at]) for name, each in risks.items()},
            score=plain(found.score[at]),
            rank=int(found.rank[at]),
            alert=bool(found.alert[at]),
            reasons=reasons.get(at, ()),
        )
        for at, row in enumerate(known.tolist())
    }
    return scores, len(asked) - len(explained)


def plain(value: Any) -> float:
    """Give a float32 as the shortest double that names it: nine digits do, and read better than seventeen."""
    return float(f"{float(value):.9g}")
