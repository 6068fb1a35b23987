"""Where the rows of a prediction frame stand in the matrix, and their labels as known at any time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import numpy as np
import pandas as pd

from features.times import milliseconds
from models.rows.ranking import Ints
from models.rows.training_set import Labels, Matrix

LabelsAt = Callable[[datetime | None], Labels]
"""From an instant to the labels of the predictions' rows as they were known then; None: by everything known."""


def row_positions(matrix: Matrix, predictions: pd.DataFrame) -> Ints:
    """Find the rows of a prediction frame.

    ``predictions``: ``decision_time`` and ``unit``, all on the decision grid.
    Returns shape (n,).
    Raises ``KeyError`` if a row is not in the matrix: the predictions belong to another.
    """
    rows = matrix.rows
    grid = np.flatnonzero(~rows["augmented"].to_numpy(dtype=bool))
    units = rows["unit"].astype("str")
    names = pd.Index(units.unique())
    held = pd.MultiIndex.from_arrays(
        [milliseconds(rows["decision_time"])[grid], names.get_indexer(pd.Index(units))[grid]]
    )
    wanted = pd.MultiIndex.from_arrays(
        [milliseconds(predictions["decision_time"]), names.get_indexer(pd.Index(predictions["unit"].astype("str")))]
    )
    found = held.get_indexer(wanted)
    if (found < 0).any():
        at = int(np.flatnonzero(found < 0)[0])
        raise KeyError(
            f"{predictions['unit'].iloc[at]} at {predictions['decision_time'].iloc[at]} is not in the matrix"
        )
    return grid[found].astype(np.int64)


def labels_of_rows(matrix: Matrix, predictions: pd.DataFrame, horizon: timedelta | None = None) -> LabelsAt:
    """Give a reader of the labels of a prediction frame's rows as known at any time; see :func:`row_positions`.

    ``horizon`` is another horizon than the matrix's own.
    """
    at = row_positions(matrix, predictions)

    def read(as_of: datetime | None) -> Labels:
        known = Labels.of(matrix.labels(as_of, horizon=horizon))
        return Labels(known.label[at], known.complete[at], known.incident[at])

    return read
