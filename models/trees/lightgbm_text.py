"""LightGBM's text format, version 4, read without LightGBM.

How a row goes down a tree is that of the library's ``Tree::NumericalDecision``. Left where the value is at most the
threshold. A node's missing type says what happens before that: "none" takes NaN for 0; "zero" sends NaN and 0 the
default way; "nan" sends NaN that way. And values within 1e-35 of 0 are 0, because the library hands only others over.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np

from models.trees.errors import UnsupportedModelError, damaged
from models.trees.flat import flatten
from models.trees.keys import ZERO_BAND, ZERO_HIGH, ZERO_LOW, Keys, limits_at_most
from models.trees.model import Output, TreeModel
from models.trees.nodes import ReadTrees, begins, end_to_end, known_cover

HEADER: Final = "predrain "
"""How a line of our own objectives before the text begins."""

_CATEGORICAL: Final = 1
_DEFAULT_LEFT: Final = 2
_MISSING_SHIFT: Final = 2
_BY_NONE, _BY_ZERO, _BY_NAN = 0, 1, 2

_SIGMOID: Final = re.compile(r"binary sigmoid:(\d+(?:\.\d+)?(?:e[+-]?\d+)?)")
_MARGINS: Final = ("lambdarank", "rank_xendcg", "custom")
_NUMBERS: Final = re.compile(r"(-?(\d[-+.\deE]*|inf)( -?(\d[-+.\deE]*|inf))*)?", re.ASCII)
_WHOLE: Final = re.compile(r"(-?\d{1,10}( -?\d{1,10})*)?", re.ASCII)


def read_lightgbm(content: bytes, where: str) -> TreeModel:
    """Read a model of two classes.

    ``content``: the file; a line of JSON of our own objectives may stand before the model.
    Returns: sums in float64, in the library's order.
    Raises ``UnsupportedModelError`` if it has splits on categories, linear leaves, averaged trees, several classes, or
    another objective than those of this package.
    Raises ``InputError`` if it is damaged.
    """
    try:
        text = content.decode("ascii")
        wrapped = text.startswith(HEADER)
        if wrapped:
            text = text.partition("\n")[2]
        head, _, body = text.partition("\n\n")
        lines = head.split("\n")
        said = _pairs(lines[1:])
        if lines[0] != "tree" or said["version"] != "v4":
            raise ValueError("it does not begin as LightGBM's text of version 4 does")
        features = _int(said["max_feature_idx"]) + 1
        if features < 1:
            raise ValueError(f"it is of {features} features")
        output, slope = _output(said, where)
        sizes = _ints(said["tree_sizes"])
        nodes = [_nodes(text, where) for text in _texts(body, sizes)]
    except KeyError as error:
        raise damaged(f"{error} is missing", where) from None
    except (ValueError, OverflowError) as error:  # UnicodeDecodeError is one
        raise damaged(error, where) from None
    read = _joined(nodes)
    return TreeModel(flatten(read, features, where), output, slope=slope, wrapped=wrapped, nodes=read)


def _output(said: dict[str, str], where: str) -> tuple[Output, float]:
    if said["num_class"] != "1" or said["num_tree_per_iteration"] != "1":
        raise UnsupportedModelError("it has several classes", where)
    if "average_output" in said:
        raise UnsupportedModelError("it averages its trees", where)
    objective = said.get("objective", "custom")
    if objective in _MARGINS:
        return Output.LIGHTGBM_MARGIN, 1.0
    sigmoid = _SIGMOID.fullmatch(objective)
    if sigmoid is None or float(sigmoid[1]) <= 0:
        raise UnsupportedModelError(f"its objective is '{objective[:40]}'", where)
    return Output.LIGHTGBM_SIGMOID, float(sigmoid[1])


def _texts(body: str, sizes: np.ndarray) -> list[str]:
    """Cut the trees apart, by the lengths that the file states."""
    texts, begin = [], 0
    for at, size in enumerate(sizes.tolist()):
        text = body[begin : begin + size]
        if size <= 0 or len(text) < size or not text.startswith(f"Tree={at}\n"):
            raise ValueError(f"tree {at} is cut off")
        texts.append(text)
        begin += size
    if not body[begin:].startswith("end of trees\n"):
        raise ValueError("its trees do not end where they should")
    return texts


def _nodes(text: str, where: str) -> dict[str, np.ndarray]:
    """Give a tree's inner nodes, then its leaves, as one list of nodes; the root is the first."""
    said = _pairs(text.rstrip("\n").split("\n")[1:])
    leaves = _int(said["num_leaves"])
    if leaves < 1:
        raise ValueError(f"a tree has {leaves} leaves")
    if said["num_cat"] != "0":
        raise UnsupportedModelError("it splits on categories", where)
    if said.get("is_linear", "0") != "0":
        raise UnsupportedModelError("its leaves are linear", where)
    value = _floats(said["leaf_value"], leaves, "leaf_value")
    inner = leaves - 1
    # a tree of one leaf may leave the rest out
    left, right, feature, kind = (
        _ints(said[name] if inner else "", inner, name)
        for name in ("left_child", "right_child", "split_feature", "decision_type")
    )
    # a node that parts NaN from all else has an infinite threshold
    threshold = _floats(said["threshold"] if inner else "", inner, "threshold")
    if (kind & _CATEGORICAL).any():
        raise UnsupportedModelError("it splits on categories", where)
    missing = kind >> _MISSING_SHIFT
    if ((kind < 0) | (missing > _BY_NAN)).any():
        raise ValueError("a decision type is unknown")
    for child in (left, right):
        # the leaves, which it numbers ~0, ~1 ..., follow the inner nodes
        child[child < 0] = inner + ~child[child < 0]
    missing_left = np.where(missing == _BY_NONE, threshold >= 0, (kind & _DEFAULT_LEFT) > 0)
    none = np.full(leaves, -1)
    zeros = np.zeros(leaves, np.int64)
    return {
        "left": np.concatenate([left, none]),
        "right": np.concatenate([right, none]),
        "feature": np.concatenate([feature, zeros]),
        "limit": np.concatenate([_limits(threshold), zeros.astype(np.uint32)]),
        "missing_left": np.concatenate([missing_left, zeros.astype(np.bool_)]),
        "zero_missing": np.concatenate([missing == _BY_ZERO, zeros.astype(np.bool_)]),
        "value": np.concatenate([np.zeros(inner), value]),
        "cover": _cover(said, inner, leaves),
    }


