"""A small matrix in memory with the interface of features.matrix.matrix.FeatureMatrix."""

import hashlib
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import numpy as np
import pandas as pd

from features.vocabulary import FeatureColumn

START = datetime(2026, 1, 1, tzinfo=UTC)
GAP = timedelta(minutes=10)
HORIZON = timedelta(hours=24)
DELAY = timedelta(minutes=10)


def _utc_ms(values) -> pd.DatetimeIndex:
    return pd.DatetimeIndex(values).tz_convert("UTC").as_unit("ms") if len(values) else pd.DatetimeIndex([], tz="UTC")


def _ms(times) -> np.ndarray:
    return times.dt.as_unit("ms").astype(np.int64).to_numpy()


def label_rows(rows, incidents, horizon=HORIZON, end=None):
    """Label rows by the first incident of their unit between gap and horizon, by the rules of features.labels.

    ``end``: what is not complete by then and has no incident yet is unknown.
    """
    complete = (rows["decision_time"] + GAP + horizon).dt.as_unit("ms")
    first, ends = np.full(len(rows), -1), _ms(complete)
    begins = ends - horizon // timedelta(milliseconds=1)
    of_unit = rows.groupby("unit").indices
    starts, units = _ms(incidents["start"]), incidents["unit"].to_numpy()
    for i in reversed(range(len(starts))):
        starts_of_unit = of_unit.get(units[i], first[:0])
        first[starts_of_unit[(begins[starts_of_unit] < starts[i]) & (starts[i] <= ends[starts_of_unit])]] = i
    events = incidents.reset_index(drop=True).reindex(first).set_axis(rows.index)
    label = pd.array(first >= 0, dtype="boolean").astype("Int8")
    if end is not None:
        label[(complete > end).to_numpy() & (first < 0)] = pd.NA
    names = ("incident", "node_incident", "common_cause")
    return pd.DataFrame(
        {
            "label": label,
            **{name: events[name].astype("Int64") for name in names},
            "incident_start": events["start"].dt.as_unit("ms"),
            "failure_class": events["failure_class"].astype(object).where(first >= 0, None),
            "complete_at": complete,
        },
        index=rows.index,
    )


class FakeMatrix:
    """Rows on a grid plus augmented windows; labels follow from ``incidents`` by the rules of features.labels.

    Half of the incidents announce themselves in the first two features. Tests may change ``events`` or ``features``
    afterwards, to poison them.
    """

    def __init__(
        self,
        *,
        units=40,
        days=40,
        every=timedelta(hours=6),
        incidents=30,
        augmentation=4,
        companions=8,
        seed=0,
        unit="gpu",
        strength=3.0,
        clock_only=False,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.unit, self.step = unit, timedelta(minutes=10)
        self.span = (START, START + timedelta(days=days))
        self.digest = hashlib.sha256(
            repr((units, days, incidents, augmentation, companions, seed)).encode()
        ).hexdigest()
        self.config = SimpleNamespace(gap=GAP, horizon=HORIZON, every=every)
        names = [f"{unit}-{i:03d}" for i in range(units)]
        grid = _utc_ms(pd.date_range(START, self.span[1], freq=every, inclusive="left"))
        start = START + np.sort(rng.integers(1, days * 144 - 1, incidents)) * self.step
        self.events = pd.DataFrame(
            {
                "incident": np.arange(incidents),
                "unit": rng.choice(names, incidents),
                "start": _utc_ms(start),
                "failure_class": rng.choice(["memory", "bus"], incidents),
            }
        )
        self.events["known_at"] = self.events["start"] + DELAY
        self.events["node"] = "n" + self.events["unit"].str[-3:].str[:2] if unit == "gpu" else self.events["unit"]
        self.events["node_incident"] = self.events["common_cause"] = self.events["incident"]
        rows = [pd.MultiIndex.from_product([grid, names], names=["decision_time", "unit"]).to_frame(index=False)]
        rows[0]["augmented"], rows[0]["established_at"] = False, pd.NaT
        for _, incident in self.events.iterrows():
            for offset in rng.integers(1, 144, augmentation):
                time = incident["start"] - GAP - offset * self.step
                if time <= grid[0] or time in grid:
                    continue
                other_units = [name for name in names if name != incident["unit"]]
                chosen = [incident["unit"], *rng.choice(other_units, min(companions, len(other_units)), replace=False)]
                frame = pd.DataFrame({"decision_time": time, "unit": chosen, "augmented": True})
                frame["established_at"] = incident["known_at"]
                rows.append(frame)
        for frame in rows:
            frame["decision_time"] = _utc_ms(frame["decision_time"])
            frame["established_at"] = pd.to_datetime(frame["established_at"], utc=True).dt.as_unit("ms")
        frame = pd.concat(rows, ignore_index=True).drop_duplicates(["decision_time", "unit", "augmented"])
        frame = frame.sort_values(["decision_time", "unit", "augmented"], ignore_index=True)
        frame["gpu"] = frame["unit"] if unit == "gpu" else None
        frame["node"] = "n" + frame["unit"].str[-3:].str[:2] if unit == "gpu" else frame["unit"]
        self.rows = frame[["decision_time", "node", "gpu", "unit", "augmented", "established_at"]]
        self.features = self._clock() if clock_only else self._signal(rng, strength)
        self.columns = [
            FeatureColumn.of("telemetry", f"f{i}", "mean", window=timedelta(hours=1))
            for i in range(self.features.shape[1])
        ]

    def _signal(self, rng, strength):
        labels, n = label_rows(self.rows, self.events), len(self.rows)
        # Half of the incidents announce themselves.
        incident = labels["incident"].fillna(1).to_numpy(dtype=int)
        is_visible = labels["label"].to_numpy(dtype=float) * (incident % 2 == 0)
        X = rng.normal(size=(n, 6))
        X[:, 0] += strength * is_visible
        X[:, 1] += 0.5 * strength * is_visible
        X[rng.random(X.shape) < 0.02] = np.nan
        return X.astype(np.float32)

    def _clock(self):
        time = self.rows["decision_time"]
        return (time.dt.hour + time.dt.minute / 60).to_numpy(dtype=np.float32)[:, None]

    def values(self, row_indices=None):
        return self.features if row_indices is None else self.features[np.asarray(row_indices)]

    def incidents(self, as_of=None):
        return self.events if as_of is None else self.events[self.events["known_at"] <= as_of]

    def labels(self, as_of=None, *, horizon=HORIZON, rows=None):
        end = self.span[1] if as_of is None else min(self.span[1], pd.Timestamp(as_of))
        frame = label_rows(self.rows, self.incidents(as_of), horizon or HORIZON, end)
        return frame if rows is None else frame.iloc[rows]
