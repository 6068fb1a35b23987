from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.linear_model import LogisticRegression
from sklearn.tree import DecisionTreeClassifier

from models.ensembles import fit_cascade, keep_threshold, splits

STAGES = [("wide", LogisticRegression()), ("sharp", DecisionTreeClassifier(max_depth=4, random_state=0))]
DAY = 86_400_000


def fitted(stages, X, y, times, floor=0.95, purge=DAY, **more):
    return fit_cascade(stages, X, y, np.ones(len(y)), times=times, purge_ms=purge, recall_floor=floor, **more)


def timed(n=600, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 4))
    y = (X[:, 0] + 0.7 * X[:, 1] + 0.6 * rng.normal(size=n) > 1.6).astype(int)
    return X, y, np.sort(rng.integers(0, 60, n)) * DAY


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.95, 1.0]))
def test_threshold_is_the_highest_that_keeps_the_floor(scores, floor):
    values = np.array(scores)
    threshold = keep_threshold(values, floor)
    assert (values >= threshold).mean() >= floor - 1e-12
    higher = values[values > threshold]
    if len(higher):
        assert (values >= higher.min()).mean() < floor


@pytest.mark.parametrize("stages", [STAGES, [*STAGES, ("last", LogisticRegression(C=0.1))]])
def test_filtered_rows_score_below_all_survivors(stages):
    X, y, times = timed()
    cascade = fitted(stages, X, y, times, 0.8)
    score, survived = cascade.score(X)
    assert 0 < survived.sum() < len(X)
    assert score[~survived].astype(np.float32).max() < score[survived].astype(np.float32).min()


def test_threshold_keeps_the_floor_of_validation_positives():
    X, y, times = timed()
    X_new, y_new, _ = timed(seed=1)
    cascade = fitted(STAGES, X, y, times, 0.9, later_positives=X_new[y_new == 1])
    assert cascade.score(X_new)[1][y_new == 1].mean() >= 0.9


def test_a_fitted_first_stage_is_used_as_it_is():
    X, y, times = timed()
    first = LogisticRegression().fit(X, y)
    cascade = fitted(STAGES, X, y, times, fitted_first=first)
    assert cascade.stages[0][1] is first
    odds = first.decision_function(X)
    np.testing.assert_allclose(cascade.score(X, odds)[0], cascade.score(X)[0], atol=1e-6)


class Recorder(ClassifierMixin, BaseEstimator):
    """Remembers which rows it was fitted on."""

    seen: ClassVar[list] = []

    def fit(self, X, y, sample_weight=None):
        self.classes_ = np.array([0, 1])
        type(self).seen.append(X[:, 0].copy())  # list.append is atomic: two fits at a time
        return self

    def predict_proba(self, X):
        return np.column_stack([1 - X[:, 1], X[:, 1]])


def test_the_last_stage_never_sees_rows_that_the_out_of_fold_filter_removed():
    fitted_on, n, suspicion, cascade = last_stage_rows(1600)
    assert len(fitted_on) < n / 2
    threshold = 1 / (1 + np.exp(-cascade.thresholds[0]))
    assert (suspicion[fitted_on] >= threshold - 1e-9).all()


def test_the_last_stage_learns_from_all_rows_where_too_few_survive():
    fitted_on, n, *_ = last_stage_rows(300)
    assert len(fitted_on) > n / 2


def last_stage_rows(n):
    rng = np.random.default_rng(0)
    times = np.sort(rng.integers(0, 60, n)) * DAY
    y = (rng.random(n) < 0.2).astype(int)
    suspicion = np.clip(np.where(y == 1, 0.7, 0.3) + 0.1 * rng.normal(size=n), 0.01, 0.99)
    X = np.column_stack([np.arange(n), suspicion])
    Recorder.seen = []
    cascade = fitted([("a", Recorder()), ("b", Recorder())], X, y, times, 0.9)
    return Recorder.seen[-1].astype(int), n, suspicion, cascade


@given(st.integers(0, 50), st.integers(0, 3))
def test_out_of_fold_models_see_only_complete_earlier_labels(seed, purge_days):
    rng = np.random.default_rng(seed)
    times = rng.integers(0, 30, 120) * DAY
    y = (rng.random(120) < 0.2).astype(int)
    if not y.any():
        return
    scored_rows = []
    for fit_on, scored in splits(y, times=times, purge_ms=purge_days * DAY):
        assert times[fit_on].max() < times[scored].min() - purge_days * DAY + (purge_days == 0)
        assert len(np.unique(y[fit_on])) == 2
        scored_rows += scored.tolist()
    assert len(scored_rows) == len(set(scored_rows))


def test_too_little_data_degrades_to_fitting_on_everything():
    X = np.arange(8.0)[:, None]
    y = np.array([0, 0, 0, 0, 0, 0, 0, 1])
    cascade = fitted(STAGES, X, y, np.arange(8) * DAY, purge=0)
    assert np.isfinite(cascade.score(X)[0]).all()
