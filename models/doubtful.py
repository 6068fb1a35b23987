"""Negatives whose label may be wrong, because an incident of the unit starts soon after their horizon."""

from __future__ import annotations

import numpy as np
import pandas as pd

from features.times import milliseconds
from models.ranking import Bools, name_hashes
from models.training_set import Labels, Rows


def doubtful_rows(rows: Rows, labels: Labels, incidents: pd.DataFrame, *, margin_ms: int) -> Bools:
    """Tell which negatives have an incident of their unit soon after the horizon.

    Tickets are dated by hand: an incident that is dated late leaves a negative where a positive belongs.

    ``rows``, ``labels``: the matrix; ``labels`` as of the refit.
    ``incidents``: ``unit`` and ``start`` (aware) of the incidents known at the refit, as the matrix gives them.
    ``margin_ms``: how long after the horizon, in milliseconds; 0: no row is doubtful.
    Returns: true for a negative with an incident start in (end of the horizon, end + margin]; shape (n_rows,).
    """
    out = np.zeros(len(rows.time), dtype=bool)
    if margin_ms <= 0 or len(incidents) == 0:
        return out
    tie, start = name_hashes(incidents["unit"]), milliseconds(incidents["start"], "start")
    touched = np.flatnonzero((labels.label == 0) & np.isin(rows.tie, tie))
    touched = touched[np.argsort(rows.tie[touched], kind="stable")]
    units, begins = np.unique(rows.tie[touched], return_index=True)
    for unit, mine in zip(units, np.split(touched, begins[1:]), strict=False):
        starts = np.sort(start[tie == unit])
        end = labels.complete[mine]
        following = np.searchsorted(starts, end, side="right")
        inside = following < len(starts)
        inside[inside] = starts[following[inside]] <= end[inside] + margin_ms
        out[mine[inside]] = True
    return out
