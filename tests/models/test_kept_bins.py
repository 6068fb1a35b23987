"""Bins kept over refits. scikit-learn's checks do not apply: these learners fit rows of one matrix by position."""

from __future__ import annotations

import copy
from datetime import timedelta

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone

from features.errors import InputError
from features.times import duration_ms, instant_ms
from models.checkpoint import FoldStore
from models.config import (
    BacktestSection,
    BinsSection,
    CalibrationSection,
    CascadeSection,
    ModelsSection,
    ParallelSection,
    TrainingSection,
)
from models.fit_facts import FitFacts
from models.fits import FitRows, LocalFits
from models.kept_bins import BinKeeper, KeptBins
from models.learners import fit_learners, make_learner
from models.on_bins import LightGBMOnBins, XGBoostOnBins, on_bins
from models.row_reader import row_reader
from models.schedule import instant_of
from models.sliding import run_backtest
from models.trainer import reach_of
from models.training_set import Labels, Rows
from tests.models.fake_matrix import GAP, HORIZON, START, FakeMatrix

TRAINING = TrainingSection(span=timedelta(days=12), negative_ratio=20, bins=BinsSection(refits=3))
REFITS = tuple(instant_ms(START) + duration_ms(timedelta(days=day)) for day in (14, 17, 20, 23, 26))
REACH = duration_ms(GAP + HORIZON)
TREES = {"n_estimators": 12, "num_leaves": 16, "min_child_samples": 5}


FLEET = FakeMatrix(units=12, days=30, incidents=40, augmentation=2, companions=5, seed=3)


def fleet() -> FakeMatrix:
    return copy.deepcopy(FLEET)


def keeper(matrix: FakeMatrix, training: TrainingSection = TRAINING) -> BinKeeper:
    rows = Rows.of(matrix.rows)
    return BinKeeper(
        matrix,
        rows,
        row_reader(matrix),
        training=training,
        refits_ms=REFITS,
        first_ms=instant_ms(matrix.span[0]),
        reach_ms=REACH,
        seed=5,
        threads=1,
    )


def at(kept: BinKeeper, matrix: FakeMatrix, refit: int) -> KeptBins:
    found = kept.at(REFITS[refit], lambda ms: Labels.of(matrix.labels(instant_of(ms))))
    assert found is not None
    return found


def rows_to_fit(seed: int = 0, size: int = 600) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(size, 6)).astype(np.float32)
    X[rng.random(X.shape) < 0.05] = np.nan
    y = (np.nan_to_num(X[:, 0]) + rng.normal(size=size) > 1.2).astype(np.int64)
    return X, y, rng.uniform(0.5, 2, size)


def bins_of(X: np.ndarray, weight: np.ndarray, *, edges: np.ndarray, held_bytes: int = 2**20) -> KeptBins:
    class Read:
        def __call__(self, rows: np.ndarray) -> np.ndarray:
            return X[rows]

        def stretch(self, first: int, until: int, whole: int) -> np.ndarray:
            assert whole == len(X)
            return X[first:until]

    window = (0, len(X))
    return KeptBins(Read(), edges, weight[edges], window=window, features=X.shape[1], held_bytes=held_bytes, threads=1)


def trees(learner) -> str:
    return learner.booster_.model_to_string().split("\nparameters")[0]


@pytest.mark.parametrize("name", ["lightgbm", "xgboost"])
def test_on_edges_of_its_own_rows_a_learner_fits_what_it_fits_alone(name):
    X, y, weight = rows_to_fit()
    alone = make_learner(name, seed=4).fit(X, y, sample_weight=weight)
    learner = on_bins(make_learner(name, seed=4), bins_of(X, weight, edges=np.arange(len(X))))
    kept = fit_learners({name: learner}, X, y, weight, FitFacts.of(rows=np.arange(len(X))))[name]
    assert np.array_equal(kept.predict_proba(X), alone.predict_proba(X))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), share=st.floats(0.2, 1))
