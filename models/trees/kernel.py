"""The compiled kernel: adds every tree's value to every row, and the two sigmoids.

Rows are taken 64 at a time. Their values at the features that any tree looks at are turned into keys
(:mod:`models.trees.keys`), a line of rows a feature, and each test is then made for all of them in a few vector
instructions. A row's trees are added one by one in their order and from its own values only, so its sum depends neither
on the rows beside it nor on threads, and is the library's own bit for bit.

The constants it takes from other modules never change: numba's cache looks at this file's date only.

Importing this module compiles it, or loads what an earlier import left in numba's cache; no call ever compiles.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numba import njit, types

from models.trees.flat import DE_BRUIJN
from models.trees.keys import ZERO_HIGH, ZERO_LOW

ROWS: Final = 64
"""Rows at a time."""

# A line of 64 rows alone would be 4 cache lines, and the lines of every 16th feature would push each other out of the
# first-level cache; 5 spread evenly.
_LINE: Final = 80

_DE_BRUIJN: Final = np.uint64(DE_BRUIJN)
_ALL: Final = np.uint64(0xFFFFFFFFFFFFFFFF)
_ONE: Final = np.uint64(1)
_TOP: Final = np.uint64(58)
_SIGN: Final = np.uint32(0x80000000)
_REST: Final = np.uint32(0x7FFFFFFF)
_INFINITE: Final = np.uint32(0x7F800000)
_ZERO_LOW: Final = np.uint32(ZERO_LOW)
_ZERO_HIGH: Final = np.uint32(ZERO_HIGH)
_NONE: Final = np.uint32(0)


def _given(kind: Any, dimensions: int = 1) -> Any:
    return types.Array(kind, dimensions, "C", readonly=True)


def _signature(kind: Any) -> Any:
    return types.void(
        _given(types.uint32, 2), _given(types.int64), _given(types.boolean), _given(types.int64),
        _given(types.uint32, 2), _given(types.uint64), _given(types.boolean), _given(types.int64), _given(kind),
        types.Array(kind, 1, "C"),
    )  # fmt: skip


@njit([_signature(types.float32), _signature(types.float64)], cache=True, nogil=True)
def add_trees(  # noqa: PLR0912 - split up, numba would no longer see that the lines do not overlap
    bits: np.ndarray,
    column: np.ndarray,
    column_zero: np.ndarray,
    first: np.ndarray,
    node: np.ndarray,
    mask: np.ndarray,
    walked: np.ndarray,
    value_first: np.ndarray,
    value: np.ndarray,
    total: np.ndarray,
) -> None:
    """Add all trees to ``total``, in place.

    ``bits``: the rows, as the bits of float32; shape (n_rows, n_features).
    ``column``, ``column_zero``, ``first``, ``node``, ``mask``, ``walked``, ``value_first``, ``value``: as in
    :class:`models.trees.flat.FlatTrees`. Nothing is checked here.
    ``total``: what each row starts with; the type of ``value``; shape (n_rows,).
    """
    lines = np.empty((len(column), _LINE), np.uint32)
    alive = np.empty(ROWS, np.uint64)
    at = np.empty(ROWS, np.uint32)
    for start in range(0, bits.shape[0], ROWS):
        rows = min(ROWS, bits.shape[0] - start)
        for row in range(rows):
            for col in range(len(column)):
                lines[col, row] = bits[start + row, column[col]]
        for col in range(len(column)):
            for row in range(rows):
                raw = lines[col, row]
                key = np.uint32(raw ^ np.uint32(np.uint32(np.int32(raw) >> np.int32(31)) | _SIGN))
                key = np.uint32(key + np.uint32(key == _REST))  # -0.0 is 0.0
                lines[col, row] = _NONE if np.uint32(raw & _REST) > _INFINITE else key
            if column_zero[col]:
                for row in range(rows):
                    key = lines[col, row]
                    lines[col, row] = _NONE if (key >= _ZERO_LOW) & (key <= _ZERO_HIGH) else key
        for tree in range(len(walked)):
            begin = value_first[tree]
            if not walked[tree]:
                for row in range(rows):
                    alive[row] = _ALL
                for each in range(first[tree], first[tree + 1]):
                    col, limit, shift, kept = node[each, 0], node[each, 1], node[each, 2], mask[each]
                    for row in range(rows):
                        alive[row] &= kept if np.uint32(lines[col, row] - shift) > limit else _ALL
                for row in range(rows):
                    lowest = alive[row] & (~alive[row] + _ONE)
                    at[row] = np.uint32((lowest * _DE_BRUIJN) >> _TOP)
                for row in range(rows):
                    total[start + row] += value[begin + np.int64(at[row])]
            else:
                root = np.uint32(first[tree])
                for row in range(rows):
                    at[row] = root
                going = True
                while going:
                    for _ in range(4):  # a row at its leaf stays there
                        for row in range(rows):
                            here = at[row]
                            right = np.uint32(lines[node[here, 0], row] - node[here, 2]) > node[here, 1]
                            at[row] = np.uint32(node[here, 3] + np.uint32(right))
                    going = False
                    for row in range(rows):
                        going |= node[at[row], 3] != at[row]
                for row in range(rows):
                    total[start + row] += value[begin + np.int64(at[row]) - np.int64(root)]


@njit([types.void(_given(types.float64), types.float64, types.Array(types.float64, 1, "C"))], cache=True, nogil=True)
def sigmoid_double(margin: np.ndarray, slope: float, out: np.ndarray) -> None:
    """Write LightGBM's probability of each margin to ``out``: 1 / (1 + exp(-slope * margin)) in float64."""
    for row in range(len(margin)):
        out[row] = 1.0 / (1.0 + math.exp(-slope * margin[row]))


@njit([types.void(_given(types.float32), types.Array(types.float32, 1, "C"))], cache=True, nogil=True)
def sigmoid_single(margin: np.ndarray, out: np.ndarray) -> None:
    """Write XGBoost's probability of each margin to ``out``: in float32, with margins below -88.7 taken for it."""
    for row in range(len(margin)):
        low = min(-margin[row], np.float32(88.7))
        out[row] = np.float32(1.0) / (np.float32(math.exp(low)) + np.float32(1.0))


@njit([types.float32(types.float32)], cache=True, nogil=True)
def logit_single(probability: float) -> Any:
    """Give the margin that XGBoost starts from where its file states a probability: -log(1 / p - 1) in float32."""
    one = np.float32(1.0)
    return -math.log(one / probability - one)
