"""LightGBM's text read without LightGBM: the same sums and probabilities, bit for bit."""

from __future__ import annotations

import lightgbm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from features.errors import InputError
from models.learners import make_learner
from models.trees.errors import UnsupportedModelError
from models.trees.evaluate import TreeEvaluator, read_evaluator
from models.trees.lightgbm_text import read_lightgbm
from tests.models.test_trees_evaluate import HOSTILE, grown, rows


def text_of(trees, features, objective="binary sigmoid:1"):
    """Write trees (split features, thresholds, decision types, children, leaf values) as LightGBM does."""
    texts = []
    for at, tree in enumerate(trees):
        fields = {"num_leaves": [len(tree["leaf_value"])], "num_cat": [0], **tree}
        if len(tree["leaf_value"]) > 1:
            fields |= {"split_gain": [0] * len(tree["threshold"])}
        lines = [f"Tree={at}", *(f"{key}={' '.join(map(str, values))}" for key, values in fields.items())]
        texts.append("\n".join([*lines, "is_linear=0", "shrinkage=1"]) + "\n\n\n")
    head = [
        "tree", "version=v4", "num_class=1", "num_tree_per_iteration=1", "label_index=0",
        f"max_feature_idx={features - 1}", f"objective={objective}",
        "feature_names=" + " ".join(f"f{at}" for at in range(features)),
        "feature_infos=" + " ".join(["[-1e308:1e308]"] * features),
        "tree_sizes=" + " ".join(str(len(text)) for text in texts),
    ]  # fmt: skip
    return "\n".join(head) + "\n\n" + "".join(texts) + "end of trees\n\nparameters:\nend of parameters\n"


def random_tree(rng, n_leaves, features):
    """Grow a tree with hostile thresholds and every way of treating what is missing."""
    left, right, *_ = grown(rng, n_leaves, features)
    inner, leaves = np.flatnonzero(left >= 0), np.flatnonzero(left < 0)
    name = np.empty(len(left), int)
    name[inner], name[leaves] = np.arange(len(inner)), ~np.arange(len(leaves))
    near = rng.choice(HOSTILE[np.isfinite(HOSTILE)], len(inner)).astype(float)
    threshold = np.where(
        rng.random(len(inner)) < 0.5, near, np.nextafter(near, rng.choice([-1e300, 1e300], len(inner)))
    )
    threshold = np.where(rng.random(len(inner)) < 0.1, np.inf, threshold)
    tree = {"leaf_value": [repr(float(each)) for each in rng.normal(size=len(leaves))]}
    if len(inner) == 0:
        return tree
    return tree | {
        "split_feature": rng.integers(0, features, len(inner)),
        "threshold": [repr(float(each)) for each in threshold],
        "decision_type": rng.choice([0, 2, 4, 6, 8, 10], len(inner)),
        "left_child": name[left[inner]],
        "right_child": name[right[inner]],
    }


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31), sizes=st.lists(st.sampled_from([1, 2, 3, 4, 7, 64, 65, 130]), min_size=1, max_size=5)
)
def test_any_threshold_and_any_way_of_missing_is_decided_as_the_library_does(seed, sizes) -> None:
    rng = np.random.default_rng(seed)
    text = text_of([random_tree(rng, size, 4) for size in sizes], 4)
    X = rng.choice(HOSTILE, (150, 4))
    library = lightgbm.Booster(model_str=text)
    evaluator = read_evaluator(text.encode(), "m.txt", 4)
    assert np.array_equal(evaluator.margins(X), library.predict(X, raw_score=True, num_threads=1))
    assert np.array_equal(evaluator.positive(X), library.predict(X, num_threads=1))


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    zero=st.booleans(),
    missing=st.booleans(),
    leaves=st.sampled_from([2, 4, 31, 100]),
    data=st.data(),
)
def test_what_it_trains_on_data_with_ties_gaps_and_constants_scores_the_same(seed, zero, missing, leaves, data) -> None:
    X, y = rows(300, 6, seed=seed)
    model = lightgbm.LGBMClassifier(
        n_estimators=8, num_leaves=leaves, min_child_samples=1, min_child_weight=0, zero_as_missing=zero,
        use_missing=missing, max_bin=data.draw(st.sampled_from([4, 255])), n_jobs=1, verbose=-1,
    )  # fmt: skip
    booster = model.fit(X, y).booster_
    evaluator = read_evaluator(booster.model_to_string().encode(), "m.txt", 6)
    more = np.concatenate([X, np.random.default_rng(seed).choice(HOSTILE, (100, 6))])
    assert np.array_equal(evaluator.positive(more), booster.predict(more, num_threads=1))


def test_trees_of_thousands_of_leaves_score_the_same() -> None:
    rng = np.random.default_rng(108)
    X = rng.normal(size=(9000, 5)).astype(np.float32)
    y = (rng.random(9000) < 0.3).astype(int)
    model = lightgbm.LGBMClassifier(
        n_estimators=3, num_leaves=4000, min_child_samples=1, min_child_weight=0, n_jobs=1, verbose=-1
    )
    booster = model.fit(X, y).booster_
    evaluator = read_evaluator(booster.model_to_string().encode(), "m.txt", 5)
    assert evaluator.model.trees.walked.all()
    assert len(evaluator.model.trees.node) > 10_000
    assert np.array_equal(evaluator.positive(X[:700]), booster.predict(X[:700], num_threads=1))