def test_rows_taken_from_bins_and_rows_binned_anew_give_the_same_trees(seed, share):
    X, y, weight = rows_to_fit(seed)
    rng = np.random.default_rng(seed)
    taken = np.flatnonzero(rng.random(len(X)) < share)
    edges = np.arange(200)
    fitted = [
        LightGBMOnBins(make_learner("lightgbm", seed=1, settings=TREES), bins).fit(
            X[taken], y[taken], weight[taken], rows=taken
        )
        for bins in (bins_of(X, weight, edges=edges), bins_of(X, weight, edges=edges, held_bytes=0))
    ]
    assert fitted[0].bins.held
    assert not fitted[1].bins.held
    assert trees(fitted[0]) == trees(fitted[1])
    assert np.array_equal(fitted[0].predict_proba(X), fitted[1].predict_proba(X))
    assert np.array_equal(fitted[0].predict_proba(X)[:, 1], fitted[0].booster_.predict(X))


@pytest.mark.parametrize("held_bytes", [2**20, 0])
@pytest.mark.parametrize("beside", ["lightgbm", "logistic"])
def test_features_of_training_rows_are_read_only_where_somebody_looks_at_them(held_bytes, beside):
    X, y, weight = rows_to_fit()
    X = np.nan_to_num(X)
    bins = bins_of(X, weight, edges=np.arange(200), held_bytes=held_bytes)
    taken = np.arange(10, 500, 3)
    asked = []

    def read(rows):
        asked.append(len(rows))
        return X[rows]

    names = dict.fromkeys(("lightgbm", beside))
    chosen = FitRows(y[taken], weight[taken], taken.astype(np.uint64), FitFacts.of(rows=taken))
    with LocalFits(read).on(chosen) as fits:
        fitted = fits.learners({name: on_bins(make_learner(name, seed=3), bins) for name in names})
    assert asked == ([] if held_bytes and beside == "lightgbm" else [len(taken)])
    for name in names:
        own = on_bins(make_learner(name, seed=3), bins)
        same = fit_learners({name: own}, X[taken], y[taken], weight[taken], FitFacts.of(rows=taken))[name]
        assert np.array_equal(fitted[name].predict_proba(X), same.predict_proba(X))


def test_settings_of_the_learner_count_in_kept_bins():
    X, y, weight = rows_to_fit()
    bins = bins_of(X, weight, edges=np.arange(len(X)))
    for more in ({"class_weight": "balanced"}, {"scale_pos_weight": 9.0}, {"max_bin": 15}, {"reg_alpha": 1.0}):
        alone = make_learner("lightgbm", seed=1, settings=more).fit(X, y, sample_weight=weight)
        learner = on_bins(make_learner("lightgbm", seed=1, settings=more), bins)
        kept = clone(learner).fit(X, y, weight, rows=np.arange(len(X)))
        assert kept.bins is bins
        np.testing.assert_allclose(kept.predict_proba(X), alone.predict_proba(X), rtol=1e-12)


def test_what_no_bins_are_kept_for_stays_as_it_is():
    X, _, weight = rows_to_fit()
    bins = bins_of(X, weight, edges=np.arange(9))
    forest = make_learner("random_forest", seed=1)
    assert on_bins(forest, bins) is forest
    assert on_bins(forest, None) is forest
    copied = clone(on_bins(make_learner("xgboost", seed=1), bins))
    assert isinstance(copied, XGBoostOnBins)
    assert copied.bins is bins


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), refit=st.integers(0, 4), memory=st.sampled_from([4, 4096]))
def test_nothing_after_the_first_refit_that_uses_them_moves_an_edge(seed, refit, memory):
    clean, spoiled = fleet(), fleet()
    rng = np.random.default_rng(seed)
    first = REFITS[refit - refit % 3]
    late = Rows.of(spoiled.rows).time + REACH > first
    spoiled.features[late] = rng.exponential(100, (int(late.sum()), 6)).astype(np.float32)
    events = spoiled.events
    unknown = events["known_at"] > pd.Timestamp(instant_of(first))
    events.loc[unknown, "unit"] = rng.permutation(events.loc[unknown, "unit"])
    spoiled.events = events[~unknown | (rng.random(len(events)) < 0.5)]
    training = TRAINING.model_copy(update={"memory": memory})
    found = [at(keeper(matrix, training), matrix, refit) for matrix in (clean, spoiled)]
    assert np.array_equal(found[0].edge_rows, found[1].edge_rows)
    assert (Rows.of(clean.rows).time[found[0].edge_rows] + REACH <= first).all()
    cuts = [bins.xgboost_edges(128).get_quantile_cut() for bins in found]
    assert all(np.array_equal(one, other) for one, other in zip(*cuts, strict=True))
    X, y, weight = rows_to_fit(seed)
    probed = [bins.lightgbm_rows(X, np.arange(-600, 0), y, weight, 127) for bins in found]
    grown = [LightGBMOnBins(make_learner("lightgbm", seed=1, settings=TREES), _Only(probe)) for probe in probed]
    assert trees(grown[0].fit(X, y, weight, rows=np.arange(600))) == trees(
        grown[1].fit(X, y, weight, rows=np.arange(600))
    )


