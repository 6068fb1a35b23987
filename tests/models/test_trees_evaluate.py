"""What scores trees: the same for every shape of input, library-free, and safe from what cannot be a tree."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from features.errors import InputError
from models.bundle import save_bundle
from models.learners import make_learner
from models.manifest import SUFFIXES
from models.native import read_learner, write_learner
from models.odds import log_odds
from models.trees.errors import UnsupportedModelError
from models.trees.evaluate import TreeEvaluator, evaluator_or_library, read_evaluator
from models.trees.flat import flatten
from models.trees.keys import keys_of, limits_at_most, limits_below
from models.trees.model import Output, TreeModel
from models.trees.nodes import ReadTrees
from tests.models.small_models import fitted_models
from tests.models.small_models import rows as small_rows

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "lightgbm": {"n_estimators": 25, "min_child_samples": 5},
    "xgboost": {"n_estimators": 25, "max_depth": 3},
    "random_forest": {"n_estimators": 12, "max_depth": 8, "min_samples_leaf": 2, "max_samples": 0.9},
}
HOSTILE = np.array(
    [0.0, -0.0, 1e-45, -1e-45, 1e-38, 1e-36, -1e-36, 1e-35, -1e-35, 1.0000001e-35, -1.0000001e-35, 0.1, -0.1, 0.5, 1.0,
     -1.0, 16777216.0, 1e30, 3.4028235e38, -3.4028235e38, np.inf, -np.inf, np.nan],
    np.float32,
)  # fmt: skip
"""Values on which readers of trees have gone wrong."""


def rows(n=600, features=12, seed=101):
    """Counters with ties, constant columns, an all-NaN column, NaN, and labels that follow some of it."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, features)).astype(np.float32)
    X[:, : features // 2] = rng.poisson(1.5, (n, features // 2))
    X[:, features // 2] = 7.0
    X[rng.random(X.shape) < 0.1] = np.nan
    X[:, -1] = np.nan
    score = np.nan_to_num(X[:, 0]) + np.nan_to_num(X[:, -2]) + 2 * np.isnan(X[:, 1])
    return X, (rng.random(n) < 1 / (1 + np.exp(2.5 - score))).astype(int)


def file_of(name, learner, folder):
    path = folder / f"{name}{SUFFIXES[name]}"
    write_learner(name, learner, path)
    return path.read_bytes()


@pytest.fixture(scope="module", params=list(SETTINGS))
def learner(request, tmp_path_factory):
    """A learner as the repository trains it: its name, its file, what the library loads, and the evaluator."""
    name = request.param
    X, y = rows()
    content = file_of(
        name, make_learner(name, seed=101, settings=SETTINGS[name]).fit(X, y), tmp_path_factory.mktemp("m")
    )
    return name, content, read_learner(name, content, name), read_evaluator(content, f"learners/{name}{SUFFIXES[name]}")


def test_it_scores_as_the_library_does_bit_for_bit(learner) -> None:
    _, _, library, evaluator = learner
    X, _ = rows(500, seed=102)
    theirs, ours = library.predict_proba(X), evaluator.predict_proba(X)
    assert ours.dtype == theirs.dtype
    assert np.array_equal(ours[:, 1], theirs[:, 1])
    np.testing.assert_allclose(ours[:, 0], theirs[:, 0], rtol=0, atol=1e-12)
    assert np.array_equal(log_odds(evaluator, X), log_odds(library, X))
    assert evaluator.classes_.tolist() == [0, 1]
    assert evaluator.n_features_in_ == 12


@pytest.mark.parametrize("n", [0, 1, 2, 63, 64, 65, 129])
def test_a_row_scores_the_same_whatever_stands_beside_it(learner, n) -> None:
    evaluator = learner[3]
    X, _ = rows(200, seed=103)
    whole = evaluator.positive(X)
    assert np.array_equal(evaluator.positive(X[:n]), whole[:n])
    assert np.array_equal(evaluator.positive(X[::-1][:n]), whole[::-1][:n])


def test_any_layout_and_read_only_rows_score_the_same_without_compiling_again(learner) -> None:
    evaluator = learner[3]
    X, _ = rows(70, seed=104)
    expected = evaluator.positive(X)
    locked = X.copy()
    locked.flags.writeable = False
    unaligned = np.frombuffer(b"x" + X.tobytes(), np.uint8)[1:].view(np.float32).reshape(X.shape)
    for same in (np.asfortranarray(X), np.repeat(X, 2, axis=0)[::2], locked, unaligned):
        assert np.array_equal(evaluator.positive(same), expected)


def test_threads_may_share_one(learner) -> None:
    evaluator = learner[3]
    X, _ = rows(300, seed=105)
    expected = evaluator.positive(X)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(evaluator.positive, [X] * 16):
            assert np.array_equal(found, expected)


def test_rows_that_would_have_to_be_rounded_are_refused(learner) -> None:
    with pytest.raises(TypeError, match="X is of float64: give float32, as features are computed"):
        learner[3].positive(np.zeros((2, 12)))
    with pytest.raises(ValueError, match=r"X is of shape \(2, 11\): give rows of 12 features"):
        learner[3].positive(np.zeros((2, 11), np.float32))
    with pytest.raises(ValueError, match=r"base is of shape \(3,\), X has 2 rows"):
        learner[3].margins(np.zeros((2, 12), np.float32), np.zeros(3))


def test_a_file_of_other_features_is_refused(learner) -> None:
    name, content, _, _ = learner
    with pytest.raises(InputError, match="it is of 12 features, the bundle of 13"):
        read_evaluator(content, f"m{SUFFIXES[name]}", 13)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_an_input_error_or_still_scores(data, learner) -> None:
    name, content, _, _ = learner
    at = data.draw(st.integers(0, len(content) - 1))
    cut = content[:at] + data.draw(st.binary(max_size=3)) + content[at + data.draw(st.integers(0, 2)) :]
    if data.draw(st.booleans()):
        cut = cut[: data.draw(st.integers(0, len(cut)))]
    try:
        evaluator = read_evaluator(cut, f"m{SUFFIXES[name]}", 12)
    except InputError:
        return
    evaluator.margins(rows(70, seed=106)[0])


def test_every_tree_model_of_a_bundle_scores_as_its_learner_does(tmp_path) -> None:
    save_bundle(tmp_path / "bundle", fitted_models(), {"profile": "cascade"})
    X, _ = small_rows(90, 1)
    scored = []
    for file in sorted((tmp_path / "bundle" / "learners").iterdir()):
        name = file.stem.rpartition("-")[2]
        library = read_learner(name, file.read_bytes(), file.name)
        found, why = evaluator_or_library(file.read_bytes(), file.name, X.shape[1], lambda same=library: same)
        assert np.array_equal(log_odds(found, X), log_odds(library, X))
        scored += [file.stem] if why is None else []
    assert scored == ["cascade-1-xgboost", "lightgbm", "random_forest", "xgboost"]


def test_a_learner_without_trees_is_left_to_its_library(tmp_path) -> None:
    X, y = rows()
    content = file_of("logistic", make_learner("logistic", seed=101).fit(X, y), tmp_path)
    with pytest.raises(UnsupportedModelError, match="no compiled evaluator for this model: it holds a PreparedClass"):
        read_evaluator(content, "learners/logistic.skops", 12)
    found, why = evaluator_or_library(content, "logistic.skops", 12, lambda: "the library's")
    assert found == "the library's"
    assert why == "no compiled evaluator for this model: it holds a PreparedClassifier"
    assert evaluator_or_library(b"", "lstm.safetensors", 12, lambda: None)[1] is not None


def test_a_damaged_file_is_not_left_to_its_library(learner) -> None:
    name, content, _, _ = learner

    def library():
        raise AssertionError("asked")

    with pytest.raises(InputError, match="not a readable tree model"):
        evaluator_or_library(content[: len(content) // 2], f"m{SUFFIXES[name]}", 12, library)
    evaluator, why = evaluator_or_library(content, f"m{SUFFIXES[name]}", 12, library)
    assert isinstance(evaluator, TreeEvaluator)
    assert why is None


def test_scoring_imports_no_library_of_learners(learner, tmp_path) -> None:
    name, content, library, _ = learner
    file = tmp_path / f"m{SUFFIXES[name]}"
    file.write_bytes(content)
    X, _ = rows(5, seed=107)
    np.save(tmp_path / "X.npy", X)
    code = (
        "import sys\nfrom pathlib import Path\nimport numpy as np\nfrom models.trees.evaluate import read_evaluator\n"
        f"e = read_evaluator(Path({str(file)!r}).read_bytes(), {file.name!r})\n"
        f"print([float(p).hex() for p in e.positive(np.load({str(tmp_path / 'X.npy')!r}))])\n"
        "print([m for m in ('pandas', 'lightgbm', 'xgboost', 'sklearn', 'skops', 'mlflow') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT)
    scores, loaded = run.stdout.splitlines()
    assert scores == str([float(each).hex() for each in library.predict_proba(X)[:, 1]])
    assert loaded == "[]"


def trees(left, right, first=(0,), feature=None, value=None, whole=True):
    n = len(left)
    return ReadTrees(
        first=np.array([*first, n]),
        left=np.array(left, int),
        right=np.array(right, int),
        feature=np.zeros(n, int) if feature is None else np.array(feature, int),
        limit=limits_at_most(np.zeros(n)),
        missing_left=np.zeros(n, bool),
        zero_missing=np.zeros(n, bool),
        value=np.arange(n, dtype=float) if value is None else np.array(value, float),
        whole=whole,
    )


@pytest.mark.parametrize(
    ("read", "why"),
    [
        (trees([1, 0, -1], [2, 0, -1]), "a node of a tree is reached twice"),
        (trees([1, -1, -1], [1, -1, -1]), "a node of a tree is reached twice"),
        (trees([0], [0]), "a node of a tree is reached twice"),
        (trees([1, 3, -1, -1], [2, 2, -1, -1]), "a node of a tree is reached twice"),
        (trees([1, -1, -1], [9, -1, -1]), "a child is no node of its tree"),
        (trees([1, -1, -1], [-1, -1, -1]), "a child is no node of its tree"),
        (trees([1, -1, -1], [-7, -1, -1]), "a child is no node of its tree"),
        (trees([1, -1, -1, 1, -1, -1], [4, -1, -1, 2, -1, -1], first=(0, 3)), "a child is no node of its tree"),
        (trees([-1, 2, 1], [-1, 2, 1]), "a node belongs to no tree"),
        (trees([-1, -1], [-1, -1], first=(0, 2)), "tree 1 has no node"),
        (trees([1, -1, -1], [2, -1, -1], feature=[3, 0, 0]), "a test is of a feature that is not among its 3"),
        (trees([1, -1, -1], [2, -1, -1], feature=[-1, 0, 0]), "a test is of a feature that is not among its 3"),
        (trees([1, -1, -1], [2, -1, -1], value=[0, np.nan, 0]), "the value of a leaf is not finite"),
    ],
)
def test_what_is_no_tree_is_refused(read, why) -> None:
    with pytest.raises(InputError) as error:
        flatten(read, 3, "bundle/learners/m.txt")
    assert str(error.value) == f"not a readable tree model: {why} (bundle/learners/m.txt). Train the bundle again."


def test_pruned_nodes_that_point_anywhere_are_left_out() -> None:
    read = trees([1, -1, -1, 77], [2, -1, -1, 3], value=[np.nan, 1, 2, np.nan], whole=False)
    evaluator = TreeEvaluator(TreeModel(flatten(read, 3, "m"), Output.LIGHTGBM_MARGIN))
    assert evaluator.margins(np.array([[-1, 0, 0], [1, 0, 0]], np.float32)).tolist() == [1.0, 2.0]


def test_no_tree_at_all_gives_what_the_sum_starts_with() -> None:
    empty = trees([], [], first=())
    evaluator = TreeEvaluator(TreeModel(flatten(empty, 3, "m"), Output.LIGHTGBM_MARGIN, start=0.25))
    assert evaluator.margins(np.zeros((2, 3), np.float32)).tolist() == [0.25, 0.25]


def slow(read, X):
    """Walk each tree, a node at a time."""
    total = np.zeros(len(X))
    keys = keys_of(X)
    for row in range(len(X)):
        for begin in read.first[:-1]:
            at = begin
            while read.left[at] >= 0:
                key = keys[row, read.feature[at]]
                left = read.missing_left[at] if key == 0 else key <= read.limit[at]
                at = begin + (read.left[at] if left else read.right[at])
            total[row] += read.value[at]
    return total


def grown(rng, n_leaves, features):
    """Split random leaves until there are enough, and shuffle the nodes below the root."""
    left, right, leaves = [-1], [-1], [0]
    while len(leaves) < n_leaves:
        at = leaves.pop(rng.integers(len(leaves)))
        left[at], right[at] = len(left), len(left) + 1
        leaves += [left[at], right[at]]
        left, right = [*left, -1, -1], [*right, -1, -1]
    name = np.concatenate([[0], 1 + rng.permutation(len(left) - 1)]) if len(left) > 1 else np.zeros(1, int)
    new = np.full((2, len(left)), -1)
    for row, child in zip(new, (left, right), strict=True):
        row[name] = [-1 if each < 0 else name[each] for each in child]
    n = len(left)
    return (
        new[0],
        new[1],
        rng.integers(0, features, n),
        rng.choice(HOSTILE[:-1], n),
        rng.random(n) < 0.5,
        rng.normal(size=n),
    )


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.sampled_from([1, 2, 3, 4, 5, 8, 31, 63, 64, 65, 66, 300]), min_size=1, max_size=6),
)
def test_trees_of_any_size_and_order_of_nodes_are_walked_right(seed, sizes) -> None:
    rng = np.random.default_rng(seed)
    parts = [grown(rng, size, 5) for size in sizes]
    left, right, feature, threshold, missing, value = (np.concatenate(each) for each in zip(*parts, strict=True))
    begin = np.concatenate([[0], np.cumsum([len(each[0]) for each in parts])])
    read = ReadTrees(begin, left, right, feature, limits_below(threshold), missing, np.zeros(len(left), bool), value)
    X = rng.choice(HOSTILE, (80, 5))
    evaluator = TreeEvaluator(TreeModel(flatten(read, 5, "m"), Output.LIGHTGBM_MARGIN))
    assert np.array_equal(evaluator.margins(X), slow(read, X))


@given(
    value=st.floats(width=32),
    threshold=st.one_of(st.floats(allow_nan=False), st.sampled_from(HOSTILE[:-1].astype(float).tolist())),
)
def test_keys_compare_as_the_numbers_do(value, threshold) -> None:
    number = np.array([value], np.float32)
    if np.isnan(value):
        assert keys_of(number)[0] == 0
        return
    assert (keys_of(number) <= limits_at_most(np.array([threshold])))[0] == (float(number[0]) <= threshold)
    with np.errstate(over="ignore"):
        narrow = np.array([threshold], np.float64).astype(np.float32)
    assert (keys_of(number) <= limits_below(narrow))[0] == (number < narrow)[0]
