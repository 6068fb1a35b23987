"""Fleets of other devices: channels nobody declared in the catalogue, no telemetry at all, nodes without GPUs."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from features.matrix.matrix import FeatureMatrix
from models.bundle.store import load_bundle
from pipeline.matrix_stage import make_matrix
from pipeline.params import load_params
from pipeline.stages import replay, train_bundle, write_report_for
from telemetry.dataset.channels import resolve_channels
from telemetry.errors import InputError
from telemetry.importing.importer import import_dataset
from tests.fleets.disks import write_disks
from tests.fleets.lifetimes import write_lifetimes

START = datetime(2026, 3, 1, tzinfo=UTC)
DAYS, UNITS = 60, 40

COMMON = """
decision: {every: 24h}
labels: {horizon: 3d}
features: {windows: [1d, 3d], peer_window: 1d, history_windows: [7d, 30d]}
telemetry: {step: 1d}
training: {window: 21d, refit_every: 14d, augmentation: 0}
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


ROOT = Path(__file__).resolve().parents[2]

LIGHT = """
models: {settings: {lightgbm: {n_estimators: 40}, xgboost: {n_estimators: 20}}}
backtest: {bootstrap: 0}
"""


def run_shipped(tmp_path: Path, names: list[str], more: str, mapping: str | None, **sources: Path | list[Path]) -> dict:
    """Import, build and replay with the parameters of ``params/`` alone."""
    (tmp_path / "more.yaml").write_text(LIGHT + more)
    params = load_params([*(ROOT / "params" / f"{name}.yaml" for name in names), tmp_path / "more.yaml"])
    imported = import_dataset(
        tmp_path / "dataset",
        samples=sources.get("samples", ()),
        events=sources["events"],
        inventory=sources["inventory"],
        step=params.telemetry.step,
        channels=resolve_channels(params.channels),
        dedupe=params.events.dedupe,
        delay=params.features.delay,
        mapping=None if mapping is None else ROOT / "params" / f"{mapping}.yaml",
    )
    assert imported.quarantined == {}
    matrix = make_matrix(tmp_path / "dataset", params, tmp_path / "matrix")
    replay(matrix, params, tmp_path / "out")
    train_bundle(matrix, params, tmp_path / "bundle")
    assert set(load_bundle(tmp_path / "bundle").fitted.learners) >= set(params.models.parallel.members)
    return json.loads((tmp_path / "out" / "metrics.json").read_text())


SHORT = "training: {window: 56d, refit_every: 56d}\n"


def test_a_fleet_of_disks_is_learned_with_the_shipped_parameters_alone(tmp_path: Path) -> None:
    write_disks(tmp_path / "raw", devices=1200, days=154, seed=100, acceleration=15.0)
    metrics = run_shipped(
        tmp_path,
        ["disks"],
        SHORT,
        "disks-mapping",
        samples=[tmp_path / "raw" / "samples"],
        events=[tmp_path / "raw" / "events.parquet"],
        inventory=tmp_path / "raw" / "inventory.parquet",
    )
    measured = metrics["models"][metrics["profile"]]["sliding"]
    assert measured["average_precision"] > 3 * measured["base_rate"]
    assert measured["capture"] > 0.15


def test_daily_files_of_disks_are_samples_events_and_inventory_at_once(tmp_path: Path) -> None:
    write_disks(tmp_path / "raw", devices=500, days=126, seed=100, acceleration=25.0)
    days = daily_files(tmp_path / "raw", tmp_path / "days")
    metrics = run_shipped(
        tmp_path,
        ["disks", "disks-daily"],
        SHORT,
        "disks-daily-mapping",
        samples=[days],
        events=[days],
        inventory=days,
    )
    measured = metrics["models"][metrics["profile"]]["sliding"]
    assert measured["incidents"] > 10
    assert measured["roc_auc"] > 0.5
    matrix = FeatureMatrix.open(tmp_path / "matrix")
    assert matrix.unit == "node"
    assert {column.channel for column in matrix.columns if column.group == "static"} == {
        *("model", "age", "capacity_bytes"),
    }


def daily_files(raw: Path, out: Path) -> Path:
    """Write a generated fleet as daily files: dates without times, a 0/1 column for failures, odd values among them."""
    samples = pd.concat([pd.read_parquet(file) for file in sorted((raw / "samples").iterdir())])
    samples["day"] = samples["date"].dt.strftime("%Y-%m-%d")
    samples = samples.sort_values("date").drop_duplicates(["serial_number", "day"], keep="last")
    failed = set(pd.read_parquet(raw / "events.parquet")["serial_number"])
    last = samples.groupby("serial_number")["date"].transform("max") == samples["date"]
    inventory = pd.read_parquet(raw / "inventory.parquet").set_index("serial_number")
    rows = samples.assign(
        date=samples["day"],
        model=inventory["model"].reindex(samples["serial_number"]).to_numpy(),
        capacity_bytes=inventory["capacity_bytes"].reindex(samples["serial_number"]).to_numpy(),
        failure=(last & samples["serial_number"].isin(failed)).astype(int),
        smart_240_raw=2**55 + 1,
    ).drop(columns="day")
    rows.loc[rows.index[::97], "capacity_bytes"] = 0
    out.mkdir()
    for day, part in rows.groupby("date"):
        part.to_csv(out / f"{day}.csv", index=False)
    return out


def test_lifetimes_without_telemetry_are_learned_with_the_shipped_parameters_alone(tmp_path: Path) -> None:
    write_lifetimes(tmp_path / "raw", devices=1200, years=5, seed=100)
    metrics = run_shipped(
        tmp_path,
        ["lifetimes"],
        "training: {refit_every: 364d}\n",
        None,
        events=[tmp_path / "raw" / "events.csv"],
        inventory=tmp_path / "raw" / "inventory.csv",
    )
    measured = metrics["models"][metrics["profile"]]["sliding"]
    assert measured["roc_auc"] > 0.6
    assert measured["average_precision"] > 1.3 * measured["base_rate"]


def test_thousands_of_models_are_one_column(tmp_path: Path) -> None:
    write_lifetimes(tmp_path / "raw", devices=2500, years=3, seed=100)
    inventory = pd.read_csv(tmp_path / "raw" / "inventory.csv")
    inventory["model"] = [f"MAKER {i % 2100} REV {i % 2100}" for i in range(len(inventory))]
    inventory.to_csv(tmp_path / "raw" / "inventory.csv", index=False)
    metrics = run_shipped(
        tmp_path,
        ["lifetimes"],
        "features: {static: [model, age, cage]}\ntraining: {refit_every: 364d, window: 182d}\n",
        None,
        events=[tmp_path / "raw" / "events.csv"],
        inventory=tmp_path / "raw" / "inventory.csv",
    )
    matrix = FeatureMatrix.open(tmp_path / "matrix")
    (column,) = [each for each in matrix.columns if each.channel == "model"]
    assert len(column.categories) > 1400
    assert metrics["models"][metrics["profile"]]["sliding"]["incidents"] > 0
