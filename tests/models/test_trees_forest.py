"""scikit-learn's forests, read from their skops archives: the same means, bit for bit, and nothing is run."""

from __future__ import annotations

import io
import json
import zipfile

import numpy as np
import pytest
import skops.io
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.ensemble import ExtraTreesClassifier, RandomForestClassifier

from features.errors import InputError
from models.trees.errors import UnsupportedModelError
from models.trees.evaluate import TreeEvaluator, read_evaluator
from models.trees.forest_skops import from_forest, read_forest
from tests.models.test_trees_evaluate import HOSTILE, rows


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), depth=st.sampled_from([1, 2, 5, None]), gaps=st.booleans(), weight=st.booleans())
def test_what_it_trains_on_data_with_ties_gaps_and_constants_scores_the_same(seed, depth, gaps, weight) -> None:
    X, y = rows(250, 6, seed=seed)
    X = X if gaps else np.nan_to_num(X)
    forest = RandomForestClassifier(
        7, max_depth=depth, random_state=1, class_weight="balanced" if weight else None
    ).fit(X, y)
    # the library takes no infinities, and warns where the sum of all values is one
    hostile = HOSTILE[~(np.abs(HOSTILE) > 1e30)] if gaps else HOSTILE[np.abs(HOSTILE) <= 1e30]
    more = np.concatenate([X, np.random.default_rng(seed).choice(hostile, (100, 6))])
    expected = forest.predict_proba(more)[:, 1]
    assert np.array_equal(TreeEvaluator(from_forest(forest)).positive(more), expected)
    assert np.array_equal(read_evaluator(skops.io.dumps(forest), "m.skops", 6).positive(more), expected)


def test_a_threshold_between_two_float32_is_compared_as_float64() -> None:
    X, y = rows(200, 3)
    X = np.nan_to_num(X)
    forest = RandomForestClassifier(5, max_depth=3, random_state=1).fit(X, y)
    values = []
    for tree in forest.estimators_:
        inner = tree.tree_.children_left >= 0
        tree.tree_.threshold[inner] = np.float64(np.float32(0.1)) + 1e-12 * np.arange(inner.sum())
        values += tree.tree_.threshold[inner].tolist()
    near = np.nextafter(np.float32(0.1), np.array([0, 1], np.float32))
    rows_ = np.random.default_rng(1).choice(np.array([0.1, *near], np.float32), (60, 3))
    assert np.array_equal(TreeEvaluator(from_forest(forest)).positive(rows_), forest.predict_proba(rows_)[:, 1])


def test_large_trees_score_the_same() -> None:
    rng = np.random.default_rng(111)
    X, y = rng.normal(size=(5000, 4)).astype(np.float32), (rng.random(5000) < 0.3).astype(int)
    forest = RandomForestClassifier(3, random_state=1).fit(X, y)
    evaluator = TreeEvaluator(from_forest(forest))
    assert evaluator.model.trees.walked.all()
    assert np.array_equal(evaluator.positive(X[:500]), forest.predict_proba(X[:500])[:, 1])


@pytest.mark.parametrize(
    ("model", "labels", "why"),
    [
        (ExtraTreesClassifier, [0, 1], "it holds a ExtraTreesClassifier"),
        (RandomForestClassifier, [0, 1, 2], r"its classes are \[0, 1, 2\]"),
        (RandomForestClassifier, ["a", "b"], r"its classes are"),
        (RandomForestClassifier, [1], r"its classes are \[1\]"),
    ],
)
def test_what_is_not_supported_says_so(model, labels, why) -> None:
    X, _ = rows(60, 4)
    y = np.array(labels)[np.arange(60) % len(labels)]
    forest = model(3, random_state=1).fit(np.nan_to_num(X), y)
    with pytest.raises(UnsupportedModelError, match=why):
        read_forest(skops.io.dumps(forest), "m.skops")


def archive(change_schema=None, change_file=None):
    """A small forest's archive after changes to its schema or to the nodes of its first tree."""
    X, y = rows(100, 4)
    content = skops.io.dumps(RandomForestClassifier(2, max_depth=2, random_state=1).fit(X, y))
    with zipfile.ZipFile(io.BytesIO(content)) as given_:
        entries = {name: given_.read(name) for name in given_.namelist()}
    schema = json.loads(entries["schema.json"])
    state = schema["content"]["content"]
    tree = state["estimators_"]["content"][0]["content"]["content"]["tree_"]["content"]["content"]
    if change_schema is not None:
        change_schema(state, tree)
    entries["schema.json"] = json.dumps(schema).encode()
    if change_file is not None:
        entries[tree["nodes"]["file"]] = change_file(entries[tree["nodes"]["file"]])
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as written:
        for name, each in entries.items():
            written.writestr(name, each)
    return out.getvalue()


def set_node(**values):
    def change(content):
        nodes = np.load(io.BytesIO(content)).copy()
        for name, value in values.items():
            nodes[name][0] = value
        out = io.BytesIO()
        np.save(out, nodes)
        return out.getvalue()

    return change


@pytest.mark.parametrize(
    ("schema", "file", "why"),
    [
        (None, set_node(left_child=0), "a node of a tree is reached twice"),
        (None, set_node(left_child=999), "a child is no node of its tree"),
        (None, set_node(right_child=-1), "a child is no node of its tree"),
        (None, set_node(feature=4), "a test is of a feature that is not among its 4"),
        (None, set_node(threshold=np.nan), "a tree's threshold is not a number"),
        (None, lambda content: content[:-8], "an array is cut off"),
        (None, lambda content: content + b"x", "an array is cut off"),
        (None, lambda content: b"", "an array is not in NumPy's format"),
        (None, lambda content: content.replace(b"threshold", b"thresholt"), "a tree's nodes are not as scikit-learn"),
        (lambda state, tree: tree["nodes"].update(type="json"), None, "an array is stored in another way than NumPy's"),
        (lambda state, tree: tree["nodes"].update(file="../secret"), None, "There is no item named"),
        (lambda state, tree: tree.pop("values"), None, "'values' is missing"),
        (lambda state, tree: state["estimators_"].update(content=[]), None, "it has no trees or no features"),
        (lambda state, tree: state["n_features_in_"].update(content="[]"), None, "int() argument"),
        (lambda state, tree: state.update(estimators_=3), None, "'int' object is not subscriptable"),
    ],
)  # fmt: skip
def test_a_damaged_archive_says_what_is_wrong(schema, file, why) -> None:
    with pytest.raises(InputError) as error:
        read_forest(archive(schema, file), "learners/random_forest.skops")
    assert not isinstance(error.value, UnsupportedModelError)
    assert why in error.value.what


def test_types_that_the_archive_names_are_never_looked_up() -> None:
    def hostile(state, tree):
        state["criterion"] |= {"__class__": "system", "__module__": "os", "__loader__": "FunctionNode"}

    assert read_forest(archive(hostile), "m").trees.n_trees == 2
