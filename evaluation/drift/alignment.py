"""Whether a reading jumped where the driver changed, and not where it did not, at the same time.

Two-way fixed effects: each feature's rank among all rows is freed of what the unit always has and of what all have on
that day; what is left is regressed on whether the unit's driver has changed by then. Errors are clustered by node
(Bertrand, Duflo and Mullainathan 2004), since an upgrade reaches a node as a whole. Where all nodes change on one day
nothing tells the upgrade from the day, and no answer is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from models.rows.ranking import Bools, Floats, Ints

LEAST_EFFECT = 0.05
"""Change of the mean rank (0 to 1) that counts."""

LEAST_T = 5.0
"""Size of the effect over its clustered error that counts: many features are looked at at once."""

_ROUNDS = 8
_LEAST_NODES = 4
_LEFT = 0.02


@dataclass(frozen=True, slots=True)
class FeatureShift:
    """What a change did to one feature.

    ``effect``: change of the mean rank, -1 to 1.
    ``t``: the effect over its error.
    """

    effect: float
    t: float

    @property
    def found(self) -> bool:
        """Whether it counts."""
        return abs(self.effect) >= LEAST_EFFECT and abs(self.t) >= LEAST_T


def changed_since_first(unit: Ints, time: Ints, code: Floats) -> Bools:
    """Tell which rows of a unit have another code than its earliest row; unknown codes count as unchanged."""
    known = np.isfinite(code)
    out = np.zeros(len(code), dtype=bool)
    at = np.flatnonzero(known)
    order = at[np.lexsort((time[at], unit[at]))]
    if not len(order):
        return out
    first = np.r_[True, unit[order][1:] != unit[order][:-1]]
    out[order] = code[order] != code[order][first][np.cumsum(first) - 1]
    return out


def effect_of(changed: Bools, values: np.ndarray, *, unit: Ints, day: Ints, node: Ints) -> FeatureShift | None:
    """Measure what a change did to one feature.

    ``changed``: whether the row comes after its unit's change; shape (n_rows,).
    ``values``: the feature; rows without a value are left out; shape (n_rows,).
    ``unit``, ``day``, ``node``: numbers from 0; shape (n_rows,).
    Returns: none where it is unknown: too few nodes changed or stayed, or all changed at once.
    """
    there = np.isfinite(values)
    nodes_changed = np.unique(node[there & changed])
    if len(nodes_changed) < _LEAST_NODES or len(np.unique(node[there])) < 2 * _LEAST_NODES:
        return None
    u = rankdata(values[there].astype(np.float64)) / there.sum()
    who, when, group = unit[there], day[there], node[there]
    d = changed[there].astype(np.float64)
    d_left = _freed(d, who, when)
    size = float(d_left @ d_left)
    if size < _LEFT * len(d) * float(d.var()):
        return None
    u_left = _freed(u, who, when)
    slope = float(d_left @ u_left) / size
    scores = np.bincount(group, weights=d_left * (u_left - slope * d_left))
    clusters = int((np.bincount(group) > 0).sum())
    error = float(np.sqrt((scores**2).sum() * clusters / max(clusters - 1, 1))) / size
    return FeatureShift(slope, slope / error if error > 0 else 0.0)


def _freed(values: Floats, unit: Ints, day: Ints) -> Floats:
    """Take out the means of units and of days, by turns."""
    left = values - values.mean()
    units, days = np.maximum(np.bincount(unit), 1), np.maximum(np.bincount(day), 1)
    for _ in range(_ROUNDS):
        left = left - (np.bincount(unit, weights=left) / units)[unit]
        left = left - (np.bincount(day, weights=left) / days)[day]
    return left
