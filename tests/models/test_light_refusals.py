"""What the light scorer refuses: what the full bundle refuses, in the same words."""

import contextlib
import hashlib
import importlib.metadata
import json
import shutil

import lightgbm
import numpy as np
import pytest
import sklearn
import skops
import skops.io
import xgboost
from hypothesis import given, settings
from hypothesis import strategies as st

from features.errors import InputError
from models.bundle import load_bundle, save_bundle
from models.bundle_files import sealed
from models.libraries import PARTS, running_versions
from models.light.bundle import load_light
from models.light.prepared import read_prepared
from tests.models.small_models import COLUMNS, fitted_models, rows

FACTS = {"profile": "stacked"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_bundle(tmp_path_factory.mktemp("saved") / "bundle", fitted_models(), FACTS).path


@pytest.fixture
def bundle(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "bundle")


def rewrite(path, change):
    content = json.loads((path / "manifest.json").read_text())
    change(content)
    (path / "manifest.json").write_bytes(sealed(content))


def replaced(path, file, content):
    (path / file).write_bytes(content)
    rewrite(path, lambda m: m["files"].update({file: hashlib.sha256(content).hexdigest()}))


def refused(load, path, **kwargs):
    with pytest.raises(InputError) as raised:
        load(path, **kwargs)
    assert type(raised.value) is InputError
    return str(raised.value)


SPOILT = {
    "another layout": lambda b: rewrite(b, lambda m: m.update(format=99)),
    "another library": lambda b: rewrite(b, lambda m: m["libraries"].update(lightgbm="3.3.1")),
    "no library": lambda b: rewrite(b, lambda m: m["libraries"].pop("skops")),
    "no stacker": lambda b: rewrite(b, lambda m: m["fitted"].pop("stacker")),
    "no files": lambda b: rewrite(b, lambda m: m.pop("files")),
    "no zone": lambda b: rewrite(b, lambda m: m["fitted"].update(refit_at="2026-01-01T00:00:00")),
    "a file outside": lambda b: rewrite(b, lambda m: m["files"].update({"../x": "0"})),
    "an unknown learner": lambda b: rewrite(b, lambda m: m["fitted"]["learners"].append("svm")),
    "a learner without file": lambda b: rewrite(b, lambda m: m["fitted"]["learners"].append("lstm")),
    "an unknown profile": lambda b: rewrite(b, lambda m: m.update(profile="svm")),
    "no profile": lambda b: rewrite(b, lambda m: m.pop("profile")),
    "an unknown member": lambda b: rewrite(b, lambda m: m["fitted"]["members"].append("svm")),
    "a calibrator less": lambda b: rewrite(b, lambda m: m["fitted"]["calibrators"].pop("mlp")),
    "a budget of 0": lambda b: rewrite(b, lambda m: m["fitted"].update(k=0)),
    "no cascade": lambda b: rewrite(b, lambda m: m["fitted"].update(cascade=None)),
    "a threshold less": lambda b: rewrite(b, lambda m: m["fitted"]["cascade"]["thresholds"].pop()),
    "an unknown model": lambda b: rewrite(b, lambda m: m["fitted"]["models"].append("oracle")),
    "a weight less": lambda b: rewrite(b, lambda m: m["fitted"]["stacker"]["weights"].pop()),
    "an unknown stand-in": lambda b: rewrite(b, lambda m: m["fitted"].update(stand_in="oracle")),
    "a changed manifest": lambda b: (b / "manifest.json").write_bytes((b / "manifest.json").read_bytes() + b" "),
    "no JSON": lambda b: (b / "manifest.json").write_text("{"),
    "no manifest": lambda b: (b / "manifest.json").unlink(),
    "a stranger": lambda b: (b / "a.txt").write_text("hello"),
    "a changed learner": lambda b: (b / "learners" / "mlp.skops").write_bytes(b"junk"),
    "a missing learner": lambda b: (b / "learners" / "xgboost.ubj").unlink(),
    "no LightGBM": lambda b: replaced(b, "learners/lightgbm.txt", b"junk"),
    "no XGBoost": lambda b: replaced(b, "learners/xgboost.ubj", b"junk"),
    "no forest": lambda b: replaced(b, "learners/random_forest.skops", b"junk"),
    "a feature less": lambda b: rewrite(b, lambda m: m["features"].pop()),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_what_the_full_bundle_refuses_is_refused_in_the_same_words(bundle, spoil):
    spoil(bundle)
    assert refused(load_light, bundle) == refused(load_bundle, bundle)


def test_other_columns_and_rows_are_refused_in_the_same_words(bundle):
    for columns in (COLUMNS[1:], COLUMNS[::-1]):
        assert refused(load_light, bundle, columns=columns) == refused(load_bundle, bundle, columns=columns)
    with pytest.raises(InputError, match="rows with 5 features where the models were fitted on 6"):
        load_light(bundle).score(np.zeros((2, 5), np.float32), np.zeros(2, np.int64), ["a", "b"])


def test_a_learner_that_the_profile_does_not_need_is_verified_by_its_hash_alone(bundle):
    replaced(bundle, "learners/mlp.skops", skops.io.dumps({"a": 1}))
    assert refused(load_bundle, bundle).startswith("not a readable mlp model: it holds a dict")
    assert load_light(bundle).profile == "stacked"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (skops.io.dumps({"a": 1}), "not a readable mlp model: it holds a dict"),
        (b"junk", "not a readable mlp model: File is not a zip file"),
    ],
)
def test_what_is_no_network_is_refused(bundle, content, message):
    replaced(bundle, "learners/mlp.skops", content)
    rewrite(bundle, lambda m: m.update(profile="mlp"))
    assert refused(load_light, bundle).startswith(message)


