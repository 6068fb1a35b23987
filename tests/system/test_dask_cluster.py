"""Features, a backtest and training on a Dask cluster of processes of their own, one of which is killed on the way."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from features.matrix.matrix import FeatureMatrix
from tests.features.small_fleet import events_of, gpus, inventory_of, write_dataset, xid
from tests.processes import PREDRAIN, ROOT, predrain, running
from tests.waiting import wait

DEADLINE_S = 600.0
pytestmark = pytest.mark.system
PARAMS = """
models:
  learners: [lightgbm, logistic]
  parallel: {members: [lightgbm, logistic]}
  cascade: {stages: [lightgbm, logistic]}
  settings: {lightgbm: {n_estimators: 10}}
features: {groups: [history, static], history_windows: [1d, 7d]}
training: {candidate_windows: [5d, 7d], refit_every: 3d, augmentation: 1}
backtest: {bootstrap: 5}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    address_file = tmp_path / "scheduler.json"
    with contextlib.ExitStack() as stack:

        def start(module: str, *options: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", f"distributed.cli.{module}", "--scheduler-file", address_file, *options]
            return stack.enter_context(running(command, tmp_path / "cluster.log"))

        start("dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0")
        wait(address_file.exists)
        options = ("--no-nanny", "--nthreads", "1", "--no-dashboard", "--local-directory", str(tmp_path))
        workers = [start("dask_worker", *options) for _ in range(2)]
        yield json.loads(address_file.read_text())["address"], workers


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    rng = np.random.default_rng(105)
    hours = 24 * 18
    events = []
    for at in np.sort(rng.uniform(5, hours - 5, 50)):
        gpu = int(rng.integers(0, 16))
        events.append(xid(float(at), f"gpu{gpu:02d}", f"node{gpu // 4}", "79"))
    write_dataset(tmp_path / "fleet", inventory_of(gpus(16)), hours=hours, events=events_of(events))
    return tmp_path / "fleet"


def test_a_backtest_on_a_cluster_that_loses_a_worker_is_the_same_bit_for_bit(cluster, dataset, tmp_path):
    address, workers = cluster
    params = tmp_path / "small.yaml"
    params.write_text(PARAMS)
    here, there = tmp_path / "here", tmp_path / "there"
    common = ("backtest", "--dataset", str(dataset), "--params", str(params), "--no-report")
    predrain(*common, "--out", str(here))
    command = [*PREDRAIN, *common, "--out", str(there)]
    options = ["--engine", "dask", "--dask-address", address]
    with subprocess.Popen([*command, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as driver:
        wait(lambda: driver.poll() is not None or any(there.glob(".fits/*/*")))
        workers[0].kill()
        output, _ = driver.communicate(timeout=DEADLINE_S)
    assert driver.returncode == 0, output.decode()
    assert FeatureMatrix.open(there / "matrix").digest == FeatureMatrix.open(here / "matrix").digest
    for name in ("predictions.parquet", "predictions_all.parquet"):
        pd.testing.assert_frame_equal(pd.read_parquet(there / name), pd.read_parquet(here / name), check_exact=True)
    assert json.loads((there / "metrics.json").read_text()) == json.loads((here / "metrics.json").read_text())
