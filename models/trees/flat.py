"""All trees of a model in a few flat arrays, checked so that nothing in them can lead a kernel astray.

A tree of at most 64 leaves is kept as one bit mask an inner node: the leaves, numbered from left to right, that are
still possible if the node's test sends a row right. All of its tests are made, whatever their outcomes, and the lowest
leaf that survives every mask is the row's (Lucchese et al., "QuickScorer", 2015): no branch depends on the data, so
the processor works on many rows at once. Larger trees are walked from node to node, children side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from models.trees.errors import damaged
from models.trees.keys import ALWAYS_LEFT, Keys
from models.trees.nodes import Bools, Ints, ReadTrees

MOST_MASKED: Final = 64
"""Leaves of a tree at most that fit a mask."""

MOST_NODES: Final = 2**31
"""Nodes of a model at most; indices are held in 32 bits."""

DE_BRUIJN: Final = 0x03F79D71B4CB0A89
"""A number whose 64 windows of 6 bits all differ: times a power of two, its top 6 bits name that power (Leiserson,
Prokop and Randall, "Using de Bruijn Sequences to Index a 1 in a Computer Word", 1998)."""

_PLACES: Final = np.array([((DE_BRUIJN << at) & (2**64 - 1)) >> 58 for at in range(64)], np.int64)


@dataclass(frozen=True, slots=True)
class FlatTrees:
    """What the kernel reads. Every index in it has been checked.

    ``column``: features that any test looks at, ascending; shape (n_columns,).
    ``column_zero``: whether 0 counts as missing there; a feature may stand twice, with and without; shape (n_columns,).
    ``first``: where each tree's nodes begin; shape (n_trees + 1,).
    ``node``: Column, limit less shift, shift (0: NaN goes left, 1: right), and left child in this array; the right
    child follows it, a leaf is its own left child. Trees with masks have inner nodes only; shape (n_nodes, 4).
    ``mask``: leaves that survive if the test sends a row right; 0 in trees that are walked; shape (n_nodes,).
    ``walked``: whether the tree has more than :data:`MOST_MASKED` leaves; shape (n_trees,).
    ``value_first``: where each tree's values begin: 64 in the order of the de Bruijn number's windows, or one a node;
    shape (n_trees,).
    ``features``: features of a row.
    """

    column: Ints
    column_zero: Bools
    first: Ints
    node: Keys
    mask: np.ndarray
    walked: Bools
    value_first: Ints
    value: np.ndarray
    features: int

    @property
    def n_trees(self) -> int:
        """Number of trees."""
        return len(self.walked)


def flatten(read: ReadTrees, features: int, where: str) -> FlatTrees:
    """Check that nodes form trees, and lay them out.

    ``features``: features of a row.
    Raises ``InputError`` if a child is no node of its tree, a node has two parents or one child, a node belongs to no
    tree, a test is of a feature that is not there, or a value is not finite.
    """
    sizes = np.diff(read.first)
    if len(sizes) and (sizes < 1).any():
        raise damaged(f"tree {int(np.argmax(sizes < 1))} has no node", where)
    if read.first[-1] >= MOST_NODES // MOST_MASKED:
        raise damaged(f"it has {int(read.first[-1])} nodes", where)
    order, level, tree = _in_breadth(read, where)
    left = np.where(read.left >= 0, read.left + np.repeat(read.first[:-1], sizes), -1)
    right = np.where(read.left >= 0, read.right + np.repeat(read.first[:-1], sizes), -1)
    inner = order[left[order] >= 0]
    if len(inner) and (read.feature[inner].min() < 0 or read.feature[inner].max() >= features):
        raise damaged(f"a test is of a feature that is not among its {features}", where)
    if not np.isfinite(read.value[order[left[order] < 0]]).all():
        raise damaged("the value of a leaf is not finite", where)
    column, column_zero, node_column = _columns(read, inner)
    leaves, leaf_at = _leaves(order, level, left, right)
    return _lay_out(
        _Found(read, order, tree, left, leaves, leaf_at), node_column, column, column_zero, features, len(sizes)
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """Nodes in breadth, tree by tree; ``leaves``: how many below each, ``leaf_at``: number of the leftmost of them."""

    read: ReadTrees
    order: Ints
    tree: Ints
    left: Ints
    leaves: Ints
    leaf_at: Ints


def _in_breadth(read: ReadTrees, where: str) -> tuple[Ints, list[Ints], Ints]:
    """Give all nodes tree by tree in breadth with siblings side by side, the same by level, and each one's tree.

    All trees are gone through at once, one level a step. A node that is reached twice ends it, so it always ends.
    """
    n_trees = len(read.first) - 1
    seen = np.zeros(int(read.first[-1]), np.bool_)
    level, tree_of, trees = read.first[:-1], np.arange(n_trees), []
    levels: list[Ints] = []
    while len(level):
        seen[level] = True
        levels.append(level)
        trees.append(tree_of)
        inner = (read.left[level] >= 0) | (read.right[level] >= 0)
        parents, tree_of = level[inner], np.repeat(tree_of[inner], 2)
        below = np.stack([read.left[parents], read.right[parents]], axis=1).ravel()
        size = read.first[tree_of + 1] - read.first[tree_of]
        if ((below < 0) | (below >= size)).any():
            raise damaged("a child is no node of its tree", where)
        level = below + read.first[tree_of]
        if seen[level].any() or len(np.unique(level)) < len(level):
            raise damaged("a node of a tree is reached twice", where)
    if read.whole and not seen.all():
        raise damaged("a node belongs to no tree", where)
    order = np.concatenate(levels) if levels else np.empty(0, np.int64)
    tree = np.concatenate(trees) if trees else np.empty(0, np.int64)
    by_tree = np.argsort(tree, kind="stable")
    return order[by_tree], levels, tree[by_tree]


def _columns(read: ReadTrees, inner: Ints) -> tuple[Ints, Bools, Ints]:
    """Give the pairs of feature and whether its 0 is missing, in order, and the number of each node's pair."""
    pair = read.feature[inner] * 2 + read.zero_missing[inner]
    used, number = np.unique(pair, return_inverse=True)
    of_node = np.zeros(len(read.left), np.int64)
    of_node[inner] = number
    return used // 2, (used % 2).astype(np.bool_), of_node


