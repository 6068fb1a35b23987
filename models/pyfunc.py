"""The script that MLflow logs as a model: it loads the bundle beside it and answers with the profile's risks.

MLflow runs this file where a model is loaded or served; nothing of ours imports it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd

from models.bundle import load_bundle


class BundleModel(mlflow.pyfunc.PythonModel):
    """Risks of the bundle's profile for rows of features."""

    def load_context(self, context: Any) -> None:
        """Verify and read the bundle among the model's artifacts."""
        self.bundle = load_bundle(Path(context.artifacts["bundle"]))

    def predict(self, context: Any, model_input: pd.DataFrame, params: Any = None) -> pd.DataFrame:  # noqa: ARG002 - MLflow's signature
        """Score rows.

        Parameters
        ----------
        context, params
            MLflow's own; not used.
        model_input : DataFrame
            ``unit``, the bundle's features by name, and, if rows are of several times, ``decision_time`` (UTC). Ranks
            and alerts are taken among the rows of one time: give all units of the fleet together.

        Returns
        -------
        DataFrame
            ``unit``, ``risk``, ``score``, ``rank`` and ``alert`` of the bundle's profile, in the order of the rows.
        """
        columns = [column.name for column in self.bundle.fitted.columns]
        rows = model_input.reset_index(drop=True)
        values = rows[columns].to_numpy(dtype=np.float32)
        if "decision_time" in rows and rows["decision_time"].notna().all():
            times = pd.to_datetime(rows["decision_time"], utc=True)
        else:  # ranks are taken among rows of one time, whichever it is
            times = pd.Series(pd.to_datetime(np.zeros(len(rows), np.int64), utc=True))
        scored = self.bundle.fitted.score(values, times, rows["unit"])
        mine = scored[scored["model"] == self.bundle.profile].reset_index(drop=True)
        return pd.DataFrame(
            {
                "unit": mine["unit"],
                "risk": mine["risk"].astype(float),
                "score": mine["score"].astype(float),
                "rank": mine["rank"].astype(np.int64),
                "alert": mine["alert"],
            }
        )


mlflow.models.set_model(BundleModel())
