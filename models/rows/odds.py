"""Log-odds of probabilities, and of what a learner says of rows."""

from __future__ import annotations

from typing import Any

import numpy as np

_EDGE = 1e-7


def log_odds(learner: Any, X: np.ndarray) -> np.ndarray:
    """Give the log-odds of the positive class, from a learner's probabilities cut to ``[1e-7, 1 - 1e-7]``.

    ``learner``: Fitted, with classes 0 and 1 and scikit-learn's ``predict_proba``.
    ``X``: Features; shape (n_rows, n_features).
    Returns: Log-odds; empty for no rows; shape (n_rows,).
    """
    if len(X) == 0:
        return np.zeros(0)
    return logit(learner.predict_proba(X)[:, 1])


def logit(probability: np.ndarray) -> np.ndarray:
    """Give the log-odds of probabilities, cut to ``[1e-7, 1 - 1e-7]`` so that 0 and 1 stay finite."""
    inside = np.clip(np.asarray(probability, dtype=np.float64), _EDGE, 1 - _EDGE)
    return np.log(inside) - np.log1p(-inside)
