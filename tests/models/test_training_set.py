from __future__ import annotations

from datetime import timedelta

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit
from sklearn.metrics import roc_auc_score

from features.service import instant_ms
from models.learners import log_odds, make_learner
from models.training_set import Labels, Rows, choose_rows, known_rows, row_reader
from tests.models.fake_matrix import GAP, HORIZON, START, FakeMatrix

DAY_MS = 86_400_000
REACH_MS = (GAP + HORIZON) // timedelta(milliseconds=1)


def at(days: float) -> int:
    return instant_ms(START + timedelta(days=days))


def chosen(matrix, *, refit_day=30.0, span_days=25, ratio=10, seed=1):
    rows = Rows.of(matrix.rows)
    labels = Labels.of(matrix.labels(START + timedelta(days=refit_day)))
    picked = choose_rows(
        rows,
        labels,
        start_ms=at(refit_day - span_days) - REACH_MS,
        complete_by_ms=at(refit_day),
        as_of_ms=at(refit_day),
        negative_ratio=ratio,
        seed=seed,
    )
    return rows, labels, picked


@pytest.fixture(scope="module")
def matrix():
    return FakeMatrix(units=60, incidents=40, companions=10)


def test_all_positives_and_the_ratio_of_negatives(matrix):
    rows, labels, picked = chosen(matrix)
    positive = known_rows(rows, labels, start_ms=at(5) - REACH_MS, complete_by_ms=at(30), as_of_ms=at(30))
    positive &= labels.label == 1
    used = set(picked.rows[picked.label == 1].tolist())
    assert used <= set(np.flatnonzero(positive).tolist())
    assert len(used) == positive.sum() - picked.n_unmatched
    assert set(np.flatnonzero(positive & ~rows.augmented).tolist()) <= used
    assert picked.n_positive == (picked.label == 1).sum() > 50
    weight = picked.weight[picked.label == 0].sum()
    assert weight == pytest.approx(10 * picked.n_positive)
    assert (picked.weight[picked.label == 1] == 1).all()
    assert picked.n_incidents <= 40
    assert np.all(np.diff(picked.rows) > 0)


def test_labels_must_be_complete_and_known_at_the_refit(matrix):
    _, labels, picked = chosen(matrix)
    assert (labels.complete[picked.rows] <= at(30)).all()
    assert (labels.label[picked.rows] >= 0).all()


def test_the_clock_tells_nothing_of_the_label(matrix):
    """On the grid, off it, and at each time off it, the weighted odds are the same."""
    rows, _, picked = chosen(matrix)
    off, time = rows.augmented[picked.rows], rows.time[picked.rows]

    def odds(mask):
        positive = picked.weight[mask & (picked.label == 1)].sum()
        return positive / picked.weight[mask & (picked.label == 0)].sum()

    assert off.any()
    assert odds(off) == pytest.approx(0.1)
    assert odds(~off) == pytest.approx(0.1)
    for each in np.unique(time[off]):
        assert odds(off & (time == each)) == pytest.approx(0.1)


def test_a_model_of_the_hour_alone_stays_at_chance():
    matrix = FakeMatrix(units=60, days=60, incidents=80, clock_only=True, seed=4)
    rows, labels, picked = chosen(matrix, refit_day=40, span_days=38)
    learner = make_learner("lightgbm", seed=1, settings={"min_child_samples": 5, "reg_lambda": 0.0})
    learner.fit(matrix.values(picked.rows), picked.label, sample_weight=picked.weight)
    in_sample = roc_auc_score(picked.label, log_odds(learner, matrix.values(picked.rows)), sample_weight=picked.weight)
    assert in_sample < 0.62

    truth = Labels.of(matrix.labels()).label
    later = np.flatnonzero((rows.time > at(41)) & (truth >= 0) & ~rows.augmented)
    assert abs(roc_auc_score(truth[later], log_odds(learner, matrix.values(later))) - 0.5) < 0.12

    # Negatives on the grid only, as one would draw them without thinking, give the clock away.
    grid_only = np.flatnonzero(
        known_rows(rows, labels, start_ms=0, complete_by_ms=at(40), as_of_ms=at(40))
        & ((labels.label == 1) | ~rows.augmented)
    )
    naive = make_learner("lightgbm", seed=1).fit(matrix.values(grid_only), labels.label[grid_only])
    assert roc_auc_score(labels.label[grid_only], log_odds(naive, matrix.values(grid_only))) > 0.7


def test_the_shift_restores_the_base_rate():
    matrix = FakeMatrix(units=80, days=50, incidents=120, strength=1.0, seed=2)
    rows, labels, picked = chosen(matrix, refit_day=45, span_days=43)
    X = np.nan_to_num(matrix.values(picked.rows))
    learner = make_learner("logistic", seed=1, settings={"C": 10.0})
    learner.fit(X, picked.label, sample_weight=picked.weight)
    grid = np.flatnonzero(~rows.augmented & (labels.label >= 0))
    risk = expit(log_odds(learner, np.nan_to_num(matrix.values(grid))) + picked.prior_shift)
    assert risk.mean() == pytest.approx((labels.label[grid] == 1).mean(), rel=0.2)


