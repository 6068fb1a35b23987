"""Incidents of nodes as the rows of a backtest met them: what a model could have caught, and from which cause."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from evaluation.metrics.metrics import Bools, Ints
from models.rows.ranking import group_starts
from policy.episodes import caught_causes, clusters


@dataclass(frozen=True, slots=True)
class Incidents:
    """Node incidents, each in the rows whose label it makes 1. A row may stand before several.

    ``row``, ``place``: rows of nodes, and the node incident's place below that each could have caught, by place and
    then row; shape (pairs,).
    ``number``: of each node incident, ascending; ``cause``: place of its cause in those below; ``start_ms``: its start;
    shape (incidents,).
    ``node``, ``cluster``: node of each cause's first incident, and the cluster that it is resampled in; shape
    (causes,).
    ``families``: the failure classes of each cause's incidents, sorted and joined by ``, ``; shape (causes,).
    """

    row: Ints
    place: Ints
    number: Ints
    cause: Ints
    start_ms: Ints
    node: Ints
    cluster: Ints
    families: np.ndarray

    @classmethod
    def of(
        cls, *, row: Ints, number: Ints, cause: Ints, node: Ints, start_ms: Ints, failure_class: pd.Series,
        shared: Ints, nodes: int,
    ) -> Incidents:  # fmt: skip
        """Read positive rows of units.

        ``row``: the row of the node; ``number``, ``cause``: node incident and common cause; ``start_ms``: start of the
        unit's incident; shape (n,).
        ``shared``, ``nodes``: as :func:`policy.episodes.clusters` takes them.
        """
        numbers, place = np.unique(number, return_inverse=True)
        pairs = np.lexsort((row, place))
        pairs = pairs[group_starts(place[pairs], row[pairs])]
        begin = np.full(len(numbers), np.iinfo(np.int64).max)
        np.minimum.at(begin, place, start_ms)
        first = np.unique(place, return_index=True)[1]
        causes, at, of_cause = np.unique(cause[first], return_index=True, return_inverse=True)
        classes = pd.DataFrame({"cause": of_cause[place], "name": failure_class.to_numpy(dtype=object)}).dropna()
        joined = classes.drop_duplicates().sort_values(["cause", "name"]).groupby("cause")["name"].agg(", ".join)
        node_of = node[first][at]
        return cls(
            row=row[pairs],
            place=place[pairs],
            number=numbers,
            cause=of_cause,
            start_ms=begin,
            node=node_of,
            cluster=clusters(node_of, causes, shared, nodes),
            families=joined.reindex(range(len(causes)), fill_value="").to_numpy(dtype=object),
        )

    def __len__(self) -> int:
        """Count failures: node incidents, those of one cause counted once."""
        return len(self.node)

    def caught_in(self, alert: Bools, group: Ints, groups: int) -> tuple[Ints, Ints]:
        """Count the failures that rows of each group could have caught, and those that their alerts did.

        ``alert``: shape (rows,); ``group``: of each row, below ``groups``.
        Returns: both of shape (groups,).
        """
        size, causes = max(len(self.number), 1), max(len(self), 1)
        key, code = np.unique(group[self.row] * size + self.place, return_inverse=True)
        alerted = np.bincount(code, weights=alert[self.row], minlength=len(key)) > 0
        cause, caught = caught_causes(key // size * causes + self.cause[key % size], alerted)
        there = np.bincount(cause // causes, minlength=groups)
        return there, np.bincount(cause[caught] // causes, minlength=groups)
