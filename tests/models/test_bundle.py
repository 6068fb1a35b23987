"""Saving and loading everything that one refit made."""

import errno
import importlib.metadata
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import skops.io

from foundation.errors import InputError
from models.bundle import serialization
from models.bundle.manifest import manifest_bytes
from models.bundle.serialization import FitStore, read_learner, write_learner
from models.bundle.store import load_bundle, save_bundle
from models.learners.factory import Fit, FitRows, make_learner
from tests.models.small_models import COLUMNS, fitted_models, score

ROOT = Path(__file__).resolve().parents[2]
FACTS = {"profile": "mean_rank", "dataset_digest": "d1", "code_revision": "c1", "params": {"seed": 42}}


@pytest.fixture
def bundle(tmp_path):
    return save_bundle(tmp_path / "bundle", fitted_models(), FACTS).path


def manifest_of(path):
    return json.loads((path / "manifest.json").read_text())


def rewrite(path, change):
    content = manifest_of(path)
    change(content)
    (path / "manifest.json").write_bytes(manifest_bytes(content))


def refuse(path):
    with pytest.raises(InputError) as raised:
        load_bundle(path)
    return raised.value


def test_scores_after_loading_are_bit_identical(bundle):
    loaded = load_bundle(bundle)
    pd.testing.assert_frame_equal(score(loaded.fitted), score(fitted_models()), check_exact=True)
    assert loaded.fitted.columns == COLUMNS
    assert loaded.fitted.calibrators == fitted_models().calibrators
    assert loaded.profile == "mean_rank"


def test_no_pickle_is_written_or_read(tmp_path, monkeypatch):
    def explode(*args, **kwargs):
        raise AssertionError("pickle was used")

    fitted_models()
    for name in ("load", "loads", "dump", "dumps", "Unpickler", "Pickler", "_Unpickler", "_Pickler"):
        monkeypatch.setattr(pickle, name, explode)
    path = save_bundle(tmp_path / "bundle", fitted_models(), FACTS).path
    score(load_bundle(path).fitted)
    for file in path.rglob("*.skops"):
        assert all(name.endswith((".json", ".npy")) for name in zipfile.ZipFile(file).namelist())


def test_the_same_models_give_the_same_bytes_also_after_loading(tmp_path, bundle):
    again = save_bundle(tmp_path / "again", load_bundle(bundle).fitted, FACTS)
    assert again.digest == load_bundle(bundle).digest
    files = sorted(path.relative_to(bundle) for path in bundle.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(again.path) for path in again.path.rglob("*") if path.is_file())
    for file in files:
        assert (bundle / file).read_bytes() == (again.path / file).read_bytes(), file


def test_the_manifest_holds_what_an_auditor_asks(bundle):
    manifest = manifest_of(bundle)
    assert manifest["params"] == {"seed": 42}
    assert manifest["dataset_digest"] == "d1"
    assert manifest["fitted"]["span_seconds"] == 28 * 86_400
    assert [feature["name"] for feature in manifest["features"]] == [column.name for column in COLUMNS]
    assert set(manifest["libraries"]) == {"lightgbm", "numpy", "scikit-learn", "skops", "xgboost"}
    on_disk = {path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file()}
    assert set(manifest["files"]) == on_disk - {"manifest.json"}
    assert "lightgbm.txt" in str(on_disk)
    assert "xgboost.json" in str(on_disk)


def test_undefined_metrics_are_null_and_the_card_shows_the_others(tmp_path):
    metrics = {
        "k": 5, "first_time": "a", "last_time": "b",
        "models": {"mean_rank": {"sliding": {
            "precision_at_k": np.float64(0.25), "precision_at_k_low": 0.1, "precision_at_k_high": 0.4,
            "recall": float("nan"),
        }}},
    }  # fmt: skip
    path = save_bundle(tmp_path / "b", fitted_models(), {**FACTS, "metrics": metrics, "simulated": {"seed": 7}}).path
    assert manifest_of(path)["metrics"]["models"]["mean_rank"]["sliding"]["recall"] is None
    card = (path / "MODEL_CARD.md").read_text()
    assert "| precision at K | 25 % | [10 %, 40 %] |" in card
    assert "| incidents caught | undefined |  |" in card
    assert "**The fleet was simulated** (seed 7)" in card
    assert "50 positive rows (of which 10 augmented) of 9 incidents" in card


