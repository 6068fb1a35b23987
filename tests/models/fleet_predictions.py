"""Hand-made predictions of a small fleet, for the tests of evaluation and report."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd

T0 = datetime(2026, 1, 30, tzinfo=UTC)
EVERY = timedelta(hours=6)
HORIZON = timedelta(hours=24)
GAP = timedelta(minutes=10)
CLASSES = ("memory", "bus", "other")

MODELS = (
    ("mean_rank", "sliding", 0.4), ("mean_rank", "train_once", 1.2), ("parallel", "sliding", 0.6),
    ("xgboost", "sliding", 0.7), ("xgboost", "train_once", 2.0), ("logistic", "sliding", 1.5),
    ("logistic", "train_once", 2.5), ("vendor_rules", "sliding", 4.0),
)  # fmt: skip
"""Models, variants and their noise: an ensemble and learners, slid and trained once, better and worse."""


def fleet(seed, models=(("xgboost", "sliding", 0.5),), units=12, times=20, incidents=6, k=2, per_fold=8, per_node=1):
    """Predictions whose score knows the label, more or less: (model, variant, noise)."""
    rng = np.random.default_rng(seed)
    starts = {}
    for i in range(incidents):
        start = T0 + timedelta(hours=float(rng.uniform(2, times * 6)))
        starts.setdefault(int(rng.integers(units)), (i, start, CLASSES[i % 3]))
    end = T0 + times * EVERY
    rows = []
    for model, variant, noise in models:
        for i in range(times):
            t = T0 + i * EVERY
            score = {}
            for unit in range(units):
                failure = starts.get(unit)
                hit = failure is not None and t + GAP < failure[1] <= t + GAP + HORIZON
                label = 1 if hit else (pd.NA if t + GAP + HORIZON > end else 0)
                score[unit] = (2.0 * hit + noise * rng.standard_normal(), label, failure if hit else None)
            order = sorted(score, key=lambda unit: (-score[unit][0], unit))
            for rank, unit in enumerate(order, 1):
                value, label, failure = score[unit]
                alert = rank <= k and not (model == "parallel" and (i + unit) % 2)
                rows.append(
                    (t, f"n{unit // per_node:02d}", f"g{unit:02d}", f"g{unit:02d}", model, variant, value,
                     1 / (1 + np.exp(2 - value)), rank, alert, label, failure[2] if failure else None,
                     failure[0] if failure else pd.NA, failure[1] if failure else pd.NaT, i // per_fold)
                )  # fmt: skip
    frame = pd.DataFrame(
        rows,
        columns=["decision_time", "node", "gpu", "unit", "model", "variant", "score", "risk", "rank", "alert", "label",
                 "failure_class", "incident", "incident_start", "fold"],
    )  # fmt: skip
    frame["node_incident"], frame["common_cause"] = frame["incident"], frame["incident"]
    return frame.astype(
        {"decision_time": "datetime64[ms, UTC]", "incident_start": "datetime64[ms, UTC]", "label": "Int8",
         "incident": "Int64", "node_incident": "Int64", "common_cause": "Int64", "failure_class": "str"}
    )  # fmt: skip


def truth_of(frame):
    rows = frame.drop_duplicates(["decision_time", "unit"])
    risk = np.where(rows["label"].fillna(0) == 1, 0.6, 0.01)
    return pd.DataFrame({"timestamp": rows["decision_time"], "gpu": rows["gpu"], "risk": risk})
