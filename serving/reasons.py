"""Why the riskiest units are at risk, in plain words, by a full bundle."""

from __future__ import annotations

import numpy as np

from models.explanation import attribute_score, members_of, weights_in
from models.fitted import FittedModels
from policy.risk_record import RiskReason
from serving.reason_words import FLEET_UNITS, reasons_of

__all__ = ["FLEET_UNITS", "top_reasons"]


def top_reasons(
    fitted: FittedModels, profile: str, values: np.ndarray, rows: np.ndarray, *, top: int, noun: str
) -> list[tuple[RiskReason, ...]]:
    """Explain some units by the model that scored them, beside the fleet at the same time.

    ``values``: all units of the decision time; shape (n_units, n_features).
    ``top``: reasons a unit at most.
    ``noun``: what units are called: ``GPUs`` or ``nodes``.
    Returns: as :func:`serving.reason_words.reasons_of` gives them; empty also where the model cannot be taken apart.
    """
    if len(rows) == 0 or top < 1:
        return [()] * len(rows)
    attributed, _ = attribute_score(members_of(fitted, profile), values[rows], weights_in(fitted, profile))
    return reasons_of(attributed, fitted.columns, values, rows, top=top, noun=noun)
