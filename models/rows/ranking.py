"""Ranks within a decision time, with ties broken by unit rather than row order; stable hashes."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundation.hashing import GOLDEN_GAMMA, mix64

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Hashes = NDArray[np.uint64]


def name_hashes(names: Iterable[Any]) -> Hashes:
    """Hash names (null as the empty name) identically on every machine, in every run and release."""
    import pandas as pd  # scoring needs no pandas here

    codes, distinct = pd.factorize(pd.Series(names, dtype=object).fillna(""), sort=False)
    table = text_hashes([str(name) for name in distinct])
    return table[codes] if len(table) else table


def text_hashes(texts: Sequence[str]) -> Hashes:
    """Return the :func:`name_hashes` of strings, one by one and without pandas."""
    digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return np.fromiter((int.from_bytes(digest, "little") for digest in digests), np.uint64, len(texts))


def mix(values: Hashes, with_values: Hashes | Ints | int) -> Hashes:
    """Combine hashes with more values into new hashes."""
    extra = np.asarray(with_values)
    if extra.dtype != np.uint64:
        extra = extra.astype(np.int64).view(np.uint64)
    with np.errstate(over="ignore"):
        return mix64(np.asarray(values, dtype=np.uint64) + GOLDEN_GAMMA * (extra + np.uint64(1)))


def uniform(hashes: Hashes) -> Floats:
    """Map hashes to numbers in the open interval (0, 1), shape kept."""
    return ((hashes >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53


def seed_of(seed: int, *purpose: object) -> int:
    """Derive a seed below 2**31 for a purpose from the run's seed, for example ``seed_of(42, "lightgbm", 3)``."""
    text = "\x1f".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % 2**31


def rank_within(times: Ints, score: NDArray[np.floating], tie: Hashes) -> Ints:
    """Rank rows by score within each decision time: 1 for the riskiest, a permutation of 1..n.

    ``times``: decision time of each row, or any code that is equal for equal times.
    ``score``: riskiest highest; finite.
    ``tie``: order of rows with equal score, lowest first: a hash of the unit.
    """
    order = np.lexsort((tie, -np.asarray(score), times))
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = position_in_group(np.asarray(times)[order]) + 1
    return ranks


def top_nodes(times: Ints, rank: Ints, node: Ints | Hashes, k: int) -> Bools:
    """Alert units in order of risk while they are on at most ``k`` nodes.

    A drain evacuates a node, so the budget counts nodes. Further units of these ``k`` nodes are alerted, too, if they
    rank above the first unit of the next node.

    ``rank``: 1 for the riskiest row of its time, a permutation of 1..n within each; shape (n,).
    """
    alert = np.zeros(len(rank), dtype=np.bool_)
    deepest = 4 * k
    while True:  # the top rows usually decide; go deeper only if nodes have many units
        rows = np.flatnonzero(rank <= deepest)
        rows = rows[np.lexsort((rank[rows], times[rows]))]
        by_node = np.lexsort((np.arange(len(rows)), node[rows], times[rows]))
        first = np.zeros(len(rows), dtype=np.int64)
        first[by_node[group_starts(times[rows][by_node], node[rows][by_node])]] = 1
        nodes = np.cumsum(first)
        starts = np.arange(len(rows)) - position_in_group(times[rows])
        nodes -= nodes[starts] - first[starts]
        in_top = nodes <= k
        # If the deepest row is alerted at any time, rows below it may be, too.
        if not (in_top & (rank[rows] == deepest)).any():
            alert[rows[in_top]] = True
            return alert
        deepest *= 2


def position_in_group(sorted_groups: NDArray[Any]) -> Ints:
    """Return 0, 1, ... within each run of equal values of a sorted array."""
    starts = np.flatnonzero(group_starts(sorted_groups))
    return np.arange(len(sorted_groups)) - np.repeat(starts, np.diff(np.r_[starts, len(sorted_groups)]))


def group_starts(*sorted_keys: NDArray[Any]) -> Bools:
    """Return which rows start a run of equal keys; rows are sorted by the keys."""
    begins = np.ones(len(sorted_keys[0]), dtype=np.bool_)
    if len(begins):
        begins[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in sorted_keys])
    return begins


def group_sizes(times: Ints) -> Ints:
    """Return, for each row, how many rows share its decision time."""
    _, inverse, counts = np.unique(times, return_inverse=True, return_counts=True)
    return counts[inverse].astype(np.int64)