def test_models_that_a_baseline_stands_in_for_are_saved_too(tmp_path):
    nothing = replace(fitted_models(), learners={}, cascade=None, stand_in="history_count", calibrated=False)
    path = save_bundle(tmp_path / "b", nothing, FACTS).path
    pd.testing.assert_frame_equal(score(load_bundle(path).fitted), score(nothing), check_exact=True)
    card = (path / "MODEL_CARD.md").read_text()
    assert "replaced by `history_count`" in card
    assert "Risks are not calibrated" in card


@pytest.mark.parametrize("file", ["learners/lightgbm.txt", "learners/mlp.skops", "MODEL_CARD.md"])
def test_a_changed_file_is_refused(bundle, file):
    content = bytearray((bundle / file).read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / file).write_bytes(content)
    error = refuse(bundle)
    assert "its SHA-256 differs" in error.problem
    assert error.location == str(bundle / file)


def test_a_missing_file_is_refused(bundle):
    (bundle / "learners" / "xgboost.json").unlink()
    assert str(refuse(bundle)).startswith("xgboost.json is missing (")


def test_no_bundle_and_no_json_have_their_own_errors(tmp_path, bundle):
    assert str(refuse(tmp_path / "nowhere")).startswith(f"no bundle in {tmp_path / 'nowhere'} (")
    (bundle / "manifest.json").write_text("{")
    assert refuse(bundle).problem.startswith("manifest.json is not JSON:")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format=99), "version 99, but this code reads 5"),
        (lambda m: m["libraries"].update(lightgbm="3.3.1"), "written with lightgbm 3.3.1, but this is "),
        (lambda m: m["libraries"].pop("skops"), "written with skops None, but this is "),
        (lambda m: m["fitted"].pop("stacker"), "fitted.stacker: Field required"),
        (lambda m: m.pop("files"), "missing: 'files'"),
        (lambda m: m["files"].update({"../x": "0"}), "refers to a file outside the bundle: ../x"),
        (lambda m: m["files"].update({"/etc/hostname": "0"}), "refers to a file outside the bundle: /etc/hostname"),
        (lambda m: m["fitted"]["learners"].append("svm"), "fitted.learners.5: String should match"),
        (lambda m: m.update(profile="svm"), "profile"),
        (lambda m: m["fitted"].update(kk=5), "fitted.kk: Extra inputs are not"),
        (lambda m: m["files"].pop("learners/lightgbm.txt"), "lightgbm.txt is missing from the manifest"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(bundle, change, message):
    rewrite(bundle, change)
    assert message in refuse(bundle).problem


def test_a_library_that_is_not_installed_is_not_compared(bundle, monkeypatch):
    installed = importlib.metadata.version

    def version(name):
        if name in ("xgboost-cpu", "xgboost"):
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    rewrite(bundle, lambda m: m["libraries"].update(xgboost="9.0.0"))
    assert load_bundle(bundle).profile == "mean_rank"
    rewrite(bundle, lambda m: m["libraries"].update(numpy="1.26.0"))
    assert refuse(bundle).problem.startswith("the bundle was written with numpy 1.26.0, but this is 2")


def replaced(bundle, file, content):
    import hashlib

    (bundle / file).write_bytes(content)
    rewrite(bundle, lambda m: m["files"].update({file: hashlib.sha256(content).hexdigest()}))


def test_a_type_that_is_not_trusted_is_refused_unread(bundle):
    from models.calibration.fitting import Calibrator

    replaced(bundle, "learners/mlp.skops", skops.io.dumps(Calibrator("sigmoid")))
    error = refuse(bundle)
    assert error.problem == "the learner's file has untrusted types: models.calibration.fitting.Calibrator"
    assert error.advice == "Do not use this bundle. Train a new one."


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("learners/mlp.skops", skops.io.dumps({"a": 1}), "not a readable mlp model: it holds a dict"),
        ("learners/mlp.skops", b"junk", "not a readable mlp model: "),
        ("learners/xgboost.json", b"junk", "not a readable xgboost model: "),
        ("learners/lightgbm.txt", b"junk", "not a readable lightgbm model: "),
    ],
)
def test_a_file_that_is_no_model_is_refused(bundle, file, content, message, capfd):
    replaced(bundle, file, content)
    assert refuse(bundle).problem.startswith(message)


