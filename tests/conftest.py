"""Fixtures that several rooms' tests share: a small simulated fleet, its matrix, and a finished backtest of it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

from pipeline.params import Params, load_params

# No deadline: how fast it is is measured in benchmarks/. The same examples each time, so that what passes here passes
# in CI; `pytest --hypothesis-profile=thorough` draws others, and more.
settings.register_profile("predrain", deadline=None, max_examples=50, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile("predrain")

SMALL = """
models:
  learners: [lightgbm, logistic]
  parallel: {members: [lightgbm, xgboost, logistic]}
  cascade: {stages: [lightgbm, logistic]}
  settings: {lightgbm: {n_estimators: 20}, xgboost: {n_estimators: 20}}
features: {windows: [6h], history_windows: [7d, 30d]}
training: {candidate_windows: [14d, 21d], refit_every: 14d, augmentation: 2}
backtest: {bootstrap: 20}
"""

LIGHT = """
models:
  learners: [lightgbm, logistic]
  parallel: {members: [lightgbm, logistic]}
  cascade: {stages: [lightgbm, logistic]}
  settings: {lightgbm: {n_estimators: 10}}
features: {groups: [history, static], history_windows: [7d]}
training: {candidate_windows: [14d], refit_every: 14d, augmentation: 1}
backtest: {bootstrap: 5}
"""

LONGEST = ("test_whole_loop_slurm.py", "test_whole_loop_kubernetes.py", "test_loop_killed.py", "test_images.py")
"""Files that start first, so that no worker ends with one of them while the other has nothing left to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, the longest of all at the front."""
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONGEST)))


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that one worker makes while the others wait for it; it is read-only."""
    shared = factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder, building = shared / name, shared / f"{name}.building"
    with FileLock(f"{folder}.lock", fallback_to_soft=False):
        if not folder.exists():
            building.mkdir()
            make(building)
            building.rename(folder)
    return folder


@pytest.fixture(scope="session")
def small_params_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parameters that keep a backtest of the small fleet to some seconds."""
    path = tmp_path_factory.mktemp("params") / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="session")
def light_params_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parameters for tests of how a model is made, not of the model: few kernels to compile, small learners."""
    path = tmp_path_factory.mktemp("params") / "light.yaml"
    path.write_text(LIGHT)
    return path


@pytest.fixture(scope="session")
def small_params(small_params_file: Path) -> Params:
    """The same, loaded."""
    return load_params([small_params_file])


@pytest.fixture(scope="session")
def small_fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated fleet of 64 GPUs over 45 days with many failures; its truth lies beside it."""
    from simulator.simulate import simulate

    def make(folder: Path) -> None:
        simulate(folder / "fleet", gpus=64, days=45, seed=5, scenario="base", acceleration=60.0)

    return made_once(tmp_path_factory, "small-fleet", make) / "fleet"


@pytest.fixture(scope="session")
def small_backtest(small_fleet: Path, small_params: Params, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a finished backtest of the small fleet, report included."""
    from pipeline.matrix_stage import make_matrix
    from pipeline.stages import backtest_matrix, write_report_for

    def make(out: Path) -> None:
        matrix = make_matrix(small_fleet, small_params, out / "matrix")
        backtest_matrix(matrix, small_params, out, truth=small_fleet.with_name("fleet-truth"))
        write_report_for(out)

    return made_once(tmp_path_factory, "small-backtest", make)


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow store with its tables, which take seconds to make; copy it."""
    from models.registry.store import opened_store

    def make(folder: Path) -> None:
        with opened_store(f"sqlite:///{folder / 'mlflow.db'}") as mlflow:
            mlflow.MlflowClient().search_registered_models()

    return made_once(tmp_path_factory, "empty-store", make) / "mlflow.db"
