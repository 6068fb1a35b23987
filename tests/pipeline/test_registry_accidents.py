"""What people, disks and other processes do to an MLflow store, and what the commands answer.

Each command's exit code, message and metrics, and the registry's state after it.
"""

import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from models.bundle.store import load_bundle
from models.registry.champion import champion_history, fetch_bundle, promotion_lock, version_at
from models.registry.store import CHAMPION, opened_store
from serving.scores.writing import TEXTFILE
from tests.processes import ROOT, invoke

NAME = "predrain"


@dataclass(frozen=True)
class Site:
    """A fleet whose matrix is made, and a store with versions 1 to 3, each of which was champion."""

    folder: Path
    params: Path

    @property
    def dataset(self) -> Path:
        return self.folder / "fleet"

    @property
    def matrix(self) -> Path:
        return self.folder / "fleet-matrix"

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def train(self, store: str, out: Path, until: str = "2026-02-01") -> tuple[object, ...]:
        data = ("--matrix", self.matrix, "--params", self.params, "--until", until)
        return ("train", *data, "--out", out, "--registry", store)

    def retrain(self, store: str) -> tuple[object, ...]:
        return ("retrain", "--dataset", self.dataset, "--params", self.params, "--registry", store)

    def score(self, store: str, out: Path) -> tuple[object, ...]:
        data = ("--dataset", self.dataset, "--params", self.params)
        return ("score", *data, "--model", "champion", "--out", out, "--registry", store)

    def retrained(self) -> bool:
        return "predrain_retrain_success 1" in (self.folder / "fleet-retrain.prom").read_text().splitlines()


def scored(out: Path) -> bool:
    return "predrain_score_success 1" in (out / TEXTFILE).read_text().splitlines()


