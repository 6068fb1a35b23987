"""Small fleets written by hand, for the tests of this folder."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd

from telemetry.config import ChannelDeclaration
from telemetry.dataset.channels import resolve_channels
from telemetry.importing.importer import import_dataset
from telemetry.importing.ingest import ImportResult

STEP = timedelta(minutes=10)
DAY = pd.Timestamp("2026-03-01", tz="UTC")


def gpu(number: int) -> str:
    return f"GPU-{number:08x}-0000-4000-8000-000000000000"


def inventory_frame(gpus: int = 4, per_node: int = 2) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "gpu": [gpu(number) for number in range(gpus)],
            "node": [f"node-{number // per_node}" for number in range(gpus)],
            "slot": [str(number % per_node) for number in range(gpus)],
            "pci_bus_id": [f"00000000:{0x10 + number % per_node:02X}:00.0" for number in range(gpus)],
            "model": "H100",
            "installed_at": "2026-01-01T00:00:00Z",
        }
    )


def samples_frame(gpus: int = 4, times: int = 6, *, every: str = "10min", per_node: int = 2) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for number in range(gpus):
        for turn, when in enumerate(pd.date_range(DAY, periods=times, freq=every)):
            rows.append(
                {
                    "timestamp": when.isoformat(),
                    "node": f"node-{number // per_node}",
                    "gpu": gpu(number),
                    "gpu_temp_c": 40 + number + turn / 4,
                    "power_w": 300 + 10 * turn,
                    "ecc_sbe_volatile_total": turn * number,
                    "clocks_event_reasons": turn % 3,
                    "xid_last": 0,
                }
            )
    return pd.DataFrame(rows)


def events_frame(rows: Sequence[tuple[str, str | None, str, str]]) -> pd.DataFrame:
    """Rows are (hour and minute of the day, gpu, type, code), on node-0 where there is no GPU."""
    return pd.DataFrame(
        {
            "timestamp": [f"2026-03-01T{clock}:00Z" for clock, *_ in rows],
            "node": [None if row[1] else "node-0" for row in rows],
            "gpu": [row[1] for row in rows],
            "type": [row[2] for row in rows],
            "code": [row[3] for row in rows],
        }
    )


def write_csv(path: Path, frame: pd.DataFrame) -> Path:
    frame.to_csv(path, index=False)
    return path


def run_import(
    folder: Path,
    *,
    samples: pd.DataFrame | Sequence[Path] | None = None,
    events: pd.DataFrame | Sequence[Path] | None = None,
    inventory: pd.DataFrame | Path | None = None,
    mapping: str | None = None,
    declared: Mapping[str, ChannelDeclaration] | None = None,
    out: str = "dataset",
    **more: Any,
) -> ImportResult:
    """Write the frames as CSV files into ``folder`` and import them into ``folder / out``."""

    def files(name: str, given: pd.DataFrame | Sequence[Path] | None) -> list[Path]:
        if given is None:
            return []
        if isinstance(given, pd.DataFrame):
            return [write_csv(folder / f"{name}.csv", given)]
        return list(given)

    if not isinstance(inventory, Path):
        inventory = write_csv(folder / "inventory.csv", inventory_frame() if inventory is None else inventory)
    rules = None
    if mapping is not None:
        rules = folder / "mapping.yaml"
        rules.write_text(mapping)
    settings: dict[str, Any] = {
        "step": STEP,
        "channels": resolve_channels(declared or {}),
        "dedupe": timedelta(seconds=60),
        "delay": timedelta(minutes=10),
        "now": datetime(2027, 1, 1, tzinfo=UTC),
        **more,
    }
    return import_dataset(
        folder / out,
        samples=files("samples", samples),
        events=files("events", events),
        inventory=inventory,
        mapping=rules,
        **settings,
    )


def without_inventory(folder: Path, samples: pd.DataFrame, **more: Any) -> ImportResult:
    return import_dataset(
        folder / "dataset",
        samples=[write_csv(folder / "samples.csv", samples)],
        step=STEP,
        channels=resolve_channels({}),
        dedupe=timedelta(minutes=1),
        delay=timedelta(minutes=10),
        **more,
    )


def all_samples(result: ImportResult) -> pd.DataFrame:
    """Every sample of a dataset, sorted by gpu (or node) and time."""
    dataset = result.dataset
    frames = [dataset.read_bucket(bucket).to_pandas() for bucket in dataset.buckets()]
    whole = pd.concat(frames, ignore_index=True)
    for name in ("node", "gpu"):
        whole[name] = whole[name].astype(object)
    return whole.sort_values([dataset.meta.unit, "timestamp"], kind="stable", ignore_index=True)


def quarantine_of(result: ImportResult) -> pd.DataFrame:
    return pd.concat(
        [pd.read_parquet(path) for path in sorted((result.dataset.path / "quarantine").glob("*.parquet"))],
        ignore_index=True,
    )


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of writing of every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
