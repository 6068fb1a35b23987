from __future__ import annotations

import json
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from features.times import instant_ms
from models.config import LEARNERS, BacktestSection, ModelsSection, SearchSection, TrainingSection
from models.fit_facts import NO_FACTS
from models.learners import make_learner
from models.search import Judge, draw_settings, judges, search_settings, search_table
from models.sliding import run_backtest
from models.trainer import Trainer
from models.training_set import Labels, Rows
from tests.models.fake_matrix import GAP, HORIZON, START, FakeMatrix

REACH_MS = (GAP + HORIZON) // timedelta(milliseconds=1)
FEW = {"n_estimators": 10, "learning_rate": 0.2}


def at(days):
    return instant_ms(START + timedelta(days=days))


def cut(matrix, day=24, folds=3):
    return judges(
        matrix.values,
        Rows.of(matrix.rows),
        Labels.of(matrix.labels(START + timedelta(days=day))),
        first_ms=at(0),
        before_ms=at(day),
        reach_ms=REACH_MS,
        negative_ratio=5,
        seed=1,
        folds=folds,
    )


@pytest.fixture(scope="module")
def matrix():
    return FakeMatrix(units=40, days=40, incidents=60, companions=4)


def test_each_period_is_later_than_what_is_fitted_for_it_and_all_end_before(matrix):
    found = cut(matrix)
    assert len(found) == 3
    for judge in found:
        assert (judge.facts.times + REACH_MS <= judge.start_ms).all()
        assert judge.end_ms <= at(24) - REACH_MS
        assert judge.truth.any()
        assert not judge.truth.all()
        assert len(judge.held) == len(judge.truth)
    assert [judge.start_ms for judge in found[1:]] == [judge.end_ms for judge in found[:-1]]


@settings(deadline=None, max_examples=3)
@given(day=st.integers(16, 34), seed=st.integers(0, 10**6))
def test_what_comes_after_the_first_test_changes_no_choice(day, seed):
    """Features, incidents and augmented rows of the future are poisoned; choice and table stay, to the bit."""
    clean = FakeMatrix(units=12, days=40, incidents=40, companions=3)
    as_of = START + timedelta(days=day)
    rng = np.random.default_rng(seed)
    poisoned = FakeMatrix.__new__(FakeMatrix)
    poisoned.__dict__.update(clean.__dict__)
    events = clean.events.copy()
    late = events["known_at"] > as_of
    events.loc[late, "unit"] = rng.choice(clean.rows["unit"].unique(), late.sum())
    poisoned.events = events[~late | (rng.random(len(late)) < 0.5)]
    later = (clean.rows["decision_time"] + GAP + HORIZON > as_of) | (clean.rows["established_at"] > as_of)
    poisoned.features = clean.features.copy()
    poisoned.features[later.to_numpy()] = rng.normal(size=(later.sum(), clean.features.shape[1])) * 100

    def searched(matrix):
        return search_settings("lightgbm", cut(matrix, day), draws=2, seed=3, given=FEW)

    first, second = searched(clean), searched(poisoned)
    assert first.settings == second.settings
    assert first.why == second.why
    assert first.table.equals(second.table)


@pytest.mark.parametrize("name", LEARNERS)
def test_drawn_settings_are_valid_distinct_and_reproducible(name):
    drawn = draw_settings(name, draws=6, seed=1)
    assert len(drawn) == 6
    assert len({json.dumps(each, sort_keys=True) for each in drawn}) == 6
    assert draw_settings(name, draws=3, seed=1) == drawn[:3]
    assert draw_settings(name, draws=6, seed=2) != drawn
    for each in drawn:
        make_learner(name, seed=1, settings=each)


def test_a_small_space_ends_and_a_sequence_learner_has_none():
    assert 1 < len(draw_settings("logistic", draws=50, seed=1)) <= 7
    assert draw_settings("lstm", draws=3, seed=1) == []


