"""Features of rows: read from a matrix with bounded memory, and scored in batches."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from models.rows.ranking import Floats, Ints

_EDGE = 1e-7


def log_odds(learner: Any, X: np.ndarray) -> np.ndarray:
    """Return the log-odds of the positive class, from probabilities clipped to ``[1e-7, 1 - 1e-7]``.

    ``learner``: fitted, with classes 0 and 1.
    """
    if len(X) == 0:
        return np.zeros(0)
    return logit(learner.predict_proba(X)[:, 1])


def logit(probability: np.ndarray) -> np.ndarray:
    """Return the log-odds of probabilities, clipped to ``[1e-7, 1 - 1e-7]`` so that 0 and 1 stay finite."""
    clipped = np.clip(np.asarray(probability, dtype=np.float64), _EDGE, 1 - _EDGE)
    return np.log(clipped) - np.log1p(-clipped)


if TYPE_CHECKING:
    from models.rows.training_set import Matrix

RowReader = Callable[[Ints], np.ndarray]
"""Maps row positions to their features, float32, shape (n_rows, n_features)."""

_CHUNK_BYTES = 2**28


class HeldRows:
    """Caches a whole matrix on first use if it fits, else the newest rows requested so far.

    Refits and tests advance in time, and a matrix is ordered by time: each mostly needs rows that earlier ones read,
    plus the rows that follow. New rows overwrite the oldest ones in a ring buffer, so a sliding backtest reads each row
    once if its span fits. Rows older than the ring are read again each time.

    ``held_bytes``: cache size for features.
    Thread-safe.
    """

    def __init__(self, matrix: "Matrix", held_bytes: int) -> None:
        self._matrix = matrix
        self._columns = len(matrix.columns)
        self._capacity = min(max(held_bytes // (4 * self._columns), 1), len(matrix.rows))
        self._ring: np.ndarray | None = None
        self._first = self._end = 0
        self._lock = threading.Lock()

    def __call__(self, rows: Ints) -> np.ndarray:
        """Return the features of rows by position, in any order, repeats allowed."""
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) == 0:
            return self._matrix.values(rows)
        with self._lock:
            ring = self._extended(int(rows.min()), int(rows.max()) + 1)
            cached = rows >= self._first
            if cached.all():
                return ring[rows % self._capacity]
            out = np.empty((len(rows), self._columns), dtype=np.float32)
            out[cached] = ring[rows[cached] % self._capacity]
        # Outside the lock, so that several threads can read old rows concurrently.
        out[~cached] = self._matrix.values(rows[~cached])
        return out

    def _extended(self, lowest: int, until: int) -> np.ndarray:
        if self._capacity == len(self._matrix.rows):
            lowest, until = 0, self._capacity
        if self._ring is None:
            self._ring = np.empty((self._capacity, self._columns), dtype=np.float32)
            self._first = self._end = lowest
        if until > self._end:
            begin = max(self._end, until - self._capacity)
            step = max(_CHUNK_BYTES // (4 * self._columns), 1)
            for low in range(begin, until, step):
                new = np.arange(low, min(low + step, until))
                self._ring[new % self._capacity] = self._matrix.values(new)
            self._first = max(self._first, until - self._capacity)
            self._end = until
        return self._ring


class Room:
    """Memory budget in bytes shared by threads: a thread that needs more than is left waits for others."""

    def __init__(self, total: int) -> None:
        self._total = self._available = total
        self._changed = threading.Condition()

    @contextmanager
    def take(self, requested: int) -> Iterator[None]:
        """Reserve bytes, capped at the total; must not be nested within a thread, which could deadlock."""
        granted = min(requested, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._available >= granted)
            self._available -= granted
        try:
            yield
        finally:
            with self._changed:
                self._available += granted
                self._changed.notify_all()


BATCH_ROWS = 65_536
"""Rows read at a time: some 80 MB at 320 features.

Not a parameter: the last bits of matrix products may depend on the number of rows."""


def batches(count: int) -> Iterator[slice]:
    """Split a number of rows into batches; zero rows yield one empty batch.

    >>> [(batch.start, batch.stop) for batch in batches(100_000)]
    [(0, 65536), (65536, 100000)]
    """
    for first in range(0, max(count, 1), BATCH_ROWS):
        yield slice(first, min(first + BATCH_ROWS, count))


def log_odds_of(learners: Sequence[Any], read: RowReader, rows: Ints) -> list[Floats]:
    """Return the log-odds of fitted learners for rows, reading each row once."""
    scores = [np.empty(len(rows)) for _ in learners]
    for batch in batches(len(rows)):
        values = read(rows[batch])
        for column, learner in zip(scores, learners, strict=True):
            column[batch] = log_odds(learner, values)
    return scores
