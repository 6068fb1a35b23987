"""Times in which nodes are kept from new jobs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from policy.episodes import Bools, Ints


@dataclass(frozen=True, slots=True)
class ReplayMarks:
    """Times in which nodes are kept from new jobs; all of shape (marks,).

    ``drained``: when the running jobs were asked to go; :data:`foundation.times.NEVER`: they stay.
    ``found``: when what would fail was found and its repair began; NEVER: it was not.
    ``refused``: nodes that budgets kept in service, each once an episode.
    ``high``: node, begin and end of each time in which a marked node is of tier ``high``; shape (times, 3).
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
        """Take rows of these."""
        node, at, until, drained, found = np.array(sorted(rows), dtype=np.int64).reshape(-1, 5).T
        return cls(node, at, until, drained, found, refused, np.array([*high], dtype=np.int64).reshape(-1, 3))

    def chosen(self, which: Bools) -> "ReplayMarks":
        """Return some of these; shape (marks,)."""
        columns = self.node, self.at, self.until, self.drained, self.found
        node, at, until, drained, found = (column[which] for column in columns)
        return ReplayMarks(node, at, until, drained, found, high=self.high)

    def high_at(self, node: int, times: Ints) -> Bools:
        """Return whether a node is of tier ``high`` at each of some times."""
        begin, end = self.high[self.high[:, 0] == node, 1:].T
        return np.asarray(((begin[:, None] < times) & (times <= end[:, None])).any(axis=0))

    def joined(self, rows: Iterable[list[int]]) -> "ReplayMarks":
        """Return these and others, without those that begin while another one has the node in repair."""
        rows_here = np.column_stack([self.node, self.at, self.until, self.drained, self.found]).tolist()
        new = list(rows)
        outside = [
            row for row in rows_here if not any(row[0] == other[0] and other[1] <= row[1] < other[2] for other in new)
        ]
        return ReplayMarks.of([*outside, *new], self.refused, self.high)


NO_ACTION: Final = ReplayMarks.of(())