@pytest.mark.parametrize(
    ("settings_", "why"),
    [
        ({"min_data_per_group": 1}, "it splits on categories"),
        ({"linear_tree": True}, "its leaves are linear"),
        ({"boosting_type": "rf", "subsample": 0.5, "subsample_freq": 1}, "it averages its trees"),
        ({"objective": "cross_entropy"}, "its objective is 'cross_entropy'"),
    ],
)
def test_what_is_not_supported_says_so(settings_, why) -> None:
    X, y = rows()
    X = np.nan_to_num(X)
    categories = [0] if "categories" in why else "auto"
    data = lightgbm.Dataset(X, y.astype(float), categorical_feature=categories, params={"verbose": -1, **settings_})
    booster = lightgbm.train({"objective": "binary", "verbose": -1, "num_threads": 1, **settings_}, data, 3)
    with pytest.raises(UnsupportedModelError) as error:
        read_evaluator(booster.model_to_string().encode(), "learners/lightgbm.txt")
    assert str(error.value) == (
        f"no compiled evaluator for this model: {why} (learners/lightgbm.txt). Score it with its own library."
    )


TREE = {
    "split_feature": [0], "threshold": [0.5], "decision_type": [2], "left_child": [-1], "right_child": [-2],
    "leaf_value": [0.1, 0.2],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text.replace("version=v4", "version=v3"), "it does not begin as LightGBM's text of version 4"),
        (lambda text: text.replace("max_feature_idx=1\n", ""), "'max_feature_idx' is missing"),
        (lambda text: text.replace("max_feature_idx=1", "max_feature_idx=-1"), "it is of 0 features"),
        (lambda text: text.replace("Tree=0", "Tree=1"), "tree 0 is cut off"),
        (lambda text: text.replace("end of trees", "end"), "its trees do not end where they should"),
        (lambda text: text.replace("threshold=0.5", "threshold=nan"), "'nan' is no list of numbers"),
        (lambda text: text.replace("threshold=0.5", "threshold=1_0"), "'1_0' is no list of numbers"),
        (lambda text: text.replace("leaf_value=0.1 0.2", "leaf_value=0.1  .2"), "'0.1  .2' is no list of numbers"),
        (lambda text: text.replace("leaf_value=0.1 0.2", "leaf_value=0.11111"), "leaf_value holds 1 of 2 numbers"),
        (lambda text: text.replace("leaf_value=0.1 0.2", "leaf_value=inf 0.2"), "the value of a leaf is not finite"),
        (lambda text: text.replace("left_child=-1", "left_child=00"), "a node of a tree is reached twice"),
        (lambda text: text.replace("left_child=-1", "left_child=-9"), "a child is no node of its tree"),
        (lambda text: text.replace("decision_type=2", "decision_type=c"), "'c' is no list of whole numbers"),
        (lambda text: text.replace("split_feature=0", "split_feature=2"), "a test is of a feature that is not among"),
        (lambda text: text.replace("num_leaves=2", "num_leaves=0"), "a tree has 0 leaves"),
        (lambda text: text.replace("is_linear=0", "num_cat=000"), "'num_cat' stands twice"),
        (lambda text: text + "\xe9", "codec can't decode"),
        (lambda text: "", "it does not begin as LightGBM's text of version 4 does"),
    ],
)  # fmt: skip
def test_a_damaged_text_says_what_is_wrong(change, why) -> None:
    with pytest.raises(InputError) as error:
        read_lightgbm(change(text_of([TREE], 2)).encode("utf-8"), "learners/lightgbm.txt")
    assert not isinstance(error.value, UnsupportedModelError)
    assert why in error.value.what
    assert error.value.where == "learners/lightgbm.txt"


@pytest.mark.parametrize("kind", [-2, 12, 14, 16, 1000])
def test_an_unknown_decision_type_is_refused(kind) -> None:
    with pytest.raises(InputError, match="a decision type is unknown"):
        read_lightgbm(text_of([TREE | {"decision_type": [kind]}], 2).encode(), "m.txt")


def test_a_node_that_parts_what_is_missing_from_all_else_is_read() -> None:
    X, y = rows()
    X[:, 0] = np.where(y == 1, np.nan, X[:, 0])
    booster = make_learner("lightgbm", seed=101, settings={"n_estimators": 20}).fit(X, y).booster_
    content = booster.model_to_string().encode()
    assert b"inf" in content.partition(b"end of trees")[0]
    assert np.array_equal(read_evaluator(content, "m.txt").positive(X), booster.predict(X, num_threads=1))


def test_a_slope_of_the_sigmoid_is_kept() -> None:
    text = text_of([TREE], 2, "binary sigmoid:0.7")
    X = np.array([[0, 0], [1, 0]], np.float32)
    evaluator = TreeEvaluator(read_lightgbm(text.encode(), "m"))
    assert np.array_equal(evaluator.positive(X), lightgbm.Booster(model_str=text).predict(X))
