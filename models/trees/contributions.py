"""What each feature added to the sum of a model's trees, without the library that grew them.

Exact path-dependent TreeSHAP (Lundberg et al., "From local explanations to global understanding with explainable AI for
trees", 2020, algorithm 2): the game is what the trees expect when a feature is unknown, by the rows that went each way
in training, which the files keep (LightGBM's counts, XGBoost's sums of Hessians, the forest's weighted counts). The
libraries compute the same numbers; XGBoost adds them up in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from models.trees.keys import ZERO_HIGH, ZERO_LOW, keys_of
from models.trees.model import TreeModel
from models.trees.nodes import ReadTrees

Floats = np.ndarray[Any, np.dtype[np.float64]]
_ZERO_LOW, _ZERO_HIGH = np.uint32(ZERO_LOW), np.uint32(ZERO_HIGH)


def tree_contributions(model: TreeModel, X: np.ndarray) -> tuple[Floats, float]:
    """Take the sum of a model's trees apart.

    ``X``: Rows; NaN: unknown; shape (n_rows, n_features).
    Returns shape (n_rows, n_features).
    Returns ``base``: what the trees expect where nothing is known: with a row's additions it makes the row's sum
    (without the model's own start).
    Raises ``ValueError`` if the file did not say how many rows went each way.
    """
    nodes = model.nodes
    if nodes is None or len(nodes.cover) != len(nodes.left):
        raise ValueError("The model does not say how many rows went each way.")
    rows = np.ascontiguousarray(keys_of(np.asarray(X, np.float32)))
    out = np.zeros(rows.shape, np.float64)
    arrays = _arrays(nodes)
    base = _expected(*arrays[:3], arrays[7], arrays[8])
    _add(rows, *arrays, out)
    return out, float(base)


def _arrays(nodes: ReadTrees) -> tuple[np.ndarray, ...]:
    return (
        nodes.first,
        nodes.left,
        nodes.right,
        nodes.feature,
        nodes.limit,
        nodes.missing_left,
        nodes.zero_missing,
        nodes.value.astype(np.float64),
        nodes.cover.astype(np.float64),
    )


@njit(cache=True, nogil=True)
def _depth(first: np.ndarray, left: np.ndarray, right: np.ndarray) -> int:
    """Give the number of nodes on the longest way down."""
    level = np.zeros(len(left), np.int64)
    stack = np.empty(len(left) + 1, np.int64)
    deepest = 1
    for tree in range(len(first) - 1):
        begin = first[tree]
        top = 0
        stack[0] = begin
        level[begin] = 1
        while top >= 0:
            node = stack[top]
            top -= 1
            deepest = max(deepest, level[node])
            if left[node] >= 0:
                for child in (begin + left[node], begin + right[node]):
                    level[child] = level[node] + 1
                    top += 1
                    stack[top] = child
    return deepest


@njit(cache=True, nogil=True)
def _expected(first: np.ndarray, left: np.ndarray, right: np.ndarray, value: np.ndarray, cover: np.ndarray) -> float:
    share = np.zeros(len(left))
    stack = np.empty(len(left) + 1, np.int64)
    total = 0.0
    for tree in range(len(first) - 1):
        begin = first[tree]
        top = 0
        stack[0] = begin
        share[begin] = 1.0
        while top >= 0:
            node = stack[top]
            top -= 1
            if left[node] < 0:
                total += share[node] * value[node]
                continue
            for child in (begin + left[node], begin + right[node]):
                share[child] = share[node] * cover[child] / cover[node] if cover[node] > 0 else 0.0
                top += 1
                stack[top] = child
    return total


@njit(cache=True, nogil=True)
def _follows(key: int, limit: int, missing_left: bool, zero_missing: bool) -> bool:
    """Tell whether a key goes left at a node."""
    if key == 0 or (zero_missing and _ZERO_LOW <= key <= _ZERO_HIGH):
        return missing_left
    return key <= limit


@njit(cache=True, nogil=True)
def _add(  # noqa: PLR0912, PLR0915 - one loop over a tree's leaves; calls in it would cost more than they say
    rows: np.ndarray,
    first: np.ndarray,
    left: np.ndarray,
    right: np.ndarray,
    feature: np.ndarray,
    limit: np.ndarray,
    missing_left: np.ndarray,
    zero_missing: np.ndarray,
    value: np.ndarray,
    cover: np.ndarray,
    out: np.ndarray,
) -> None:
    room = _depth(first, left, right) + 1
    path = np.empty(room, np.int64)
    side = np.empty(room, np.int64)
    seen = np.empty(room, np.int64)
    zero = np.empty(room)
    one = np.empty(room)
    weight = np.empty(room + 1)
    for row in range(len(rows)):
        for tree in range(len(first) - 1):
            begin = first[tree]
            depth = 0
            path[0] = begin
            side[0] = -1
            while depth >= 0:
                node = path[depth]
                if left[node] >= 0:
                    side[depth] += 1
                    if side[depth] > 1:
                        depth -= 1
                        continue
                    path[depth + 1] = begin + (left[node] if side[depth] == 0 else right[node])
                    depth += 1
                    side[depth] = -1
                    continue
                # A leaf: the features on the way to it, each once.
                count = 0
                for step in range(depth):
                    above = path[step]
                    ratio = cover[path[step + 1]] / cover[above] if cover[above] > 0 else 0.0
                    here = feature[above]
                    lefts = _follows(rows[row, here], limit[above], missing_left[above], zero_missing[above])
                    taken = 1.0 if lefts == (side[step] == 0) else 0.0
                    at = 0
                    while at < count and seen[at] != here:
                        at += 1
                    if at == count:
                        seen[at], zero[at], one[at] = here, ratio, taken
                        count += 1
                    else:
                        zero[at] *= ratio
                        one[at] *= taken
                # The weights of all subsets of them, by size.
                weight[0] = 1.0
                for at in range(count):
                    length = at + 1
                    weight[length] = 0.0
                    for j in range(length - 1, -1, -1):
                        weight[j + 1] += one[at] * weight[j] * (j + 1) / (length + 1)
                        weight[j] = zero[at] * weight[j] * (length - j) / (length + 1)
                # Each feature's part: the same sum with the feature taken out again.
                for at in range(count):
                    total = 0.0
                    if one[at] > 0:
                        following = weight[count]
                        for j in range(count - 1, -1, -1):
                            part = following * (count + 1) / (j + 1)
                            total += part
                            following = weight[j] - part * zero[at] * (count - j) / (count + 1)
                    elif zero[at] > 0:
                        for j in range(count - 1, -1, -1):
                            total += weight[j] / zero[at] * (count + 1) / (count - j)
                    out[row, seen[at]] += total * (one[at] - zero[at]) * value[node]
                depth -= 1
