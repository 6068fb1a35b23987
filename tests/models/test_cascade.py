from __future__ import annotations

from datetime import timedelta
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.linear_model import LogisticRegression
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils.estimator_checks import parametrize_with_checks

from models.ensembles.cascade import CascadeEnsemble, keep_threshold, splits
from models.rows.odds import log_odds

STAGES = [("wide", LogisticRegression()), ("sharp", DecisionTreeClassifier(max_depth=4, random_state=0))]
DAY = 86_400_000
FEW = {"n_estimators": 10, "min_child_samples": 5, "verbose": -1}


def known_deviations(estimator):
    # To repeat a row is not to weigh it twice where folds are drawn: they change with the number of rows.
    return {"check_sample_weight_equivalence_on_dense_data": "out-of-fold scores depend on the number of rows"}


@parametrize_with_checks(
    [
        CascadeEnsemble(STAGES),
        CascadeEnsemble([*STAGES, ("last", LogisticRegression())]),
        CascadeEnsemble([*STAGES, ("last", LogisticRegression())], order_by="mean"),
    ],
    expected_failed_checks=known_deviations,
)
def test_sklearn_contract(estimator, check):
    check(estimator)


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
    cascade = CascadeEnsemble(stages, recall_floor=0.8, purge=timedelta(days=1)).fit(X, y, times=times)
    score, survived = cascade.score_rows(X)
    assert 0 < survived.sum() < len(X)
    assert score[~survived].astype(np.float32).max() < score[survived].astype(np.float32).min()
    assert np.array_equal(cascade.log_odds(X), score)
    assert np.array_equal(cascade.survives(X), survived)


def test_earlier_filters_put_rows_lower():
    X, y, times = timed()
    cascade = CascadeEnsemble([*STAGES, ("last", LogisticRegression())], 0.7, timedelta(days=1)).fit(X, y, times=times)
    score, survived = cascade.score_rows(X)
    first = np.array([cascade.stages_[0][1].predict_proba(X)[:, 1]])[0]
    by_first = np.log(first / (1 - first)) < cascade.thresholds_[0]
    assert score[by_first].max() < score[~by_first].min()
    assert not survived[by_first].any()


def test_threshold_keeps_the_floor_of_validation_positives():
    X, y, times = timed()
    X_new, y_new, _ = timed(seed=1)
    cascade = CascadeEnsemble(STAGES, 0.9, timedelta(days=1)).fit(X, y, times=times, validation=(X_new, y_new))
    assert cascade.survives(X_new)[y_new == 1].mean() >= 0.9


def test_a_fitted_first_stage_is_used_as_it_is():
    X, y, times = timed()
    first = LogisticRegression().fit(X, y)
    cascade = CascadeEnsemble(STAGES).fit(X, y, times=times, fitted_first=first)
    assert cascade.stages_[0][1] is first
    odds = first.decision_function(X)
    np.testing.assert_allclose(cascade.score_rows(X, odds)[0], cascade.log_odds(X), atol=1e-6)


class Recorder(ClassifierMixin, BaseEstimator):
    """Remembers which rows it was fitted on."""

    seen: ClassVar[list] = []

    def fit(self, X, y, sample_weight=None):
        self.classes_ = np.array([0, 1])
        type(self).seen.append(X[:, 0].copy())
        return self

    def predict_proba(self, X):
        return np.column_stack([1 - X[:, 1], X[:, 1]])


def test_the_last_stage_never_sees_rows_that_the_out_of_fold_filter_removed():
    fitted_on, n, suspicion, cascade = last_stage_rows(1600)
    assert len(fitted_on) < n / 2
    threshold = 1 / (1 + np.exp(-cascade.thresholds_[0]))
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
    cascade = CascadeEnsemble([("a", Recorder()), ("b", Recorder())], 0.9, timedelta(days=1)).fit(X, y, times=times)
    return Recorder.seen[-1].astype(int), n, suspicion, cascade


@given(st.integers(0, 50), st.integers(0, 3))
def test_out_of_fold_models_see_only_complete_earlier_labels(seed, purge_days):
    rng = np.random.default_rng(seed)
    times = rng.integers(0, 30, 120) * DAY
    y = (rng.random(120) < 0.2).astype(int)
    if not y.any():
        return
    scored_rows = []
    for fit_on, scored in splits(y, times=times, groups=None, purge_ms=purge_days * DAY):
        assert times[fit_on].max() < times[scored].min() - purge_days * DAY + (purge_days == 0)
        assert len(np.unique(y[fit_on])) == 2
        scored_rows += scored.tolist()
    assert len(scored_rows) == len(set(scored_rows))


def test_without_times_folds_keep_groups_whole():
    rng = np.random.default_rng(0)
    y, groups = rng.integers(0, 2, 80), rng.integers(0, 9, 80)
    for fit_on, scored in splits(y, times=None, groups=groups, purge_ms=0):
        assert not set(groups[fit_on]) & set(groups[scored])


def test_too_little_data_degrades_to_fitting_on_everything():
    X = np.arange(8.0)[:, None]
    y = np.array([0, 0, 0, 0, 0, 0, 0, 1])
    cascade = CascadeEnsemble(STAGES).fit(X, y, times=np.arange(8) * DAY)
    assert np.isfinite(cascade.log_odds(X)).all()


def test_a_cascade_without_stages_says_so():
    with pytest.raises(ValueError, match="has no stages: give a list"):
        CascadeEnsemble().fit(np.eye(4), [0, 1, 0, 1])


def test_an_unknown_score_is_refused():
    with pytest.raises(ValueError, match="order_by is 'first': give 'last' or 'mean'"):
        CascadeEnsemble(STAGES, order_by="first").fit(np.eye(4), [0, 1, 0, 1])


def test_survivors_may_be_ordered_by_the_mean_of_all_stages():
    X, y, times = timed()
    stages = [*STAGES, ("last", LogisticRegression(C=0.1))]
    cascade = CascadeEnsemble(stages, 0.8, timedelta(days=1), order_by="mean").fit(X, y, times=times)
    score, survived = cascade.score_rows(X)
    mean = np.mean([log_odds(stage, X) for _, stage in cascade.stages_], axis=0)
    assert np.array_equal(np.argsort(score[survived]), np.argsort(mean[survived]))
    assert score[~survived].max() < score[survived].min()
    last = CascadeEnsemble(stages, 0.8, timedelta(days=1)).fit(X, y, times=times)
    assert np.array_equal(last.survives(X), survived)
    assert last.thresholds_ == cascade.thresholds_


def test_alerts_are_at_most_k_and_survivors_only():
    X, y, times = timed()
    cascade = CascadeEnsemble(STAGES, 0.6, timedelta(days=1), k=3).fit(X, y, times=times)
    chosen = cascade.select(X, times, [f"u{i}" for i in range(len(X))])
    survived = cascade.survives(X)
    for time in np.unique(times):
        here = times == time
        assert chosen.alert[here].sum() == min(3, survived[here].sum())
        assert sorted(chosen.rank[here].tolist()) == list(range(1, here.sum() + 1))
    assert not (chosen.alert & ~survived).any()
    assert cascade.select(X).alert.sum() == 3