def planted(seed, n=1500):
    """Folds on which only a deep tree sees the signal: the product of two features."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(2 * n, 3)).astype(np.float32)
    y = ((X[:, 0] * X[:, 1] > 0.8) & (rng.random(2 * n) < 0.9)).astype(int)
    return Judge(X[:n], y[:n], np.ones(n), NO_FACTS, X[n:], y[n:] == 1, 0, 1)


def test_better_settings_are_found_and_said():
    over = [planted(seed) for seed in range(3)]
    stump = {"learning_rate": 0.1, "n_estimators": 40, "colsample_bytree": 1.0, "reg_lambda": 1.0, "subsample": 1.0}
    found = search_settings("lightgbm", over, draws=6, seed=1, given=stump)
    assert found.settings["num_leaves"] > 4
    assert {key: found.settings[key] for key in stump} == stump
    assert found.table["chosen"].sum() == 1
    best = found.table.loc[found.table["chosen"]].iloc[0]
    assert json.loads(best["settings"]) == found.settings
    assert best["mean"] == pytest.approx(best[["fold_1", "fold_2", "fold_3"]].mean())
    assert best["mean"] == found.table["mean"].max()
    assert "more than its standard error" in found.why


def test_what_is_told_of_the_best_other_settings_is_how_they_did(monkeypatch):
    monkeypatch.setattr("models.search.draw_settings", lambda *_, **__: [{"num_leaves": 2}])
    found = search_settings("lightgbm", [planted(seed) for seed in range(3)], draws=1, seed=1, given=FEW)
    lost = found.table["mean"].iloc[0] - found.table["mean"].iloc[1]
    assert lost > 0
    assert found.why.startswith("settings of lightgbm stay: the best other one loses ")
    assert f" {lost:.4f} in average precision over 3 folds" in found.why


def test_settings_stay_where_nothing_is_better_or_nothing_can_be_compared():
    rng = np.random.default_rng(0)
    noise = [planted(seed) for seed in range(3)]
    for judge in noise:
        judge.label[:] = rng.integers(0, 2, len(judge.label))
    stays = search_settings("logistic", noise, draws=2, seed=1, given={"C": 0.001})
    assert stays.settings == {"C": 0.001}
    assert stays.why == "settings of logistic stay: nothing to try"
    alone = search_settings("lightgbm", noise[:1], draws=2, seed=1)
    assert alone.settings == {}
    assert alone.why == "settings of lightgbm stay: 1 folds with enough incidents are too few"
    assert alone.table.empty


def sections(draws):
    training = TrainingSection(
        span=timedelta(days=10), negative_ratio=5, search=SearchSection(draws=draws, learners=("lightgbm",))
    )
    few = {"lightgbm": FEW, "logistic": {}, "random_forest": {"n_estimators": 5}, "xgboost": {"n_estimators": 5}}
    models = ModelsSection.model_validate(
        {
            "profile": "lightgbm",
            "learners": ["lightgbm"],
            "settings": few,
            "parallel": {"members": ["lightgbm", "logistic"]},
            "cascade": {"stages": ["lightgbm", "logistic"]},
        }
    )
    return training, models


def test_a_backtest_searches_once_before_its_first_test_and_keeps_the_choice(matrix, monkeypatch):
    training, models = sections(draws=2)
    asked = []
    original = Trainer.search

    def spy(self):
        found = original(self)
        asked.append((self.search_at_ms, id(found)))
        return found

    monkeypatch.setattr(Trainer, "search", spy)
    first = START + timedelta(days=26)
    result = run_backtest(
        matrix, training=training, models=models, backtest=BacktestSection(first_test=first, bootstrap=0), seed=1
    )
    assert result.searched["learner"].unique().tolist() == ["lightgbm"]
    assert result.searched["chosen"].sum() == 1
    assert {when for when, _ in asked} == {instant_ms(first)}
    assert len({found for _, found in asked}) == 1


def test_without_draws_there_is_no_search(matrix):
    training, models = sections(draws=0)
    trainer = Trainer(matrix, training=training, models=models, k=1, seed=1, search_at_ms=at(26))
    assert trainer.search() == {}
    assert search_table({}) is None
    training, models = sections(draws=1)
    assert Trainer(matrix, training=training, models=models, k=1, seed=1).search() == {}
    found = Trainer(matrix, training=training, models=models, k=1, seed=1, search_at_ms=at(26)).search()
    assert list(found) == ["lightgbm"]
    assert {key: found["lightgbm"].settings[key] for key in FEW} == FEW
