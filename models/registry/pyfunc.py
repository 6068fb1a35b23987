"""Script that MLflow logs as a model: loads the bundle next to it and predicts the profile's risks.

MLflow runs this file when a model is loaded or served; no other module imports it.
"""

from pathlib import Path
from typing import Any

import mlflow
import mlflow.exceptions
import numpy as np
import pandas as pd

from models.bundle.store import load_bundle


class BundleModel(mlflow.pyfunc.PythonModel):
    """Predicts risks of the bundle's profile for rows of features."""

    def load_context(self, context: Any) -> None:
        """Verify and load the bundle among the model's artifacts."""
        self.bundle = load_bundle(Path(context.artifacts["bundle"]))

    def predict(self, context: Any, model_input: pd.DataFrame, params: Any = None) -> pd.DataFrame:
        """Score rows.

        ``context``, ``params``: required by MLflow; not used.
        ``model_input``: ``unit``, the bundle's features by name (NaN: unknown), and, if rows are of several times,
        ``decision_time`` (ISO 8601 text, for example 2026-01-31T06:00:00Z; without a zone: UTC). Ranks and alerts are
        computed among the rows of one time: pass all units of the fleet together.
        Returns: ``unit``, ``risk``, ``score``, ``rank`` and ``alert`` of the bundle's profile, in row order.
        Raises ``MlflowException`` if a unit is missing, a feature is infinite (or too large for 32 bits), or a time is
        invalid or missing in some rows only. A server returns it with status 400.
        """
        columns = [column.name for column in self.bundle.fitted.columns]
        rows = model_input.reset_index(drop=True)
        units = _units(rows["unit"])
        values = _values(rows[columns])
        scored = self.bundle.fitted.score(values, _times(rows), units)
        of_profile = scored[scored["model"] == self.bundle.profile].reset_index(drop=True)
        return pd.DataFrame(
            {
                "unit": of_profile["unit"],
                "risk": of_profile["risk"].astype(float),
                "score": of_profile["score"].astype(float),
                "rank": of_profile["rank"].astype(np.int64),
                "alert": of_profile["alert"],
            }
        )


def _units(named: pd.Series) -> pd.Series:
    missing = np.flatnonzero(named.isna())
    if len(missing):
        raise _refused(f"row {missing[0]} has no unit", "Give the GPU (or node) of each row.")
    return named.astype(str)


def _values(features: pd.DataFrame) -> np.ndarray:
    with np.errstate(over="ignore"):  # overflow becomes infinite and is rejected
        values = features.to_numpy(dtype=np.float32)
    infinite = np.argwhere(np.isinf(values))
    if len(infinite):
        row, column = infinite[0]
        raise _refused(
            f"{features.columns[column]} of row {row} is {features.iloc[row, column]}, which is infinite in 32 bits",
            "Give a finite number, or null where it is unknown.",
        )
    return values


def _times(rows: pd.DataFrame) -> pd.Series:
    if "decision_time" not in rows or rows["decision_time"].isna().all():
        # any common time, since ranks are computed among its rows
        return pd.Series(pd.to_datetime(np.zeros(len(rows), np.int64), utc=True))
    texts = rows["decision_time"]
    missing = np.flatnonzero(texts.isna())
    if len(missing):
        raise _refused(f"row {missing[0]} has no decision_time", "Give it for all rows, or for none.")
    text = texts.astype(str)
    times = pd.to_datetime(text, utc=True, format="ISO8601", errors="coerce")
    unread = np.flatnonzero(times.isna())
    if len(unread):
        raise _refused(
            f"decision_time of row {unread[0]} is '{text[unread[0]]}', which is not a time",
            "Give it as 2026-01-31T06:00:00Z.",
        )
    return pd.Series(times)


def _refused(problem: str, advice: str) -> mlflow.exceptions.MlflowException:
    return mlflow.exceptions.MlflowException.invalid_parameter_value(f"{problem}. {advice}")


mlflow.models.set_model(BundleModel())
