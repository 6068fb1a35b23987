"""XGBoost's UBJSON read without XGBoost: the same float32 sums and probabilities, bit for bit."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xgboost
from hypothesis import given, settings
from hypothesis import strategies as st

from features.errors import InputError
from models.trees.errors import UnsupportedModelError
from models.trees.evaluate import read_evaluator
from models.trees.xgboost_ubj import read_xgboost
from tests.models.test_trees_evaluate import HOSTILE, rows


def trained(X, y, **more):
    model = xgboost.XGBClassifier(**{"n_estimators": 8, "max_depth": 3, "n_jobs": 1, "tree_method": "hist"} | more)
    return model.fit(X, y).get_booster()


def changed(booster, change):
    """Give the file after a change to the model's JSON; XGBoost itself writes it anew."""
    model = json.loads(bytes(booster.save_raw("json")))
    change(model["learner"])
    again = xgboost.Booster({"nthread": 1})
    again.load_model(bytearray(json.dumps(model).encode()))
    return again


def margins(booster, X):
    return booster.inplace_predict(X, predict_type="margin")


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**31), depth=st.sampled_from([1, 2, 3, 8]), base=st.floats(1e-7, 1 - 1e-7), data=st.data())
def test_what_it_trains_on_data_with_ties_gaps_and_constants_scores_the_same(seed, depth, base, data) -> None:
    X, y = rows(300, 6, seed=seed)
    booster = trained(
        X,
        y,
        max_depth=depth,
        min_child_weight=0,
        base_score=base,
        num_parallel_tree=data.draw(st.sampled_from([1, 2])),
        gamma=data.draw(st.sampled_from([0.0, 0.5])),  # it prunes
        grow_policy=data.draw(st.sampled_from(["depthwise", "lossguide"])),
    )
    evaluator = read_evaluator(bytes(booster.save_raw("ubj")), "m.ubj", 6)
    more = np.concatenate([X, np.random.default_rng(seed).choice(HOSTILE, (100, 6))])
    assert np.array_equal(evaluator.margins(more), margins(booster, more))
    assert np.array_equal(evaluator.positive(more), booster.inplace_predict(more))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_any_threshold_is_decided_as_the_library_does(seed) -> None:
    rng = np.random.default_rng(seed)
    booster = trained(*rows(300, 6, seed=109), max_depth=4, min_child_weight=0)

    def hostile(learner):
        for tree in learner["gradient_booster"]["model"]["trees"]:
            inner = np.array(tree["left_children"]) >= 0
            condition = np.array(tree["split_conditions"], np.float32)
            near = rng.choice(HOSTILE[np.isfinite(HOSTILE)], len(condition))
            near = np.where(rng.random(len(near)) < 0.5, near, np.nextafter(near, np.float32(0)))
            tree["split_conditions"] = [float(each) for each in np.where(inner, near, condition)]
            tree["default_left"] = rng.integers(0, 2, len(near)).tolist()
            tree["split_indices"] = np.where(inner, rng.integers(0, 6, len(near)), 0).tolist()

    booster = changed(booster, hostile)
    X = rng.choice(HOSTILE, (150, 6))
    evaluator = read_evaluator(bytes(booster.save_raw("ubj")), "m.ubj", 6)
    assert np.array_equal(evaluator.margins(X), margins(booster, X))


@pytest.mark.parametrize(
    "settings_", [{"max_leaves": 3000, "grow_policy": "lossguide", "max_depth": 0}, {"max_depth": 7}]
)
def test_large_trees_score_the_same(settings_) -> None:
    rng = np.random.default_rng(110)
    X = rng.normal(size=(8000, 5)).astype(np.float32)
    y = (rng.random(8000) < 0.3).astype(int)
    booster = trained(X, y, n_estimators=3, min_child_weight=0, max_bin=1024, reg_lambda=0, **settings_)
    evaluator = read_evaluator(bytes(booster.save_raw("ubj")), "m.ubj")
    assert evaluator.model.trees.walked.any()
    assert np.array_equal(evaluator.margins(X[:700]), margins(booster, X[:700]))


@pytest.mark.parametrize("start", [0.0, 1e-9, 1.0])
def test_a_base_score_at_the_edge_starts_where_the_librarys_does(start) -> None:
    X, y = rows()

    def set_start(learner):
        learner["learner_model_param"]["base_score"] = f"[{start:E}]"

    booster = changed(trained(X, y), set_start)
    evaluator = read_evaluator(bytes(booster.save_raw("ubj")), "m.ubj")
    assert np.array_equal(evaluator.positive(X), booster.inplace_predict(X))


