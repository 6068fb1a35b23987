"""Positions of prediction rows in the matrix, and their labels as known at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

import numpy as np
import pandas as pd

from features.times import coded, milliseconds
from models.rows.ranking import Ints
from models.rows.training_set import Labels, Matrix

LabelsAt = Callable[[datetime | None], Labels]
"""From an instant to the labels of the predictions' rows as they were known then; None: by everything known."""


def row_positions(matrix: Matrix, predictions: pd.DataFrame) -> Ints:
    """Find the rows of a prediction frame.

    ``predictions``: ``decision_time`` and ``unit``, all on the decision grid.
    Raises ``KeyError`` if a row is not in the matrix: the predictions belong to another.
    """
    rows = matrix.rows
    grid = np.flatnonzero(~rows["augmented"].to_numpy(dtype=bool))
    unit, names = coded(rows["unit"])
    own, own_names = coded(predictions["unit"])
    key = milliseconds(rows["decision_time"])[grid] * len(names) + unit[grid]
    place = names.get_indexer(own_names)[own]
    wanted = milliseconds(predictions["decision_time"]) * len(names) + place
    order = np.argsort(key, kind="stable")
    position = np.searchsorted(key, wanted, sorter=order)
    missing = (place < 0) | (key[order[np.minimum(position, len(order) - 1)]] != wanted)
    if missing.any():
        at = int(np.flatnonzero(missing)[0])
        raise KeyError(
            f"{predictions['unit'].iloc[at]} at {predictions['decision_time'].iloc[at]} is not in the matrix"
        )
    return grid[order[position]]


def labels_of_rows(matrix: Matrix, at: Ints, horizon: timedelta | None = None) -> LabelsAt:
    """Give a reader of the labels of rows as known at any time.

    ``horizon``: another horizon than the matrix's own.
    """

    def read(as_of: datetime | None) -> Labels:
        return Labels.of(matrix.labels(as_of, horizon=horizon, rows=at))

    return read


@dataclass(frozen=True, slots=True)
class IncidentGroups:
    """Node incident and common cause by incident, for incidents numbered as of one time; shape (n_incidents,).

    An entry that is no incident is -1 everywhere.
    """

    node_incident: Ints
    common_cause: Ints

    @classmethod
    def of(cls, incidents: pd.DataFrame) -> "IncidentGroups":
        """Read what :meth:`Matrix.incidents` gives for the same time as the labels."""
        number = incidents["incident"].to_numpy(dtype=np.int64)

        def table(values: np.ndarray) -> Ints:
            out = np.full(int(number.max(initial=-1)) + 2, -1, dtype=np.int64)  # incident -1 reads the last entry
            out[number] = values
            return out

        return cls(table(incidents["node_incident"].to_numpy()), table(incidents["common_cause"].to_numpy()))
