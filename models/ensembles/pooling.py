"""The share of a prior's log-odds in a fleet's own models: what is believed, corrected by its newest labels."""

from __future__ import annotations

from typing import Final

import numpy as np
from scipy.special import expit

from models.rows.ranking import Bools, Floats

HALF: Final = 100.0
"""Own incidents that leave half to a prior; measured on simulated fleets, see docs/decisions/0029-priors.md."""

DEVIATION: Final = 0.2
"""How far the share may lie from what is believed, as a standard deviation."""


def believed_share(n_incidents: int) -> float:
    """Give the share of a prior after so many own incidents, where nothing else is known."""
    return HALF / (HALF + n_incidents)


def fit_share(own: Floats, prior: Floats, positive: Bools, *, n_incidents: int, believed: float) -> float:
    """Fit the share of a prior by penalised likelihood on rows that neither was fitted on.

    Share, slope and level are fitted together, so that only what tells rows apart counts. Rows of one incident count as
    one; the share has a normal prior around what is believed, the logarithm of the slope one around 0 (0.5).

    ``own``, ``prior``: log-odds; shape (n_rows,).
    ``n_incidents``: distinct incidents among the positives.
    Returns: from 0 to 1; 0 where these rows are no likelier than by own log-odds alone: a prior must not harm.
    """
    from scipy.optimize import minimize  # noqa: PLC0415 - what only scores needs no optimiser

    y = positive.astype(np.float64)
    rows_per_incident = max(y.sum() / max(n_incidents, 1), 1.0)
    own, apart = own - own.mean(), prior - prior.mean() - (own - own.mean())
    level = np.log(max(y.mean(), 1e-9))

    def belief(share: float) -> float:
        return 0.5 * ((share - believed) / DEVIATION) ** 2

    def loss(point: Floats) -> tuple[float, Floats]:
        share, log_slope, shift = point
        slope, joined = np.exp(log_slope), own + share * apart
        z = level + shift + slope * joined
        residual = expit(z) - y
        value = np.sum(np.logaddexp(0, z) - y * z) / rows_per_incident
        gradient = np.array([slope * (residual @ apart), slope * (residual @ joined), residual.sum()])
        gradient /= rows_per_incident
        gradient[:2] += (share - believed) / DEVIATION**2, log_slope / 0.25
        return float(value + belief(share) + 0.5 * (log_slope / 0.5) ** 2), gradient

    def fit(start: float, least: float, most: float) -> tuple[float, float]:
        bounds = [(least, most), (-3.0, 3.0), (-20.0, 20.0)]
        optimum = minimize(loss, [start, 0.0, 0.0], jac=True, method="L-BFGS-B", bounds=bounds)
        return float(optimum.x[0]), float(optimum.fun) - belief(float(optimum.x[0]))

    share, pooled = fit(believed, 0.0, 1.0)
    return share if pooled < fit(0.0, 0.0, 0.0)[1] else 0.0
