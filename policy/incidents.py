"""Failures as they are counted: by node, and those of several nodes with one cause as one."""

from __future__ import annotations

import numpy as np

from policy.episodes import Bools, Ints


def shared_causes(node: Ints, cause: Ints) -> Ints:
    """Find the causes that several nodes share.

    ``node``, ``cause``: of rows that an incident follows; shape (n,).
    Returns: ascending.
    """
    width = int(node.max(initial=0)) + 1
    causes, nodes = np.unique(np.unique(cause * width + node) // width, return_counts=True)
    return causes[nodes > 1]


def clusters(node: Ints, cause: Ints, shared: Ints, nodes: int) -> Ints:
    """Give the clusters that resampling and bounds take for independent of each other.

    The decisions about one node are one cluster. Those that a cause shared by several nodes made true are one cluster
    together, whatever their nodes: however many it hit, it happened once.

    ``node``: below ``nodes``; ``cause``: -1 where nothing followed; shape (n,).
    ``shared``: as :func:`shared_causes` gives them.
    Returns: the node's number, or ``nodes`` and the place in ``shared``; shape (n,).
    """
    out = node.copy()
    rows = np.flatnonzero(np.isin(cause, shared))
    out[rows] = nodes + np.searchsorted(shared, cause[rows])
    return out


def caught_causes(cause: Ints, caught: Bools) -> tuple[Ints, Bools]:
    """Group node incidents by common cause. A cause is caught if at least half of its incidents are.

    A cause that hits many nodes would else be caught by nearly any alert.

    ``cause``, ``caught``: of each node incident; shape (n,).
    Returns: the causes, ascending, and whether each is caught.
    """
    causes, code, size = np.unique(cause, return_inverse=True, return_counts=True)
    return causes, 2 * np.bincount(code, weights=caught, minlength=len(causes)) >= size
