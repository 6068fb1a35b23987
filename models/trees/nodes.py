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

    Attributes
    ----------
    first : ndarray of int64, shape (n_trees + 1,)
        Where each tree's nodes begin; its root is its first node.
    left, right : ndarray of int64, shape (n_nodes,)
        Children, counted within the tree; -1 in both: a leaf.
    feature : ndarray of int64, shape (n_nodes,)
        Feature of an inner node's test.
    limit : ndarray of uint32, shape (n_nodes,)
        Largest key (:mod:`models.trees.keys`) that goes left.
    missing_left : ndarray of bool, shape (n_nodes,)
        Whether NaN goes left.
    zero_missing : ndarray of bool, shape (n_nodes,)
        Whether 0 (as LightGBM understands it) goes where NaN goes.
    value : ndarray of float32 or float64, shape (n_nodes,)
        Value of a leaf, in the type that the library adds in.
    whole : bool
        Whether every node must belong to a tree; XGBoost leaves pruned nodes in its files.
    cover : ndarray of float64, shape (n_nodes,)
        How many training rows, or what weight of them, came to each node; empty where the file does not say.
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
