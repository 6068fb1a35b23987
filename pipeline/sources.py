"""Builds a dataset from the history of a Prometheus server or from files; estimates the duration of an assessment."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Final

import pandas as pd

from foundation.errors import InputError
from foundation.files import recover_folder, write_bytes
from foundation.http import Connection
from foundation.place import Place
from foundation.running import Progress
from pipeline.params import Params
from telemetry.collect.prometheus.backfill import BackfillPlan, backfill
from telemetry.collect.prometheus.preview import BackfillPreview
from telemetry.collect.series.mapping import SourceMapping
from telemetry.dataset.channels import resolve_channels
from telemetry.dataset.meta import DatasetMeta
from telemetry.dataset.store import Dataset
from telemetry.importing.importer import DEFAULT_MAX_LOSS, import_dataset
from telemetry.importing.ingest import ImportResult
from telemetry.importing.mapping import load_mapping
from telemetry.importing.sampling import STEPS, step_for, step_of
from telemetry.importing.suggestion.questions import Inquiry, Tables
from telemetry.importing.suggestion.trial import inquire
from telemetry.staging.compaction import CompactResult, CompactSettings, compact
from telemetry.staging.folder import StagingFolder, staging_of

_SETTLING: Final = timedelta(minutes=5)
_PERIOD: Final = "prometheus.json"


@dataclass(frozen=True, slots=True)
class Rate:
    """Measured speed of fetching and staging: ``samples`` of a ``span`` of history in ``seconds``."""

    samples: int
    seconds: float
    span: timedelta


def period_of(
    out: Path, connection: Connection, since: str, match: str | None, start_of: Callable[[datetime], datetime]
) -> BackfillPlan:
    """Return the period to fetch: that of an earlier run into ``out`` with the same arguments, else up to now.

    ``start_of``: returns the start of the period for its end.
    """
    expected = {"url": connection.url, "since": since, "match": match}
    path = out / _PERIOD
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    is_same = all(earlier.get(key) == value for key, value in expected.items())
    end = datetime.fromisoformat(earlier["end"]) if is_same else datetime.now(UTC) - _SETTLING
    return BackfillPlan(start=start_of(end), end=end, match=match)


def keep_period(out: Path, connection: Connection, since: str, plan: BackfillPlan) -> None:
    """Store a period, so that the next run into ``out`` continues it."""
    out.mkdir(parents=True, exist_ok=True)
    content = {"url": connection.url, "since": since, "match": plan.match, "end": plan.end.isoformat()}
    write_bytes(out / _PERIOD, json.dumps(content).encode())


def known_gpus(preview: BackfillPreview, since: datetime) -> pd.DataFrame:
    """Return the GPUs that a server reports as an inventory, as if all had been installed at ``since``."""
    rows = [row | {"installed_at": since} for row in preview.gpus.values()]
    frame = pd.DataFrame(rows)
    return frame.drop_duplicates("gpu", keep="first") if "gpu" in frame and frame["gpu"].notna().all() else frame


def fetch_history(
    connection: Connection,
    plan: BackfillPlan,
    dataset: Path,
    params: Params,
    *,
    mapping: SourceMapping | None,
    begin: Callable[[str], Progress],
    measured: Callable[[Rate], object],
    inventory: Path | None = None,
) -> CompactResult:
    """Fetch a server's history and compact it into a dataset; an interrupted run is resumed.

    ``measured``: called with the speed of the first chunk.
    """
    refuse_removed(dataset)
    channels, root = resolve_channels(params.channels), staging_of(dataset)
    plan = replace(plan, delay=params.features.delay)
    progress = begin("fetching")
    first = replace(plan, end=min(plan.start + plan.chunk, plan.end))
    started_s = time.monotonic()
    report = {"samples": 0}
    with suppress(InputError):  # the server's retention is shorter, or the full fetch reports the error
        report = backfill(connection, first, root, channels=channels, mapping=mapping)
    if report["samples"]:
        measured(Rate(int(report["samples"]), time.monotonic() - started_s, first.end - first.start))
    backfill(connection, plan, root, channels=channels, mapping=mapping, progress=progress)
    return compact_staged(dataset, params, inventory, begin("compacting"))


def compact_staged(dataset: Path, params: Params, inventory: Path | None, progress: Progress) -> CompactResult:
    """Merge staged rows into a dataset; raises ``InputError``, see :func:`telemetry.staging.compaction.compact`."""
    channels = resolve_channels(params.channels)
    settings = CompactSettings(params.telemetry, channels, params.events.dedupe, params.features.delay)
    return compact(dataset, settings=settings, inventory=inventory, now=datetime.now(UTC), progress=progress)


def refuse_removed(dataset: Path) -> None:
    """Raise ``InputError`` if history was fetched before and its dataset is gone: it would not be fetched again."""
    root = staging_of(dataset)
    recover_folder(dataset)
    resumed = any((root / "state").glob("prometheus-*.json"))
    if resumed and not dataset.exists() and not StagingFolder(root, writer="prometheus").waiting("samples"):
        raise InputError(
            "history was fetched before, but the dataset does not exist",
            str(dataset),
            f"If it was removed, remove {root} as well to fetch everything again.",
        )


def check_sources(tables: Tables, mapping: Path | None, params: Params, *, known: pd.DataFrame | None) -> Inquiry:
    """Return the questions that an import of files raises, see :func:`telemetry.importing.suggestion.trial.inquire`."""
    channels = resolve_channels(params.channels)
    importing = partial(
        import_dataset,
        step=params.telemetry.step or STEPS[0],
        channels=channels,
        dedupe=params.events.dedupe,
        delay=params.features.delay,
    )
    return inquire(tables, mapping, channels, importing, known=known)


def import_tables(
    tables: Tables,
    out: Path,
    params: Params,
    *,
    mapping: Path | None,
    max_loss: float = DEFAULT_MAX_LOSS,
    progress: Progress | None = None,
) -> ImportResult:
    """Import files into the dataset at ``out``; a new one gets the step of its samples unless one is set."""
    channels, samples = resolve_channels(params.channels), tables.get("samples", ())
    step = params.telemetry.step or step_of(out, samples, load_mapping(mapping).samples, channels)
    return import_dataset(
        out,
        samples=samples,
        events=tables.get("events", ()),
        inventory=next(iter(tables.get("inventory", ())), None),
        jobs=next(iter(tables.get("jobs", ())), None),
        mapping=mapping,
        step=step,
        channels=channels,
        dedupe=params.events.dedupe,
        delay=params.features.delay,
        progress=progress,
        max_loss=max_loss,
    )


def truth_beside(dataset: Place) -> Path | None:
    """Return the folder of a simulated dataset's truth; None if it has none or is in object storage."""
    if not isinstance(dataset, Path):
        return None
    sibling = dataset.resolve().with_name(f"{dataset.resolve().name}-truth")
    return sibling if sibling.is_dir() else None


