"""A bundle's profile evaluated without pandas and without a library that trains, for a service that lives long."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from models.light.bundle import LightBundle
from models.light.errors import HeavyModelError
from policy.risk_record import RiskReason
from serving.profile_scores import ProfileScores

if TYPE_CHECKING:
    from serving.unit_scores import FullScorer

_LOG = logging.getLogger(__name__)


class LightScorer:
    """Evaluates a light bundle's profile; see :class:`serving.profile_scores.ProfileScorer`."""

    def __init__(self, bundle: LightBundle) -> None:
        self._bundle = bundle
        self._full: FullScorer | None = None

    def score(self, values: NDArray[np.float32], t_ms: int, units: Sequence[str]) -> ProfileScores:
        """Score all rows of one decision time."""
        found = self._bundle.score(values, np.full(len(values), t_ms, dtype=np.int64), units)
        risks = {name.removeprefix("risk_"): each for name, each in found.risks.items()}
        return ProfileScores(found.score, found.risk, found.rank, found.alert, risks)

    def reasons(
        self, values: NDArray[np.float32], rows: NDArray[np.int64], *, top: int, noun: str
    ) -> list[tuple[RiskReason, ...]]:
        """Explain some of the rows."""
        if len(rows) == 0 or top < 1:
            return [()] * len(rows)
        from serving.reason_words import reasons_of  # noqa: PLC0415 - for who explains

        try:
            attributed, _ = self._bundle.contributions(values[rows])
        except HeavyModelError as heavy:
            return self._by_libraries(heavy, values, rows, top, noun)
        return reasons_of(attributed, self._bundle.columns, values, rows, top=top, noun=noun)

    def _by_libraries(
        self, heavy: HeavyModelError, values: NDArray[np.float32], rows: NDArray[np.int64], top: int, noun: str
    ) -> list[tuple[RiskReason, ...]]:
        """Explain by the full bundle, as long as it is where it was."""
        if self._full is None:
            from models.bundle import load_bundle  # noqa: PLC0415 - every library, where there is no other way
            from serving.unit_scores import FullScorer  # noqa: PLC0415

            _LOG.warning("reasons are given by the full bundle, which takes more time and memory: %s", heavy.why)
            full = load_bundle(self._bundle.path)
            if full.digest != self._bundle.digest:
                return [()] * len(rows)
            self._full = FullScorer(full)
        return self._full.reasons(values, rows, top=top, noun=noun)
