"""How well the risks of several horizons are calibrated out of time."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pandas as pd

from models.as_of_rows import row_positions
from models.horizon_map import HorizonMap, add_risks, horizon_column
from models.training_set import Labels, Matrix


def horizon_table(predictions: pd.DataFrame, matrix: Matrix, maps: tuple[HorizonMap, ...]) -> pd.DataFrame:
    """Compare mean risk and outcome at each horizon.

    ``predictions``: one model and variant of a backtest: ``decision_time``, ``unit``, ``risk``, ``fold``.
    ``matrix``: gives the labels at each horizon.
    ``maps``: one for each fold.
    Returns: ``hours``, ``rows`` (with a label at this horizon), ``positives``, ``mean_risk``, ``rate``, ``ratio`` (mean
    risk over rate; NaN without positives), ``brier_skill`` (against the constant rate of the same rows).
    """
    at = row_positions(matrix, predictions)
    columns = add_risks(predictions["risk"].to_numpy(dtype=np.float64), predictions["fold"].to_numpy(), maps)
    records = []
    for hours in maps[0].hours:
        label = Labels.of(matrix.labels(None, horizon=timedelta(hours=hours))).label[at]
        known = label >= 0
        y = (label[known] == 1).astype(np.float64)
        risk = columns[horizon_column(hours)][known].astype(np.float64)
        rate = float(y.mean()) if len(y) else np.nan
        spread = rate * (1 - rate)
        records.append(
            {
                "hours": hours,
                "rows": int(known.sum()),
                "positives": int(y.sum()),
                "mean_risk": float(risk.mean()) if len(y) else np.nan,
                "rate": rate,
                "ratio": float(risk.mean() / rate) if rate > 0 else np.nan,
                "brier_skill": 1 - float(((risk - y) ** 2).mean()) / spread if spread > 0 else np.nan,
            }
        )
    return pd.DataFrame.from_records(records)
