"""The bundle that scores rows: read lightly where that is enough, whole where it is not."""

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from models.bundle import load_bundle, save_bundle
from models.prepared import PreparedClassifier
from serving.http.model import ModelHolder, load_model
from serving.http.rows import FeatureRows
from tests.models.small_models import fitted_models, rows

ROOT = Path(__file__).resolve().parents[3]
FACTS = {"profile": "logistic", "version": 7, "params": {"labels": {"horizon": "24h"}}}


def heavy_bundle(path: Path) -> Path:
    """A bundle whose profile only its library scores."""
    X, y = rows()
    given = fitted_models()
    learner = PreparedClassifier(LinearDiscriminantAnalysis(solver="lsqr"))
    learner.scaler_ = given.learners["logistic"].scaler_
    learner.classifier_ = LinearDiscriminantAnalysis(solver="lsqr").fit(learner.scaler_.transform(X), y)
    learner.classes_, learner.n_features_in_ = learner.classifier_.classes_, X.shape[1]
    learners = {**given.learners, "logistic": learner}
    return save_bundle(path, replace(given, learners=learners), FACTS).path


def some_rows() -> FeatureRows:
    values, _ = rows(40, seed=6)
    return FeatureRows(values, [f"g{at % 20}" for at in range(40)], np.arange(40) // 20 * 3_600_000, True)


def test_a_bundle_is_scored_lightly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_bundle(tmp_path / "bundle", fitted_models(), FACTS).path
    model = load_model(path)
    assert model.heavy is None
    assert model.about() == {"digest": load_bundle(path).digest, "profile": "logistic", "version": "7"}
    assert model.horizon_s == 86_400
    assert model.fitted_at == fitted_models().refit_at
    assert caplog.records == []
    answers = model.score(some_rows())
    assert [set(each) for each in answers] == [{"unit", "risk", "score", "rank", "alert"}] * 40
    assert [each["unit"] for each in answers] == some_rows().units
    assert sorted(each["rank"] for each in answers[:20]) == list(range(1, 21))


def test_a_profile_that_needs_its_library_is_scored_by_the_full_bundle_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = heavy_bundle(tmp_path / "bundle")
    with caplog.at_level(logging.WARNING):
        model = load_model(path)
    assert model.heavy == "it holds a LinearDiscriminantAnalysis"
    assert [each.getMessage() for each in caplog.records] == [
        "the model is scored by the full bundle, which takes more time and memory: "
        "it holds a LinearDiscriminantAnalysis"
    ]
    light = load_model(save_bundle(tmp_path / "light", fitted_models(), FACTS).path)
    assert (model.columns, model.profile, model.version) == (light.columns, light.profile, light.version)
    assert (model.horizon_s, model.fitted_at) == (light.horizon_s, light.fitted_at)
    X, y = rows(40, seed=6)
    risks = [each["risk"] for each in model.score(some_rows())]
    assert np.mean(np.array(risks)[y == 1]) > np.mean(np.array(risks)[y == 0])
    assert len(risks) == len(X)


def test_a_damaged_bundle_is_left_to_nobody(tmp_path: Path) -> None:
    path = save_bundle(tmp_path / "bundle", fitted_models(), FACTS).path
    (path / "learners" / "mlp.skops").write_bytes(b"junk")
    holder = ModelHolder(path)
    holder.load()
    assert holder.model is None
    assert str(holder.trouble).startswith(
        "the model cannot be served: mlp.skops is not the file that was saved: its SHA-256 differs"
    )


LOADS = """
import json, sys
from pathlib import Path
from serving.http.model import load_model

model = load_model(Path(sys.argv[1]))
heavy = ("pandas", "sklearn", "lightgbm", "xgboost", "mlflow", "torch", "skops", "pyarrow")
print(json.dumps([model.heavy, [name for name in heavy if name in sys.modules]]))
"""


def test_a_server_that_scores_rows_imports_neither_pandas_nor_a_library_that_trains(tmp_path: Path) -> None:
    path = save_bundle(tmp_path / "bundle", fitted_models(), {"profile": "cascade"}).path
    done = subprocess.run(
        [sys.executable, "-c", LOADS, str(path)], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [None, []]
