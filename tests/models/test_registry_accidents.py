"""What people and disks do to a store: aliases removed, versions deleted, folders moved, disks full, two at once."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import InputError
from models.bundle.store import Bundle, save_bundle
from models.registry.champion import champion_history, crown, fetch_bundle, step_back, version_at
from models.registry.store import CHAMPION, DIGEST_TAG, log_run, opened_store, register_bundle
from tests.models.small_models import fitted_models

NAME = "predrain"


def run_of(uri: str) -> str:
    return log_run(uri, "predrain", name="train", params={}, metrics={}, tags={})


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Bundle]:
    folder = tmp_path_factory.mktemp("bundles")
    fitted = fitted_models()
    return [save_bundle(folder / f"{number}", fitted, {"profile": "mean_rank", "n": number}) for number in range(3)]


@pytest.fixture(scope="module")
def made(bundles: list[Bundle], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with three versions, each of which was champion."""
    folder = tmp_path_factory.mktemp("made") / "store"
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    assert register_bundle(uri, NAME, bundles[0].path, run_id=run_of(uri)) == 1
    with opened_store(uri) as mlflow:
        client = mlflow.MlflowClient()
        source = client.get_model_version(NAME, "1").source
        for bundle in bundles[1:]:
            client.create_model_version(NAME, source, tags={DIGEST_TAG: bundle.digest})
    for number in (1, 2, 3):
        crown(uri, NAME, number, expected=number - 1 or None, tags={})
    return folder


@pytest.fixture
def store(made: Path) -> Any:
    """The address of the store, which is as it was again after the test."""
    kept = Path(shutil.copytree(made, made.with_name("kept")))
    yield f"sqlite:///{made / 'mlflow.db'}"
    # in place: MLflow keeps a connection to the file for as long as the process lives
    shutil.copytree(kept, made, dirs_exist_ok=True)
    shutil.rmtree(kept)


def change(uri: str, deed: Callable[[Any], None]) -> None:
    with opened_store(uri) as mlflow:
        deed(mlflow.MlflowClient())


def test_a_model_whose_alias_was_removed_names_its_champions_and_how_to_restore_one(store: str) -> None:
    change(store, lambda client: client.delete_registered_model_alias(NAME, CHAMPION))
    history = champion_history(store, NAME)
    assert (history.champion, history.unseated) == (None, (1, 2, 3))
    with pytest.raises(InputError, match=r"version 3, version 2, version 1.*promote --to 3 --force"):
        history.refuse_unseated(NAME)


def test_a_deleted_champion_is_not_offered_for_restoring(store: str) -> None:
    change(store, lambda client: client.delete_model_version(NAME, "3"))
    with pytest.raises(InputError, match=r"version 2, version 1.*promote --to 2 --force"):
        champion_history(store, NAME).refuse_unseated(NAME)


def test_a_restored_champion_has_its_history_again(store: str) -> None:
    change(store, lambda client: client.delete_registered_model_alias(NAME, CHAMPION))
    crown(store, NAME, 2, expected=None, tags={})
    assert champion_history(store, NAME).history == (1, 2)
    assert step_back(store, NAME, expected=2, tags={}) == 1


def test_a_rollback_passes_over_a_deleted_version(store: str) -> None:
    change(store, lambda client: client.delete_model_version(NAME, "2"))
    assert champion_history(store, NAME).previous == 1
    assert step_back(store, NAME, expected=3, tags={}) == 1
    assert champion_history(store, NAME).history == (1,)


