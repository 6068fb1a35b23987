"""Alters a fleet so that it has no signal, or one known signal: drawn incidents, shuffled owners, a leak."""

import hashlib
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from features.labels.labelling import label_rows
from features.matrix.matrix import FeatureMatrix
from features.vocabulary import FeatureColumn
from telemetry.dataset.store import Dataset
from telemetry.dataset.writer import DatasetWriter

HOT_C = 6.0
"""Degrees that the planted signal adds to the GPU temperature, for :data:`HOT_BEFORE` before an incident."""

HOT_BEFORE = timedelta(hours=24)
"""How long a GPU runs hot before its incident."""

REPAIR = timedelta(hours=12)
"""Time from an incident to its repair."""

TEMPERATURE = "gpu_temp_c"
"""Channel of the planted signal."""


def draw_incidents(dataset: Dataset, count: int, seed: int) -> pd.DataFrame:
    """Draw failures, each followed by a repair, uniformly over GPUs and time.

    Returns: events in the format of a dataset.
    """
    rng = np.random.default_rng(seed)
    installations = dataset.inventory()
    first, last = (pd.Timestamp(end) for end in dataset.meta.span)
    chosen = installations.iloc[rng.integers(0, len(installations), count)]
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
    driver_events = own[own["type"] == "driver"]
    drawn = drawn[driver_events.columns]
    for column in ("timestamp", "known_at"):
        drawn[column] = drawn[column].astype(driver_events[column].dtype)
    events = pd.concat([driver_events, drawn], ignore_index=True).sort_values(
        "timestamp", kind="stable", ignore_index=True
    )
    failures = drawn[drawn["type"] == "failure"]
    starts = {gpu: times.to_numpy(dtype="datetime64[ms]") for gpu, times in failures.groupby("gpu")["timestamp"]}
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


class Wrapped:
    """A feature matrix of which a part is replaced."""

    def __init__(self, matrix: Any, tag: str) -> None:
        self._matrix = matrix
        self._digest = hashlib.sha256(f"{matrix.digest} {tag}".encode()).hexdigest()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matrix, name)

    @property
    def digest(self) -> str:
        """Digest of the matrix and the replacement."""
        return self._digest


class ShuffledOwners(Wrapped):
    """A matrix whose incidents are reassigned to random GPUs, independently and at unchanged times."""

    def __init__(self, matrix: FeatureMatrix, seed: int) -> None:
        super().__init__(matrix, f"owners shuffled {seed}")
        self._seed = seed
        installations = matrix.inventory
        column = "gpu" if matrix.unit == "gpu" else "node"
        self._unit = installations[column].to_numpy(dtype=object)
        self._from = installations["installed_at"].to_numpy(dtype="datetime64[ms]")
        removed = installations["removed_at"].fillna(pd.Timestamp("2200-01-01", tz="UTC"))
        self._until = removed.to_numpy(dtype="datetime64[ms]")

    def incidents(self, as_of: datetime | None = None) -> pd.DataFrame:
        """Return the incidents with their new owners, which are the same in every call."""
        incidents: pd.DataFrame = self._matrix.incidents(as_of).copy()
        owners = []
        for unit, start in zip(incidents["unit"], incidents["start"], strict=True):
            at = np.datetime64(start.tz_convert(None), "ms")
            there = np.flatnonzero((self._from <= at) & (at < self._until))
            name = f"{self._seed} {unit} {start.value}".encode()
            owners.append(self._unit[there[int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) % len(there)]])
        incidents["unit"] = pd.array(owners, dtype="str")
        # the new owners' incidents may overlap, which those of one GPU never do: the later one is dropped
        incidents = incidents.sort_values(["unit", "start"], kind="stable")
        end = incidents["end"].fillna(pd.Timestamp("2200-01-01", tz="UTC"))
        before = end.groupby(incidents["unit"]).cummax().groupby(incidents["unit"]).shift()
        incidents = incidents[~(before > incidents["start"])]
        return incidents.sort_values(["start", "unit"], kind="stable", ignore_index=True)

    def labels(
        self, as_of: datetime | None = None, *, horizon: timedelta | None = None, rows: Any = None
    ) -> pd.DataFrame:
        """Label the rows by the new owners' incidents; drains and removals belong to the old owners."""
        labels = self._matrix.config.labels.model_copy(update={"censor_leavers": False})
        if horizon is not None:
            labels = labels.model_copy(update={"horizon": horizon})
        return label_rows(
            self._matrix.rows if rows is None else self._matrix.rows.iloc[rows],
            self.incidents(as_of),
            self._matrix.inventory,
            labels,
            data_end=self._matrix.span[1],
            as_of=as_of,
        )


class ReadsTheFuture(Wrapped):
    """A matrix with an additional feature that leaks the label, hidden in noise."""

    def __init__(self, matrix: Any, seed: int, *, strength: float = 2.0) -> None:
        super().__init__(matrix, f"reads the future {seed} {strength}")
        label = matrix.labels(None)["label"].fillna(0).to_numpy(dtype=np.float32)
        noise = np.random.default_rng(seed).normal(size=len(label))
        self._leak = (strength * label + noise).astype(np.float32)
        leaking = FeatureColumn.of("telemetry", "from_the_future", "mean", window=timedelta(hours=6))
        self._columns = [*matrix.columns, leaking]

    @property
    def columns(self) -> list[FeatureColumn]:
        """The columns, the leaking one last."""
        return self._columns

    def values(self, row_indices: Any = None) -> np.ndarray:
        """Features of rows, the leaking one last."""
        leak = self._leak if row_indices is None else self._leak[np.asarray(row_indices)]
        return np.column_stack([self._matrix.values(row_indices), leak])