@pytest.mark.parametrize(
    "change", [lambda raw: raw.replace(b'"k": 5', b'"k": 6'), lambda raw: raw + b" "], ids=["a value", "a blank"]
)
def test_a_changed_manifest_is_refused(bundle, change):
    file = bundle / "manifest.json"
    file.write_bytes(change(file.read_bytes()))
    assert refuse(bundle).problem == "manifest.json was changed after it was saved: its digest does not match"


def test_threads_that_keep_learners_write_one_at_a_time(tmp_path, monkeypatch):
    writing, most = [], []

    def write(name, _learner, path):
        writing.append(name)
        most.append(len(writing))
        time.sleep(0.02)
        path.touch()
        writing.remove(name)

    monkeypatch.setattr(serialization, "write_learner", write)
    rows = FitRows(np.zeros((4, 2)), np.array([0, 1, 0, 1]))
    fits = [Fit("random_forest", make_learner("random_forest", seed=seed), rows) for seed in range(6)]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda fit: FitStore(tmp_path)(fit, object), fits))
    assert most == [1] * 6


def test_a_learner_of_other_features_is_refused(bundle):
    content = (bundle / "learners/lightgbm.txt").read_bytes()
    replaced(bundle, "learners/lightgbm.txt", content.replace(b"max_feature_idx=5", b"max_feature_idx=4"))
    assert refuse(bundle).problem.startswith("not a readable lightgbm model: ")


def test_a_save_that_fails_leaves_the_old_bundle(bundle, monkeypatch):
    digest = load_bundle(bundle).digest

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("models.bundle.store.write_learner", full)
    with pytest.raises(InputError, match="the disk is full"):
        save_bundle(bundle, fitted_models(), {**FACTS, "dataset_digest": "d2"})
    assert load_bundle(bundle).digest == digest
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]


def test_a_save_that_is_killed_leaves_nothing_after_the_next_and_every_file_is_on_the_disk(bundle, monkeypatch):
    kill = "import os, sys; from tests.models.small_models import fitted_models; import models.bundle.store as store; "
    kill += "store.write_learner = lambda *_: os._exit(9); "
    kill += f"store.save_bundle(store.Path({str(bundle)!r}), fitted_models(), {FACTS!r})"
    assert subprocess.run([sys.executable, "-c", kill], cwd=ROOT, check=False).returncode == 9
    assert load_bundle(bundle).manifest["dataset_digest"] == "d1"
    synced = []
    monkeypatch.setattr("models.bundle.store.fsync_path", lambda path: synced.append(path.name))
    save_bundle(bundle, fitted_models(), {**FACTS, "dataset_digest": "d2"})
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]
    assert {path.name for path in bundle.rglob("*")} <= {*synced}


def test_a_save_killed_between_its_renames_leaves_the_old_bundle_readable(bundle):
    shutil.move(bundle, bundle.parent / ".bundle.previous")
    assert load_bundle(bundle).manifest["dataset_digest"] == "d1"
    save_bundle(bundle, fitted_models(), {**FACTS, "dataset_digest": "d2"})
    assert load_bundle(bundle).manifest["dataset_digest"] == "d2"
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]


def test_a_folder_that_is_no_bundle_is_never_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="exists and is not a bundle"):
        save_bundle(tmp_path / "home", fitted_models(), FACTS)
    assert (tmp_path / "home" / "thesis.tex").exists()
    with pytest.raises(InputError, match="the profile 'svm' is not among the fitted models"):
        save_bundle(tmp_path / "b", fitted_models(), {"profile": "svm"})
    with pytest.raises(ValueError, match="keys files are written by the bundle itself"):
        save_bundle(tmp_path / "b", fitted_models(), {**FACTS, "files": {}})


def test_a_tree_that_splits_on_what_is_missing_can_be_read_again(tmp_path):
    """LightGBM gives such a split an infinite threshold."""
    rng = np.random.default_rng(5)
    X = rng.normal(size=(3000, 1)).astype(np.float32)
    y = rng.random(3000) < 0.2
    X[~y, 0] = np.nan
    learner = make_learner("lightgbm", seed=1).fit(X, y.astype(int))
    path = tmp_path / "lightgbm.txt"
    write_learner("lightgbm", learner, path)
    content = path.read_bytes()
    assert any(line.startswith(b"threshold=") and b"inf" in line for line in content.splitlines())
    loaded = read_learner("lightgbm", content, "lightgbm.txt", 1)
    assert np.array_equal(loaded.predict_proba(X), learner.predict_proba(X))
