"""From contributions to the reasons of risk records, beside the fleet at the same time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from features.vocabulary import FeatureColumn
from models.reasons import Floats, Telling, largest
from policy.risk_record import RiskReason

FLEET_UNITS = 2048
"""Units that a value is placed among at most, spread evenly: percentiles need no more."""


def reasons_of(
    attributed: Floats, columns: Sequence[FeatureColumn], values: np.ndarray, rows: np.ndarray, *, top: int, noun: str
) -> list[tuple[RiskReason, ...]]:
    """Tell in words what raised some units' scores.

    ``attributed``: what each feature added to the scores of ``rows``; shape (n_rows, n_features).
    ``values``: all units of the decision time; shape (n_units, n_features).
    ``rows``: which of them to explain; shape (n_rows,).
    ``top``: reasons a unit at most.
    ``noun``: what units are called: ``GPUs`` or ``nodes``.
    Returns: one for each of ``rows``, the weightiest first; empty where nothing raised the score. ``share`` is of all
    that raised it.
    """
    sampled = len(values) > FLEET_UNITS
    among = np.unique(np.append(np.linspace(0, len(values) - 1, FLEET_UNITS).astype(np.int64), rows))
    fleet = values[among] if sampled else values
    called = f"{noun} sampled" if sampled else noun
    telling = Telling.of_columns(columns)
    group = {column.name: column.group for column in columns}
    found = []
    for number, row in enumerate(rows.tolist()):
        told, raised = largest(attributed[number], values[row], telling, top, fleet, called)
        found.append(
            tuple(RiskReason(each.text, group[each.column], round(each.contribution / raised, 4)) for each in told)
        )
    return found
