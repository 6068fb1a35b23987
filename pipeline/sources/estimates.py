"""How long an assessment takes: measured where it can be, by the size of the work elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

from pipeline.params import Params
from pipeline.sources.history import Rate
from telemetry.collect.prometheus.backfill import BackfillPlan
from telemetry.collect.prometheus.outlook import Outlook
from telemetry.dataset.meta import DatasetMeta
from telemetry.importing.sampling import step_for

# Seconds on two cores, measured: 600 GPUs, 30 days, default parameters.
_START_S = 40.0
_COMPACTED_VALUES_PER_S = 1.2e6
_FEATURE_ROWS_PER_S = 500e3
_DECISIONS_PER_S = 8e3

# Bytes on the disk: staged values, rows of the dataset (20 channels), rows of the matrix.
_STAGED_VALUE_B, _ROW_B, _DECISION_B = 2, 15, 400


@dataclass(frozen=True, slots=True)
class Work:
    """The size of an assessment.

    ``values``: to fetch, 0 if there is a dataset. ``rows``: samples of the dataset, one a GPU and step.
    ``decisions``: rows of the matrix. ``values_per_second``: speed of fetching and staging.
    """

    what: str
    rows: int
    decisions: int
    values: int = 0
    values_per_second: float = 1.0

    @classmethod
    def of_history(cls, outlook: Outlook, plan: BackfillPlan, params: Params) -> Work:
        """Return the work behind a server's history, by a look at it."""
        span, gpus = plan.end - plan.start, len(outlook.gpus)
        step = params.telemetry.step or step_for(outlook.interval)
        what = f"{gpus:,} GPUs, at most {outlook.samples:,} values of {span.days:,} days"
        rows, decisions = int(gpus * (span / step)), int(gpus * (span / params.decision.every))
        return cls(what, rows, decisions, outlook.samples, outlook.samples_per_second)

    @classmethod
    def of_dataset(cls, meta: DatasetMeta, params: Params) -> Work:
        """Return the work behind a dataset."""
        name, rows = {"gpu": "GPUs", "node": "nodes"}[meta.unit], int(meta.counts["samples"])
        units, span = int(meta.counts[f"{meta.unit}s"]), meta.span[1] - meta.span[0]
        what = f"{units:,} {name}, {rows:,} samples of {span.days:,} days"
        return cls(what, rows, int(units * (span / params.decision.every)))

    def measured(self, rate: Rate) -> Work:
        """Return the same work, with the speed at which its first chunk was fetched and staged."""
        return replace(self, values_per_second=rate.samples / max(rate.seconds, 1e-3))

    @property
    def seconds(self) -> float:
        """Estimated time from now on."""
        fetching = self.values / self.values_per_second + self.values / _COMPACTED_VALUES_PER_S
        return fetching + _START_S + self.rows / _FEATURE_ROWS_PER_S + self.decisions / _DECISIONS_PER_S

    @property
    def time_text(self) -> str:
        """The estimated time in words."""
        minutes = timedelta(seconds=self.seconds) / timedelta(minutes=1)
        return f"about {minutes:.0f} minutes" if minutes >= 1.5 else "about a minute"

    def __str__(self) -> str:
        size_b = self.values * _STAGED_VALUE_B + self.rows * _ROW_B + self.decisions * _DECISION_B
        return f"{self.what}: {self.time_text} on two cores, and {size_b / 1e9:.1f} GB of disk"
