"""The light scorer: a bundle's profile scored as the full bundle scores it, without what trains."""

import json
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from features.vocabulary import FeatureColumn
from models.bundle import load_bundle, save_bundle
from models.bundle_files import sealed
from models.calibrator import Calibrator
from models.horizon_map import HorizonMap, Link
from models.light.bundle import load_light
from models.light.errors import HeavyModelError
from models.light.learners import read_light
from models.prepared import PreparedClassifier
from models.ranking import name_hashes, text_hashes
from models.sequence.tabular import FirstColumns
from tests.models.small_models import COLUMNS, fitted_models, rows

ROOT = Path(__file__).resolve().parents[2]
HORIZONS = HorizonMap(24.0, -5.0, (Link(6.0, -1.0, 0.3), Link(1.0, -2.0, 0.1)), (Link(72.0, -3.0, 0.5),))
PROFILES = (*fitted_models().models, "min_votes", "mean_log_odds")
HOUR = 3_600_000


def models():
    """Every model there is, with risks at further horizons of some."""
    fitted = fitted_models()
    names = (*fitted.models, "min_votes", "mean_log_odds")
    calibrators = {**fitted.calibrators, "min_votes": Calibrator("prior"), "mean_log_odds": Calibrator("prior")}
    horizons = dict.fromkeys(("lightgbm", "cascade", "mean_rank"), HORIZONS)
    return replace(fitted, models=names, calibrators=calibrators, horizons=horizons, min_votes=2)


@cache
def loaded(profile):
    """The same bundle, read fully and lightly."""
    path = Path(mkdtemp(dir=world())) / "bundle"
    save_bundle(path, models(), {"profile": profile})
    return load_bundle(path, columns=COLUMNS), load_light(path, columns=COLUMNS)


@cache
def world():
    return mkdtemp(prefix="light-")


@pytest.fixture(scope="module", autouse=True)
def cleared():
    yield
    import shutil

    shutil.rmtree(world())


