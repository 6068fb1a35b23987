"""Rows in batches: what scores rows reads so many of them at a time, so that memory does not grow with their number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from models.rows.odds import log_odds
from models.rows.ranking import Floats, Ints
from models.rows.row_reader import RowReader

AT_ONCE = 65_536
"""Rows read at a time: some 80 MB of features where there are 320.

No parameter: products of matrices may differ in their last bits with the number of rows."""


def batches(count: int) -> Iterator[slice]:
    """Cut so many rows into batches; none of them: one batch that is empty.

    Examples
    --------
    >>> [(batch.start, batch.stop) for batch in batches(100_000)]
    [(0, 65536), (65536, 100000)]
    """
    for first in range(0, max(count, 1), AT_ONCE):
        yield slice(first, min(first + AT_ONCE, count))


def log_odds_of(learners: Sequence[Any], read: RowReader, rows: Ints) -> list[Floats]:
    """Give what fitted learners say of rows, each row read once.

    ``rows``: Positions; shape (n_rows,).
    Returns: Log-odds, one for each learner; shape (n_rows,).
    """
    said = [np.empty(len(rows)) for _ in learners]
    for batch in batches(len(rows)):
        values = read(rows[batch])
        for own, learner in zip(said, learners, strict=True):
            own[batch] = log_odds(learner, values)
    return said
