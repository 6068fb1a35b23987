"""Compares two backtests at equal alerts, on their common decisions, with intervals of the difference."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from evaluation.metrics.aggregation import split_predictions
from evaluation.metrics.comparison import PAIRED, SLIDING, pair
from evaluation.metrics.estimates import estimate_model
from evaluation.metrics.metrics import resample
from foundation.errors import InputError
from foundation.times import milliseconds
from models.rows.ranking import top_nodes
from models.rows.training_set import node_codes
from pipeline.artefacts import load_evaluation

_STATISTICS = ("episode_precision", *(name for name in PAIRED if name != "precision"))
_KEY = ["decision_time", "unit"]
_SEED = 42


def compare_backtests(one: Path, two: Path) -> dict[str, Any]:
    """Compare the profiles of two backtests of the same fleet and labels.

    Both alert on the same number of nodes per decision, the smaller K. Differences are the second minus the first.

    Returns: JSON-able; ``statistics``: both values, their difference and its interval; ``params``: those that differ.
    Raises ``InputError`` if a folder is not a backtest, or the two have no common decisions or different labels.
    """
    loaded = [load_evaluation(folder) for folder in (one, two)]
    profiles = [context.profile for _, context in loaded]
    k = min(evaluation.k for evaluation, _ in loaded)
    frames = [_predictions(folder, profile) for folder, profile in zip((one, two), profiles, strict=True)]
    common = frames[0].merge(frames[1][[*_KEY, "label"]], on=_KEY, suffixes=("", "_other"))
    location = f"{one} and {two}"
    if common.empty:
        raise InputError("the backtests have no decision in common", location, _DO)
    differing = int((common["label"].fillna(-1) != common["label_other"].fillna(-1)).sum())
    if differing:
        problem = (
            f"{differing} of {len(common)} rows have different labels: the gap, the horizon or the failures differ"
        )
        raise InputError(problem, location, _DO)
    parts = [
        frame.merge(common[_KEY], on=_KEY).assign(model=name, variant=SLIDING)
        for name, frame in zip(("one", "two"), frames, strict=True)
    ]
    combined = pd.concat(parts, ignore_index=True)
    order = combined.groupby(["model", "decision_time"], observed=True)["rank"]
    combined["rank"] = order.rank(method="first").astype("int32")
    combined["alert"] = False
    for rows in combined.groupby("model").indices.values():
        time, node = milliseconds(combined["decision_time"].iloc[rows]), node_codes(combined.iloc[rows])
        alert = top_nodes(time, combined["rank"].to_numpy(dtype=np.int64)[rows], node, k)
        combined.loc[rows[alert], "alert"] = True
    evaluation = loaded[0][0]
    reach = pd.Timedelta(hours=evaluation.drain_hours).to_pytimedelta()
    scored = split_predictions(combined, k, reach)
    weights = resample(scored[0].shared.n_clusters, evaluation.replicates, _SEED)
    first, second = (estimate_model(part, weights) for part in scored)
    rows = {name: pair("", second, first, name) for name in _STATISTICS}
    params = [context.params for _, context in loaded]
    return {
        "profiles": profiles,
        "k": k,
        "decisions": int(combined["decision_time"].nunique()),
        "rows": len(common),
        "incidents": len(first.incidents),
        "statistics": {
            name: {"one": row[7], "two": row[6], "difference": row[8], "low": row[9], "high": row[10]}
            for name, row in rows.items()
        },
        "params": {
            name: [values.get(name) for values in params]
            for name in sorted({*params[0], *params[1]})
            if params[0].get(name) != params[1].get(name)
        },
    }


_DO = "Compare backtests of one dataset with the same `labels` and `decision`."


def _predictions(folder: Path, profile: str) -> pd.DataFrame:
    chosen = [("model", "==", profile), ("variant", "==", SLIDING)]
    frame = pd.read_parquet(folder / "predictions_all.parquet", filters=chosen)
    return frame.astype({"unit": "str", "node": "str", "gpu": "str"})
