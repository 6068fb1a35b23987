"""Whether a learner's file is what its library expects, checked before the library sees it.

XGBoost and LightGBM read files they trust: a wrong length, a child that is no node or a feature that is no column makes
them read beyond their memory or abort the process, when the file is loaded or only when a row is scored. So the trees
are walked here first. What passes is loaded and asked for one score; whatever a library raises then is an InputError.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from features.errors import InputError

Ints = np.ndarray[Any, np.dtype[np.int64]]

_MOST_ENTRIES = 100_000
_MOST_UNPACKED = 2**31
_ROOT = 2**31 - 1  # XGBoost's parent of the root
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)
_OBJECTIVE = re.compile(r"binary sigmoid:\d+(\.\d+)?")
_SCORE = re.compile(r"\[?-?\d+(\.\d+)?(E[+-]?\d+)?\]?")
_TAIL = re.compile(
    r"end of trees\n\nfeature_importances:\n(?P<importances>(\S+\n)*)\nparameters:\n(?P<parameters>([^\n]+\n)*)\n?"
    r"end of parameters\n\npandas_categorical:(null|\[\])\n"
)
_TREE_INTS = ("left_children", "right_children", "parents", "split_indices")
_TREE_ALIGNED = (
    *_TREE_INTS, "split_conditions", "default_left", "split_type", "base_weights", "loss_changes", "sum_hessian",
)  # fmt: skip


def check_file(content: bytes, where: str, features: int) -> None:
    """Check a learner's file by its suffix.

    Raises ``InputError`` if it is empty, cut off, or its parts do not fit each other.
    """
    suffix = where.rpartition(".")[2]
    check: Callable[[bytes, int], None] | None = {"json": _xgboost, "txt": _lightgbm, "skops": _skops}.get(suffix)
    try:
        if not content:
            raise ValueError("it is empty")
        if check is not None:
            check(content, features)
    except Exception as error:  # as below: a damaged zip alone raises five kinds
        raise _damaged(where, error) from None


def load_checked(load: Callable[[], Any], where: str, features: int) -> Any:
    """Load a learner whose file passed :func:`check_file`, and ask it for a score.

    Returns: with classes 0 and 1, which gives finite probabilities.
    Raises ``InputError`` if the library refuses the file, or the learner is of other features or classes or cannot
    score.
    """
    try:
        learner = load()
        _forest(learner, features)
        if [int(each) for each in learner.classes_] != [0, 1]:
            raise ValueError(f"its classes are {list(learner.classes_)}")
        found = getattr(learner, "n_features_in_", features)
        if int(found) != features:
            raise ValueError(f"it is of {found} features, the bundle of {features}")
        given = np.asarray(learner.predict_proba(np.zeros((2, features), np.float32)))
        if given.shape != (2, 2) or not np.isfinite(given).all():
            raise ValueError("it gives no probabilities")
    except InputError:
        raise
    except Exception as error:  # whatever a library raises for a damaged file: there is no list of it
        raise _damaged(where, error) from None
    return learner


def _xgboost(content: bytes, features: int) -> None:
    # what two readers of JSON take differently is refused
    root = json.loads(content.decode("ascii"), object_pairs_hook=_once, parse_constant=_no_constant)
    learner = root["learner"]
    _say(len(root["version"]) == 3, "its version is not three numbers")
    model_param = learner["learner_model_param"]
    _say(_int(model_param["num_feature"]) == features, f"it is of {model_param['num_feature']} features")
    _say(_int(model_param["num_class"]) == 0 and _int(model_param["num_target"]) == 1, "it is no binary model")
    _say(_SCORE.fullmatch(model_param["base_score"]) is not None, "its base score is no number")
    _say(_int(model_param["boost_from_average"]) in (0, 1), "boost_from_average is neither 0 nor 1")
    _say(learner["objective"]["name"] == "binary:logistic", f"its objective is {learner['objective']['name']}")
    booster = learner["gradient_booster"]
    _say(booster["name"] == "gbtree", f"its booster is {booster['name']}")
    model = booster["model"]
    trees = model["trees"]
    param = model["gbtree_model_param"]
    _say(_int(param["num_trees"]) == len(trees) == len(model["tree_info"]), "its number of trees is wrong")
    _say(_int(param["num_parallel_tree"]) == 1, "it has parallel trees")
    _say(all(int(each) == 0 for each in model["tree_info"]), "its trees are of several classes")
    _say([int(each) for each in model["iteration_indptr"]] == list(range(len(trees) + 1)), "iterations are misstated")
    for at, tree in enumerate(trees):
        _say(tree["id"] == at, f"tree {at} is numbered {tree['id']}")
        _xgboost_tree(tree, features)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _say(len(dict(pairs)) == len(pairs), "a key stands twice")
    return dict(pairs)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _xgboost_tree(tree: dict[str, Any], features: int) -> None:
    param = tree["tree_param"]
    nodes = _int(param["num_nodes"])
    _say(_int(param["num_feature"]) == features, "a tree is of other features")
    _say(_int(param["size_leaf_vector"]) in (0, 1), "a leaf is a vector")
    _say(nodes > 0 and 0 <= _int(param["num_deleted"]) < nodes, "a tree's number of nodes is wrong")
    for name in _TREE_ALIGNED:
        _say(len(tree[name]) == nodes, f"{name} of a tree holds {len(tree[name])} of {nodes} nodes")
    for name in ("categories", "categories_nodes", "categories_segments", "categories_sizes"):
        _say(len(tree[name]) == 0, "a tree splits on categories")
    left, right, parents, split = (np.asarray(tree[name], np.int64) for name in _TREE_INTS)
    _say(not np.asarray(tree["split_type"]).any(), "a tree splits on categories")
    _say(bool(np.isin(tree["default_left"], (0, 1)).all()), "default_left is neither 0 nor 1")
    _say(parents[0] in (_ROOT, -1), "the root of a tree has a parent")
    _walk(left, right, split, features, leaf=lambda child: child == -1)
    inner = np.flatnonzero(left != -1)
    reached = _reached(left, right)
    inner = inner[np.isin(inner, reached)]
    _say(
        bool((parents[left[inner]] == inner).all() and (parents[right[inner]] == inner).all()), "parents are misstated"
    )
    _say(bool(np.isfinite(np.asarray(tree["split_conditions"], np.float64)).all()), "a tree's value is not finite")


def _lightgbm(content: bytes, features: int) -> None:
    text = content.decode("ascii")
    head, _, body = text.partition("\n\n")
    lines = head.split("\n")
    _say(lines[0] == "tree", "it does not begin with 'tree'")
    said = _pairs(lines[1:], bare=("average_output",))
    _say(said["version"] == "v4", f"its version is {said['version']}")
    _say(said["num_class"] == said["num_tree_per_iteration"] == "1" and said["label_index"] == "0", "no binary model")
    _say(_int(said["max_feature_idx"]) == features - 1, f"it is of {_int(said['max_feature_idx']) + 1} features")
    _say(len(said["feature_names"].split(" ")) == features, "its feature names are misstated")
    _say(len(set(said["feature_names"].split(" "))) == features, "its feature names repeat")
    _say(len(said["feature_infos"].split(" ")) == features, "its feature ranges are misstated")
    for each in said["feature_infos"].split(" "):
        _say(re.fullmatch(r"none|\[-?[\d.e+-]+:-?[\d.e+-]+\]|(-?\d+)(:-?\d+)*", each) is not None, f"a range is {each}")
    known = {"version", "num_class", "num_tree_per_iteration", "label_index", "max_feature_idx", "objective",
             "feature_names", "feature_infos", "tree_sizes", "average_output", "monotone_constraints"}  # fmt: skip
    _say(set(said) <= known, f"it holds {', '.join(sorted(set(said) - known))}")
    if "objective" in said:
        _say(_OBJECTIVE.fullmatch(said["objective"]) is not None, f"its objective is {said['objective']}")
    begin = 0
    for at, size in enumerate(said["tree_sizes"].split(" ") if said["tree_sizes"] else ()):
        tree = body[begin : begin + _int(size)]
        _say(
            len(tree) == _int(size) and tree.startswith(f"Tree={at}\n") and tree.endswith("\n\n\n"), f"tree {at} is cut"
        )
        _lightgbm_tree(_pairs(tree.rstrip("\n").split("\n")[1:]), features)
        begin += _int(size)
    _lightgbm_tail(body[begin:])


def _lightgbm_tail(text: str) -> None:
    found = _TAIL.fullmatch(text)
    if found is None:
        raise ValueError("what follows its trees is misstated")
    for line in found["importances"].split("\n"):
        _say(not line or re.fullmatch(r"\S+=-?[\d.e+-]+", line) is not None, f"an importance reads {line[:40]!r}")
    for line in found["parameters"].split("\n"):
        # the library's own reader of these runs off the end of a line that is not of this form
        _say(not line or re.fullmatch(r"\[\w+: [^\[\]]*\]", line) is not None, f"a parameter reads {line[:40]!r}")


def _lightgbm_tree(said: dict[str, str], features: int) -> None:
    leaves = _int(said["num_leaves"])
    _say(leaves >= 1, "a tree has no leaf")
    _say(said["num_cat"] == "0" and said.get("is_linear", "0") == "0", "a tree has categories or linear leaves")
    inner = {"split_feature", "threshold", "decision_type", "left_child", "right_child", "split_gain", "internal_value",
             "internal_weight", "internal_count"}  # fmt: skip
    outer = {"leaf_value", "leaf_weight", "leaf_count"}
    known = inner | outer | {"num_leaves", "num_cat", "is_linear", "shrinkage"}
    _say(set(said) == known, f"a tree lacks or adds {', '.join(sorted(set(said) ^ known))}")
    numbers = {}
    for name in inner | outer:
        want = leaves - 1 if name in inner else leaves
        # a split between what is known and what is not has an infinite threshold
        unbounded = ("inf", "-inf") if name == "threshold" else ()
        read = (0.0 if each in unbounded else _float(each) for each in said[name].split(" "))
        numbers[name] = list(read) if said[name] else []
        # a tree of one leaf leaves its statistics out
        _say(len(numbers[name]) == want or (leaves == 1 and name != "leaf_value" and len(numbers[name]) <= 1),
             f"{name} of a tree holds {len(numbers[name])} of {want}")  # fmt: skip
        _say(bool(np.isfinite(numbers[name]).all()), f"{name} of a tree is not finite")
    _say(np.isfinite(_float(said["shrinkage"])), "a tree's shrinkage is not finite")
    if leaves == 1:
        return
    left, right, split, kind = (
        np.array([_int(each) for each in said[name].split(" ")], np.int64)
        for name in ("left_child", "right_child", "split_feature", "decision_type")
    )
    _say(bool(np.isin(kind, (0, 2, 4, 6, 8, 10)).all()), "a decision type is unknown")
    _walk(left, right, split, features, leaf=lambda child: child < 0)
    ends = ~np.concatenate([left[left < 0], right[right < 0]])
    _say(sorted(ends.tolist()) == list(range(leaves)), "a tree's leaves are misstated")


def _skops(content: bytes, features: int) -> None:  # noqa: ARG001 - as the other checks
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        _say(len(entries) <= _MOST_ENTRIES, f"it holds {len(entries)} files")
        _say(sum(each.file_size for each in entries) <= _MOST_UNPACKED, "it unpacks to more than 2 GiB")
        _say(len({each.filename for each in entries}) == len(entries), "a file stands in it twice")


def _forest(learner: Any, features: int) -> None:
    """Walk the trees of a forest: scikit-learn checks their types, not where they point."""
    for estimator in getattr(learner, "estimators_", ()):
        tree = estimator.tree_
        nodes = int(tree.node_count)
        _say(int(tree.n_features) == features, f"a tree is of {tree.n_features} features")
        _say(tree.value.shape == (nodes, 1, 2) and nodes > 0, "a tree's values are misstated")
        left, right = (np.asarray(each, np.int64) for each in (tree.children_left, tree.children_right))
        _walk(left, right, np.asarray(tree.feature, np.int64), features, leaf=lambda child: child == -1)
        _say(int(tree.max_depth) < nodes, "a tree's depth is misstated")


def _walk(left: Ints, right: Ints, split: Ints, features: int, *, leaf: Callable[[Ints], np.ndarray[Any, Any]]) -> None:
    """Refuse children that are no nodes, nodes that are reached twice, and splits on what is no column."""
    end = leaf(left)
    for child in (left, right):
        inside = ~leaf(child)
        _say(bool((child[inside] > 0).all() and (child[inside] < len(left)).all()), "a child is no node of its tree")
    both = np.concatenate([left[~leaf(left)], right[~leaf(right)]])
    _say(len(np.unique(both)) == len(both), "a node of a tree has two parents")
    if leaf(np.array([-2]))[0]:  # LightGBM numbers inner nodes only
        used = split
    else:
        _say(bool((leaf(right) == end).all()), "a node of a tree has one child")
        used = split[~end]
    _say(bool((used >= 0).all() and (used < features).all()), "a tree splits on a feature that is not there")
    # a cycle would need a node with two parents or a parent of the root, which is 0 and nobody's child


def _reached(left: Ints, right: Ints) -> Ints:
    seen, waiting = [], [0]
    while waiting:
        node = waiting.pop()
        seen.append(node)
        if left[node] != -1:
            waiting += [int(left[node]), int(right[node])]
    return np.array(seen, np.int64)


def _pairs(lines: Sequence[str], bare: Sequence[str] = ()) -> dict[str, str]:
    said: dict[str, str] = {}
    for line in lines:
        key, equals, value = line.partition("=")
        _say(equals == "=" or key in bare, f"a line reads {line[:40]!r}")
        _say(key not in said, f"{key!r} stands twice")
        said[key] = value
    return said


def _int(text: Any) -> int:
    _say(isinstance(text, str) and _INTEGER.fullmatch(text) is not None, f"{str(text)[:40]!r} is no whole number")
    return int(text)


def _float(text: str) -> float:
    # Python's own reading is laxer (blanks, underscores) than the libraries'
    _say(_NUMBER.fullmatch(text) is not None, f"{text[:40]!r} is no number")
    return float(text)


def _say(holds: bool, why: str) -> None:
    if not holds:
        raise ValueError(why)


def _damaged(where: str, error: BaseException) -> InputError:
    said = str(error).strip().splitlines()
    first = said[0][:200] if said else type(error).__name__
    name = where.rpartition("/")[2].partition(".")[0].rpartition("-")[2]
    return InputError(f"not a readable {name} model: {first}", where, "Train the bundle again.")
