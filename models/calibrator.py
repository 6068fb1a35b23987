"""The map from a model's scores to risks, once it is fitted: see :mod:`models.calibration` for how it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import expit

from models.ranking import Floats

EDGE = 1e-6
"""Risks keep this far from 0 and 1."""


@dataclass(frozen=True, slots=True)
class Calibrator:
    """A monotone map from scores to risks in the open interval (0, 1).

    ``method``: ``sigmoid``: risk = expit(intercept + slope * score); ``isotonic``: interpolated between the knots;
    ``prior``: as ``sigmoid``, not fitted on a slice but from the base rate (see
    :func:`models.calibration.fit_calibrator`).
    ``slope``, ``intercept``: of the sigmoid; the slope is positive.
    ``knots``, ``risks``: scores ascending and risks ascending, for ``isotonic``; empty otherwise.
    """

    method: Literal["sigmoid", "isotonic", "prior"]
    slope: float = 1.0
    intercept: float = 0.0
    knots: tuple[float, ...] = ()
    risks: tuple[float, ...] = ()

    def risk(self, score: Floats) -> Floats:
        """Give the risk of scores, shape kept, float64; never falls as the score rises."""
        values = np.asarray(score, dtype=np.float64)
        if self.method == "isotonic":
            risk = np.interp(values, self.knots, self.risks)
        else:
            risk = expit(self.intercept + self.slope * values)
        return np.clip(risk, EDGE, 1 - EDGE)
