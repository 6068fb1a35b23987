"""Datasets on S3-compatible storage, as a user of the command meets them."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from features.matrix.matrix import FeatureMatrix
from tests.features.small_fleet import events_of, gpus, inventory_of, samples_of, write_dataset, xid
from tests.object_storage import Storage, object_storage, upload
from tests.processes import invoke
from tests.serving.batch_world import make_world

PLACE = "s3://telemetry/fleets/east"
PARAMS = """
models:
  learners: [lightgbm, logistic]
  parallel: {members: [lightgbm, logistic]}
  cascade: {stages: [lightgbm, logistic]}
  settings: {lightgbm: {n_estimators: 10}}
features: {groups: [telemetry, history, static], windows: [6h], history_windows: [1d, 7d]}
training: {candidate_windows: [5d, 7d], refit_every: 3d, augmentation: 1}
backtest: {bootstrap: 5}
"""


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    with object_storage(tmp_path_factory.mktemp("storage") / "server.log") as running:
        running.direct.create_dir("telemetry")
        yield running


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, storage: Storage) -> Path:
    """A folder with parameters and a dataset, which lies in the bucket too."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "params.yaml").write_text(PARAMS)
    rng = np.random.default_rng(105)
    hours = 24 * 18
    inventory = inventory_of(gpus(16))
    events = []
    for at in np.sort(rng.uniform(5, hours - 5, 50)):
        gpu = int(rng.integers(0, 16))
        events.append(xid(float(at), f"gpu{gpu:02d}", f"node{gpu // 4}", "79"))
    write_dataset(
        folder / "fleet", inventory, hours=hours, samples=samples_of(inventory, hours), events=events_of(events)
    )
    upload(storage, folder / "fleet", PLACE.removeprefix("s3://"))
    return folder


def result_of(storage: Storage, *arguments: str, cwd: Path) -> dict:
    return json.loads(invoke(*arguments, "--json", cwd=cwd, **storage.environment).stdout)


@pytest.mark.system
def test_features_and_a_backtest_of_a_stored_dataset_are_those_of_the_folder(storage: Storage, home: Path) -> None:
    result_of(storage, "features", "--dataset", "fleet", "--out", "matrix-here", cwd=home)
    result_of(storage, "features", "--dataset", PLACE, "--out", "matrix-there", cwd=home)
    result_of(storage, "backtest", "--dataset", PLACE, "--out", "replay", "--no-report", cwd=home)
    digest = FeatureMatrix.open(home / "matrix-here").digest
    assert FeatureMatrix.open(home / "matrix-there").digest == digest
    assert FeatureMatrix.open(home / "replay" / "matrix").digest == digest
    assert (home / "replay" / "predictions.parquet").is_file()


@pytest.mark.system
def test_workers_of_a_cluster_read_the_stored_dataset_by_themselves(storage: Storage, home: Path) -> None:
    pytest.importorskip("distributed")
    result_of(storage, "features", "--dataset", "fleet", "--out", "matrix-alone", cwd=home)
    options = ("--engine", "dask", "--dask-workers", "1")
    result_of(storage, "features", "--dataset", PLACE, "--out", "matrix-dask", *options, cwd=home)
    assert FeatureMatrix.open(home / "matrix-dask").digest == FeatureMatrix.open(home / "matrix-alone").digest


@pytest.mark.system
def test_a_fleet_is_scored_from_storage_as_from_the_folder(storage: Storage, tmp_path: Path) -> None:
    world = make_world(tmp_path)
    place = "s3://telemetry/fleets/scored"
    upload(storage, world.dataset.path, place.removeprefix("s3://"))
    frames = []
    for out, dataset in (("here", str(world.dataset.path)), ("there", place)):
        result_of(storage, "score", "--dataset", dataset, "--model", str(world.bundle.path), "--out", out, cwd=tmp_path)
        (file,) = (tmp_path / out).rglob("*.parquet")
        frames.append(pd.read_parquet(file).drop(columns="issued_at"))
    pd.testing.assert_frame_equal(frames[1], frames[0], check_exact=True)
    assert frames[0]["risk"].notna().sum() > 3


def test_the_doctor_reads_a_stored_dataset_like_a_folder(storage: Storage, home: Path) -> None:
    here = invoke("doctor", "fleet", "--json", cwd=home, code=1, **storage.environment)
    there = invoke("doctor", PLACE, "--json", cwd=home, code=1, **storage.environment)
    assert there.stderr == here.stderr
    local, stored = json.loads(here.stdout), json.loads(there.stdout)
    for observed in (local, stored):
        del observed["source"]["at"]
    assert (local["source"].pop("where"), stored["source"].pop("where")) == ("fleet", PLACE)
    assert stored == local


@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate", "--gpus", "8", "--days", "1", "--out", PLACE),
        ("features", "--dataset", "fleet", "--out", PLACE),
        ("train", "--matrix", "matrix", "--out", PLACE),
        ("collect", "compact", "--dataset", PLACE),
        ("score", "--dataset", "fleet", "--model", PLACE, "--out", "scores", "--interval", "1m"),
    ],
)
def test_what_needs_a_folder_says_so_and_makes_none(storage: Storage, tmp_path: Path, arguments) -> None:
    refused = invoke(*arguments, cwd=tmp_path, code=1, **storage.environment)
    assert "a local folder is required, not S3-compatible storage" in refused.stderr
    assert "copy the dataset from the bucket" in refused.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("s3")] == []


def test_an_error_of_the_storage_is_one_line_and_exit_code_1(storage: Storage, tmp_path: Path) -> None:
    arguments = ("features", "--dataset", "s3://nobody/fleet", "--out", "matrix")
    failed = invoke(*arguments, cwd=tmp_path, code=1, **storage.environment)
    assert failed.stderr.splitlines() == [
        "predrain: error: there is no bucket 'nobody' (s3://nobody/fleet). "
        "Check its name and AWS_ENDPOINT_URL, or create it."
    ]
