"""Oracle: scores of the simulator's true risk, an upper bound for models. Only the evaluation may read the truth."""

from datetime import timedelta
from pathlib import Path

import numpy as np
import pandas as pd

from foundation.errors import InputError
from foundation.times import duration_ms, milliseconds, name_codes
from models.rows.ranking import position_in_group, top_nodes
from models.rows.training_set import node_codes

ORACLE = "oracle"
"""Name of the pseudo-model, and of its variant."""

TRUE_RISKS = "risk.parquet"
"""File of the true risks in a truth folder."""

MAX_VALIDITY = timedelta(days=1)
"""Maximum validity of a true risk; it otherwise ends at the next one."""


def read_truth(folder: Path) -> pd.DataFrame:
    """Read the simulator's true risks: ``timestamp`` (UTC), ``gpu``, ``risk``, and possibly other columns.

    Raises ``InputError`` if the folder has none.
    """
    try:
        return pd.read_parquet(folder / TRUE_RISKS)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f"no {TRUE_RISKS} in {folder}",
            "truth",
            "Give the folder that `predrain simulate` wrote, or leave --truth out.",
        ) from None


def oracle_predictions(predictions: pd.DataFrame, truth: pd.DataFrame, k: int) -> pd.DataFrame:
    """Return the oracle's predictions for the same decisions, with the same alert budget.

    ``predictions``: predictions of all models; the oracle scores each of their (decision_time, unit) pairs once.
    ``truth``: from :func:`read_truth`. A decision uses the unit's latest true risk at or before it, unless the next one
    is overdue, which means that the unit was down.
    Returns: rows like those of ``predictions``, with model and variant ``"oracle"``. Rows without a true risk have
    risk NaN, rank last and are not alerted; ties rank by unit name.
    Raises ``InputError`` if the truth covers no decision.
    """
    truth_ms = milliseconds(truth["timestamp"])
    unit, names = name_codes(predictions["unit"])
    key = milliseconds(predictions["decision_time"]) * len(names) + unit
    first = np.flatnonzero(~pd.Series(key).duplicated().to_numpy())
    first = first[np.argsort(key[first], kind="stable")]
    rows = predictions.iloc[first].reset_index(drop=True)
    time = key[first] // len(names)
    known = pd.DataFrame(
        {
            "time": truth_ms,
            "unit": names.get_indexer(pd.Index(truth["gpu"].astype("str"))),
            "truth": truth["risk"].astype("float64"),
        }
    ).sort_values("time", kind="stable")
    decisions = pd.DataFrame({"time": time, "unit": unit[first]})
    spacing = int(np.diff(np.unique(truth_ms)).min(initial=duration_ms(MAX_VALIDITY)))
    risks = pd.merge_asof(decisions, known, on="time", by="unit", tolerance=spacing - 1)
    risk = risks["truth"].to_numpy()
    if not np.isfinite(risk).any():
        raise InputError(
            "the truth has no risk for any decision", "truth", "Give the truth folder that belongs to this dataset."
        )
    order = np.lexsort((-np.nan_to_num(risk, nan=-1.0), time))
    rank = np.empty(len(rows), np.int64)
    rank[order] = position_in_group(time[order]) + 1
    alert = top_nodes(time, rank, node_codes(rows), k) & np.isfinite(risk)
    return rows.assign(model=ORACLE, variant=ORACLE, score=risk, risk=risk, rank=rank, alert=alert)
