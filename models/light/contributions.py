"""What each feature added to a score, by the learners of the light scorer; the full ones share what is no library's.

The methods and the numbers are those of :mod:`models.contributions`, within rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np
from scipy.special import expit

from models.light.errors import HeavyModelError
from models.light.learners import FirstFeatures
from models.light.prepared import PreparedScorer
from models.odds import logit
from models.points import Points
from models.reasons import GRADIENTS, LINEAR, TREES, UNKNOWN
from models.signed_log import scaled

Floats = np.ndarray[Any, np.dtype[np.float64]]

_STEPS: Final = 64
"""Points of the midpoint rule along the way; the error of the sum is tested to stay within 2 %."""


class Pointing(Protocol):
    """What gives points to rows."""

    def points(self, X: np.ndarray, identity: Any = None) -> Floats:
        """Score rows."""


def light_contributions(learner: Any, X: np.ndarray) -> tuple[Floats, str]:
    """Contribution of each feature to each row's score.

    ``learner``: as :class:`models.light.bundle.LightBundle` holds it.
    ``X``: rows to explain; NaN: unknown; shape (rows, features).
    Returns shape (rows, features).
    Raises ``HeavyModelError`` if only its library can take it apart.
    """
    if isinstance(learner, FirstFeatures):
        first: np.ndarray = np.ascontiguousarray(X[:, : learner.columns])
        own, method = light_contributions(learner.inner, first)
        return np.pad(own, ((0, 0), (0, X.shape[1] - own.shape[1]))), method
    if isinstance(learner, Points):
        return without_each(learner, X), UNKNOWN
    if isinstance(learner, PreparedScorer):
        values = scaled(X, learner.center, learner.scale, learner.clip).astype(np.float64)
        if len(learner.weights) == 1:
            return values * learner.weights[0][:, 0], LINEAR
        return along_gradients(learner.weights, learner.intercepts, learner.activation, values), GRADIENTS
    try:
        return learner.contributions(X), TREES
    except (AttributeError, ValueError) as error:
        raise HeavyModelError(str(error), type(learner).__name__) from None


def as_log_odds(values: Floats, base: Floats) -> Floats:
    """Scale a forest's parts of its probability, each row's by one factor, to its difference in log-odds.

    The forest is additive in probability, not in log-odds; one factor a row keeps order, signs and proportions.

    ``values``: additions to the probability; shape (rows, features).
    ``base``: the probability where nothing is known; shape (rows,).
    """
    change = values.sum(axis=1)
    log_change = logit(base + change) - logit(base)
    slope = 1 / np.clip(base * (1 - base), 1e-7, None)  # where nothing changes in sum, parts still cancel each other
    factor = np.divide(log_change, change, out=slope, where=np.abs(change) > 1e-12)
    return values * factor[:, None]


_SLOPES: dict[str, Callable[[Floats], Floats]] = {
    "relu": lambda z: (z > 0).astype(np.float64),
    "tanh": lambda z: 1 - np.tanh(z) ** 2,
    "logistic": lambda z: expit(z) * (1 - expit(z)),
    "identity": np.ones_like,
}
_ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "relu": lambda z: np.maximum(z, 0),
    "tanh": np.tanh,
    "logistic": expit,
    "identity": lambda z: z,
}


def along_gradients(
    weights: Sequence[np.ndarray], intercepts: Sequence[np.ndarray], activation: str, values: Floats
) -> Floats:
    """Integrate the gradient of a network's log-odds along the straight way from 0, the median of all, to each row.

    ``values``: scaled rows; shape (rows, features).
    """
    total = np.zeros(values.shape)
    for step in range(_STEPS):
        hidden = values * ((step + 0.5) / _STEPS)
        slopes = []
        for weight, bias in zip(weights[:-1], intercepts[:-1], strict=True):
            before = hidden @ weight.astype(np.float64) + bias
            slopes.append(_SLOPES[activation](before))
            hidden = _ACTIVATIONS[activation](before)
        back = np.broadcast_to(weights[-1][:, 0].astype(np.float64), hidden.shape)
        for weight, slope in zip(weights[-2::-1], slopes[::-1], strict=True):
            back = (back * slope) @ weight.astype(np.float64).T
        total += back
    return total / _STEPS * values


def without_each(baseline: Pointing, X: np.ndarray) -> Floats:
    """Tell what a baseline's points lose when each feature alone is unknown; shape of ``X``."""
    identity = np.zeros(1, np.uint64)  # chance depends on nothing but who the row is: no feature moves it
    out = np.zeros(X.shape)
    for row in range(len(X)):
        known = np.flatnonzero(~np.isnan(X[row]))
        without = np.repeat(X[row : row + 1], len(known), axis=0)
        without[np.arange(len(known)), known] = np.nan
        whole = baseline.points(X[row : row + 1], identity)
        out[row, known] = whole - baseline.points(without, np.repeat(identity, len(known)))
    return out
