from datetime import timedelta

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from foundation.errors import InputError
from foundation.times import instant_ms
from models.config import LEARNERS, ModelsSection, TrainingSection
from models.ensembles import fit_cascade
from models.learners import factory
from models.learners.factory import FitRows, fit_learners, make_learner
from models.rows.training_set import Labels
from models.training.trainer import Trainer
from tests.models.fake_matrix import FakeMatrix


def rare_signal(seed: int, n: int = 40_000) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 8)).astype(np.float32)
    logit = 2.5 * (X[:, 0] + X[:, 1]) - 13.0
    return X, (rng.random(n) < 1 / (1 + np.exp(-logit))).astype(int)


@pytest.mark.parametrize("name", ["lightgbm", "xgboost"])
def test_boosting_does_not_collapse_when_positives_are_rare(name):
    X, y = rare_signal(1)
    X_new, y_new = rare_signal(2)
    assert 0.0003 < y.mean() < 0.0015
    score = make_learner(name, seed=3).fit(X, y).predict_proba(X_new)[:, 1]
    assert average_precision_score(y_new, score) > 25 * y_new.mean()


@pytest.mark.parametrize("name", LEARNERS)
def test_learns_with_missing_values_and_an_empty_column(name):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1500, 6)).astype(np.float32)
    y = (X[:, 0] + 0.3 * rng.normal(size=1500) > 1.4).astype(int)
    X[rng.random(X.shape) < 0.1] = np.nan
    X[:, 5] = np.nan
    X[:, 4] = 1e12
    weight = np.ones(1500)
    learner = make_learner(name, seed=1)
    proba = learner.fit(X, y, sample_weight=weight).predict_proba(X)
    assert proba.shape == (1500, 2)
    assert np.isfinite(proba).all()
    assert average_precision_score(y, proba[:, 1]) > 0.5
    np.testing.assert_allclose(proba.sum(axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("name", LEARNERS)
def test_same_seed_same_model_bit_for_bit(name):
    X, y = rare_signal(5, 3000)
    y[:40] = 1
    first = make_learner(name, seed=9).fit(X, y).predict_proba(X)
    second = make_learner(name, seed=9).fit(X, y).predict_proba(X)
    assert np.array_equal(first, second)


@pytest.mark.parametrize("name", LEARNERS)
def test_a_row_of_weight_two_is_not_ignored(name):
    rng = np.random.default_rng(2)
    X = rng.normal(size=(600, 3)).astype(np.float32)
    y = (rng.random(600) < 0.3).astype(int)
    light = make_learner(name, seed=1).fit(X, y, sample_weight=np.ones(600)).predict_proba(X)[:, 1].mean()
    heavy = make_learner(name, seed=1).fit(X, y, sample_weight=np.where(y == 1, 5.0, 1.0)).predict_proba(X)[:, 1].mean()
    assert heavy > light + 0.1


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(InputError, match=r"'n_estimator' .*models\.settings\.lightgbm.*Did you mean 'n_estimators'\?"):
        make_learner("lightgbm", seed=1, settings={"n_estimator": 7})
    with pytest.raises(InputError, match=r"unknown learner 'xgbost' \(parameter models\)\. Did you mean 'xgboost'\?"):
        make_learner("xgbost", seed=1)


@pytest.mark.parametrize(("many", "leaves"), [(10, 8), (10_000, 4)])
def test_boosted_trees_are_larger_where_a_training_set_holds_many_incidents(monkeypatch, many, leaves):
    monkeypatch.setattr(factory, "MANY_INCIDENTS", many)
    matrix = FakeMatrix(units=24, days=30, incidents=40, seed=3)
    models = ModelsSection(
        profile="lightgbm", learners=("lightgbm",), horizons=(), settings={"lightgbm": {"n_estimators": 12}}
    )
    trainer = Trainer(matrix, training=TrainingSection(negative_ratio=20), models=models, seed=7, names=("lightgbm",))
    labels = Labels.of(matrix.labels(matrix.span[1]))
    fitted = trainer.fit(instant_ms(matrix.span[1]), labels, timedelta(days=21))
    assert fitted.learners["lightgbm"].num_leaves == leaves


def test_a_size_that_is_set_holds_whatever_the_incidents():
    learner = make_learner("xgboost", seed=1, settings={"max_depth": 1}, incidents=10**6)
    assert learner.max_depth == 1


REFUSED = (
    ("lightgbm", {"num_leaves": -3}, "Check failed: (num_leaves) > (1)"),
    ("xgboost", {"max_depth": -3}, "value -3 for Parameter max_depth should be greater equal to 0"),
    (
        "random_forest",
        {"max_depth": -3},
        "The 'max_depth' parameter of RandomForestClassifier must be an int in the range [1, inf) or None. Got -3 "
        "instead",
    ),
    ("mlp", {"hidden_layer_sizes": [-3]}, "hidden_layer_sizes must be > 0, got [-3]"),
)


@pytest.mark.parametrize(("name", "settings", "line"), REFUSED)
def test_settings_that_a_library_refuses_are_named_with_its_own_words(name, settings, line):
    X, y = rare_signal(5, 300)
    y[:40] = 1
    learner = make_learner(name, seed=1, settings=settings)
    message = f"{name} could not be fitted: {line} (parameter models.settings.{name}). Correct the setting that"
    with pytest.raises(InputError) as caught:
        fit_learners({name: learner}, FitRows(X, y))
    assert str(caught.value).startswith(message)
    sound = make_learner("logistic", seed=1)
    for stages in ([(name, learner), ("logistic", sound)], [("logistic", sound), (name, learner)]):
        with pytest.raises(InputError) as caught:
            fit_cascade(stages, X, y, np.ones(len(y)), times=np.arange(len(y)), purge_ms=0, recall_floor=0.9)
        assert str(caught.value).startswith(message)


def test_a_network_learns_from_fewer_rows_than_a_batch():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(40, 3)).astype(np.float32), np.arange(40) % 4 == 0
    risk = make_learner("mlp", seed=1).fit(X, y.astype(int)).predict_proba(X)[:, 1]
    assert np.isfinite(risk).all()


@pytest.mark.parametrize("name", ["random_forest", "logistic", "lightgbm"])
def test_balanced_classes_raise_every_risk_and_keep_the_order(name):
    X, y = rare_signal(5, 6000)
    y[:60] = 1
    plain = make_learner(name, seed=1).fit(X, y).predict_proba(X)[:, 1]
    balanced = make_learner(name, seed=1, settings={"class_weight": "balanced"}).fit(X, y).predict_proba(X)[:, 1]
    assert balanced.mean() > 3 * plain.mean()
    assert average_precision_score(y, balanced) > 0.3 * average_precision_score(y, plain)
