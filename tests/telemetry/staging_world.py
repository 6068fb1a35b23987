"""A staging folder with rows of a small fleet, and its compaction."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd
import pyarrow as pa

from telemetry.config import TelemetrySection
from telemetry.dataset.channels import resolve_channels
from telemetry.dataset.store import Dataset
from telemetry.importing.ingest import ImportResult
from telemetry.staging.compaction import CompactResult, CompactSettings, compact
from telemetry.staging.folder import Kind, StagingFolder, staging_of
from tests.telemetry.helpers import DAY, all_samples, samples_frame

NOW = datetime(2026, 5, 1, tzinfo=UTC)


def compact_settings(**telemetry: object) -> CompactSettings:
    return CompactSettings(
        TelemetrySection.model_validate(telemetry), resolve_channels({}), timedelta(seconds=60), timedelta(minutes=10)
    )


def raw(gpus: int = 4, times: int = 60, *, every: str = "30s", start: pd.Timestamp = DAY) -> pd.DataFrame:
    frame = samples_frame(gpus, times, every=every)
    frame["timestamp"] = pd.to_datetime(frame["timestamp"], utc=True) + (start - DAY)
    return frame


def table_of(frame: pd.DataFrame) -> pa.Table:
    arrays = {
        str(name): pa.array(column.dt.tz_convert(None).to_numpy())
        .cast(pa.timestamp("ms"))
        .cast(pa.timestamp("ms", tz="UTC"))
        if isinstance(column.dtype, pd.DatetimeTZDtype)
        else pa.Array.from_pandas(column)
        for name, column in frame.items()
    }
    return pa.table(arrays)


def staging(folder: Path) -> StagingFolder:
    return StagingFolder(staging_of(folder / "dataset"), writer="test")


def state_of(folder: Path, name: str) -> Path:
    return folder / "dataset" / "compaction" / f"{name}.parquet"


def stage_frame(folder: Path, frame: pd.DataFrame, **named: str) -> Path | None:
    return staging(folder).stage("samples", table_of(frame), **named)


def stage_rows(folder: Path, kind: Kind, *rows: dict[str, object]) -> None:
    staging(folder).stage(kind, pa.Table.from_pylist(list(rows)))


def stage_events(folder: Path, rows: list[dict[str, object]]) -> None:
    names = dict.fromkeys(name for row in rows for name in row)
    staging(folder).stage("events", pa.table({name: [row.get(name) for row in rows] for name in names}))


def event(when: pd.Timestamp, code: str, **more: object) -> dict[str, object]:
    stamp = when.to_pydatetime()
    return {"timestamp": stamp, "known_at": stamp, "node": "node-0", "type": "xid", "code": code, **more}


def compacted(
    folder: Path, *, inventory: Path | None = None, now: datetime = NOW, **telemetry: object
) -> CompactResult:
    return compact(folder / "dataset", settings=compact_settings(**telemetry), inventory=inventory, now=now)


def samples_of(folder: Path) -> pd.DataFrame:
    dataset = Dataset.open(folder / "dataset")
    return all_samples(ImportResult(dataset, {}, {}))