def reordered(matrix: FakeMatrix, order: np.ndarray) -> FakeMatrix:
    other = FakeMatrix.__new__(FakeMatrix)
    other.__dict__.update(matrix.__dict__)
    other.rows = matrix.rows.iloc[order].reset_index(drop=True)
    other.features = matrix.features[order]
    return other


def test_the_draw_does_not_depend_on_the_order_of_rows(matrix):
    order = np.random.default_rng(0).permutation(len(matrix.rows))
    _, _, picked = chosen(matrix)
    _, _, other = chosen(reordered(matrix, order))
    assert set(order[other.rows].tolist()) == set(picked.rows.tolist())
    assert other.prior_shift == pytest.approx(picked.prior_shift, rel=1e-12)
    assert set(chosen(matrix, seed=2)[2].rows.tolist()) != set(picked.rows.tolist())


@settings(deadline=None, max_examples=15)
@given(refit=st.integers(10, 38), seed=st.integers(0, 10**6))
def test_what_is_not_known_at_the_refit_changes_nothing(refit, seed):
    matrix = FakeMatrix(units=15, incidents=25, companions=4)
    as_of = START + timedelta(days=refit)
    _, _, clean = chosen(matrix, refit_day=refit)
    kept = matrix.rows["augmented"] & (matrix.rows["established_at"] > as_of)
    rng = np.random.default_rng(seed)
    poisoned = reordered(matrix, np.flatnonzero(~kept | (rng.random(len(kept)) < 0.5)))
    events = matrix.events.copy()
    late = events["known_at"] > as_of
    events.loc[late, "unit"] = rng.choice(matrix.rows["unit"].unique(), late.sum())
    poisoned.events = events[~late | (rng.random(len(late)) < 0.5)]
    _, _, other = chosen(poisoned, refit_day=refit)

    def key(m, picked):
        rows = m.rows.iloc[picked.rows]
        return list(
            zip(rows["decision_time"], rows["unit"], rows["augmented"], picked.label, picked.weight, strict=True)
        )

    assert key(poisoned, other) == key(matrix, clean)
    assert other.prior_shift == clean.prior_shift


def test_augmented_rows_without_a_known_positive_at_their_time_are_left_out(matrix):
    """Even where the matrix does not say when a row was established."""
    bare = reordered(matrix, np.arange(len(matrix.rows)))
    bare.rows = matrix.rows.drop(columns="established_at")
    late = bare.events.copy()
    late["known_at"] = late["start"] + timedelta(days=90)
    bare.events = late
    rows, labels, picked = chosen(bare)
    assert not picked.usable
    usable = known_rows(rows, labels, start_ms=0, complete_by_ms=at(30), as_of_ms=at(30))
    assert not (usable & rows.augmented).any()


def test_augmented_positives_without_companions_are_counted_and_left_out(matrix):
    positive = matrix.labels()["label"].fillna(0) == 1
    alone = reordered(matrix, np.flatnonzero(~matrix.rows["augmented"] | positive))
    rows, _, picked = chosen(alone)
    off = rows.augmented[picked.rows]
    assert picked.n_unmatched > 0
    for time in np.unique(rows.time[picked.rows][off]):
        assert {0, 1} == set(picked.label[off & (rows.time[picked.rows] == time)].tolist())


def test_one_class_is_not_usable(matrix):
    quiet = reordered(matrix, np.arange(len(matrix.rows)))
    quiet.events = matrix.events.iloc[:0]
    _, _, picked = chosen(quiet)
    assert not picked.usable
    assert picked.n_positive == 0


def test_reader_holds_small_matrices_only(matrix, monkeypatch):
    calls = []
    spy = reordered(matrix, np.arange(len(matrix.rows)))
    spy.values = lambda rows=None: calls.append(rows) or matrix.values(rows)
    read = row_reader(spy)
    picked = np.array([3, 1, 2])
    assert np.array_equal(read(picked), matrix.values(picked), equal_nan=True)
    read(picked)
    assert calls == [None]
    monkeypatch.setattr("models.training_set.MAX_HELD_BYTES", 10)
    calls.clear()
    row_reader(spy)(picked)
    assert len(calls) == 1
    assert calls[0] is picked


def test_rows_read_times_and_units():
    frame = pd.DataFrame(
        {
            "decision_time": pd.to_datetime(["2026-01-01T06:00Z", "2026-01-01T00:00Z"]).as_unit("ms"),
            "unit": ["b", "a"],
            "augmented": [False, False],
        }
    )
    rows = Rows.of(frame)
    assert rows.grid_times.tolist() == sorted(rows.time.tolist())
    assert rows.time[0] - rows.time[1] == DAY_MS // 4
    assert (rows.established < 0).all()
