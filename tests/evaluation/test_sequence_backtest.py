"""A run with a sequence learner: nothing else changes, and its bundle scores as it did."""

import json
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from evaluation.backtest.run import run_backtest
from features.matrix.sequences import SequencePlan
from foundation.errors import InputError
from models.bundle.store import load_bundle, save_bundle
from models.config import BacktestSection, CascadeSection, ModelsSection, ParallelSection, TrainingSection
from models.explanation.contributions import ReasonPlan, contributions, largest_reasons
from models.sequence.layout import WindowedMatrix, window_of, with_windows
from models.training.final import fit_final
from telemetry.dataset.channels import CATALOGUE
from tests.models.fake_matrix import FakeMatrix, label_rows

pytest.importorskip("torch")

PLAN = SequencePlan(
    (CATALOGUE["power_w"], CATALOGUE["gpu_temp_c"]), timedelta(hours=8), timedelta(hours=1), delay_ms=600_000
)
SETTINGS = {
    "lightgbm": {"n_estimators": 10},
    "cnn1d": {"epochs": 6, "filters": 8, "hidden": 8, "batch_size": 128, "learning_rate": 2e-2},
}
PLAIN = ModelsSection(
    profile="lightgbm",
    learners=("lightgbm",),
    settings=SETTINGS,
    parallel=ParallelSection(members=("lightgbm",)),
    cascade=CascadeSection(stages=("lightgbm", "lightgbm")),
)
WITH = ModelsSection(
    profile="mean_rank",
    learners=("lightgbm", "cnn1d"),
    settings=SETTINGS,
    parallel=ParallelSection(members=("lightgbm", "cnn1d")),
    cascade=CascadeSection(stages=("cnn1d", "lightgbm")),
)
TRAINING = TrainingSection(candidate_windows=(timedelta(days=7), timedelta(days=14)), refit_every=timedelta(days=10))
BACKTEST = BacktestSection(bootstrap=0)


