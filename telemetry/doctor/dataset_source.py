"""Observation of a dataset: which channels have values, for which GPUs."""

from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from foundation.durations import format_duration
from foundation.place import Place
from foundation.text import quantity
from telemetry.accounting import Accounting
from telemetry.dataset.channels import Channel
from telemetry.dataset.layout import dictionary_codes, instants_ms
from telemetry.dataset.store import Dataset
from telemetry.doctor.diagnosis import ChannelSeen, Observation, TelemetryFinding, findings_of
from telemetry.importing.samples.derived_events import CHANNEL as XID_GAUGE
from telemetry.importing.sampling import sampling_interval
from telemetry.staging.folder import StagingFolder, staging_of

RECENT: Final = timedelta(days=7)
"""Length of the newest part of a dataset, which shows what arrives now."""

MAX_FILES: Final = 128
"""Limit on sample files read for a whole history, spread evenly over buckets and time."""

MAX_BUCKETS: Final = 16
"""Limit on buckets to read; each is a random sample of the nodes."""

_COLUMNS: Final = 8
"""Channels read at a time: wide datasets must fit into memory, and each read merges the runs again."""

SPARSE_STEPS: Final = 2
"""Limit on steps between two samples; above it a unit has less than half of the samples that scoring expects."""

_OLD: Final = timedelta(days=1)
_MIN_EVENTS: Final = 10
_SILENCE_FACTOR: Final = 2
# A source with at least _MIN_EVENTS events is reported as silent after _SILENCE_FACTOR times its longest earlier gap.


def observe_dataset(
    place: Place, *, channels: Mapping[str, Channel], now: datetime, whole_history: bool = False
) -> Observation:
    """Observe the newest :data:`RECENT` of a dataset, or its whole history.

    The newest days show what arrives now, not what a model can learn from: a failed GPU may stop reporting some fields.

    Raises ``InputError`` if there is no dataset, or it is corrupt.
    """
    dataset = Dataset.open(place)
    meta = dataset.meta
    buckets = dataset.buckets()
    if len(buckets) > MAX_BUCKETS:
        buckets = [buckets[index] for index in np.linspace(0, len(buckets) - 1, MAX_BUCKETS).astype(int)]
    columns = [name for name in meta.channels if name in channels]
    spans: list[tuple[int, datetime, datetime | None]] = [(bucket, meta.span[1] - RECENT, None) for bucket in buckets]
    if whole_history:
        files = dataset.sample_files()
        chosen = np.linspace(0, len(files) - 1, min(len(files), MAX_FILES)).astype(int)
        spans = [(file.bucket, *file.span) for file in (files[index] for index in chosen)]
        buckets = sorted({bucket for bucket, _, _ in spans})
    rows = 0
    values: Counter[str] = Counter()
    units: dict[str, set[str]] = {name: set() for name in columns}
    reporting: set[str] = set()
    for bucket, since, until in spans:
        keys = dataset.read_bucket(bucket, [meta.unit], since=since, until=until)[meta.unit].combine_chunks()
        names, codes = keys.dictionary.to_numpy(zero_copy_only=False), keys.indices.to_numpy()
        reporting |= {*names[np.bincount(codes).nonzero()]}
        measured = np.zeros(len(keys), dtype=bool)
        for start in range(0, len(columns), _COLUMNS):
            table = dataset.read_bucket(bucket, columns[start : start + _COLUMNS], since=since, until=until)
            for name in table.column_names:
                valid = pc.is_valid(table[name]).to_numpy()
                if name != XID_GAUGE:
                    measured |= valid
                values[name] += int(np.count_nonzero(valid))
                units[name] |= {*names[np.bincount(codes[valid]).nonzero()]}
        # Rows of a frozen sensor keep only the XID, and do not show what the exporter exports.
        rows += int(measured.sum())
    by_name = {name: ChannelSeen(name, len(units[name]), None, 1.0 - values[name] / rows) for name in columns if rows}
    events, inventory = dataset.events(), dataset.inventory()
    in_service = inventory[inventory["removed_at"].isna()]
    inspected = in_service[in_service["node"].map(dataset.bucket_of).isin(set(buckets))]
    # Missing channels are evaluated on units that report: silent GPUs are a separate finding.
    is_reporting = inspected[meta.unit].isin(reporting)
    return Observation(
        kind="dataset",
        where=str(place),
        at=now,
        units=len(reporting),
        nodes=int(inspected.loc[is_reporting, "node"].nunique()),
        models={
            str(model): int(count)
            for model, count in inspected.loc[is_reporting, "model"].value_counts().sort_index().items()
        },
        channels=by_name,
        xid_events=bool((events["type"] == "xid").any()),
        facts=_facts(dataset, events, buckets),
        findings=tuple(_findings(dataset, events, inspected[~is_reporting], now)),
        accounting=_account(dataset, place),
    )


