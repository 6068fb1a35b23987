"""Scores that the controller would have read at each time of a replay."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from math import isfinite
from typing import Any

import numpy as np
import pandas as pd

from foundation.instants import from_ms
from foundation.times import duration_ms, milliseconds
from policy.episodes import Bools, Floats
from policy.fleet import Score, UnitView


@dataclass(frozen=True, slots=True)
class ScoredDecision:
    """Scores of one decision time.

    ``at``: when they are available, in milliseconds.
    ``risk``: by unit code; NaN: unknown; ``scored``: whether the unit has a score at all; shape (units,).
    ``decided_at``, ``expires_at``: common to all scores; ``fitted_at``: when their model was fitted.
    """

    at: int
    risk: Floats
    scored: Bools
    decided_at: datetime
    expires_at: datetime
    fitted_at: datetime
    _views: dict[int, UnitView] = field(default_factory=dict, repr=False)

    def view(self, name: str, code: int) -> UnitView:
        """Return the view of a unit; code -1: never scored."""
        if code < 0 or not self.scored[code]:
            return UnitView(name)
        if code not in self._views:  # cached: one reading serves many rounds
            risk = float(self.risk[code])
            score = Score(risk if isfinite(risk) else None, self.decided_at, self.expires_at)
            self._views[code] = UnitView(name, score)
        return self._views[code]


class Readings(Sequence[ScoredDecision]):
    """Readings of all decision times, in order of time, created on first access.

    ``predictions``: ``decision_time``, ``unit``, ``risk``, ``fold`` of one model; ``folds``: ``fold``, ``refit_at``.
    ``delay``: from a decision time until its scores are available; ``lifetime``: from the decision time until expiry.
    """

    def __init__(
        self, predictions: pd.DataFrame, folds: pd.DataFrame, *, delay: timedelta, lifetime: timedelta
    ) -> None:
        time = milliseconds(predictions["decision_time"])
        order = np.argsort(time, kind="stable")
        times, first = np.unique(time[order], return_index=True)
        fitted = dict(zip(folds["fold"], milliseconds(folds["refit_at"]).tolist(), strict=True))
        units = predictions["unit"].astype("category").cat
        self.units = pd.Index(units.categories.astype("str"))
        """Unit names, indexed by code."""
        self._unit = units.codes.to_numpy()[order]
        self._risk = predictions["risk"].to_numpy()[order]
        self._bounds = [*first.tolist(), len(order)]
        self._fitted = [fitted[fold] for fold in predictions["fold"].to_numpy()[order[first]].tolist()]
        self._decided, self._lifetime = times.tolist(), lifetime
        self._read: dict[int, ScoredDecision] = {}  # several replays read the same scores
        self.at: list[int] = (times + duration_ms(delay)).tolist()
        """When the scores of each decision time are available."""

    def __len__(self) -> int:
        return len(self.at)

    def __getitem__(self, index: Any) -> Any:
        """Return a reading, cached."""
        place = range(len(self.at))[index]
        if place not in self._read:
            at, rows = from_ms(self._decided[place]), slice(*self._bounds[place : place + 2])
            risk, scored = np.full(len(self.units), np.nan), np.zeros(len(self.units), dtype=np.bool_)
            risk[self._unit[rows]], scored[self._unit[rows]] = self._risk[rows], True
            self._read[place] = ScoredDecision(
                self.at[place], risk, scored, at, at + self._lifetime, from_ms(self._fitted[place])
            )
        return self._read[place]

    def newest(self, now_ms: int) -> ScoredDecision:
        """Return the latest reading available at a time, or the first if there is none yet."""
        reading: ScoredDecision = self[max(bisect_right(self.at, now_ms) - 1, 0)]
        return reading