def inventory_of(dataset: Path, path: Path) -> Path:
    """Write the inventory of a dataset to a file, for the import of further tables; return its path."""
    Dataset.open(dataset).inventory().to_parquet(path, index=False)
    return path


# Measured on two cores: 600 GPUs, 30 days, default parameters.
_START_S = 40.0
_COMPACTED_VALUES_PER_S = 1.2e6
_FEATURE_ROWS_PER_S = 500e3
_DECISIONS_PER_S = 8e3

# Bytes on the disk: staged values, rows of the dataset (20 channels), rows of the matrix.
_STAGED_VALUE_B, _ROW_B, _DECISION_B = 2, 15, 400


@dataclass(frozen=True, slots=True)
class Work:
    """The size of an assessment.

    ``values``: values to fetch; 0: there is a dataset. ``rows``: samples of the dataset, one per GPU and step.
    ``decisions``: rows of the matrix. ``values_per_second``: speed of fetching and staging.
    """

    description: str
    rows: int
    decisions: int
    values: int = 0
    values_per_second: float = 1.0

    @classmethod
    def of_history(cls, preview: BackfillPreview, plan: BackfillPlan, params: Params) -> "Work":
        """Return the work for a server's history."""
        span, gpus = plan.end - plan.start, len(preview.gpus)
        step = params.telemetry.step or step_for(preview.interval)
        description = f"{gpus:,} GPUs, at most {preview.samples:,} values of {span.days:,} days"
        rows, decisions = int(gpus * (span / step)), int(gpus * (span / params.decision.every))
        return cls(description, rows, decisions, preview.samples, preview.samples_per_second)

    @classmethod
    def of_dataset(cls, meta: DatasetMeta, params: Params) -> "Work":
        """Return the work for a dataset."""
        name, rows = {"gpu": "GPUs", "node": "nodes"}[meta.unit], int(meta.counts["samples"])
        units, span = int(meta.counts[f"{meta.unit}s"]), meta.span[1] - meta.span[0]
        description = f"{units:,} {name}, {rows:,} samples of {span.days:,} days"
        return cls(description, rows, int(units * (span / params.decision.every)))

    def measured(self, rate: Rate) -> "Work":
        """Return the same work with the measured speed of its first chunk."""
        return replace(self, values_per_second=rate.samples / max(rate.seconds, 1e-3))

    @property
    def seconds(self) -> float:
        """Estimated time from now."""
        fetching = self.values / self.values_per_second + self.values / _COMPACTED_VALUES_PER_S
        return fetching + _START_S + self.rows / _FEATURE_ROWS_PER_S + self.decisions / _DECISIONS_PER_S

    @property
    def time_text(self) -> str:
        """The estimated time as text."""
        minutes = timedelta(seconds=self.seconds) / timedelta(minutes=1)
        return f"about {minutes:.0f} minutes" if minutes >= 1.5 else "about a minute"

    def __str__(self) -> str:
        size_b = self.values * _STAGED_VALUE_B + self.rows * _ROW_B + self.decisions * _DECISION_B
        return f"{self.description}: {self.time_text} on two cores, and {size_b / 1e9:.1f} GB of disk"
