"""Calibration of scores: a monotone map fitted on a time slice that the frozen model was not fitted on."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.optimize import brentq, minimize
from scipy.special import expit

from models.rows.ranking import Floats

EDGE = 1e-6
"""Distance that risks keep from 0 and 1."""


@dataclass(frozen=True, slots=True)
class Calibrator:
    """A sigmoid from scores to risks in (0, 1): expit(intercept + slope * score) with a positive slope.

    ``method``: ``sigmoid``: fitted on a slice; ``prior``: derived from the base rate (see :func:`fit_calibrator`).
    """

    method: Literal["sigmoid", "prior"]
    slope: float = 1.0
    intercept: float = 0.0

    def risk(self, score: Floats) -> Floats:
        """Return the risks of scores, shape kept, float64; non-decreasing in the score, except for rounding."""
        risk = expit(self.intercept + self.slope * np.asarray(score, dtype=np.float64))
        return np.clip(risk, EDGE, 1 - EDGE)


MIN_INCIDENTS = 5
"""Minimum distinct incidents in a slice to fit a map on; with fewer, risks would be noise."""

_FARTHEST = 8.0
_ORDER_SLOPE = 0.5
"""Default slope of scores that are ranks only: a conservative guess."""


def fit_calibrator(
    score: Floats,
    label: np.ndarray,
    *,
    n_incidents: int,
    base_rate: float,
    log_odds: bool,
) -> Calibrator:
    """Fit a map on the rows of a slice, or return the fallback.

    ``score``: scores of grid rows that the model was not fitted on. Rows without a label affect only the fallback;
    shape (n,).
    ``label``: 1, 0, or -1 for none; shape (n,).
    ``n_incidents``: distinct incidents among the positives. With fewer than :data:`MIN_INCIDENTS`, or a single class,
    the fallback is used.
    ``base_rate``: share of positives among grid rows of the training window, for the fallback.
    ``log_odds``: whether the score is a log-odds already corrected for sampling. The fallback is then the score itself;
    otherwise (ranks only) a sigmoid with slope 0.5 whose mean over the rows is the base rate.
    Returns: a strictly positive slope: risks never reverse the order of scores.

    The sigmoid is Platt's, with normal priors that shrink it to the fallback: on the log slope (standard deviation 0.5
    for log-odds, 1.5 for ranks) and the intercept (1.5). A few positives thus change it little.
    """
    score = np.asarray(score, dtype=np.float64)
    known = np.asarray(label) >= 0
    y = np.asarray(label)[known].astype(np.float64)
    fallback = _fallback(score, base_rate, log_odds)
    if n_incidents < MIN_INCIDENTS or y.sum() in (0, len(y)):
        return fallback
    return _sigmoid(score[known], y, fallback, 0.5 if log_odds else 1.5)


def at_level(calibrator: Calibrator, score: Floats, rate: float) -> Calibrator:
    """Shift a map in log-odds so that its mean risk over the given scores equals a rate; order is preserved.

    ``score``: scores of recent rows, with or without labels; shape (n,).
    ``rate``: between 0 and 1; with a rate of 0 or without scores, the map is returned unchanged.
    """
    score = np.asarray(score, dtype=np.float64)
    if len(score) == 0 or rate <= 0:
        return calibrator
    log_odds = calibrator.intercept + calibrator.slope * score

    def mean(shift: float) -> float:
        return float(expit(log_odds + shift).mean())

    if not mean(-_FARTHEST) < rate < mean(_FARTHEST):
        return calibrator
    shift = float(brentq(lambda x: mean(x) - rate, -_FARTHEST, _FARTHEST, xtol=1e-9))
    return replace(calibrator, intercept=calibrator.intercept + shift)


def _fallback(score: Floats, base_rate: float, log_odds: bool) -> Calibrator:
    if log_odds:
        return Calibrator("prior")
    rate = min(max(base_rate, EDGE), 0.5)
    reference = score if len(score) else np.zeros(1)
    slope = _ORDER_SLOPE

    def excess(intercept: float) -> float:
        return float(np.mean(expit(intercept + slope * reference))) - rate

    # expit(±40) is 0 or 1 up to 1e-17, so a root lies between.
    bound = 40.0 + slope * float(np.abs(reference).max())
    return Calibrator("prior", slope, float(brentq(excess, -bound, bound, xtol=1e-9)))


def _sigmoid(score: Floats, y: Floats, start: Calibrator, slope_deviation: float) -> Calibrator:
    # Centered at the mean score, slope and intercept are nearly independent.
    middle = float(score.mean())
    origin = start.intercept + start.slope * middle

    def loss(point: Floats) -> tuple[float, Floats]:
        slope = start.slope * np.exp(point[0])
        z = origin + point[1] + slope * (score - middle)
        residual = expit(z) - y
        value = float(np.sum(np.logaddexp(0, z) - y * z))
        value += 0.5 * (point[0] / slope_deviation) ** 2 + 0.5 * (point[1] / 1.5) ** 2
        gradient = np.array(
            [
                np.sum(residual * slope * (score - middle)) + point[0] / slope_deviation**2,
                np.sum(residual) + point[1] / 1.5**2,
            ]
        )
        return value, gradient

    # Far beyond what the priors suggest: the bounds only keep exp() finite during the line search.
    optimum = minimize(loss, np.zeros(2), jac=True, method="L-BFGS-B", bounds=[(-6, 6), (-20, 20)])
    slope = float(start.slope * np.exp(optimum.x[0]))
    return Calibrator("sigmoid", slope, float(origin + optimum.x[1] - slope * middle))
