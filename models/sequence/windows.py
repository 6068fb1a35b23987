"""Rows that hold the flattened raw window after their features, for the runs that have a sequence learner.

One array of rows serves every learner: those that read sequences take the window and the static features out of it,
all others are wrapped to see the columns before the window, and what is built on learners (ensembles, calibration,
scoring, explanation) need not know. Runs without a sequence learner have exactly the matrix's own rows.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd

from features.vocabulary import FeatureColumn
from foundation.errors import InputError
from models.config import SEQUENCE
from models.rows.ranking import Ints
from models.rows.training_set import Matrix
from models.sequence.layout import WindowFacts, require_torch, versions, window_of


def with_windows(matrix: Matrix, learners: Iterable[str]) -> Matrix:
    """Give the matrix itself, or one whose rows hold the raw windows if one of the learners reads them.

    Raises ``InputError`` if a sequence learner is asked for and PyTorch is not installed, or the matrix has no raw
    windows.
    """
    asked = sorted(set(SEQUENCE) & set(learners))
    if not asked or isinstance(matrix, WindowedMatrix):
        return matrix
    require_torch(asked[0])
    if getattr(matrix, "sequences", None) is None:
        raise InputError(
            f"the learner {asked[0]} reads raw windows, and the feature matrix has none",
            "parameter features.sequence.channels",
            "Set it to 'auto' (as params/paper.yaml does) and compute the features again.",
        )
    return WindowedMatrix(matrix)


class WindowedMatrix:
    """A matrix whose rows hold the flattened raw window after their features; otherwise the matrix it is made of.

    ``matrix``: a :class:`features.matrix.matrix.FeatureMatrix` that holds raw windows (its ``sequences`` is not None).
    """

    def __init__(self, matrix: Any) -> None:
        self._matrix = matrix
        self._columns = (*matrix.columns, *matrix.sequences.plan.columns)
        facts = window_of(self._columns)
        assert facts is not None
        self.facts: WindowFacts = facts

    @property
    def rows(self) -> pd.DataFrame:
        """The rows' keys."""
        return self._matrix.rows

    @property
    def columns(self) -> Sequence[FeatureColumn]:
        """The features, then the numbers of the window."""
        return self._columns

    @property
    def span(self) -> tuple[datetime, datetime]:
        """First and last instant of the dataset."""
        return self._matrix.span

    @property
    def digest(self) -> str:
        """Digest of the matrix and of the PyTorch that reads the windows: another one gives other bits."""
        read_by = json.dumps([self._matrix.digest, versions()], sort_keys=True)
        return hashlib.sha256(read_by.encode()).hexdigest()

    def values(self, row_indices: Any = None) -> np.ndarray:
        """Give features and windows of rows, float32, shape (n_rows, columns); NaN: unknown."""
        tabular = self._matrix.values(row_indices)
        window = self._matrix.windows(row_indices)
        return np.concatenate([tabular, window.reshape(len(window), -1)], axis=1)

    def labels(
        self, as_of: datetime | None = None, *, horizon: timedelta | None = None, rows: Ints | None = None
    ) -> pd.DataFrame:
        """Give the labels of all rows, or of some, as known at a time."""
        return self._matrix.labels(as_of, horizon=horizon, rows=rows)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not set yet, as while it is copied
            raise AttributeError(name)
        return getattr(self._matrix, name)


def tabular_columns(matrix: Matrix) -> tuple[FeatureColumn, ...]:
    """Give the columns before the window."""
    columns = tuple(matrix.columns)
    return columns[: matrix.facts.tabular] if isinstance(matrix, WindowedMatrix) else columns


def tabular_values(matrix: Matrix, values: Any) -> Any:
    """Give a reader of the columns before the window, of a reader of a matrix's rows."""
    if not isinstance(matrix, WindowedMatrix):
        return values
    tabular = matrix.facts.tabular
    return lambda rows: values(rows)[:, :tabular]