def assert_same(full, light, X, times, units):
    """Scores, risks, ranks and alerts of both, bit for bit."""
    at = pd.Series(pd.DatetimeIndex(np.asarray(times, np.int64).astype("datetime64[ms]"), tz="UTC"))
    scored = full.fitted.score(X, at, units)
    mine = scored[scored["model"] == full.profile]
    found = light.score(X, np.asarray(times, np.int64), units)
    for name in ("score", "risk", "rank", "alert"):
        expected, got = mine[name].to_numpy(), getattr(found, name)
        assert got.dtype == expected.dtype, name
        assert got.tobytes() == expected.tobytes(), name
    risks = full.fitted.risks(full.profile, mine["score"].to_numpy())
    assert list(risks) == list(found.risks)
    for name, expected in risks.items():
        assert found.risks[name].tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_is_scored_bit_for_bit_as_by_the_full_bundle(profile):
    full, light = loaded(profile)
    assert (light.profile, light.digest, light.columns) == (full.profile, full.digest, full.fitted.columns)
    assert light.facts.refit_at == full.fitted.refit_at
    X, _ = rows(700, seed=8)
    assert_same(full, light, X, np.arange(700) // 90 * HOUR, [f"g{i % 90}" for i in range(700)])


FLOATS = st.one_of(
    st.just(np.nan), st.sampled_from([0.0, -0.0, 1e-35, -1e-40, 3e38, -3e38]), st.floats(-1e6, 1e6, width=32)
)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_rows_times_and_units_get_the_same_scores(data):
    profile = data.draw(st.sampled_from(PROFILES))
    n = data.draw(st.integers(1, 70))
    X = np.array(data.draw(st.lists(st.lists(FLOATS, min_size=6, max_size=6), min_size=n, max_size=n)), np.float32)
    times = data.draw(st.lists(st.sampled_from([0, HOUR, -HOUR]), min_size=n, max_size=n))
    units = data.draw(st.lists(st.text(max_size=3), min_size=n, max_size=n))
    assert_same(*loaded(profile), X, times, units)


def test_a_row_is_scored_alike_alone_and_among_others():
    _, light = loaded("mean_log_odds")
    X, _ = rows(200, seed=4)
    whole = light.score(X, np.zeros(200, np.int64), ["u"] * 200)
    for at in (0, 63, 64, 199):
        alone = light.score(X[at : at + 1], np.zeros(1, np.int64), ["u"])
        assert alone.risk[0] == whole.risk[at]
        assert alone.rank[0] == 1


def test_no_rows_and_rows_in_columns_order_are_scored_too():
    _, light = loaded("mlp")
    assert len(light.score(np.zeros((0, 6), np.float32), np.zeros(0, np.int64), []).risk) == 0
    X, _ = rows(50, seed=2)
    by_column = light.score(np.asfortranarray(X), np.zeros(50, np.int64), ["u"] * 50)
    assert by_column.risk.tobytes() == light.score(X, np.zeros(50, np.int64), ["u"] * 50).risk.tobytes()


def test_a_model_that_a_baseline_stands_in_for_is_scored_by_it(tmp_path):
    nothing = replace(models(), learners={}, cascade=None, stand_in="history_count", calibrated=False)
    for profile in ("mean_rank", "random"):
        path = save_bundle(tmp_path / profile, nothing, {"profile": profile}).path
        X, _ = rows(60)
        assert_same(load_bundle(path), load_light(path), X, np.zeros(60), [f"g{i}" for i in range(60)])


def test_a_learner_beside_raw_windows_sees_the_first_columns_only(tmp_path):
    step = timedelta(minutes=10)
    columns = (
        *COLUMNS,
        *(FeatureColumn.of("telemetry", "power_w", "step_mean", window=step * at) for at in range(4, 0, -1)),
    )
    X, _ = rows()
    wide = np.column_stack([X, np.random.default_rng(1).normal(size=(len(X), 4))]).astype(np.float32)
    learners = {
        name: FirstColumns.around(fitted_models().learners[name], 6, 10) for name in ("lightgbm", "logistic", "xgboost")
    }
    made = replace(
        fitted_models(), columns=columns, models=("logistic", "stacked"), learners=learners, members=tuple(learners),
        cascade=None, baselines={},
    )  # fmt: skip
    for profile in made.models:
        path = save_bundle(tmp_path / profile, made, {"profile": profile}).path
        assert_same(load_bundle(path), load_light(path), wide, np.zeros(300), [f"g{i}" for i in range(300)])


def test_a_profile_that_only_its_library_scores_says_so(tmp_path):
    with pytest.raises(HeavyModelError) as raised:
        read_light("lstm", b"weights", "learners/lstm.safetensors", 6)
    assert str(raised.value) == (
        "the light scorer does not score this model: lstm is scored by PyTorch (learners/lstm.safetensors). "
        "Score it with the full bundle."
    )
    X, y = rows()
    other = PreparedClassifier(LinearDiscriminantAnalysis(solver="lsqr"))
    other.scaler_ = fitted_models().learners["logistic"].scaler_
    other.classifier_ = LinearDiscriminantAnalysis(solver="lsqr").fit(other.scaler_.transform(X), y)
    other.classes_, other.n_features_in_ = other.classifier_.classes_, 6
    heavy = replace(fitted_models(), learners={**fitted_models().learners, "logistic": other})
    path = save_bundle(tmp_path / "bundle", heavy, {"profile": "logistic"}).path
    load_bundle(path)
    with pytest.raises(HeavyModelError, match="it holds a LinearDiscriminantAnalysis"):
        load_light(path)
    content = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_bytes(sealed(content | {"profile": "lightgbm"}))
    assert load_light(path).profile == "lightgbm"


IMPORTS = """
import json, sys
import numpy as np
from models.light.bundle import load_light

for path in sys.argv[1:]:
    light = load_light(__import__("pathlib").Path(path))
    light.score(np.zeros((9, 6), np.float32), np.zeros(9, np.int64), [str(i) for i in range(9)])
heavy = ("pandas", "sklearn", "lightgbm", "xgboost", "mlflow", "torch", "skops", "joblib", "pyarrow", "scipy.optimize")
print(json.dumps([name for name in heavy if name in sys.modules]))
"""


def test_loading_and_scoring_import_neither_pandas_nor_a_library_that_trains():
    paths = [str(loaded(profile)[1].path) for profile in PROFILES]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, *paths], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == []


@given(st.lists(st.text(max_size=5)))
def test_texts_are_hashed_as_names_are(texts):
    assert np.array_equal(text_hashes(texts), name_hashes(texts))


def test_a_count_below_zero_is_no_division_by_zero():
    X = np.full((3, 6), np.nan, np.float32)
    X[1:, 4] = -1
    for profile in ("history_count", "random"):
        assert_same(*loaded(profile), X, [0, 0, HOUR], ["a", "b", "c"])
