"""Whether the trees of a learner's file lead nowhere beyond it, checked before its library sees it.

XGBoost and LightGBM read files they trust: a wrong length, a child that is no node or a feature that is no column makes
them read beyond their memory or abort the process, when the file is loaded or only when a row is scored. So the trees
are walked here first. What passes is loaded and asked for one score; whatever a library raises then is an InputError.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from features.errors import InputError

Ints = np.ndarray[Any, np.dtype[np.int64]]

_MOST_UNPACKED = 2**31
_TREE_ALIGNED = (
    "left_children", "right_children", "parents", "split_indices", "split_conditions", "default_left", "split_type",
    "base_weights", "loss_changes", "sum_hessian",
)  # fmt: skip
_INNER = (
    "split_feature", "threshold", "decision_type", "left_child", "right_child", "split_gain", "internal_value",
    "internal_weight", "internal_count",
)  # fmt: skip
_OUTER = ("leaf_value", "leaf_weight", "leaf_count")
_PARAMETER = re.compile(r"\[\w+: [^\[\]]*\]")  # the library's own reader runs off the end of a line of another form


def check_file(content: bytes, where: str, features: int) -> None:
    """Check a learner's file by its suffix.

    Raises ``InputError`` if it is cut off, or its parts do not fit each other.
    """
    suffix = where.rpartition(".")[2]
    check: Callable[[bytes, int], None] | None = {"json": _xgboost, "txt": _lightgbm, "skops": _skops}.get(suffix)
    try:
        if check is not None:
            check(content, features)
    except Exception as error:  # as below: a damaged zip alone raises five kinds
        raise _damaged(where, error) from None


def load_checked(load: Callable[[], Any], where: str, features: int) -> Any:
    """Load a learner whose file passed :func:`check_file`, and ask it for a score.

    Raises ``InputError`` if the library refuses the file, or the learner is of other features or classes or cannot
    score.
    """
    try:
        learner = load()
        for estimator in getattr(learner, "estimators_", ()):  # scikit-learn checks types, not where they point
            tree = estimator.tree_
            _require(int(tree.n_features) == features, f"a tree is of {tree.n_features} features")
            _require(tree.value.shape == (int(tree.node_count), 1, 2), "a tree's values are misstated")
            _walk(tree.children_left, tree.children_right, tree.feature, features)
        _require([int(each) for each in learner.classes_] == [0, 1], f"its classes are {list(learner.classes_)}")
        own = int(getattr(learner, "n_features_in_", features))
        _require(own == features, f"it is of {own} features, the bundle of {features}")
        given = np.asarray(learner.predict_proba(np.zeros((2, features), np.float32)))
        _require(given.shape == (2, 2) and bool(np.isfinite(given).all()), "it gives no probabilities")
    except InputError:
        raise
    except Exception as error:  # whatever a library raises for a damaged file: there is no list of it
        raise _damaged(where, error) from None
    return learner


def _xgboost(content: bytes, features: int) -> None:
    learner = json.loads(content)["learner"]
    param = learner["learner_model_param"]
    _require(int(param["num_feature"]) == features, f"it is of {param['num_feature']} features")
    _require((int(param["num_class"]), int(param["num_target"])) == (0, 1), "it is no binary model")
    _require(learner["gradient_booster"]["name"] == "gbtree", "its booster is none of trees")
    model = learner["gradient_booster"]["model"]
    trees = model["trees"]
    counts = model["gbtree_model_param"]
    _require(int(counts["num_trees"]) == len(trees) == len(model["tree_info"]), "its number of trees is wrong")
    _require(int(counts["num_parallel_tree"]) == 1 and not any(model["tree_info"]), "its trees are of several classes")
    _require(model["iteration_indptr"] == list(range(len(trees) + 1)), "its iterations are misstated")
    for at, tree in enumerate(trees):
        _require(tree["id"] == at, f"tree {at} is numbered {tree['id']}")
        own = tree["tree_param"]
        nodes = int(own["num_nodes"])
        _require(int(own["num_feature"]) == features, "a tree is of other features")
        _require(int(own["size_leaf_vector"]) in (0, 1), "a leaf is a vector")
        for name in _TREE_ALIGNED:
            _require(len(tree[name]) == nodes, f"{name} of a tree holds {len(tree[name])} of {nodes} nodes")
        plain = not any(tree["split_type"]) and not any(tree[name] for name in tree if name.startswith("categories"))
        _require(plain, "a tree splits on categories")
        left, right, split = (np.asarray(tree[name], np.int64) for name in (
            "left_children", "right_children", "split_indices"))  # fmt: skip
        _walk(left, right, split, features)


def _lightgbm(content: bytes, features: int) -> None:
    head, _, body = content.decode("ascii").partition("\n\n")
    lines = head.split("\n")
    said = _pairs(line for line in lines[1:] if line != "average_output")
    _require(lines[0] == "tree" and said["version"] == "v4", "it is no model of version 4")
    _require(said["num_class"] == said["num_tree_per_iteration"] == "1", "it is no binary model")
    _require(int(said["max_feature_idx"]) == features - 1, f"it is of {int(said['max_feature_idx']) + 1} features")
    for name in ("feature_names", "feature_infos"):
        _require(len(said[name].split(" ")) == features, f"its {name} are misstated")
    begin = 0
    for at, size in enumerate(map(int, said["tree_sizes"].split())):
        tree = body[begin : begin + size]
        whole = len(tree) == size > 0 and tree.startswith(f"Tree={at}\n") and tree.endswith("\n\n\n")
        _require(whole, f"tree {at} is cut")
        _lightgbm_tree(_pairs(tree.rstrip("\n").split("\n")[1:]), features)
        begin += size
    trees, _, parameters = body[begin:].partition("\nparameters:\n")
    _require(trees.startswith("end of trees\n"), "what follows its trees is misstated")
    for line in parameters.partition("\nend of parameters\n")[0].split("\n"):
        _require(not line or _PARAMETER.fullmatch(line) is not None, f"a parameter reads {line[:40]!r}")


def _lightgbm_tree(said: dict[str, str], features: int) -> None:
    leaves = int(said["num_leaves"])
    _require(leaves >= 1, "a tree has no leaf")
    _require(said["num_cat"] == "0" and said.get("is_linear", "0") == "0", "a tree has categories or linear leaves")
    for names, count in ((_INNER, leaves - 1), (_OUTER, leaves)):
        for name in names:
            numbers = np.array(said[name].split(" ") if said[name] else [], np.float64)
            # a tree of one leaf leaves its statistics out
            fits = len(numbers) == count or (leaves == 1 and name != "leaf_value" and len(numbers) <= 1)
            _require(fits, f"{name} of a tree holds {len(numbers)} of {count}")
    if leaves == 1:
        return
    left, right, split = (np.array(said[name].split(" "), np.int64) for name in ("left_child", "right_child",
                                                                                "split_feature"))  # fmt: skip
    ends = ~np.concatenate([left[left < 0], right[right < 0]])
    _require(sorted(ends.tolist()) == list(range(leaves)), "a tree's leaves are misstated")
    _walk(left, right, split, features, inner_only=True)


def _skops(content: bytes, _features: int) -> None:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        size = sum(each.file_size for each in archive.infolist())
        _require(size <= _MOST_UNPACKED, "it unpacks to more than 2 GiB")


def _walk(left: Ints, right: Ints, split: Ints, features: int, *, inner_only: bool = False) -> None:
    """Refuse children that are no nodes, nodes that are reached twice, and splits on what is no column.

    ``inner_only``: nodes are the inner ones, and any negative child is a leaf; otherwise -1 is none, on both sides.
    """
    left, right, split = (np.asarray(each, np.int64) for each in (left, right, split))
    _require(len(left) > 0, "a tree has no node")
    inside = [child >= 0 if inner_only else child != -1 for child in (left, right)]
    for child, here in zip((left, right), inside, strict=True):
        _require(bool((child[here] > 0).all() and (child[here] < len(left)).all()), "a child is no node of its tree")
    both = np.concatenate([left[inside[0]], right[inside[1]]])
    # a cycle would need a node with two parents or a parent of the root, which is 0 and nobody's child
    _require(len(np.unique(both)) == len(both), "a node of a tree has two parents")
    if not inner_only:
        _require(bool((inside[0] == inside[1]).all()), "a node of a tree has one child")
        split = split[inside[0]]
    _require(bool((split >= 0).all() and (split < features).all()), "a tree splits on a feature that is not there")


def _pairs(lines: Iterable[str]) -> dict[str, str]:
    pairs = [line.partition("=") for line in lines]
    _require(all(equals for _, equals, _ in pairs), "a line holds no value")
    _require(len({key for key, _, _ in pairs}) == len(pairs), "a key stands twice")
    return {key: value for key, _, value in pairs}


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise ValueError(why)


def _damaged(where: str, error: BaseException) -> InputError:
    said = str(error).strip().splitlines()
    first = said[0][:200] if said else type(error).__name__
    name = where.rpartition("/")[2].partition(".")[0].rpartition("-")[2]
    return InputError(f"not a readable {name} model: {first}", where, "Train the bundle again.")
