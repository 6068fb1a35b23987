"""A fleet with a grid of labels as known at a time, a model that is often right about it, and one that never is."""

from datetime import timedelta

import numpy as np
import pandas as pd
from scipy.special import expit

from models.config import PrecisionTargetsSection
from tests.models.fake_matrix import HORIZON, START, label_rows

EVERY = timedelta(hours=6)
FOLD = timedelta(days=7)
UNITS, TIMES = 300, 4 * 28
SECTION = PrecisionTargetsSection(values=(0.5, 0.85), horizon=None)


class FleetMatrix:
    """Labels of a grid as known at a time: an incident is known ``late`` after its start."""

    def __init__(self, late=timedelta(0), incidents=260, seed=0):
        rng = np.random.default_rng(seed)
        self.span = (START, START + TIMES * EVERY)
        self.late = late
        times = [START + i * EVERY for i in range(TIMES)]
        names = [f"g{i:03d}" for i in range(UNITS)]
        grid = pd.MultiIndex.from_product([times, names], names=["decision_time", "unit"]).to_frame(index=False)
        grid["decision_time"] = grid["decision_time"].dt.as_unit("ms")
        self.rows = grid.assign(augmented=False, node="n" + grid["unit"], gpu=grid["unit"])
        self.starts = np.sort(rng.uniform(0, TIMES * 6.0, incidents))
        self.of = rng.integers(0, UNITS, incidents)

    def incidents(self, as_of=None):
        frame = pd.DataFrame({"unit": [f"g{unit:03d}" for unit in self.of], "failure_class": "memory"})
        frame["node"], frame["start"] = "n" + frame["unit"], START + pd.to_timedelta(self.starts, unit="h")
        frame["incident"] = frame["node_incident"] = frame["common_cause"] = frame.index
        return frame if as_of is None else frame[frame["start"] + self.late <= as_of]

    def labels(self, as_of=None, *, horizon=HORIZON, rows=None):
        frame = label_rows(self.rows, self.incidents(as_of), horizon or HORIZON, as_of or self.span[1])
        return frame if rows is None else frame.iloc[rows]


def predictions(matrix, sharp=6.0, seed=1):
    """A model whose risk is high for most rows before an incident; and one that knows nothing."""
    rng = np.random.default_rng(seed)
    labels, final = matrix.labels(), label_rows(matrix.rows, matrix.incidents())
    is_visible = ((final["label"] == 1) & (final["incident"].fillna(0) % 4 != 0)).to_numpy(dtype=bool)
    frames = []
    for model, strength in (("good", sharp), ("blind", 0.0)):
        score = -7 + strength * is_visible + rng.normal(size=len(is_visible))
        frame = matrix.rows[["decision_time", "node", "gpu", "unit"]].copy()
        frame["model"], frame["variant"] = model, "sliding"
        frame["risk"] = expit(score).astype(np.float32)
        frame["rank"] = frame.groupby("decision_time")["risk"].rank(ascending=False, method="first").astype(int)
        frame["label"], frame["incident"] = labels["label"], labels["incident"]
        frame["node_incident"] = frame["common_cause"] = labels["incident"]
        frame["incident_start"], frame["score"], frame["alert"] = pd.NaT, frame["risk"], False
        frame["failure_class"] = final["failure_class"]
        frame["fold"] = ((frame["decision_time"] - START) // FOLD).astype(np.int32)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def folds():
    return pd.DataFrame({"fold": range(4), "variant": "sliding"})
