"""Small datasets for the tests of the matrix."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from features.config import DecisionSection, FeatureSection, LabelSection
from features.matrix.build_tasks import array_of
from features.matrix.building import build_matrix
from features.matrix.matrix import FeatureMatrix
from features.matrix.meta import MatrixConfig
from telemetry.dataset.channels import CATALOGUE, Channel
from telemetry.dataset.store import Dataset
from telemetry.dataset.writer import DatasetWriter

T0 = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
STEP = timedelta(minutes=10)
CHANNELS: dict[str, Channel] = {
    name: CATALOGUE[name]
    for name in (
        "gpu_temp_c",
        "power_w",
        "gpu_util_pct",
        "ecc_sbe_volatile_total",
        "row_remap_correctable_total",
        "row_remap_pending",
        "clocks_event_reasons",
        "xid_last",
    )
}
SMALL = FeatureSection(windows=(HOUR, 2 * HOUR, 4 * HOUR), peer_window=2 * HOUR)
EVENT_COLUMNS = ("timestamp", "node", "gpu", "type", "code", "detail", "source", "known_at")


@dataclass(frozen=True)
class Training:
    augmentation: int = 2
    negative_ratio: int = 3


def stamps(values) -> pd.Series:
    return pd.Series(pd.DatetimeIndex(pd.to_datetime(list(values), utc=True)).as_unit("ms"))


def inventory_of(rows: list[dict]) -> pd.DataFrame:
    frame = pd.DataFrame(rows)
    frame["installed_at"] = stamps(frame.get("installed_at", pd.Series([T0 - 30 * 24 * HOUR] * len(frame))))
    frame["removed_at"] = stamps(frame.get("removed_at", pd.Series([None] * len(frame))))
    return frame


def gpus(n: int, *, a_node: int = 4) -> list[dict]:
    return [
        {
            "gpu": f"gpu{g:02d}",
            "node": f"node{g // a_node}",
            "slot": str(g % a_node),
            "model": "A100" if g % 3 else "H100",
            "driver": "535.1",
            "rack": f"r{g // (2 * a_node)}",
            "installed_at": T0 - timedelta(days=10 + g),
        }
        for g in range(n)
    ]


def events_of(rows: list[dict]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=list(EVENT_COLUMNS))
    frame["known_at"] = frame["known_at"].where(frame["known_at"].notna(), frame["timestamp"] + STEP)
    for name in ("timestamp", "known_at"):
        frame[name] = stamps(frame[name])
    return frame


def xid(hours: float, gpu: str, node: str, code: str = "79", **extra) -> dict:
    return {"timestamp": T0 + hours * HOUR, "gpu": gpu, "node": node, "type": "xid", "code": code, **extra}


def samples_of(
    inventory: pd.DataFrame,
    hours: float,
    *,
    seed: int = 0,
    channels: Mapping[str, Channel] = CHANNELS,
    step: timedelta = STEP,
    lost: float = 0.05,
) -> pd.DataFrame:
    """Random samples of every installation from T0 on, with nulls, missing samples and counter resets."""
    rng = np.random.default_rng(seed)
    parts = []
    for row in inventory.to_dict("records"):
        times = pd.date_range(T0, T0 + hours * HOUR, freq=step, inclusive="both").as_unit("ms")
        inside = times >= row["installed_at"]
        if not pd.isna(row["removed_at"]):
            inside &= times < row["removed_at"]
        times = times[inside & (rng.random(len(times)) >= lost)]
        n = len(times)
        columns: dict[str, object] = {"timestamp": times, "node": row["node"], "gpu": row.get("gpu")}
        for channel in channels.values():
            columns[channel.name] = _series(channel, n, rng)
        parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True)


def _series(channel: Channel, n: int, rng: np.random.Generator) -> object:
    missing = rng.random(n) < 0.1
    if channel.kind == "gauge":
        values = rng.normal(50.0, 20.0, n).clip(0) if channel.unit != "bool" else (rng.random(n) < 0.1).astype(float)
        return pd.array(np.where(missing, np.nan, values).astype(np.float32), dtype="Float32")
    if channel.kind == "counter":
        rises = np.where(rng.random(n) < 0.3, rng.integers(1, 50, n), 0).astype(float)
        values = np.cumsum(rises)
        for i in np.flatnonzero(rng.random(n) < 0.02):
            values[i:] -= values[i]
        return pd.array(np.where(missing, np.nan, values), dtype="Float64")
    if channel.kind == "flags":
        bits = pd.array(rng.integers(0, 256, n).astype(np.uint64), dtype="UInt64")
        bits[missing] = pd.NA
        return bits
    codes = pd.array(rng.integers(0, 3, n).astype(np.int32), dtype="Int32")
    codes[missing] = pd.NA
    return codes


def write_dataset(
    path: Path,
    inventory: pd.DataFrame,
    *,
    hours: float = 24,
    samples: pd.DataFrame | None = None,
    events: pd.DataFrame | None = None,
    channels: Mapping[str, Channel] = CHANNELS,
    unit: str = "gpu",
    step: timedelta = STEP,
    buckets: int = 3,
) -> Dataset:
    with DatasetWriter(
        path, step=step, channels=channels if samples is not None else {}, unit=unit, buckets=buckets
    ) as w:
        if samples is not None:
            bucket = samples["node"].map(w.bucket_of)
            for number in sorted(set(bucket)):
                w.write_samples(number, to_table(samples[bucket == number], unit))
        return w.finish(
            events=events_of([]) if events is None else events, inventory=inventory, span=(T0, T0 + hours * HOUR)
        )


def to_table(samples: pd.DataFrame, unit: str = "gpu") -> pa.Table:
    if unit == "node":
        samples = samples.drop(columns=["gpu"], errors="ignore")
    return pa.table({str(name): array_of(samples[name]) for name in samples.columns})


def make_matrix(
    dataset: Dataset,
    out: Path,
    *,
    features: FeatureSection = SMALL,
    decision: DecisionSection | None = None,
    labels: LabelSection | None = None,
    training: Training | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FeatureMatrix:
    return build_matrix(
        dataset,
        out,
        decision=decision or DecisionSection(every=3 * HOUR),
        labels=labels or LabelSection(horizon=6 * HOUR),
        features=features,
        training=training or Training(),
        seed=5,
        progress=progress,
    )


def config_of(**changed: Any) -> MatrixConfig:
    """The settings of a matrix of any dataset, but for what is given."""
    defaults: dict[str, Any] = {
        "decision": DecisionSection(), "labels": LabelSection(), "features": FeatureSection(), "augmentation": 4,
        "negative_ratio": 2, "seed": 3, "unit": "gpu", "step": STEP, "span": (T0, T0), "channels": CHANNELS,
        "columns": (), "dataset_digest": "",
    }  # fmt: skip
    return MatrixConfig(**{**defaults, **changed})


def frame_of(matrix: FeatureMatrix) -> pd.DataFrame:
    values = pd.DataFrame(matrix.values(), columns=[column.name for column in matrix.columns])
    return pd.concat([matrix.rows, values], axis=1)


def window(node, start, end, *, known=None):
    """A planned maintenance of a node, in hours; known as it begins."""
    begin, until = T0 + start * HOUR, T0 + end * HOUR
    known_at = begin if known is None else T0 + known * HOUR
    return {"timestamp": begin, "node": node, "type": "maintenance", "code": until.isoformat(), "known_at": known_at}
