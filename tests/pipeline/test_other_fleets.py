"""Fleets of other devices: channels nobody declared in the catalogue, no telemetry at all, nodes without GPUs."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from features.matrix import FeatureMatrix
from pipeline.params import load_params
from pipeline.stages import make_matrix, replay, write_report_for
from telemetry.channels import resolve_channels
from telemetry.errors import InputError
from telemetry.importing import import_dataset

START = datetime(2026, 3, 1, tzinfo=UTC)
DAYS, UNITS = 60, 40

COMMON = """
decision: {every: 24h}
labels: {horizon: 3d}
features: {windows: [1d, 3d], peer_window: 1d, history_windows: [7d, 30d]}
telemetry: {step: 1d}
training: {span: 21d, refit_every: 14d, augmentation: 0}
models:
  profile: lightgbm
  learners: [lightgbm, logistic]
  parallel: {members: [lightgbm, logistic]}
  cascade: {stages: [lightgbm, logistic]}
  settings: {lightgbm: {n_estimators: 15}}
backtest: {bootstrap: 10, k: 2}
"""


def write_inventory(path: Path, *, with_gpus: bool) -> Path:
    frame = pd.DataFrame({"node": [f"host-{i // 2 if with_gpus else i}" for i in range(UNITS)]})
    if with_gpus:
        frame["gpu"] = [f"disk-{i}" for i in range(UNITS)]
    frame["installed_at"] = START.isoformat()
    frame["vendor_grade"] = [i % 3 for i in range(UNITS)]
    frame.to_csv(path, index=False)
    return path


def failures(rng: np.random.Generator) -> list[tuple[int, datetime]]:
    """Repeat offenders: the first quarter of the units fails often, the others hardly ever."""
    found = []
    for unit in range(UNITS):
        rate = 1 / 12 if unit < UNITS // 4 else 1 / 300
        when = rng.exponential(1 / rate)
        while when < DAYS:
            found.append((unit, START + timedelta(days=when)))
            when += 2 + rng.exponential(1 / rate)
    return found


def write_events(path: Path, found: list[tuple[int, datetime]], *, with_gpus: bool) -> Path:
    rows = []
    for unit, when in found:
        node = f"host-{unit // 2 if with_gpus else unit}"
        gpu = {"gpu": f"disk-{unit}"} if with_gpus else {}
        rows.append({"timestamp": when.isoformat(), "node": node, **gpu, "type": "failure", "code": "media"})
        rows.append(
            {
                "timestamp": (when + timedelta(hours=9)).isoformat(),
                "node": node,
                **gpu,
                "type": "repair",
                "code": "swap",
            }
        )
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def write_samples(path: Path, found: list[tuple[int, datetime]], rng: np.random.Generator) -> Path:
    """A sample a day: media errors climb in the days before a failure, vibration is noise."""
    rows = []
    for unit in range(UNITS):
        errors = 0.0
        for day in range(DAYS):
            when = START + timedelta(days=day)
            near = any(each == unit and timedelta(0) < at - when < timedelta(days=3) for each, at in found)
            errors += rng.poisson(20 if near else 0.2)
            rows.append(
                {
                    "timestamp": when.isoformat(),
                    "node": f"host-{unit // 2}",
                    "gpu": f"disk-{unit}",
                    "vibration_mm_s": round(rng.normal(2.0, 0.3), 3),
                    "media_errors_total": errors,
                }
            )
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def run(tmp_path: Path, params_text: str, **sources: Path) -> tuple[FeatureMatrix, dict, pd.DataFrame]:
    file = tmp_path / "params.yaml"
    file.write_text(params_text)
    params = load_params([file])
    imported = import_dataset(
        tmp_path / "dataset",
        samples=[sources["samples"]] if "samples" in sources else (),
        events=[sources["events"]],
        inventory=sources["inventory"],
        step=params.telemetry.step,
        channels=resolve_channels(params.channels),
        dedupe=params.events.dedupe,
        delay=params.features.delay,
    )
    assert imported.quarantined == {}
    matrix = make_matrix(tmp_path / "dataset", params, tmp_path / "matrix")
    replay(matrix, params, tmp_path / "out")
    write_report_for(tmp_path / "out")
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    return matrix, metrics, pd.read_parquet(tmp_path / "out" / "predictions.parquet")


def test_channels_that_only_the_parameters_know(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    found = failures(rng)
    declared = (
        "channels:\n"
        "  vibration_mm_s: {kind: gauge, unit: mm/s, range: [0, 100]}\n"
        "  media_errors_total: {kind: counter, unit: count}\n"
    )
    matrix, metrics, predictions = run(
        tmp_path,
        COMMON + declared,
        inventory=write_inventory(tmp_path / "inventory.csv", with_gpus=True),
        events=write_events(tmp_path / "events.csv", found, with_gpus=True),
        samples=write_samples(tmp_path / "samples.csv", found, rng),
    )
    channels = {column.channel for column in matrix.columns if column.group == "telemetry"}
    assert channels == {"vibration_mm_s", "media_errors_total"}
    assert metrics["simulated"] is None
    measured = metrics["models"]["lightgbm"]["sliding"]
    assert measured["average_precision"] > 2 * measured["base_rate"]
    assert predictions["gpu"].str.startswith("disk-").all()


def test_events_and_inventory_without_telemetry(tmp_path: Path) -> None:
    found = failures(np.random.default_rng(2))
    matrix, metrics, predictions = run(
        tmp_path,
        COMMON,
        inventory=write_inventory(tmp_path / "inventory.csv", with_gpus=True),
        events=write_events(tmp_path / "events.csv", found, with_gpus=True),
    )
    assert {column.group for column in matrix.columns} <= {"history", "static"}
    assert len(predictions) > 0
    measured = metrics["models"]["lightgbm"]["sliding"]
    assert measured["roc_auc"] > 0.6, "repeat offenders are there to be found in the history"


def test_nodes_without_gpus(tmp_path: Path) -> None:
    found = failures(np.random.default_rng(3))
    matrix, metrics, predictions = run(
        tmp_path,
        COMMON,
        inventory=write_inventory(tmp_path / "inventory.csv", with_gpus=False),
        events=write_events(tmp_path / "events.csv", found, with_gpus=False),
    )
    assert matrix.unit == "node"
    assert predictions["gpu"].isna().all()
    assert predictions["node"].str.startswith("host-").all()
    assert not predictions.duplicated(["decision_time", "node"]).any()
    assert metrics["models"]["lightgbm"]["sliding"]["incidents"] > 0


def test_a_channel_that_nobody_declared_is_refused_with_the_way_out(tmp_path: Path) -> None:
    found = failures(np.random.default_rng(4))
    with pytest.raises(InputError, match=r"vibration_mm_s.*channels"):
        run(
            tmp_path,
            COMMON,
            inventory=write_inventory(tmp_path / "inventory.csv", with_gpus=True),
            events=write_events(tmp_path / "events.csv", found, with_gpus=True),
            samples=write_samples(tmp_path / "samples.csv", found, np.random.default_rng(5)),
        )