def _account(dataset: Dataset, place: Place) -> Accounting:
    """Return the accounting of the dataset: its rows, quarantined rows, and files waiting in its staging folder."""
    accounting, meta = Accounting(), dataset.meta
    for table in ("samples", "events", "inventory", "jobs"):
        accounting.take(table, int(meta.counts.get(table, 0)), {})
    accounting.take("quarantined", sum(meta.quarantine.values()), meta.quarantine)
    waiting = [] if not isinstance(place, Path) else StagingFolder(staging_of(place), writer="doctor").waiting()
    accounting.read("staged files", len(waiting))
    accounting.waiting("staged files", "`predrain collect compact`", len(waiting), waiting[0].name if waiting else None)
    return accounting


def _facts(dataset: Dataset, events: pd.DataFrame, buckets: list[int]) -> dict[str, str]:
    meta = dataset.meta
    xids = events[events["type"] == "xid"]
    sources = sorted(str(source) for source in xids["source"].dropna().unique())
    checked = f"the newest {format_duration(RECENT)}"
    if len(buckets) < len(dataset.buckets()):
        checked += f", {len(buckets)} of {len(dataset.buckets())} buckets"
    return {
        "span": " to ".join(instant.isoformat() for instant in meta.span),
        "step": format_duration(meta.step),
        "checked": checked,
        "XIDs": f"{len(xids):,}" + (f" from {', '.join(sources)}" if sources else ""),
        "quarantined rows": f"{sum(meta.quarantine.values()):,}",
    }


def sparse_samples(dataset: Dataset) -> list[TelemetryFinding]:
    """Check in one bucket whether the samples of most units are further apart than scoring expects."""
    meta = dataset.meta
    keys = [meta.unit, "timestamp"]
    for bucket in dataset.buckets()[:1]:
        samples = dataset.read_bucket(bucket, keys, since=meta.span[1] - RECENT)
        sampled = sampling_interval(dictionary_codes(samples[meta.unit])[0], instants_ms(samples))
        spacing = pd.Timedelta(sampled or 0).round("min" if meta.step >= timedelta(minutes=1) else "s")
        if spacing > SPARSE_STEPS * meta.step:
            interval, step = format_duration(spacing.to_pytimedelta()), format_duration(meta.step)
            problem = (
                f"samples arrive every {interval}, but the dataset's step is {step}: "
                "scoring treats such units as unknown"
            )
            return [
                TelemetryFinding(
                    problem, f"Set `telemetry.step: {interval}` and import into an empty folder, or sample faster."
                )
            ]
    return []


def silent_sources(events: pd.DataFrame, until: datetime) -> list[TelemetryFinding]:
    """Find event sources that have been silent for longer than ever before.

    ``events``: with ``source`` and ``timestamp``.
    ``until``: end of the telemetry.
    """
    findings = []
    for source, times in events.groupby("source")["timestamp"]:
        longest, silence = times.sort_values().diff().max(), until - times.max()
        if len(times) >= _MIN_EVENTS and silence > max(_SILENCE_FACTOR * longest, RECENT):
            problem = f"no events from the source {source} for {quantity(silence.days, 'day')}, longer than ever before"
            advice = "Check that it still runs: without its events the next fit learns from missing failures."
            findings.append(TelemetryFinding(problem, advice, problem=False))
    return findings


def _findings(dataset: Dataset, events: pd.DataFrame, silent: pd.DataFrame, now: datetime) -> list[TelemetryFinding]:
    """Check a dataset; ``silent``: installations in service without samples."""
    meta = dataset.meta
    kinds = set(events["type"])
    unit_name = "GPU" if meta.unit == "gpu" else "node"
    example = "" if silent.empty else f"{silent.iloc[0][meta.unit]} on {silent.iloc[0]['node']}"
    age = now - meta.span[1]
    quarantined = sum(meta.quarantine.values())
    reason = max(meta.quarantine, key=lambda name: meta.quarantine[name], default="")
    findings = sparse_samples(dataset) + silent_sources(events, meta.span[1])
    return findings + findings_of(
        (
            example and meta.channels,
            f"in the newest {format_duration(RECENT)}, no samples from {quantity(len(silent), unit_name)} of the "
            f"inventory, such as {example}",
            "Check whether they failed or were removed. Record removals: `removed_at` in an --inventory, or a ticket.",
        ),
        (
            not meta.channels,
            "the dataset has no telemetry, only events and inventory",
            "Collect it: `predrain collect prometheus` for history, `predrain collect exporters` for new samples.",
        ),
        (
            "xid" not in kinds,
            "the events contain no XID",
            "Import the kernel logs (`predrain import --events`), or follow them (`predrain collect kernel-log`).",
        ),
        (
            not kinds & {"repair", "replacement"},
            "the events contain no repair or replacement: incidents end by timeout only",
            "Add tickets (`predrain collect tickets`), or the records of the scheduler "
            "(`predrain collect slurm`, `predrain collect kubernetes`).",
            False,
        ),
        (
            age > _OLD,
            f"the newest row is {quantity(age.days, 'day')} old",
            "Start a live collector to score the fleet.",
            False,
        ),
        (
            0 < meta.counts.get("samples", 0) < 100 * quarantined,
            f"{quarantined:,} rows or values were quarantined, most for: {reason}",
            f"Check {dataset.place}/quarantine, and correct the source or the mapping.",
        ),
    )