def store_at(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"


@pytest.fixture(scope="module")
def site(
    small_fleet: Path, light_params_file: Path, empty_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Site:
    new_site = Site(tmp_path_factory.mktemp("site"), light_params_file)
    shutil.copytree(small_fleet, new_site.dataset)
    new_site.store.mkdir()
    shutil.copy(empty_store, new_site.store)
    invoke("features", "--dataset", new_site.dataset, "--params", new_site.params, "--out", new_site.matrix)
    for until in ("2026-01-25", "2026-01-28", "2026-02-01"):
        invoke(*new_site.train(store_at(new_site.store), new_site.folder / until, until))
        invoke("promote", "--force", "--reason", "the test begins", "--registry", store_at(new_site.store))
    return new_site


@pytest.fixture
def store(site: Site) -> Iterator[str]:
    """The address of the store, which has its first content again after the test."""
    copy = Path(shutil.copytree(site.store, site.folder / "copy"))
    yield store_at(site.store)
    # in place: MLflow keeps a connection to the file for as long as the process lives
    shutil.copytree(copy, site.store, dirs_exist_ok=True)
    shutil.rmtree(copy)


def change(store: str, edit: Callable[[Any], None]) -> None:
    with opened_store(store) as mlflow:
        edit(mlflow.MlflowClient())


def refused(arguments: tuple[object, ...], store: str, *messages: str) -> None:
    """Run a command that fails, says why, and leaves the registry as it was."""
    history = champion_history(store, NAME)
    output = " ".join(invoke(*arguments, code=1).output.split())
    assert [message for message in messages if message not in output] == [], output
    assert champion_history(store, NAME) == history


@pytest.mark.parametrize(
    ("deleted", "messages"),
    [
        ((), ("version 3, version 2, version 1", "promote --to 3 --force")),
        ((3,), ("version 2, version 1", "promote --to 2 --force")),
        ((1, 2, 3), ("all of them are deleted",)),
    ],
)
def test_no_other_version_takes_the_place_of_a_champion_that_was_removed(
    site: Site, store: str, tmp_path: Path, deleted: tuple[int, ...], messages: tuple[str, ...]
) -> None:
    def remove(client: Any) -> None:
        if not deleted:
            client.delete_registered_model_alias(NAME, CHAMPION)
        for version in deleted:
            client.delete_model_version(NAME, str(version))

    change(store, remove)
    refused(site.retrain(store), store, *messages)
    refused(site.score(store, tmp_path / "scores"), store, *messages)
    refused(("promote", "--force", "--reason", "to whom?", "--registry", store), store, *messages)
    refused(("promote", "--rollback", "--registry", store), store, *messages)
    assert not site.retrained()
    assert not scored(tmp_path / "scores")


def test_a_restored_champion_scores_and_has_its_history_again(site: Site, store: str, tmp_path: Path) -> None:
    change(store, lambda client: client.delete_registered_model_alias(NAME, CHAMPION))
    restored = invoke("promote", "--to", 2, "--force", "--reason", "the alias was removed", "--registry", store)
    assert "version 2 was promoted by force" in restored.output
    assert champion_history(store, NAME).history == (1, 2)
    invoke(*site.score(store, tmp_path / "scores"))
    assert scored(tmp_path / "scores")


def test_a_rollback_passes_over_a_deleted_version(store: str) -> None:
    change(store, lambda client: client.delete_model_version(NAME, "2"))
    assert "rolled back to version 1" in invoke("promote", "--rollback", "--registry", store).output
    assert champion_history(store, NAME).history == (1,)
    refused(("promote", "--rollback", "--registry", store), store, "version 1 has no previous champion")


def test_a_moved_store_is_refused_with_the_link_that_repairs_it(site: Site, store: str, tmp_path: Path) -> None:
    moved = site.store.rename(site.folder / "moved")
    repair = f"ln -s {moved} {site.store}"
    try:
        for arguments in (
            site.score(store_at(moved), tmp_path / "scores"),
            site.retrain(store_at(moved)),
            site.train(store_at(moved), tmp_path / "bundle"),
        ):
            refused(arguments, store_at(moved), "moved or copied", repair)
            assert not site.store.exists(), "nothing is written where the store was"
        assert not scored(tmp_path / "scores")
        assert not site.retrained()
        site.store.symlink_to(moved)  # as advised
        invoke(*site.score(store_at(moved), tmp_path / "scores"))
        assert scored(tmp_path / "scores")
    finally:
        site.store.unlink(missing_ok=True)
        moved.rename(site.store)


def test_a_copy_of_a_store_does_not_write_among_the_originals_files(site: Site, store: str, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(site.store, tmp_path / "copy"))
    files = sorted(site.store.rglob("*"))
    refused(site.train(store_at(copy), tmp_path / "bundle"), store_at(copy), "moved or copied")
    assert sorted(site.store.rglob("*")) == files


def test_a_version_whose_files_were_deleted_is_registered_again_as_advised(
    site: Site, store: str, tmp_path: Path
) -> None:
    scores = tmp_path / "scores"
    shutil.rmtree(site.store / "mlartifacts" / NAME / "models")
    refused(site.score(store, scores), store, "contains no bundles", "predrain train --registry")
    assert not scored(scores)
    invoke(*site.train(store, tmp_path / "bundle"))
    invoke("promote", "--to", 4, "--force", "--reason", "its files are there", "--registry", store)
    invoke(*site.score(store, scores))
    assert scored(scores)
    assert champion_history(store, NAME).history == (1, 2, 3, 4)


@contextmanager
def space(bytes_: int) -> Iterator[None]:
    """Let no file be written beyond a size: the system refuses it, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_named_and_leaves_a_store_that_works_once_there_is_space(
    site: Site, store: str, tmp_path: Path
) -> None:
    history = champion_history(store, NAME)
    with space((site.store / "mlflow.db").stat().st_size):
        failed = invoke(*site.retrain(store), code=1)
    assert "disk" in failed.stderr
    assert "Traceback" not in failed.stderr, failed.stderr
    assert not site.retrained()
    assert champion_history(store, NAME) == history
    assert "promoted" in invoke(*site.retrain(store)).output
    assert site.retrained()
    assert champion_history(store, NAME).history == (1, 2, 3, 4)


def test_a_new_store_that_a_full_disk_prevented_is_created_by_the_next_run(site: Site, tmp_path: Path) -> None:
    store = store_at(tmp_path)
    with space(100_000):
        failed = invoke(*site.train(store, tmp_path / "bundle"), code=1)
    assert "disk" in failed.stderr
    assert "Traceback" not in failed.stderr, failed.stderr
    assert not list(tmp_path.glob("*.db")) + list(tmp_path.glob(".*.new*")), "no half store"
    assert not (tmp_path / "bundle").exists(), "it fails before the fit"
    invoke(*site.train(store, tmp_path / "bundle"))
    assert version_at(store, NAME, 1).digest == load_bundle(tmp_path / "bundle").digest


COMMAND = """
import sys
import mlflow
from predrain.command import main
print("ready", flush=True)
sys.stdin.readline()
main()
"""


def test_two_first_trainings_at_once_register_both_bundles(site: Site, tmp_path: Path) -> None:
    store, bundles = store_at(tmp_path), [tmp_path / "first", tmp_path / "second"]
    pipe: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | {"text": True}
    processes = []
    for bundle, until in zip(bundles, ("2026-01-25", "2026-02-01"), strict=True):
        arguments = map(str, site.train(store, bundle, until))
        processes.append(subprocess.Popen([sys.executable, "-c", COMMAND, *arguments], cwd=ROOT, **pipe))
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:  # both have imported MLflow, so they create the store at the same time
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        assert "challenger   predrain version" in output
        assert "Traceback" not in errors, errors
    history = champion_history(store, NAME)
    assert (history.versions, history.champion) == ({1, 2}, None)
    versions = [version_at(store, NAME, number) for number in (1, 2)]
    assert {version.digest for version in versions} == {load_bundle(bundle).digest for bundle in bundles}
    for version in versions:
        fetch_bundle(store, NAME, version, tmp_path / f"fetched-{version.number}")
    waiting = invoke(*site.score(store, tmp_path / "scores"))
    assert "waiting" in waiting.output, "no version is champion yet, which is no failure"
    assert not (tmp_path / "scores" / TEXTFILE).exists(), "and no success"


def test_a_retraining_beside_another_is_refused_before_it_registers_anything(site: Site, store: str) -> None:
    with promotion_lock(store):
        refused(site.retrain(store), store, "another promotion is running", "Wait for its end")
    assert not site.retrained()
