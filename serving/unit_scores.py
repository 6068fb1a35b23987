"""What a full bundle says of the units that may be scored."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from models.bundle import Bundle
from models.ranking import name_hashes
from policy.risk_record import RiskReason
from policy.tiers import TierThresholds
from serving.model_source import profile_alone
from serving.profile_scores import ProfileScores, UnitScore, plain, score_rows
from serving.reasons import top_reasons
from serving.scores.fleet_rows import FleetRows
from serving.scores.settings import ScoringSettings

__all__ = ["FullScorer", "UnitScore", "plain", "score_units"]


class FullScorer:
    """Evaluates a profile with the libraries that trained it; see :class:`serving.profile_scores.ProfileScorer`."""

    def __init__(self, bundle: Bundle) -> None:
        self._fitted = profile_alone(bundle)
        self._profile = bundle.profile

    def score(self, values: NDArray[np.float32], t_ms: int, units: Sequence[str]) -> ProfileScores:
        """Score all rows of one decision time."""
        fitted, profile = self._fitted, self._profile
        times = np.full(len(values), t_ms, dtype=np.int64)
        found = fitted.score_arrays(values, times, name_hashes(np.array(units, dtype=object)))[profile]
        return ProfileScores(
            found.score,
            fitted.risk(profile, found.score),
            found.rank.astype(np.int32),
            found.alert,
            {name.removeprefix("risk_"): each for name, each in fitted.risks(profile, found.score).items()},
        )

    def reasons(
        self, values: NDArray[np.float32], rows: NDArray[np.int64], *, top: int, noun: str
    ) -> list[tuple[RiskReason, ...]]:
        """Explain some of the rows."""
        return top_reasons(self._fitted, self._profile, values, rows, top=top, noun=noun)


def score_units(
    bundle: Bundle,
    rows: FleetRows,
    thresholds: TierThresholds,
    settings: ScoringSettings,
    t: datetime,
) -> tuple[dict[int, UnitScore], int]:
    """Score a decision time's rows with a full bundle; see :func:`serving.profile_scores.score_rows`."""
    return score_rows(FullScorer(bundle), rows, thresholds, settings, t)
