"""What a bundle's profile says of the units that may be scored, whoever evaluates it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from policy.risk_record import RiskReason
from policy.tiers import RAISED, TierThresholds
from serving.scores.settings import ScoringSettings

if TYPE_CHECKING:
    from serving.scores.fleet_rows import FleetRows


@dataclass(frozen=True, slots=True)
class UnitScore:
    """What a bundle says of one unit; see :class:`policy.risk_record.RiskRecord`."""

    risk: float
    risks: Mapping[str, float]
    score: float
    rank: int
    alert: bool
    reasons: tuple[RiskReason, ...]


@dataclass(frozen=True, slots=True)
class ProfileScores:
    """A profile's scores of the rows of one decision time, each of shape (n_rows,).

    ``rank``: 1 for the riskiest.
    ``risks``: by horizon in hours: ``6h`` and so on.
    """

    score: NDArray[np.float32]
    risk: NDArray[np.float32]
    rank: NDArray[np.int32]
    alert: NDArray[np.bool_]
    risks: Mapping[str, NDArray[np.float32]]


class ProfileScorer(Protocol):
    """Evaluates a bundle's profile: the full bundle, or the light scorer."""

    def score(self, values: NDArray[np.float32], t_ms: int, units: Sequence[str]) -> ProfileScores:
        """Score all rows of one decision time, shape (n_rows, n_features)."""

    def reasons(
        self, values: NDArray[np.float32], rows: NDArray[np.int64], *, top: int, noun: str
    ) -> list[tuple[RiskReason, ...]]:
        """Explain some of the rows beside all of them, the weightiest reason first."""


def score_rows(
    scorer: ProfileScorer,
    rows: FleetRows,
    thresholds: TierThresholds,
    settings: ScoringSettings,
    t: datetime,
    *,
    explain: frozenset[str] | None = None,
) -> tuple[dict[int, UnitScore], int]:
    """Score the rows that may be scored, with reasons for those that alert or whose tier is raised.

    ``rows``: ranks and alerts are taken among those without a ``why``: who is unknown takes nobody's place.
    ``explain``: explain these units only, whatever their tier.
    Returns ``scores``: by row.
    Returns ``unexplained``: units that were to be explained and are not, because there are too many.
    """
    from features.times import instant_ms  # noqa: PLC0415 - whoever has rows has pandas, whoever scores alone has not

    known = np.flatnonzero([why is None for why in rows.why])
    if not known.size:
        return {}, 0
    values = rows.values[known]
    units = rows.keys["unit"].to_numpy(dtype=object)[known]
    found = scorer.score(values, instant_ms(t), units.tolist())
    if explain is None:
        wanted = np.array([thresholds.tier(plain(each)) in RAISED for each in found.risk], dtype=np.bool_) | found.alert
    else:
        wanted = np.array([unit in explain for unit in units.tolist()], dtype=np.bool_)
    asked = np.flatnonzero(wanted)
    explained = asked[np.lexsort((found.rank[asked], -found.risk[asked]))][: settings.explained]
    noun = "GPUs" if rows.keys["gpu"].notna().any() else "nodes"
    told = scorer.reasons(values, explained, top=settings.reasons, noun=noun)
    reasons = dict(zip(explained.tolist(), told, strict=True))
    scores = {
        row: UnitScore(
            risk=plain(found.risk[at]),
            risks={name: plain(each[at]) for name, each in found.risks.items()},
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
