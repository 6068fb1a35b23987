"""From the margins of trees that learn by an objective of ours to probabilities: what scoring needs of it."""

from __future__ import annotations

import numpy as np
from scipy.special import expit, log_expit

from models.ranking import Floats, Ints

_FAR = 30.0


def focal_derivatives(z: Floats, y: Ints, gamma: float) -> tuple[Floats, Floats]:
    """First and second derivative of the focal loss -(1 - q)^gamma log(q) by the margin.

    ``z``: Margins; shape (n,).
    ``y``: 0 or 1; q is the probability that the margin gives to the row's own class; shape (n,).
    ``gamma``: focusing parameter, 0 or more; 0 is the likelihood.
    Returns: the derivatives; the second may be negative; shape (n,).

    The loss is of Lin et al., "Focal Loss for Dense Object Detection" (2017), without its class weight.
    """
    sign = np.where(y == 1, 1.0, -1.0)
    own = expit(sign * z)
    other = expit(-sign * z)
    log_own = log_expit(sign * z)
    power = other**gamma
    first = power * (gamma * own * log_own - other)
    second = own * power * (other * (gamma * log_own + gamma + 1) - gamma * (gamma * own * log_own - other))
    return sign * first, second


def probability_of(z: Floats, gamma: float) -> Floats:
    """Give the probability that a margin stands for, which under focal loss is not the margin's own sigmoid.

    ``z``: margins that minimise the expected focal loss; shape (n,).
    Returns: rises with z; where the derivatives of both classes' losses balance. The closed form is that of
    Charoenphakdee et al., "On Focal Loss for Class-Posterior Probability Estimation" (2021); shape (n,).
    """
    z = np.asarray(z, dtype=np.float64)
    up, _ = focal_derivatives(z, np.ones(len(z), dtype=np.int64), gamma)
    down, _ = focal_derivatives(z, np.zeros(len(z), dtype=np.int64), gamma)
    return down / (down - up)


def focal_probability(margins: Floats, start: float, gamma: float) -> Floats:
    """Give the probabilities of margins on top of a start; beyond 30, where derivatives are lost, they are cut.

    ``margins``: sums of the trees; shape (n,).
    ``start``: margin that stands for the share of positives.
    Returns shape (n,).
    """
    return probability_of(np.clip(start + margins, -_FAR, _FAR), gamma)


def ranked_probability(margins: Floats, slope: float, intercept: float) -> Floats:
    """Give the probabilities of ranking margins, whose log-odds are slope times margin plus intercept."""
    return expit(slope * margins + intercept)


def hazard_risk(margins: Floats) -> Floats:
    """Give the probability of an incident in any interval from its hazards' margins, shape (n_rows, intervals)."""
    return -np.expm1(-np.logaddexp(0, margins).sum(axis=1))


def room_for_interval(X: np.ndarray) -> np.ndarray:
    """Give rows with one column more, to be filled with the number of an interval."""
    rows = np.empty((len(X), X.shape[1] + 1), dtype=X.dtype)
    rows[:, :-1] = X
    return rows
