"""Why the riskiest units are at risk, in plain words."""

from __future__ import annotations

import numpy as np

from models.explanation import attribute_score, explain, members_of, told_as, weights_in
from models.fitted import FittedModels
from policy.risk_record import RiskReason

FLEET_UNITS = 2048
"""Units that a value is placed among at most, spread evenly: percentiles need no more."""


def top_reasons(
    fitted: FittedModels, profile: str, values: np.ndarray, rows: np.ndarray, *, top: int, noun: str
) -> list[tuple[RiskReason, ...]]:
    """Explain some units by the model that scored them, beside the fleet at the same time.

    Parameters
    ----------
    fitted : FittedModels
    profile : str
        The model.
    values : ndarray of float32, shape (n_units, n_features)
        All units of the decision time.
    rows : ndarray of int64
        Which of them to explain.
    top : int
        Reasons a unit at most.
    noun : str
        What units are called: ``GPUs`` or ``nodes``.

    Returns
    -------
    list of tuple of RiskReason
        One for each of ``rows``, the weightiest first; empty where nothing raised the score or the model cannot be
        taken apart. ``share`` is of all that raised the score.
    """
    if len(rows) == 0 or top < 1:
        return [()] * len(rows)
    columns = fitted.columns
    X = values[rows]
    members = members_of(fitted, profile)
    attributed = attribute_score(members, X, weights_in(fitted, profile))
    sampled = len(values) > FLEET_UNITS
    among = np.unique(np.append(np.linspace(0, len(values) - 1, FLEET_UNITS).astype(np.int64), rows))
    fleet = values[among] if sampled else values
    explained = explain(
        members,
        X,
        columns,
        top=top,
        attributed=attributed,
        fleets=[fleet] * len(rows),
        noun=f"{noun} sampled" if sampled else noun,
    )
    keys = {key: at for at, key in enumerate(dict.fromkeys(map(told_as, columns)))}
    of = np.array([keys[told_as(column)] for column in columns])
    group = {column.name: column.group for column in columns}
    found = []
    for row, each in enumerate(explained):
        raised = float(np.bincount(of, weights=attributed[0][row]).clip(min=0).sum())
        found.append(
            tuple(
                RiskReason(reason.text, group[reason.column], round(reason.contribution / raised, 4))
                for reason in each.reasons
            )
        )
    return found
