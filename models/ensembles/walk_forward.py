"""Out-of-fold scores that respect time: each row is scored by a model that was fitted on earlier rows only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.model_selection import GroupKFold, StratifiedKFold

from models.rows.odds import log_odds
from models.rows.ranking import Floats, Ints

BLOCKS = 3
"""Blocks of time; the first is never scored, each other one by a model fitted on all before it."""


def splits(
    y: Ints, *, times: Ints | None, groups: np.ndarray | None, purge_ms: int, blocks: int = BLOCKS
) -> Iterator[tuple[Ints, Ints]]:
    """Give pairs of row positions: to fit on, and to score.

    ``y``: 0 or 1; shape (n_rows,).
    ``times``: decision times in milliseconds. Borders between blocks hold equal numbers of positives apart. Rows to fit
    on end at least ``purge_ms`` before the block begins, so that no label window, and so no incident, reaches across;
    shape (n_rows,).
    ``groups``: Units. With times they need no further split: the purge keeps a unit's incident on one side. Without
    times the folds keep each unit whole; shape (n_rows,).
    ``blocks``: number of blocks, or of folds where there are no times.
    Yields: positions to fit on, with both classes among them, and positions to score.
    """
    if times is not None:
        borders = np.unique(np.quantile(times[y == 1], np.arange(1, blocks) / blocks, method="lower"))
        for i, border in enumerate(borders):
            until = borders[i + 1] if i + 1 < len(borders) else np.inf
            fit_on = np.flatnonzero(times < border - purge_ms)
            if len(np.unique(y[fit_on])) == 2:
                yield fit_on, np.flatnonzero((times >= border) & (times < until))
        return
    rare = min(int(y.sum()), int(len(y) - y.sum()))
    if groups is not None and len(np.unique(groups)) >= 2:
        folds = GroupKFold(min(blocks, len(np.unique(groups)))).split(y, y, groups)
    elif rare >= 2:
        folds = StratifiedKFold(min(blocks, rare)).split(y, y)
    else:
        return
    for fit_on, scored in folds:
        if len(np.unique(y[fit_on])) == 2:
            yield fit_on, scored


def out_of_fold(
    learner: Any,
    X: np.ndarray,
    y: Ints,
    weight: Floats,
    *,
    times: Ints | None,
    groups: np.ndarray | None,
    purge_ms: int,
) -> Floats:
    """Score rows out of fold.

    ``learner``: cloned for each fold.
    ``X``, ``y``, ``weight``: training rows: features, 0 or 1, weights.
    ``times``, ``groups``, ``purge_ms``: see :func:`splits`.
    Returns: Log-odds; NaN for rows that no fold scored; shape (n_rows,).
    """
    scores = np.full(len(y), np.nan)
    for fit_on, scored in splits(y, times=times, groups=groups, purge_ms=purge_ms):
        fitted = clone(learner).fit(X[fit_on], y[fit_on], sample_weight=weight[fit_on])
        scores[scored] = log_odds(fitted, X[scored])
    return scores