class _Only:
    """Bins that give one set of rows, whichever is asked for."""

    def __init__(self, rows) -> None:
        self.rows = rows

    def lightgbm_rows(self, *_):
        return self.rows

    dataset_settings = KeptBins.dataset_settings
    _threads = 1


def test_edges_serve_as_many_refits_as_asked_and_are_then_renewed():
    matrix = fleet()
    forward = keeper(matrix)
    found = [at(forward, matrix, refit) for refit in range(5)]
    assert found[0] is found[1] is found[2]
    assert found[3] is found[4]
    assert not np.array_equal(found[0].edge_rows, found[3].edge_rows)
    backward = keeper(matrix)
    again = [at(backward, matrix, refit) for refit in (4, 1)]
    assert np.array_equal(again[0].edge_rows, found[4].edge_rows)
    assert np.array_equal(again[1].edge_rows, found[1].edge_rows)
    assert forward.at(REFITS[0] + 1, lambda ms: None) is None
    assert keeper(matrix, TrainingSection()).at(REFITS[0], lambda ms: None) is None


def test_rows_of_all_refits_that_edges_serve_are_held_in_bins():
    matrix = fleet()
    rows = Rows.of(matrix.rows)
    assert reach_of(rows, Labels.of(matrix.labels())) == REACH
    bins = at(keeper(matrix), matrix, 1)
    span = duration_ms(timedelta(days=12))
    used = (rows.time >= REFITS[0] - REACH - span) & (rows.time <= REFITS[2] - REACH)
    assert np.array_equal(np.arange(*bins.window), np.flatnonzero(used))


MODELS = ModelsSection(
    learners=("lightgbm", "xgboost", "logistic"),
    parallel=ParallelSection(members=("lightgbm", "xgboost")),
    cascade=CascadeSection(stages=("lightgbm", "logistic")),
    calibration=CalibrationSection(slice=timedelta(days=3)),
    settings={"lightgbm": {"n_estimators": 10}, "xgboost": {"n_estimators": 10}, "logistic": {"max_iter": 50}},
    horizons=(),
)


def backtest(matrix, training, **more):
    section = BacktestSection(k=2, bootstrap=0)
    return run_backtest(matrix, training=training, models=MODELS, backtest=section, seed=7, **more)


def test_a_backtest_in_kept_bins_resumes_bit_for_bit(tmp_path, monkeypatch):
    matrix = FakeMatrix(units=10, days=30, incidents=24, augmentation=1, companions=4, seed=4)
    training = TRAINING.model_copy(update={"bins": BinsSection(refits=2)})
    used = []
    take = KeptBins.lightgbm_rows
    monkeypatch.setattr(KeptBins, "lightgbm_rows", lambda self, *given: used.append(self) or take(self, *given))
    whole = backtest(matrix, training).predictions
    assert len({id(bins) for bins in used}) == 2
    assert whole["fold"].nunique() == 3

    saved = []
    save = FoldStore.save

    def killed(self, fold, table, facts):
        save(self, fold, table, facts)
        saved.append(fold)
        if len(saved) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(FoldStore, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        backtest(matrix, training, checkpoint=tmp_path)
    resumed = backtest(matrix, training, checkpoint=tmp_path).predictions
    pd.testing.assert_frame_equal(resumed, whole, check_exact=True)


def test_runs_with_windows_refuse_kept_bins(monkeypatch):
    monkeypatch.setattr("models.kept_bins.WindowedMatrix", FakeMatrix)
    with pytest.raises(InputError) as caught:
        keeper(fleet())
    assert str(caught.value) == (
        "bins are not kept where a learner reads raw windows (parameter training.bins.refits). "
        "Set it to 0, or leave the sequence learners out."
    )
