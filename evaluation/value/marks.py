"""Marks of a replay: intervals in which nodes are kept from new jobs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from policy.episodes import Bools, Ints


@dataclass(frozen=True, slots=True)
class ReplayMarks:
    """Intervals in which nodes are kept from new jobs; arrays of shape (marks,), times in ms.

    ``drained``: when the running jobs were evicted; :data:`foundation.times.NEVER`: they stay.
    ``found``: when a fault was found and its repair started; NEVER: none was found.
    ``refused``: number of nodes that budgets kept in service, once per episode.
    ``high``: node, start and end of each interval in which a marked node is of tier ``high``; shape (intervals, 3).
    """

    node: Ints
    at: Ints
    until: Ints
    drained: Ints
    found: Ints
    refused: int = 0
    high: Ints = field(default_factory=lambda: np.empty((0, 3), dtype=np.int64))

    @classmethod
    def of(cls, rows: Iterable[list[int]], refused: int = 0, high: Iterable[Sequence[int]] = ()) -> "ReplayMarks":
        """Build from rows of ``node``, ``at``, ``until``, ``drained`` and ``found``."""
        node, at, until, drained, found = np.array(sorted(rows), dtype=np.int64).reshape(-1, 5).T
        return cls(node, at, until, drained, found, refused, np.array([*high], dtype=np.int64).reshape(-1, 3))

    def chosen(self, which: Bools) -> "ReplayMarks":
        """Return a subset; ``which``: mask of shape (marks,)."""
        columns = self.node, self.at, self.until, self.drained, self.found
        node, at, until, drained, found = (column[which] for column in columns)
        return ReplayMarks(node, at, until, drained, found, high=self.high)

    def high_at(self, node: int, times: Ints) -> Bools:
        """Return whether a node is of tier ``high`` at each of ``times``."""
        begin, end = self.high[self.high[:, 0] == node, 1:].T
        return np.asarray(((begin[:, None] < times) & (times <= end[:, None])).any(axis=0))

    def joined(self, rows: Iterable[list[int]]) -> "ReplayMarks":
        """Add ``rows``, and drop marks that start within one of them on the same node."""
        rows_here = np.column_stack([self.node, self.at, self.until, self.drained, self.found]).tolist()
        new = list(rows)
        outside = [
            row for row in rows_here if not any(row[0] == other[0] and other[1] <= row[1] < other[2] for other in new)
        ]
        return ReplayMarks.of([*outside, *new], self.refused, self.high)


NO_ACTION: Final = ReplayMarks.of(())