class WindowedFake(FakeMatrix):
    """The other half of the incidents announce themselves, too, but in the course of the first channel only."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.sequences = SimpleNamespace(plan=PLAN)
        rng = np.random.default_rng(7)
        reported = label_rows(self.rows, self.events)
        is_visible = reported["label"].fillna(0).to_numpy(float) * (reported["incident"].fillna(0).to_numpy(int) % 2)
        window = rng.normal(size=(len(self.rows), PLAN.steps, 2)) + rng.normal(0, 2, (len(self.rows), 1, 2))
        window[:, :, 0] += is_visible[:, None] * np.linspace(-4, 4, PLAN.steps)
        self.raw = window.astype(np.float32)

    def windows(self, row_indices=None):
        return self.raw if row_indices is None else self.raw[np.asarray(row_indices)]


@pytest.fixture(scope="module")
def matrix():
    return WindowedFake(units=30, days=40, incidents=40)


def replayed(matrix, models, **kwargs):
    return run_backtest(matrix, training=TRAINING, models=models, backtest=BACKTEST, seed=1, **kwargs)


@pytest.fixture(scope="module")
def result(matrix):
    return replayed(matrix, WITH, explain=5)


def scores_of(result, model):
    frame = result.predictions
    of_model = frame[(frame["model"] == model) & (frame["variant"] == "sliding")]
    return of_model.sort_values(["decision_time", "unit"]).reset_index(drop=True)


def test_the_network_finds_what_stands_in_the_windows_only(result):
    caught = {}
    for model in ("lightgbm", "cnn1d"):
        frame = scores_of(result, model)
        reported = frame[(frame["label"] == 1) & (frame["incident"] % 2 == 1)]
        caught[model] = reported["alert"].mean()
    assert caught["cnn1d"] > caught["lightgbm"] + 0.2


def test_other_learners_and_spans_are_bit_for_bit_those_of_a_run_without(matrix, result):
    plain = replayed(matrix, PLAIN)
    for column in ("score", "risk", "rank", "alert"):
        pd.testing.assert_series_equal(scores_of(plain, "lightgbm")[column], scores_of(result, "lightgbm")[column])
    pd.testing.assert_frame_equal(plain.folds, result.folds)


@pytest.mark.parametrize(("tail_share", "is_early_stopped"), [(0.2, True), (0.97, False)])
def test_no_incident_is_in_the_fit_and_in_the_tail_of_a_network(matrix, tail_share, is_early_stopped):
    """All rows before the longer tail are within a horizon of it, so the network is fitted without one."""
    settings = SETTINGS | {"cnn1d": SETTINGS["cnn1d"] | {"tail_share": tail_share}}
    models = WITH.model_copy(update={"settings": settings})
    fitted = fit_final(matrix, training=TRAINING, models=models, backtest=BACKTEST, seed=1)
    assert fitted.learners["cnn1d"].early_stopped_ == is_early_stopped


def test_reasons_say_which_members_are_explained_exactly(result):
    assert result.reasons
    assert all("exact tree contributions of lightgbm" in reason.method for reason in result.reasons)
    assert all("cnn1d" in reason.method for reason in result.reasons)  # by name among those left out
    assert set(result.attributions["feature"]) >= {"telemetry__f0__mean__1h", "telemetry__power_w__step_mean__1h"}


def test_a_matrix_without_windows_is_refused_with_what_to_set(matrix):
    with pytest.raises(InputError, match=r"cnn1d reads raw windows.*parameter features\.sequence\.channels"):
        replayed(FakeMatrix(), WITH)
    assert with_windows(matrix, PLAIN.learners) is matrix


def test_rows_are_features_then_window_and_the_rest_is_the_matrix_s(matrix):
    wide = WindowedMatrix(matrix)
    rows = np.array([5, 3])
    np.testing.assert_array_equal(
        wide.values(rows), np.concatenate([matrix.values(rows), matrix.windows(rows).reshape(2, -1)], axis=1)
    )
    assert wide.rows is matrix.rows
    assert wide.events is matrix.events
    assert wide.digest == WindowedMatrix(matrix).digest != matrix.digest  # PyTorch's version is in it
    facts = window_of(wide.columns)
    assert (facts.tabular, facts.channels, facts.window, facts.step) == (
        6,
        ("power_w", "gpu_temp_c"),
        PLAN.window,
        PLAN.step,
    )
    assert (facts.layout.begin, facts.layout.steps, facts.layout.channels) == (6, 8, 2)


def test_a_bundle_says_its_windows_and_scores_as_before(matrix, tmp_path):
    fitted, twin = (fit_final(matrix, training=TRAINING, models=WITH, backtest=BACKTEST, seed=1) for _ in range(2))
    saved = save_bundle(tmp_path / "bundle", fitted, {"profile": "mean_rank"})
    assert saved.manifest["sequence"] == {
        "channels": ["power_w", "gpu_temp_c"], "window_seconds": 28800.0, "step_seconds": 3600.0, "tabular_features": 6,
    }  # fmt: skip
    files = {path.name for path in (tmp_path / "bundle" / "learners").iterdir()}
    assert files == {"lightgbm.txt", "cnn1d.safetensors"}
    assert {"torch", "safetensors"} < set(saved.manifest["libraries"])
    loaded = load_bundle(tmp_path / "bundle")
    values = WindowedMatrix(matrix).values(np.arange(60))
    rows = matrix.rows.iloc[:60]
    scores = fitted.score(values, rows["decision_time"], rows["unit"])
    pd.testing.assert_frame_equal(loaded.fitted.score(values, rows["decision_time"], rows["unit"]), scores)
    added, method = contributions(loaded.fitted.learners["cnn1d"], values[:5])
    assert method == "change when a channel is set to its median"
    plan = ReasonPlan.of(WindowedMatrix(matrix).columns)
    reasons = [reason for row in range(5) for reason in largest_reasons(added[row], values[row], plan)[0]]
    assert any("in the interval that started 1 h earlier" in reason.text for reason in reasons)
    again = save_bundle(tmp_path / "again", loaded.fitted, {"profile": "mean_rank"})
    assert again.digest == saved.digest
    assert save_bundle(tmp_path / "twin", twin, {"profile": "mean_rank"}).digest == saved.digest
    assert json.loads((tmp_path / "again" / "manifest.json").read_text())["features"][-1]["statistic"] == "step_mean"