def _leaves(order: Ints, levels: list[Ints], left: Ints, right: Ints) -> tuple[Ints, Ints]:
    """Count the leaves below each node, and number leaves from left to right within their tree."""
    leaves = np.zeros(len(left), np.int64)
    leaves[order[left[order] < 0]] = 1
    for level in reversed(levels):
        inner = level[left[level] >= 0]
        leaves[inner] = leaves[left[inner]] + leaves[right[inner]]
    leaf_at = np.zeros(len(left), np.int64)
    for level in levels:
        inner = level[left[level] >= 0]
        leaf_at[left[inner]] = leaf_at[inner]
        leaf_at[right[inner]] = leaf_at[inner] + leaves[left[inner]]
    return leaves, leaf_at


def _lay_out(
    found: _Found, node_column: Ints, column: Ints, column_zero: Bools, features: int, n_trees: int
) -> FlatTrees:
    read, order, tree, left = found.read, found.order, found.tree, found.left
    walked = found.leaves[read.first[:-1]] > MOST_MASKED
    is_leaf = left[order] < 0
    kept = walked[tree] | ~is_leaf
    nodes, of_tree, leaf = order[kept], tree[kept], is_leaf[kept]
    first = np.searchsorted(of_tree, np.arange(n_trees + 1)).astype(np.int64)
    place = np.zeros(len(left), np.int64)
    place[nodes] = np.arange(len(nodes))
    shift = np.where(leaf | read.missing_left[nodes], 0, 1)
    node = np.empty((len(nodes), 4), np.uint32)
    node[:, 0] = node_column[nodes]
    node[:, 1] = np.where(leaf, ALWAYS_LEFT, read.limit[nodes].astype(np.int64) - shift)
    node[:, 2] = shift
    node[:, 3] = np.where(leaf, np.arange(len(nodes)), place[left[nodes]])
    # The bits of the leaves left of the right child, without those left of the node itself, are cleared.
    masked = ~walked[of_tree]
    mask = np.zeros(len(nodes), np.uint64)
    begin = found.leaf_at[nodes[masked]].astype(np.uint64)
    count = found.leaves[left[nodes[masked]]].astype(np.uint64)
    mask[masked] = ~(((np.uint64(1) << count) - np.uint64(1)) << begin)
    size = np.where(walked, np.diff(first), MOST_MASKED)
    value_first = np.concatenate([[0], np.cumsum(size)])
    value = np.zeros(int(value_first[-1]), read.value.dtype)
    ends = order[is_leaf]
    end_tree = tree[is_leaf]
    within = np.where(walked[end_tree], place[ends] - first[end_tree], _PLACES[found.leaf_at[ends] % MOST_MASKED])
    value[value_first[end_tree] + within] = read.value[ends]
    return FlatTrees(column, column_zero, first, node, mask, walked, value_first[:-1], value, features)