@pytest.mark.parametrize("change", ["classes", "shape", "nan", "features"])
def test_a_network_whose_parts_do_not_fit_is_refused(change):
    learner = skops.io.loads(skops.io.dumps(fitted_models().learners["mlp"]), trusted=TRUSTED)
    if change == "classes":
        learner.classes_ = np.array([0, 2])
    elif change == "shape":
        learner.classifier_.coefs_[1] = learner.classifier_.coefs_[1][:-1]
    elif change == "nan":
        learner.classifier_.intercepts_[0][0] = np.nan
    with pytest.raises(InputError, match="not a readable mlp model: "):
        read_prepared("mlp", skops.io.dumps(learner), "mlp.skops", 5 if change == "features" else 6)


TRUSTED = [
    "models.prepared.PreparedClassifier",
    "models.prepared.SignedLogScaler",
    "sklearn.neural_network._stochastic_optimizers.AdamOptimizer",
]
ARCHIVES = {name: skops.io.dumps(fitted_models().learners[name]) for name in ("logistic", "mlp")}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(ARCHIVES)), st.data())
def test_no_damage_to_an_archive_makes_anything_but_an_input_error(name, data):
    content = bytearray(ARCHIVES[name])
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(InputError):
        assert read_prepared(name, bytes(content), f"{name}.skops", 6).predict_proba(rows(5)[0]).shape == (5, 2)


def test_versions_are_those_that_the_libraries_say_of_themselves():
    said = {each.__name__: each.__version__ for each in (lightgbm, np, skops, xgboost)}
    said["scikit-learn"] = sklearn.__version__
    assert {"scikit-learn" if name == "sklearn" else name: said[name] for name in said} == running_versions()
    assert set(running_versions()) == set(PARTS)


def test_a_library_that_is_not_installed_is_not_compared(bundle, monkeypatch):
    installed = importlib.metadata.version

    def version(name):
        if name in ("lightgbm", "xgboost-cpu", "xgboost"):
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    rewrite(bundle, lambda m: m["libraries"].update(lightgbm="9.0.0"))
    assert load_light(bundle).profile == "stacked"
    rewrite(bundle, lambda m: m["libraries"].update(numpy="1.26.0"))
    assert refused(load_light, bundle).startswith("the bundle was written with numpy 1.26.0, this is 2")


def test_a_bundle_that_is_being_replaced_is_read(bundle):
    shutil.move(bundle, bundle.parent / ".bundle.previous")
    assert load_light(bundle).digest == load_bundle(bundle).digest