def test_a_model_without_any_champion_so_far_is_no_error(bundles: list[Bundle], tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    register_bundle(uri, NAME, bundles[0].path, run_id=run_of(uri))
    history = champion_history(uri, NAME)
    history.refuse_unseated(NAME)
    assert (history.champion, history.unseated) == (None, ())


def test_a_moved_store_says_where_its_files_are_recorded_and_writes_nothing_there(
    store: str, made: Path, bundles: list[Bundle], tmp_path: Path
) -> None:
    moved = Path(shutil.copytree(made, tmp_path / "moved"))
    elsewhere = made.rename(made.with_name("elsewhere"))
    uri = f"sqlite:///{moved / 'mlflow.db'}"
    try:
        for deed in (
            lambda: fetch_bundle(uri, NAME, version_at(uri, NAME, 1), tmp_path),
            lambda: register_bundle(uri, NAME, bundles[0].path, run_id="any"),
            lambda: run_of(uri),
        ):
            with pytest.raises(InputError, match=f"moved or copied.*ln -s {moved} {made}"):
                deed()
            assert not made.exists()
        made.symlink_to(moved)  # as advised
        assert fetch_bundle(uri, NAME, version_at(uri, NAME, 1), tmp_path).is_dir()
        made.unlink()
    finally:
        elsewhere.rename(made)


def test_a_copy_of_a_store_does_not_write_among_the_originals_files(
    made: Path, bundles: list[Bundle], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(made, tmp_path / "copy"))
    before = sorted(made.rglob("*"))
    with pytest.raises(InputError, match="moved or copied"):
        register_bundle(f"sqlite:///{copy / 'mlflow.db'}", NAME, bundles[0].path, run_id="any")
    assert sorted(made.rglob("*")) == before


def test_a_bundle_whose_files_were_deleted_is_registered_again(
    store: str, made: Path, bundles: list[Bundle], tmp_path: Path
) -> None:
    shutil.rmtree(made / "mlartifacts" / "predrain" / "models")
    number = register_bundle(store, NAME, bundles[0].path, run_id=run_of(store))
    assert number == 4
    version = version_at(store, NAME, number)
    assert version.digest == bundles[0].digest
    assert (fetch_bundle(store, NAME, version, tmp_path) / "manifest.json").is_file()
    with pytest.raises(InputError, match="the digest of the bundle is"):
        fetch_bundle(store, NAME, replace(version, digest=bundles[1].digest), tmp_path)


ACCIDENTS = """
import os, resource, signal, sys
from foundation.errors import InputError
from models.registry.store import log_run
from models.registry.store import opened_store
import mlflow  # before the limit: its first import writes caches

full, raced = sys.argv[1:]

def record(uri, name):
    return log_run(uri, "predrain", name=name, params={}, metrics={}, tags={})

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
try:
    record(full, "on a full disk")
except InputError as error:
    print(error.what, "|", error.do)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(record(full, "once there is space"))
child = os.fork()
record(raced, "parent" if child else "child")
if child:
    print(os.waitpid(child, 0)[1])
"""


@pytest.fixture(scope="module")
def accidents(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of two new stores, ``full.db`` and ``raced.db``, and what became of them; one process, for MLflow's
    import takes seconds."""
    folder = tmp_path_factory.mktemp("accidents")
    stores = [f"sqlite:///{folder / name}" for name in ("full.db", "raced.db")]
    command = [sys.executable, "-c", ACCIDENTS, *stores]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout.splitlines()


def test_a_store_that_a_full_disk_kept_from_being_made_is_made_by_the_next_run(
    accidents: tuple[Path, list[str]],
) -> None:
    folder, (refused, run_id, _) = accidents
    assert "disk" in refused
    assert "space" in refused or "full" in refused
    with opened_store(f"sqlite:///{folder / 'full.db'}") as mlflow:
        assert mlflow.MlflowClient().get_run(run_id).info.run_name == "once there is space"
    assert not list(folder.glob(".*.new*"))


def test_two_first_recordings_on_a_new_store_both_succeed(accidents: tuple[Path, list[str]]) -> None:
    folder, (_, _, child_exit) = accidents
    assert child_exit == "0"
    with opened_store(f"sqlite:///{folder / 'raced.db'}") as mlflow:
        client = mlflow.MlflowClient()
        (experiment,) = client.search_experiments(filter_string="name = 'predrain'")
        names = {run.info.run_name for run in client.search_runs([experiment.experiment_id])}
    assert names == {"parent", "child"}
