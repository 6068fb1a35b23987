"""Decisions about nodes, the level at which drains act, with their labels: one row per time and node."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import pandas as pd

from evaluation.metrics.metrics import Bools, Floats, Ints, UnitFigures
from models.rows.ranking import group_starts
from policy.episodes import caught_causes, openings


@dataclass(frozen=True, slots=True)
class Incidents:
    """Node incidents, linked to the rows whose label they make 1. A row may precede several.

    ``row``, ``place``: pairs of a row of nodes and the position (in ``number``) of a node incident that it could have
    caught, sorted by position and then row; shape (pairs,).
    ``number``: node incidents, ascending; ``cause``: position of the cause in ``node``; ``start_ms``: start; shape
    (incidents,).
    ``node``, ``cluster``: node of each cause's first incident, and its resampling cluster; shape (causes,).
    ``families``: failure classes of each cause's incidents, sorted and joined by ``, ``; shape (causes,).
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
        cls,
        *,
        row: Ints,
        number: Ints,
        cause: Ints,
        node: Ints,
        start_ms: Ints,
        failure_class: pd.Series,
        shared: Ints,
        nodes: int,
    ) -> Self:
        """Build from positive rows of units.

        ``row``: row of the node; ``number``, ``cause``: node incident and common cause; ``start_ms``: start of the
        unit's incident; shape (n,).
        """
        numbers, place = np.unique(number, return_inverse=True)
        pairs = np.lexsort((row, place))
        pairs = pairs[group_starts(place[pairs], row[pairs])]
        begin = np.full(len(numbers), np.iinfo(np.int64).max)
        np.minimum.at(begin, place, start_ms)
        first = np.unique(place, return_index=True)[1]
        causes, position, of_cause = np.unique(cause[first], return_index=True, return_inverse=True)
        classes = pd.DataFrame({"cause": of_cause[place], "name": failure_class.to_numpy(dtype=object)}).dropna()
        class_names = classes.drop_duplicates().sort_values(["cause", "name"]).groupby("cause")["name"].agg(", ".join)
        node_of = node[first][position]
        return cls(
            row=row[pairs],
            place=place[pairs],
            number=numbers,
            cause=of_cause,
            start_ms=begin,
            node=node_of,
            cluster=clusters(node_of, causes, shared, nodes),
            families=class_names.reindex(range(len(causes)), fill_value="").to_numpy(dtype=object),
        )

    def __len__(self) -> int:
        """Return the number of failures, that is, of common causes."""
        return len(self.node)

    def caught_in(self, alert: Bools, group: Ints, groups: int) -> tuple[Ints, Ints]:
        """Count the failures that the rows of each group could have caught, and those that their alerts caught.

        ``alert``, ``group``: alert and group (``0 .. groups - 1``) of each row; shape (rows,).
        """
        size, causes = max(len(self.number), 1), max(len(self), 1)
        key, code = np.unique(group[self.row] * size + self.place, return_inverse=True)
        alerted = np.bincount(code, weights=alert[self.row], minlength=len(key)) > 0
        cause, caught = caught_causes(key // size * causes + self.cause[key % size], alerted)
        occurring = np.bincount(cause // causes, minlength=groups)
        return occurring, np.bincount(cause[caught] // causes, minlength=groups)


_MS_PER_DAY = 86_400_000


@dataclass(frozen=True, slots=True)
class Shared:
    """Data shared by all models of an evaluation.

    ``nodes``: sorted node names; rows refer to them by position; shape (nodes,).
    ``times_ms``: decision times in milliseconds since the epoch (UTC), ascending; rows refer to them by position; shape
    (times,).
    ``causes``: common causes that several nodes share, ascending.
    ``reach_ms``: duration of an episode in milliseconds; 0: every alert is an episode.
    """

    nodes: np.ndarray
    units: int
    times_ms: Ints
    causes: Ints
    k: int
    reach_ms: int = 0

    @property
    def n_clusters(self) -> int:
        """Number of resampling clusters: nodes, and causes that several nodes share."""
        return len(self.nodes) + len(self.causes)


@dataclass(frozen=True, slots=True)
class NodeRows:
    """Decisions about nodes, sorted by decision time and node; shared by all models that scored the same units.

    ``time``, ``node``: positions of the decision time and node in ``Shared``.
    ``label``, ``drain_label``: 1, 0, or -1 if unknown, within the horizon and the drain horizon.
    ``cluster``: resampling cluster (:func:`clusters`).
    """

    time: Ints
    node: Ints
    label: np.ndarray
    drain_label: np.ndarray
    fold: Ints
    cluster: Ints
    incidents: Incidents


@dataclass(frozen=True, slots=True)
class Scored:
    """Decisions of one model and variant; arrays have shape (rows,), aligned with ``rows``.

    ``rank``: rank within the decision time, 1 is the riskiest node.
    ``risk``: maximum of the units' calibrated probabilities; NaN if the model has none.
    ``units``: per-unit metrics; calibration is measured per unit.
    """

    model: str
    variant: str
    shared: Shared
    rows: NodeRows
    rank: Ints
    risk: Floats
    alert: Bools
    units: UnitFigures

    @property
    def name(self) -> tuple[str, str]:
        """Return ``(model, variant)``."""
        return self.model, self.variant

    @property
    def known(self) -> Bools:
        """Whether a row is labelled; unlabelled rows are ignored by all metrics."""
        return self.rows.label >= 0

    @property
    def positive(self) -> Bools:
        """Whether an incident of the node follows within the horizon."""
        return self.rows.label == 1

    @property
    def day(self) -> Ints:
        """UTC day of each row's decision time, counted from the epoch."""
        return (self.shared.times_ms // _MS_PER_DAY)[self.rows.time]

    def episodes(self) -> tuple[Ints, Ints]:
        """Return the alerts that open an episode (:func:`policy.episodes.openings`).

        Returns: their rows, and their drain label: 1, 0, or -1 if unknown; shape (episodes,).
        """
        alerts = np.flatnonzero(self.alert)
        times = self.shared.times_ms[self.rows.time[alerts]]
        rows = alerts[openings(self.rows.node[alerts], times, self.shared.reach_ms)]
        return rows, self.rows.drain_label[rows]

    def per_cluster(self, chosen: Bools | Ints) -> Floats:
        """Count rows by cluster.

        ``chosen``: mask of shape (rows,), or positions of rows.
        """
        return np.bincount(self.rows.cluster[chosen], minlength=self.shared.n_clusters).astype(np.float64)

    def top(self, budget: Ints | int) -> Bools:
        """Mask of the top-ranked rows of each decision time.

        ``budget``: number of nodes, for all decision times or for each; shape () or (times,).
        """
        return self.rank <= np.broadcast_to(budget, self.shared.times_ms.shape)[self.rows.time]

    def per_time(self, chosen: Bools) -> Ints:
        """Count rows by decision time."""
        return np.bincount(self.rows.time[chosen], minlength=len(self.shared.times_ms)).astype(np.int64)


def shared_causes(node: Ints, cause: Ints) -> Ints:
    """Return the causes that several nodes share, ascending."""
    width = int(node.max(initial=0)) + 1
    causes, nodes = np.unique(np.unique(cause * width + node) // width, return_counts=True)
    return causes[nodes > 1]


def clusters(node: Ints, cause: Ints, shared: Ints, nodes: int) -> Ints:
    """Return the clusters that bootstrap and bounds treat as independent.

    Decisions about one node form a cluster. Positive decisions due to a cause shared by several nodes form one cluster
    across nodes, because the cause happened once.

    ``node``: codes below ``nodes``; ``cause``: -1 if no incident followed; shape (n,).
    ``shared``: from :func:`shared_causes`.
    Returns: the node's code, or ``nodes`` plus the position in ``shared``; shape (n,).
    """
    out = node.copy()
    rows = np.flatnonzero(np.isin(cause, shared))
    out[rows] = nodes + np.searchsorted(shared, cause[rows])
    return out