def _cover(said: dict[str, str], inner: int, leaves: int) -> np.ndarray:
    """Give how many rows came to each node; NaN where the file does not say, which scoring does not need."""
    if "leaf_count" not in said or (inner and "internal_count" not in said):
        return np.full(inner + leaves, np.nan)
    above = _ints(said["internal_count"] if inner else "", inner, "internal_count")
    return np.concatenate([above, _ints(said["leaf_count"], leaves, "leaf_count")]).astype(np.float64)


def _limits(threshold: np.ndarray) -> Keys:
    """Give the largest key that goes left where all values near 0 are compared as if they were 0."""
    band = float(ZERO_BAND)
    limits = limits_at_most(threshold)
    limits[(threshold >= 0) & (threshold < band)] = ZERO_HIGH
    limits[(threshold < 0) & (threshold >= -band)] = ZERO_LOW - 1
    return limits


def _joined(nodes: list[dict[str, np.ndarray]]) -> ReadTrees:
    def all_of(name: str, kind: Any) -> np.ndarray:
        return end_to_end([each[name] for each in nodes], kind)

    return ReadTrees(
        first=begins([len(each["left"]) for each in nodes]),
        left=all_of("left", np.int64),
        right=all_of("right", np.int64),
        feature=all_of("feature", np.int64),
        limit=all_of("limit", np.uint32),
        missing_left=all_of("missing_left", np.bool_),
        zero_missing=all_of("zero_missing", np.bool_),
        value=all_of("value", np.float64),
        cover=known_cover(all_of("cover", np.float64)),
    )


def _pairs(lines: list[str]) -> dict[str, str]:
    said: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition("=")
        if key in said:
            raise ValueError(f"{key[:40]!r} stands twice")
        said[key] = value
    return said


def _int(text: str) -> int:
    return int(_ints(text, 1, "a number")[0])


def _ints(text: str, count: int | None = None, name: str = "") -> np.ndarray:
    # Python's own reading is laxer (blanks, underscores, other scripts' digits) than the library's
    if _WHOLE.fullmatch(text) is None:
        raise ValueError(f"{text[:40]!r} is no list of whole numbers")
    return _counted(np.array([int(each) for each in text.split(" ")] if text else [], np.int64), count, name)


def _floats(text: str, count: int, name: str) -> np.ndarray:
    if _NUMBERS.fullmatch(text) is None:
        raise ValueError(f"{text[:40]!r} is no list of numbers")
    return _counted(np.array([float(each) for each in text.split(" ")] if text else [], np.float64), count, name)


def _counted(found: np.ndarray, count: int | None, name: str) -> np.ndarray:
    if count is not None and len(found) != count:
        raise ValueError(f"{name} holds {len(found)} of {count} numbers")
    return found
