"""XGBoost's UBJSON format, version 3, read without XGBoost.

Left where the value is below the threshold; both, and the values of leaves, are float32, and so is the sum. NaN goes
the node's default way.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np

from models.trees.errors import UnsupportedModelError, damaged
from models.trees.flat import flatten
from models.trees.keys import limits_below
from models.trees.model import Output, TreeModel
from models.trees.nodes import ReadTrees, begins, end_to_end, known_cover
from models.ubjson import read_ubjson

ATTRIBUTE: Final = "predrain"
"""The attribute in which our own objectives keep their facts."""

_SIGMOIDS: Final = ("binary:logistic",)
_MARGINS: Final = ("binary:logitraw", "rank:ndcg", "rank:pairwise", "rank:map")
_SCORE: Final = re.compile(r"\[?(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\]?", re.ASCII)
# XGBoost keeps a base score this far from 0 and 1 before it takes the log-odds (seen in what 3.2 answers).
_EDGE: Final = np.float32(1e-6)
_WHOLE: Final = re.compile(r"-?\d{1,10}", re.ASCII)


def read_xgboost(content: bytes, where: str) -> TreeModel:
    """Read a model of two classes.

    Returns: sums in float32, in the library's order.
    Raises ``UnsupportedModelError`` if it has splits on categories, vector leaves, several classes, another booster
    than ``gbtree``, or another objective than those of this package.
    Raises ``InputError`` if it is damaged.
    """
    try:
        return _model(read_ubjson(content)["learner"], where)
    except KeyError as error:
        raise damaged(f"{error} is missing", where) from None
    except (ValueError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise damaged(error, where) from None


def _model(learner: Any, where: str) -> TreeModel:
    param = learner["learner_model_param"]
    features = _int(param["num_feature"])
    if features < 1:
        raise ValueError(f"it is of {features} features")
    if _int(param["num_class"]) > 1 or _int(param["num_target"]) != 1:
        raise UnsupportedModelError("it has several classes or targets", where)
    booster = learner["gradient_booster"]
    if booster["name"] != "gbtree":
        raise UnsupportedModelError(f"its booster is '{str(booster['name'])[:40]}'", where)
    objective = learner["objective"]["name"]
    if objective not in _SIGMOIDS + _MARGINS:
        raise UnsupportedModelError(f"its objective is '{str(objective)[:40]}'", where)
    model = booster["model"]
    trees = model["trees"]
    if not len(trees) == _int(model["gbtree_model_param"]["num_trees"]) == len(model["tree_info"]):
        raise ValueError("its number of trees is misstated")
    if any(int(each) != 0 for each in model["tree_info"]):
        raise UnsupportedModelError("its trees are of several classes", where)
    read = _joined([_nodes(tree, where) for tree in trees])
    return TreeModel(
        flatten(read, features, where),
        Output.XGBOOST_SIGMOID if objective in _SIGMOIDS else Output.XGBOOST_MARGIN,
        start=_start(str(param["base_score"]), objective),
        wrapped=ATTRIBUTE in learner.get("attributes", {}),
        nodes=read,
    )


def _start(text: str, objective: str) -> float:
    """Give the margin that the file's base score stands for: ``binary:logistic`` alone states a probability."""
    from models.trees.kernel import logit_single  # noqa: PLC0415 - it compiles

    found = _SCORE.fullmatch(text)
    if found is None:
        raise ValueError(f"its base score is {text[:40]!r}")
    score = np.float32(found[1])
    if objective not in _SIGMOIDS:
        if not np.isfinite(score):
            raise ValueError(f"its base score is {text[:40]!r}")
        return float(score)
    if not 0 <= score <= 1:
        raise ValueError(f"its base score {text[:40]!r} is no probability")
    return float(logit_single(np.clip(score, _EDGE, np.float32(1) - _EDGE)))


def _nodes(tree: Any, where: str) -> dict[str, np.ndarray]:
    size = _int(tree["tree_param"]["num_nodes"])
    if size < 1:
        raise ValueError("a tree has no node")
    if _int(tree["tree_param"]["size_leaf_vector"]) > 1:
        raise UnsupportedModelError("its leaves are vectors", where)
    if len(tree["categories"]) or np.any(_column(tree, "split_type", size, np.int64)):
        raise UnsupportedModelError("it splits on categories", where)
    left, right, feature, default = (
        _column(tree, name, size, np.int64)
        for name in ("left_children", "right_children", "split_indices", "default_left")
    )
    condition = _column(tree, "split_conditions", size, np.float32)
    if np.isnan(condition).any():
        raise ValueError("a tree's threshold or value is not a number")
    if not np.isin(default, (0, 1)).all():
        raise ValueError("default_left is neither 0 nor 1")
    cover = _column(tree, "sum_hessian", size, np.float32) if "sum_hessian" in tree else np.full(size, np.nan)
    return {
        "left": left,
        "right": right,
        "feature": feature,
        "value": condition,
        "missing_left": default > 0,
        "cover": cover,
    }


def _column(tree: Any, name: str, size: int, kind: Any) -> np.ndarray:
    found = np.asarray(tree[name])
    if found.shape != (size,) or found.dtype.kind not in ("iuf" if kind is np.float32 else "iu"):
        raise ValueError(f"{name} of a tree is not {size} numbers")
    with np.errstate(over="ignore"):  # a number too large for float32 is refused where it is a leaf's
        return found.astype(kind)


def _joined(nodes: list[dict[str, np.ndarray]]) -> ReadTrees:
    def all_of(name: str, kind: Any) -> np.ndarray:
        return end_to_end([each[name] for each in nodes], kind)

    condition = all_of("value", np.float32)
    return ReadTrees(
        first=begins([len(each["left"]) for each in nodes]),
        left=all_of("left", np.int64),
        right=all_of("right", np.int64),
        feature=all_of("feature", np.int64),
        limit=limits_below(condition),
        missing_left=all_of("missing_left", np.bool_),
        zero_missing=np.zeros(len(condition), np.bool_),
        value=condition,
        whole=False,
        cover=known_cover(all_of("cover", np.float64)),
    )


def _int(text: Any) -> int:
    if not isinstance(text, str) or _WHOLE.fullmatch(text) is None:
        raise ValueError(f"{str(text)[:40]!r} is no whole number")
    return int(text)
