"""Reasons of alerts: contributions against slow oracles, and what is said of them."""

import itertools

import numpy as np
import pytest

from features.vocabulary import describe
from models.bundle import load_bundle, save_bundle
from models.explanation import LINEAR, OCCLUSION, PATHS, TREES, UNKNOWN, contributions, explain, members_of
from models.learners import logit
from tests.models.small_models import COLUMNS, fitted_models, rows


@pytest.fixture(scope="module")
def X():
    return rows(25, seed=8)[0]


def margin(learner, X):
    return logit(learner.predict_proba(X)[:, 1])


@pytest.mark.parametrize("name", ["lightgbm", "xgboost"])
def test_contributions_of_boosted_trees_add_up_to_the_log_odds(X, name):
    learner = fitted_models().learners[name]
    values, method = contributions(learner, X)
    assert method == TREES
    assert values.shape == X.shape
    rest = margin(learner, X) - values.sum(axis=1)
    np.testing.assert_allclose(rest, rest[0], atol=1e-5)  # what is left is the same for every row: the average


def test_contributions_of_a_forest_follow_its_paths(X):
    forest = fitted_models().learners["random_forest"]
    values, method = contributions(forest, X)
    assert method == PATHS
    expected = np.zeros(X.shape)
    root = 0.0
    for estimator in forest.estimators_:
        tree = estimator.tree_
        share = tree.value[:, 0, 1] / tree.value[:, 0].sum(axis=1)
        root += share[0] / len(forest.estimators_)
        for row, path in enumerate(estimator.decision_path(X)):
            nodes = path.indices
            for parent, child in itertools.pairwise(nodes):
                expected[row, tree.feature[parent]] += (share[child] - share[parent]) / len(forest.estimators_)
    change = expected.sum(axis=1)
    np.testing.assert_allclose(root + change, forest.predict_proba(X)[:, 1], atol=1e-9)
    np.testing.assert_allclose(values.sum(axis=1), margin(forest, X) - logit(np.array(root)), atol=1e-9)
    moved = np.abs(change) > 1e-9
    scale = (values.sum(axis=1)[moved] / change[moved])[:, None]
    np.testing.assert_allclose(values[moved], expected[moved] * scale, atol=1e-9)
    assert (scale > 0).all()


def test_contributions_of_a_linear_model_add_up_to_its_decision(X):
    learner = fitted_models().learners["logistic"]
    values, method = contributions(learner, X)
    assert method == LINEAR
    np.testing.assert_allclose(values.sum(axis=1) + learner.classifier_.intercept_[0], margin(learner, X), atol=1e-4)
    assert (values[np.isnan(X)] == 0).all()


def test_contributions_of_a_network_are_what_its_score_loses(X):
    learner = fitted_models().learners["mlp"]
    values, method = contributions(learner, X)
    assert method == OCCLUSION
    scaled = learner.scaler_.transform(X)
    for row in range(3):
        for feature in range(X.shape[1]):
            without = scaled[row : row + 1].copy()
            without[0, feature] = 0
            one, two = (
                logit(learner.classifier_.predict_proba(each)[:, 1]) for each in (scaled[row : row + 1], without)
            )
            assert values[row, feature] == pytest.approx(float((one - two)[0]), abs=1e-5)


def test_baselines_are_explained_by_what_they_count():
    X = np.array([[60, 400, 0, 2, 5, 0]], dtype=np.float32)
    [counted] = explain(members_of(fitted_models(), "history_count"), X, COLUMNS)
    assert [reason.column for reason in counted.reasons] == [COLUMNS[3].name, COLUMNS[4].name]
    assert counted.reasons[0].contribution == pytest.approx(2)
    assert counted.method == f"{UNKNOWN} of history_count"
    [chance] = explain(members_of(fitted_models(), "random"), X, COLUMNS)
    assert chance.reasons == ()


def test_an_ensemble_is_explained_by_the_mean_of_its_boosted_members(X):
    fitted = fitted_models()
    explained = explain(members_of(fitted, "mean_rank"), X, COLUMNS, top=2)
    mean = np.mean([contributions(fitted.learners[name], X)[0] for name in ("lightgbm", "xgboost")], axis=0)
    assert len(explained) == len(X)
    for row, explanation in enumerate(explained):
        best = [at for at in np.argsort(-mean[row], kind="stable")[:2] if mean[row, at] > 0]
        assert [reason.column for reason in explanation.reasons] == [COLUMNS[at].name for at in best]
        for at, reason in zip(best, explanation.reasons, strict=True):
            assert reason.contribution == pytest.approx(mean[row, at])
            assert reason.text == describe(COLUMNS[at], float(X[row, at]))
    assert explained[0].method == "exact tree contributions of lightgbm, xgboost (without random_forest)"


def test_an_alert_on_a_hot_gpu_says_that_it_is_hot():
    X = np.array([[80, 400, 0, 0, 0, 0], [60, 400, 0, 0, 0, 0]], dtype=np.float32)
    hot, _ = explain(members_of(fitted_models(), "xgboost"), X, COLUMNS)
    assert hot.reasons[0].column == "telemetry__gpu_temp_c__mean__6h"
    assert hot.reasons[0].value == 80
    assert "80" in hot.reasons[0].text
    [compared] = explain(members_of(fitted_models(), "xgboost"), X[:1], COLUMNS, usual=np.full(len(COLUMNS), 61.5))
    assert compared.reasons[0].text == describe(COLUMNS[0], 80.0, 61.5) != hot.reasons[0].text


def test_members_are_those_that_make_the_alerts():
    fitted = fitted_models()
    names = {model: [name for name, _ in members_of(fitted, model)] for model in fitted.models}
    assert names["lightgbm"] == ["lightgbm"]
    assert names["intersection"] == names["stacked"] == ["lightgbm", "xgboost", "random_forest"]
    assert names["cascade"] == ["mlp"]
    assert names["vendor_rules"] == ["vendor_rules"]
    with pytest.raises(ValueError, match="svm is not among random"):
        members_of(fitted, "svm")


def test_a_loaded_bundle_explains_the_same(X, tmp_path):
    fitted = fitted_models()
    loaded = load_bundle(save_bundle(tmp_path / "b", fitted, {"profile": "mean_rank"}).path).fitted
    for model in ("mean_rank", "random_forest", "logistic", "cascade", "vendor_rules"):
        one, two = (explain(members_of(each, model), X, COLUMNS) for each in (fitted, loaded))
        assert repr(one) == repr(two)


def test_nothing_to_explain_and_wrong_input():
    members = members_of(fitted_models(), "xgboost")
    assert explain(members, np.zeros((0, len(COLUMNS)), np.float32), COLUMNS) == []
    with pytest.raises(ValueError, match=r"rows of shape \(1, 2\) do not match 6 columns"):
        explain(members, np.zeros((1, 2), np.float32), COLUMNS)
    with pytest.raises(ValueError, match="no members"):
        explain([], np.zeros((1, len(COLUMNS)), np.float32), COLUMNS)
    with pytest.raises(TypeError, match="no way to explain a object"):
        contributions(object(), np.zeros((1, 6), np.float32))
