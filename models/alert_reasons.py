"""Why the profile alerted, asked fold by fold: only the models that gave an alert can say, and they are not kept."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa

from models.explanation import explain, members_of
from models.fitted import FittedModels
from models.ranking import Ints
from models.training_set import Matrix

_USUAL_ROWS = 4096
"""Rows whose median is what is usual: enough for a median, and quick."""


@dataclass(frozen=True, slots=True)
class AlertReasons:
    """Why one unit was alerted at one decision time.

    Attributes
    ----------
    decision_time : datetime
        UTC.
    unit : str
        The GPU, or the node where there are no GPUs.
    reasons : tuple of str
        In plain words with the numbers, the weightiest first.
    method : str
        How they were computed.
    """

    decision_time: datetime
    unit: str
    reasons: tuple[str, ...]
    method: str


def riskiest_alerts(scored: pa.Table, *, model: int, variant: int, count: int) -> Ints:
    """Choose the alerts of a fold to explain: the riskiest.

    Parameters
    ----------
    scored : Table
        ``row``, ``variant``, ``model``, ``score``, ``risk``, ``alert`` of a fold.
    model, variant : int
        Whose alerts, by their numbers in the table.
    count : int
        How many at most.

    Returns
    -------
    ndarray of int64
        Rows of the matrix, the riskiest first.
    """
    columns = {name: scored.column(name).to_numpy() for name in ("row", "variant", "model", "score", "risk", "alert")}
    mine = np.flatnonzero((columns["model"] == model) & (columns["variant"] == variant) & columns["alert"])
    order = np.lexsort((columns["row"][mine], -columns["score"][mine], -columns["risk"][mine]))
    return columns["row"][mine[order[:count]]].astype(np.int64)


def explain_rows(fitted: FittedModels, matrix: Matrix, model: str, rows: Ints, *, among: Ints) -> list[dict[str, Any]]:
    """Explain alerted rows by the models that alerted them, beside what is usual among the rows scored with them.

    Returns
    -------
    list of dict
        ``row``, ``reasons`` and ``method``, JSON-able, one for each of ``rows``.
    """
    if rows.size == 0:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a feature that no row has: its median is NaN, as it should be
        usual = np.nanmedian(matrix.values(among[:: max(1, among.size // _USUAL_ROWS)]), axis=0)
    explained = explain(members_of(fitted, model), matrix.values(rows), matrix.columns, usual=usual)
    return [
        {"row": int(row), "reasons": [reason.text for reason in each.reasons], "method": each.method}
        for row, each in zip(rows, explained, strict=True)
    ]


def alert_reasons(matrix: Matrix, told: list[dict[str, Any]]) -> tuple[AlertReasons, ...]:
    """Name the rows that :func:`explain_rows` told of."""
    rows = matrix.rows
    return tuple(
        AlertReasons(
            decision_time=rows["decision_time"].iloc[each["row"]].to_pydatetime(),
            unit=str(rows["unit"].iloc[each["row"]]),
            reasons=tuple(each["reasons"]),
            method=each["method"],
        )
        for each in told
    )
