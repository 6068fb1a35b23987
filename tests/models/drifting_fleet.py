"""A small fleet in memory whose rows can be made to drift, for the tests of evaluation/drift."""

from datetime import timedelta
from functools import partial

import numpy as np
import pandas as pd

from evaluation.drift.check import examine
from features.vocabulary import FeatureColumn
from foundation.instants import from_ms
from models.rows.training_set import TrainingRows
from models.training.reference import LabelledRows, make_reference
from tests.models.fake_matrix import DELAY, HORIZON, START, label_rows

DAY_MS = 86_400_000
START_MS = int(START.timestamp() * 1000)
HOURS = [timedelta(hours=hours) for hours in (1, 6, 24)]

COLUMNS = (
    *(FeatureColumn.of("telemetry", "gpu_temp_c", "mean", window=window, unit="C") for window in HOURS),
    *(FeatureColumn.of("telemetry", "gpu_util_pct", "mean", window=window, unit="%") for window in HOURS),
    *(FeatureColumn.of("telemetry", "pcie_replay_total", "rise", window=window) for window in HOURS),
    *(FeatureColumn.of("workload", "gpu_util_pct", "busy_share", window=window) for window in HOURS[1:]),
    *(FeatureColumn.of("gaps", "samples", "missing", window=window) for window in HOURS),
    FeatureColumn.of("static", "model", "code", categories=("A", "B", "C")),
    FeatureColumn.of("static", "driver", "code", categories=("550", "560")),
    FeatureColumn.of("static", "age", "days", unit="d"),
)
NAMES = [column.name for column in COLUMNS]


class DriftingFleet:
    """Rows every 12 hours; units keep their ways, jobs come and go, and failures are few.

    ``rows`` is filled at once; tests change ``X`` (float32, a row for each of ``rows``) and ``incidents`` afterwards.
    The driver rolls over the nodes from day 36 to 41, without effect on anything.
    """

    def __init__(self, *, nodes=24, per_node=4, days=56, rate=0.004, seed=0) -> None:
        rng = np.random.default_rng(seed)
        self.rng, self.units, self.days = rng, nodes * per_node, days
        n, times = self.units, days * 2
        self.hour, self.unit = np.divmod(np.arange(times * n), n)
        self.node, self.day = self.unit // per_node, self.hour / 2
        self.names = np.array([f"g{unit:03d}" for unit in range(n)])
        time = pd.DatetimeIndex(START + self.hour * timedelta(hours=12)).as_unit("ms")
        self.rows = pd.DataFrame(
            {
                "decision_time": time,
                "node": [f"n{node:02d}" for node in self.node],
                "gpu": self.names[self.unit],
                "unit": self.names[self.unit],
                "augmented": False,
                "established_at": time,
            }
        )
        of_unit = rng.normal(size=n)[self.unit]
        # A job holds a node for three days or so, and its units are as busy as each other.
        job = rng.uniform(10, 90, (nodes, days // 3 + 1))[self.node, (self.day // 3).astype(int)]
        self.util = np.clip(job + rng.normal(0, 8, len(job)), 0, 100)
        self.upgraded = self.day >= (36 + 5 * rng.random(nodes))[self.node]
        self.X = np.empty((len(self.hour), len(COLUMNS)), dtype=np.float32)
        noise = partial(rng.normal, 0, size=len(job))
        for i, column in enumerate(COLUMNS):
            self.X[:, i] = {
                "gpu_temp_c": lambda: 40 + 3 * of_unit + 0.2 * self.util + noise(2),
                "gpu_util_pct": lambda c=column: (
                    self.util + noise(3) if c.group == "telemetry" else np.clip(self.util / 100 + noise(0.05), 0, 1)
                ),
                "pcie_replay_total": lambda: rng.poisson(np.exp(of_unit)),
                "samples": lambda: rng.binomial(30, 0.02, len(job)) / 30,
                "model": lambda: (self.unit % 2).astype(float),
                "driver": lambda: self.upgraded.astype(float),
                "age": lambda: self.day + 100 + 10 * (self.unit % 7),
            }[str(column.channel)]()
        self.incidents = self.draw(rate)

    def draw(self, rate, start=0.0, end=None, kind="memory"):
        end = self.days if end is None else end
        count = self.rng.poisson(rate * self.units * (end - start))
        days = np.sort(self.rng.uniform(start, end, count))
        return [(int(self.rng.integers(self.units)), int(START_MS + day * DAY_MS), kind) for day in days]

    def leave_out(self, rows):
        """Take rows away, as before a unit was installed or after it was taken out."""
        self.rows = self.rows[~rows].reset_index(drop=True)
        for name in ("hour", "unit", "node", "day", "util", "upgraded", "X"):
            setattr(self, name, getattr(self, name)[~rows])

    def column(self, part):
        return [i for i, name in enumerate(NAMES) if part in name]

    def labels(self, as_of=None, *, horizon=HORIZON, rows=None):
        events = pd.DataFrame(self.incidents, columns=["unit", "start", "failure_class"])
        events["incident"] = events["node_incident"] = events["common_cause"] = events.index
        events["unit"] = self.names[events["unit"].to_numpy(dtype=int)]
        events["start"] = pd.to_datetime(events["start"].astype(np.int64), unit="ms", utc=True)
        if as_of is not None:
            events = events[events["start"] + DELAY <= as_of]
        frame = label_rows(self.rows, events, horizon or HORIZON, as_of)
        return frame if rows is None else frame.iloc[rows]

    def values(self, row_indices=None):
        return self.X if row_indices is None else self.X[row_indices]

    def at(self, day):
        return START_MS + day * DAY_MS

    def check(self, day, fitted=35, span=28):
        """What a check at the end of ``day`` says of models fitted at ``fitted``."""
        rows = TrainingRows.of(self.rows)
        fit, now = self.at(fitted), self.at(day)
        reference = make_reference(
            LabelledRows.join(rows, self.labels(from_ms(fit))),
            self.values,
            COLUMNS,
            start_ms=fit - (span + 1) * DAY_MS,
            end_ms=fit - DAY_MS - 600_000,
            as_of_ms=fit,
            seed=1,
        )
        labelled = LabelledRows.join(rows, self.labels(from_ms(now)))
        return examine(
            reference,
            labelled,
            self.values,
            self.rows["node"],
            start_ms=max(fit, now - 14 * DAY_MS),
            end_ms=now,
            seed=1,
        )
