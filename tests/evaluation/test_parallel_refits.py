import pickle
from datetime import timedelta

import pandas as pd
import pytest

from evaluation.backtest import run as refits
from evaluation.backtest.run import RefitTask, run_backtest
from foundation.errors import InputError
from models.config import (
    BacktestSection,
    CalibrationSection,
    CascadeSection,
    ModelsSection,
    ParallelSection,
    TrainingSection,
)
from tests.models.fake_matrix import FakeMatrix

QUICK = ModelsSection(
    learners=("lightgbm", "logistic"),
    parallel=ParallelSection(members=("lightgbm", "logistic"), min_votes=2),
    cascade=CascadeSection(stages=("lightgbm", "logistic"), recall_floor=0.9),
    calibration=CalibrationSection(slice=timedelta(days=5)),
    horizons=(timedelta(hours=6), timedelta(hours=24)),
    settings={"lightgbm": {"n_estimators": 4, "learning_rate": 0.2}},
)
SPANS = TrainingSection(
    candidate_windows=(timedelta(days=7), timedelta(days=14)), refit_every=timedelta(days=5), negative_ratio=8
)


class Fleet(FakeMatrix):
    """Works labels out once."""

    def labels(self, as_of=None, *, horizon=None, rows=None):
        cache = self.__dict__.setdefault("held", {})
        key = (as_of, horizon)
        if key not in cache:
            cache[key] = super().labels(as_of, horizon=horizon)
        return cache[key] if rows is None else cache[key].iloc[rows]


class Sent:
    """Runs tasks backwards, each as it arrives on another machine."""

    def __init__(self) -> None:
        self.ran: list[object] = []

    def run(self, job, items, on_result, *, max_workers):
        for item in reversed(items):
            sent = pickle.loads(pickle.dumps((job, item)))
            self.ran.append(item)
            on_result(item, pickle.loads(pickle.dumps(sent[0](sent[1]))))

    def everywhere(self, job):
        job()


def in_folder(matrix, tmp_path, monkeypatch):
    matrix.path = tmp_path / "matrix"
    monkeypatch.setattr(RefitTask, "open", lambda self: matrix)
    return matrix


def backtest(matrix, training=SPANS, **more):
    return run_backtest(matrix, training=training, models=QUICK, backtest=BacktestSection(), seed=7, explain=3, **more)


def assert_same(a, b):
    pd.testing.assert_frame_equal(a.predictions, b.predictions, check_exact=True)
    pd.testing.assert_frame_equal(a.folds, b.folds, check_exact=True)
    pd.testing.assert_frame_equal(a.attributions, b.attributions, check_exact=True)
    for name in ("k", "skipped", "models", "drift", "horizons", "reasons"):
        assert getattr(a, name) == getattr(b, name), name


@pytest.fixture(scope="module")
def matrix():
    return Fleet(units=12, days=32, incidents=30, companions=4, seed=3)


@pytest.fixture(scope="module")
def here(matrix):
    return backtest(matrix)


def test_refits_done_apart_give_the_same_backtest_bit_for_bit(matrix, here, tmp_path, monkeypatch):
    engine = Sent()
    assert_same(backtest(in_folder(matrix, tmp_path, monkeypatch), engine=engine), here)
    assert len(engine.ran) == here.folds["fold"].nunique() >= 4
    assert here.folds["span"].nunique() >= 2


@pytest.mark.parametrize("at_once", [1, 4])
def test_the_number_of_refits_at_a_time_changes_nothing(matrix, here, monkeypatch, at_once):
    monkeypatch.setattr(refits, "MAX_CONCURRENT_FITS", at_once)
    assert_same(backtest(matrix), here)


def test_folds_of_one_class_fall_back_as_they_do_here(tmp_path, monkeypatch):
    matrix = Fleet(units=12, days=22, incidents=5, companions=4, seed=4)
    training = SPANS.model_copy(update={"window": timedelta(days=4), "refit_every": timedelta(days=3)})
    here = backtest(matrix, training)
    assert any(line.startswith("fold (fold 0)") for line in here.skipped)
    assert_same(backtest(in_folder(matrix, tmp_path, monkeypatch), training, engine=Sent()), here)


def test_a_worker_that_does_not_see_the_matrix_says_so(matrix, tmp_path):
    matrix.path = tmp_path / "nowhere"
    with pytest.raises(InputError, match=r"a worker cannot read the matrix.*nowhere"):
        backtest(matrix, engine=Sent())
    assert refits._BACKTESTS == {}
