"""Trees as a reader found them in a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models.trees.keys import Keys

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class ReadTrees:
    """Trees as a reader found them; nothing about how nodes hang together is checked yet.

    ``first``: where each tree's nodes begin; its root is its first node; shape (n_trees + 1,).
    ``left``, ``right``: Children, counted within the tree; -1 in both: a leaf; shape (n_nodes,).
    ``feature``: feature of an inner node's test; shape (n_nodes,).
    ``limit``: largest key (:mod:`models.trees.keys`) that goes left; shape (n_nodes,).
    ``missing_left``: whether NaN goes left; shape (n_nodes,).
    ``zero_missing``: whether 0 (as LightGBM understands it) goes where NaN goes; shape (n_nodes,).
    ``value``: value of a leaf, in the type that the library adds in; shape (n_nodes,).
    ``whole``: whether every node must belong to a tree; XGBoost leaves pruned nodes in its files.
    ``cover``: how many training rows, or what weight of them, came to each node; empty where the file does not say;
    shape (n_nodes,).
    """

    first: Ints
    left: Ints
    right: Ints
    feature: Ints
    limit: Keys
    missing_left: Bools
    zero_missing: Bools
    value: np.ndarray
    whole: bool = True
    cover: np.ndarray = field(default_factory=lambda: np.empty(0))


def begins(sizes: Sequence[int]) -> Ints:
    """Give where each of several stretches begins if they follow one another, and where the last ends."""
    return np.concatenate([[0], np.cumsum(np.asarray(sizes, np.int64))]).astype(np.int64)


def end_to_end(parts: Sequence[np.ndarray], kind: Any) -> np.ndarray:
    """Give arrays one after the other as one of a type; an empty one for none."""
    return np.concatenate(parts).astype(kind) if parts else np.empty(0, kind)


def known_cover(cover: np.ndarray) -> np.ndarray:
    """Give the rows that came to each node as they are, or none at all where they cannot be true."""
    return cover if np.isfinite(cover).all() and (cover >= 0).all() else np.empty(0)
