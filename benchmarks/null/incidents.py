"""Datasets whose only failures were drawn: at a constant rate, of any unit, with or without a sign before them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.store import Dataset, DatasetWriter

HOT_C = 6.0
"""What the planted signal adds to the GPU temperature, for :data:`HOT_BEFORE` before an incident."""

HOT_BEFORE = timedelta(hours=24)
"""How long a GPU runs hot before its incident."""

REPAIR = timedelta(hours=12)
"""From an incident to its repair."""

TEMPERATURE = "gpu_temp_c"
"""The channel that shows the planted signal."""


def draw_incidents(dataset: Dataset, count: int, seed: int) -> pd.DataFrame:
    """Draw failures, and a repair after each, at a constant rate: any GPU and any time of the dataset alike.

    Returns: events of the dataset's own shape.
    """
    rng = np.random.default_rng(seed)
    stays = dataset.inventory()
    first, last = (pd.Timestamp(each) for each in dataset.meta.span)
    chosen = stays.iloc[rng.integers(0, len(stays), count)]
    minutes = rng.integers(0, int((last - first).total_seconds() // 60), count)
    failed = pd.Series(first + pd.to_timedelta(np.sort(minutes), unit="min"))
    parts = [
        pd.DataFrame(
            {
                "timestamp": failed + shift,
                "node": chosen["node"].to_numpy(),
                "gpu": chosen["gpu"].to_numpy(),
                "type": kind,
                "code": code,
                "detail": "",
                "source": "drawn",
                "known_at": failed + shift + timedelta(minutes=10),
            }
        )
        for kind, code, shift in (("failure", "gpu_lost", timedelta(0)), ("repair", "reset", REPAIR))
    ]
    events = pd.concat(parts, ignore_index=True)
    return events[events["timestamp"] < last].sort_values(["timestamp", "type"], kind="stable", ignore_index=True)


def with_incidents(source: Path, out: Path, *, count: int, seed: int, planted: bool) -> Path:
    """Copy a dataset with drawn incidents as its only failures; ``planted``: the GPU runs hot before each."""
    original = Dataset.open(source)
    drawn = draw_incidents(original, count, seed)
    own = original.events()
    kept = own[own["type"] == "driver"]
    drawn = drawn[kept.columns]
    for column in ("timestamp", "known_at"):
        drawn[column] = drawn[column].astype(kept[column].dtype)
    events = pd.concat([kept, drawn], ignore_index=True).sort_values("timestamp", kind="stable", ignore_index=True)
    failures = drawn[drawn["type"] == "failure"]
    starts = {gpu: each.to_numpy(dtype="datetime64[ms]") for gpu, each in failures.groupby("gpu")["timestamp"]}
    with DatasetWriter(
        out,
        step=original.meta.step,
        channels=original.meta.channels,
        unit=original.meta.unit,
        buckets=original.meta.buckets,
        sample_count=original.meta.sample_count,
    ) as writer:
        for bucket in original.buckets():
            table = original.read_bucket(bucket)
            writer.write_samples(bucket, heated(table, starts) if planted else table)
        writer.finish(
            events=events, inventory=original.inventory(), span=original.meta.span, sources=original.meta.sources
        )
    return out


def heated(table: pa.Table, starts: dict[str, np.ndarray]) -> pa.Table:
    """Add :data:`HOT_C` to the temperature of GPUs in the day before their incidents."""
    gpu = table["gpu"].cast(pa.string()).to_numpy(zero_copy_only=False)
    at = table["timestamp"].to_numpy().astype("datetime64[ms]")
    hot = np.zeros(len(at), dtype=bool)
    for name in np.unique(gpu):
        mine = np.flatnonzero(gpu == name)
        for start in starts.get(name, ()):
            before = start - at[mine]
            hot[mine[(before > np.timedelta64(0, "ms")) & (before <= np.timedelta64(HOT_BEFORE, "ms"))]] = True
    place = table.schema.get_field_index(TEMPERATURE)
    field = table.schema.field(place)
    warmer = pc.add(table[TEMPERATURE], pa.scalar(HOT_C, field.type))
    return table.set_column(place, field, pc.if_else(pa.array(hot), warmer, table[TEMPERATURE]))
