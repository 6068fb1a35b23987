"""Fleets of other devices: channels nobody declared in the catalogue, no telemetry at all, nodes without GPUs."""

import json
from pathlib import Path

import pandas as pd

from features.matrix.matrix import FeatureMatrix
from models.bundle.store import load_bundle
from pipeline.matrix_stage import make_matrix
from pipeline.params import load_params
from pipeline.stages import backtest_matrix, train_bundle, write_report_for
from telemetry.dataset.channels import resolve_channels
from telemetry.importing.importer import import_dataset
from telemetry.importing.sampling import STEPS
from tests.light_models import lightgbm_alone
from tests.pipeline.device_fleets import write_disks, write_lifetimes

ROOT = Path(__file__).resolve().parents[2]

FEW_TREES = """
models: {settings: {lightgbm: {n_estimators: 40}, xgboost: {n_estimators: 20}, random_forest: {n_estimators: 40}}}
backtest: {bootstrap: 0}
"""
ALONE = lightgbm_alone(40, "backtest: {bootstrap: 0}\n")


def run_shipped(
    tmp_path: Path,
    names: list[str],
    more: str,
    mapping: str | None,
    *,
    trains: bool = True,
    **sources: Path | list[Path],
) -> tuple[FeatureMatrix, dict, pd.DataFrame]:
    """Import, build and replay with the parameters of ``params/``; ``trains``: with all learners, and fit a bundle."""
    (tmp_path / "more.yaml").write_text((FEW_TREES if trains else ALONE) + more)
    params = load_params([*(ROOT / "params" / f"{name}.yaml" for name in names), tmp_path / "more.yaml"])
    imported = import_dataset(
        tmp_path / "dataset",
        samples=sources.get("samples", ()),
        events=sources["events"],
        inventory=sources["inventory"],
        step=params.telemetry.step or STEPS[0],
        channels=resolve_channels(params.channels),
        dedupe=params.events.dedupe,
        delay=params.features.delay,
        mapping=None if mapping is None else ROOT / "params" / f"{mapping}.yaml",
    )
    assert imported.quarantined == {}
    matrix = make_matrix(tmp_path / "dataset", params, tmp_path / "matrix")
    backtest_matrix(matrix, params, tmp_path / "out")
    if trains:
        train_bundle(matrix, params, tmp_path / "bundle")
        assert set(load_bundle(tmp_path / "bundle").fitted.learners) >= set(params.models.parallel.members)
    write_report_for(tmp_path / "out")
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["simulated"] is None
    return matrix, metrics, pd.read_parquet(tmp_path / "out" / "predictions.parquet")


SHORT = "training: {window: 56d, refit_every: 56d}\n"


def test_a_fleet_of_disks_is_learned_with_the_shipped_parameters_alone(tmp_path: Path) -> None:
    write_disks(tmp_path / "raw", devices=800, days=154, seed=100)
    matrix, metrics, predictions = run_shipped(
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
    channels = {column.channel for column in matrix.columns if column.group == "telemetry"}
    assert {"smart_5_raw", "smart_197_raw"} <= channels
    assert predictions["gpu"].str.startswith("Z").all()


def test_daily_files_of_disks_are_samples_events_and_inventory_at_once(tmp_path: Path) -> None:
    write_disks(tmp_path / "raw", devices=200, days=112, seed=100)
    days = daily_files(tmp_path / "raw", tmp_path / "days")
    matrix, metrics, predictions = run_shipped(
        tmp_path, ["disks", "disks-daily"], SHORT, "disks-daily-mapping", trains=False,
        samples=[days], events=[days], inventory=days,
    )  # fmt: skip
    measured = metrics["models"][metrics["profile"]]["sliding"]
    assert measured["incidents"] > 10
    assert measured["roc_auc"] > 0.5
    assert matrix.unit == "node"
    assert predictions["gpu"].isna().all()
    assert not predictions.duplicated(["decision_time", "node"]).any()
    assert {column.channel for column in matrix.columns if column.group == "static"} == {
        *("model", "age", "capacity_bytes")
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
    write_lifetimes(tmp_path / "raw", slots=300, years=3, seed=100)
    matrix, metrics, _ = run_shipped(
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
    assert {column.group for column in matrix.columns} <= {"history", "static"}


def test_thousands_of_models_are_one_column(tmp_path: Path) -> None:
    write_lifetimes(tmp_path / "raw", slots=1200, years=1, seed=100)
    inventory = pd.read_csv(tmp_path / "raw" / "inventory.csv")
    inventory["model"] = [f"MAKER {i % 2100} REV {i % 2100}" for i in range(len(inventory))]
    inventory.to_csv(tmp_path / "raw" / "inventory.csv", index=False)
    matrix, metrics, _ = run_shipped(
        tmp_path,
        ["lifetimes"],
        "features: {static: [model, age, cage]}\ntraining: {refit_every: 273d, window: 91d}\n",
        None,
        trains=False,
        events=[tmp_path / "raw" / "events.csv"],
        inventory=tmp_path / "raw" / "inventory.csv",
    )
    (column,) = [column for column in matrix.columns if column.channel == "model"]
    assert len(column.categories) > 1400
    assert metrics["models"][metrics["profile"]]["sliding"]["incidents"] > 0