@pytest.mark.parametrize(
    ("settings_", "why"),
    [
        ({"booster": "dart"}, "its booster is 'dart'"),
        ({"booster": "gblinear"}, "its booster is 'gblinear'"),
        ({"objective": "count:poisson"}, "its objective is 'count:poisson'"),
        ({"objective": "multi:softprob", "num_class": 3}, "it has several classes or targets"),
    ],
)
def test_what_is_not_supported_says_so(settings_, why) -> None:
    X, y = rows()
    X = np.nan_to_num(X)
    booster = xgboost.train({"objective": "binary:logistic", "nthread": 1, **settings_}, xgboost.DMatrix(X, y), 2)
    with pytest.raises(UnsupportedModelError) as error:
        read_evaluator(bytes(booster.save_raw("ubj")), "learners/xgboost.ubj")
    assert str(error.value) == (
        f"no compiled evaluator for this model: {why} (learners/xgboost.ubj). Score it with its own library."
    )


def test_categories_are_not_supported() -> None:
    X, y = rows()
    X = np.abs(np.nan_to_num(X[:, :3]))
    data = xgboost.DMatrix(X, y, feature_types=["c", "q", "q"], enable_categorical=True)
    booster = xgboost.train({"objective": "binary:logistic", "nthread": 1, "max_cat_to_onehot": 1}, data, 3)
    with pytest.raises(UnsupportedModelError, match="it splits on categories"):
        read_evaluator(bytes(booster.save_raw("ubj")), "m.ubj")


def ubjson(value):
    """Write a document as UBJSON, without the checks that XGBoost makes."""
    if isinstance(value, dict):
        return b"{" + b"".join(text(key) + ubjson(each) for key, each in value.items()) + b"}"
    if isinstance(value, list):
        return b"[" + b"".join(map(ubjson, value)) + b"]"
    if isinstance(value, str):
        return b"S" + text(value)
    if isinstance(value, bool) or value is None:
        return {True: b"T", False: b"F", None: b"Z"}[value]
    if isinstance(value, int):
        return b"L" + value.to_bytes(8, "big", signed=True)
    return b"D" + np.array(value, ">f8").tobytes()


def text(value):
    return b"L" + len(value.encode()).to_bytes(8, "big") + value.encode()


def at(tree, **values):
    def change(learner):
        first = learner["gradient_booster"]["model"]["trees"][tree]
        for name, value in values.items():
            first[name] = [value, *first[name][1:]]

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (at(0, left_children=0), "a node of a tree is reached twice"),
        (at(0, left_children=10**6), "a child is no node of its tree"),
        (at(0, right_children=-1), "a child is no node of its tree"),
        (at(0, split_indices=99), "a test is of a feature that is not among its 12"),
        (at(0, split_conditions=float("nan")), "a tree's threshold or value is not a number"),
        (at(0, default_left=7), "default_left is neither 0 nor 1"),
        (at(0, split_indices="a"), "split_indices of a tree is not"),
        (lambda learner: learner.pop("objective"), "'objective' is missing"),
        (lambda learner: learner["learner_model_param"].update(base_score="x"), "its base score is 'x'"),
        (lambda learner: learner["learner_model_param"].update(base_score="[2E0]"), "its base score '[2E0]' is no"),
        (lambda learner: learner["learner_model_param"].update(num_feature="0"), "it is of 0 features"),
        (lambda learner: learner["learner_model_param"].update(num_feature="many"), "'many' is no whole number"),
        (lambda learner: learner["gradient_booster"]["model"]["trees"].pop(), "its number of trees is misstated"),
        (lambda learner: learner["gradient_booster"]["model"]["trees"][0]["tree_param"].update(num_nodes="0"),
         "a tree has no node"),
    ],
)  # fmt: skip
def test_a_damaged_model_says_what_is_wrong(change, why) -> None:
    X, y = rows()
    model = json.loads(bytes(trained(X, y).save_raw("json")))
    assert np.array_equal(read_evaluator(ubjson(model), "m.ubj").margins(X), margins(trained(X, y), X))
    change(model["learner"])
    with pytest.raises(InputError) as error:
        read_xgboost(ubjson(model), "learners/xgboost.ubj")
    assert not isinstance(error.value, UnsupportedModelError)
    assert why in error.value.what


@pytest.mark.parametrize("content", [b"", b"{}", b"[", b"{" * 100, b"Z", b"S" + text("a")])
def test_what_is_no_model_is_refused(content) -> None:
    with pytest.raises(InputError, match="not a readable tree model"):
        read_xgboost(content, "m.ubj")
