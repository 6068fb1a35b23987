"""What a model's scores are made of: the average size of each feature's contributions, fold by fold.

A share of attributions says what moved the scores. It does not say what precision would be lost without the feature:
another one may tell the same.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd

from models.explanation.members import explained_by
from models.rows.ranking import Ints
from models.rows.training_set import Matrix
from models.training.fitted import FittedModels

SAMPLED_ROWS: Final = 256
"""Rows of a fold that contributions are taken of: the alerts given, and others spread evenly over the fold."""

COLUMNS: Final = ("fold", "model", "feature", "group", "channel", "share", "rows")


def attribute(fitted: FittedModels, matrix: Matrix, model: str, alerted: Ints, tested: Ints) -> dict[str, Any]:
    """Take the mean absolute contribution of each feature over a sample of a fold's rows.

    ``model``: one of ``fitted.models``.
    Returns: ``shares`` (list of float, one a feature, adding up to 1; empty if nothing moved a score) and ``rows``;
    JSON-able.
    """
    room = max(0, SAMPLED_ROWS - alerted.size)
    spread = tested[np.linspace(0, tested.size - 1, min(room, tested.size)).astype(np.int64)] if tested.size else tested
    rows = np.unique(np.concatenate([alerted, spread]))
    if rows.size == 0:
        return {"shares": [], "rows": 0}
    sizes = np.abs(explained_by(fitted, model, matrix.values(rows))[0]).mean(axis=0)
    total = float(sizes.sum())
    return {"shares": [float(size / total) for size in sizes] if total > 0 else [], "rows": int(rows.size)}


def attribution_frame(matrix: Matrix, model: str, folds: list[dict[str, Any]]) -> pd.DataFrame:
    """Lay the attributions of all folds out as a table.

    ``folds``: what :func:`attribute` returned for each fold, in their order.
    Returns: ``fold`` (int32), ``model``, ``feature``, ``group``, ``channel`` (null where the feature has none),
    ``share`` (float64; those of a fold add up to 1), ``rows`` (int32; rows explained). Folds without attributions are
    absent.
    """
    parts = []
    for number, fold in enumerate(folds):
        if fold["shares"]:
            part = pd.DataFrame(
                {
                    "fold": np.int32(number),
                    "model": model,
                    "feature": [column.name for column in matrix.columns],
                    "group": [column.group for column in matrix.columns],
                    "channel": [column.channel for column in matrix.columns],
                    "share": fold["shares"],
                    "rows": np.int32(fold["rows"]),
                }
            )
            parts.append(part.astype({"channel": "str"}))
    if not parts:
        empty = {name: pd.Series(dtype="str") for name in COLUMNS}
        return pd.DataFrame(empty).astype({"fold": np.int32, "share": np.float64, "rows": np.int32})
    return pd.concat(parts, ignore_index=True)


def by_group(attributions: pd.DataFrame) -> pd.DataFrame:
    """Bring attributions down to ``group``, ``share`` (mean over the folds) and ``channels``, the weightiest first.

    ``channels`` names up to three channels (or what a history counts) that weigh most in the group, with their shares.
    """
    folds = attributions["fold"].nunique()
    if folds == 0:
        return pd.DataFrame({"group": [], "share": [], "channels": []})
    shares = attributions.groupby("group")["share"].sum() / folds
    inner = attributions.groupby(["group", "channel"])["share"].sum() / folds
    rows = []
    for group, share in shares.sort_values(ascending=False, kind="stable").items():
        own = inner[group].sort_values(ascending=False, kind="stable").head(3) if group in inner else {}
        rows.append({"group": group, "share": share, "channels": dict(own)})
    return pd.DataFrame(rows)
