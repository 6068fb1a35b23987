"""Selection of training rows: all positives, and negatives sampled so that time is no predictor.

Augmented positives are at off-grid times of the day. If negatives were on the decision grid only, a model would learn
the time of day instead of the failure. Negatives are therefore drawn at the positives' own times, and weighted if a
time has too few, until the class proportions are equal on the grid, off it, and at each time off it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol, Self

import numpy as np
import pandas as pd

from features.matrix.meta import ACTED_ON
from features.vocabulary import FeatureColumn
from foundation.times import NEVER, milliseconds, name_codes
from models.rows.ranking import Bools, Floats, Hashes, Ints, mix, name_hashes, position_in_group, seed_of

MAX_NEGATIVES = 50_000
MIN_RATIO = 5
"""Negatives of a training set without telemetry: at most :data:`MAX_NEGATIVES`, but at least this many per positive."""


class Matrix(Protocol):
    """Interface of a feature matrix for models; implemented by :class:`features.matrix.matrix.FeatureMatrix`."""

    @property
    def rows(self) -> pd.DataFrame:
        """Columns ``decision_time``, ``node``, ``gpu``, ``unit``, ``augmented``, and ``established_at`` if known."""

    @property
    def columns(self) -> Sequence[FeatureColumn]:
        """Feature columns, in order."""

    @property
    def span(self) -> tuple[datetime, datetime]:
        """First and last instant of the dataset."""

    @property
    def digest(self) -> str:
        """Digest of content and settings."""

    def values(self, row_indices: Any = None) -> np.ndarray:
        """Features of rows, float32, shape (n_rows, n_features); NaN: unknown."""

    def incidents(self, as_of: datetime | None = None) -> pd.DataFrame:
        """Incidents as known at a time: ``incident``, ``unit``, ``start``, ``known_at`` and more."""

    def labels(
        self, as_of: datetime | None = None, *, horizon: timedelta | None = None, rows: Ints | None = None
    ) -> pd.DataFrame:
        """Labels of all or some rows as known at a time, for the matrix's own horizon or another."""


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """Rows of a matrix as arrays, each of shape (n_rows,).

    ``time``: decision times in milliseconds since the epoch (UTC).
    ``established``: when an augmented row became known to exist (its incident's known-at time), in milliseconds; the
    lowest integer for grid rows and if the matrix does not record it.
    ``tie``: hash of the unit.
    """

    time: Ints
    augmented: Bools
    established: Ints
    tie: Hashes
    node: Ints

    @classmethod
    def of(cls, frame: pd.DataFrame) -> Self:
        """Build from :attr:`Matrix.rows`."""
        established = np.full(len(frame), -NEVER, dtype=np.int64)
        if "established_at" in frame.columns:
            established_ms = milliseconds(frame["established_at"], "established_at")
            established = np.where(established_ms == NEVER, established, established_ms)
        return cls(
            time=milliseconds(frame["decision_time"], "decision_time"),
            augmented=frame["augmented"].to_numpy(dtype=bool),
            established=established,
            tie=name_hashes(frame["unit"]),
            node=node_codes(frame),
        )

    @property
    def grid_times(self) -> Ints:
        """Distinct grid times, ascending."""
        return np.unique(self.time[~self.augmented])


def acted_on(frame: pd.DataFrame) -> pd.Series:
    """Return the target of an action on each row: its node, or the column :data:`ACTED_ON` if present."""
    return frame[ACTED_ON if ACTED_ON in frame.columns else "node"]


def node_codes(frame: pd.DataFrame) -> Ints:
    """Return codes of the action targets of rows; a unit without a node is its own target."""
    node, names = name_codes(acted_on(frame))
    return node if (node >= 0).all() else np.where(node < 0, len(names) + name_codes(frame["unit"])[0], node)


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels of all rows as known at one time, each of shape (n_rows,).

    ``label``: 1, 0, or -1 for none (censored, or not known yet).
    ``complete``: earliest time at which the label can be known: decision time + gap + horizon, in milliseconds since
    the epoch.
    ``incident``: the incident of a positive; -1: none.
    """

    label: np.ndarray
    complete: Ints
    incident: Ints

    @classmethod
    def of(cls, frame: pd.DataFrame) -> Self:
        """Build from the result of :meth:`Matrix.labels`."""
        incident = frame["incident"] if "incident" in frame.columns else pd.Series(-1, index=frame.index, dtype="Int64")
        return cls(
            label=frame["label"].fillna(-1).to_numpy(dtype=np.int8),
            complete=milliseconds(frame["complete_at"], "complete_at"),
            incident=incident.fillna(-1).to_numpy(dtype=np.int64),
        )


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """Rows to fit on.

    ``rows``: positions in the matrix, ascending; shape (n,).
    ``weight``: 1 for a positive; for a negative, corrects proportions if there were too few negatives; shape (n,).
    ``prior_shift``: added to the log-odds of a model fitted on these rows to undo the sampling: log of the odds of grid
    rows in the span, minus log of the weighted odds here. Augmented positives count in the latter only.
    ``n_positive``, ``n_negative``, ``n_augmented``: rows by label, and augmented ones among the positives.
    ``thinned_to``: negatives per positive if memory limited them; None: as requested.
    """

    rows: Ints
    label: Ints
    weight: Floats
    prior_shift: float
    n_positive: int
    n_negative: int
    n_augmented: int
    n_incidents: int
    thinned_to: int | None = None

    @property
    def usable(self) -> bool:
        """Whether both classes occur."""
        return self.n_positive > 0 and self.n_negative > 0

    @property
    def sampled_log_odds(self) -> float:
        """Log of the weighted class odds: the base level of a model fitted on these rows."""
        return float(np.log(self.weight[self.label == 1].sum() / self.weight[self.label == 0].sum()))


def known_rows(rows: TrainingRows, labels: Labels, *, start_ms: int, complete_by_ms: int, as_of_ms: int) -> Bools:
    """Return the rows decided from ``start_ms`` on whose label is complete and known in time.

    ``complete_by_ms``: labels must be complete (decision time + gap + horizon) by then; at most ``as_of_ms``.
    ``as_of_ms``: the refit; an augmented row must have been established by then.
    """
    usable = (rows.time >= start_ms) & (labels.complete <= min(complete_by_ms, as_of_ms)) & (labels.label >= 0)
    usable &= ~rows.augmented | (rows.established <= as_of_ms)
    # An augmented time must have a known positive: otherwise its incident is not known yet, and the mere existence of
    # its rows would leak it.
    causes = np.unique(rows.time[usable & rows.augmented & (labels.label == 1)])
    return usable & (~rows.augmented | np.isin(rows.time, causes))


def purged(times: Ints, border: float, purge_ms: int) -> Bools:
    """Return the rows to fit on if those decided from ``border`` on are held out.

    ``purge_ms``: gap + horizon, so that no label window, and so no incident, spans both.
    """
    return times < border - purge_ms


def choose_rows(
    rows: TrainingRows,
    labels: Labels,
    *,
    start_ms: int,
    complete_by_ms: int,
    as_of_ms: int,
    negative_ratio: int,
    seed: int,
    max_rows: int | None = None,
    events_only: bool = False,
) -> TrainingSet:
    """Select all positives and ``negative_ratio`` negatives for each.

    Off the grid, each time with p positives gets ``negative_ratio * p`` negatives of that time. On the grid, half of
    the negatives come from the positives' own times and the rest from all times of the span, to include quiet days. If
    there are too few, they are weighted up.

    ``rows``, ``labels``, ``start_ms``, ``complete_by_ms``, ``as_of_ms``: see :func:`known_rows`.
    ``seed``: seed of the draw, which depends on a row's unit and time only, not on row order.
    ``max_rows``: maximum rows. If the requested negatives exceed it, fewer are drawn per positive, at least one;
    positives are always included.
    ``events_only``: no feature comes from telemetry. Negatives are then repetitive, and :data:`MAX_NEGATIVES`, or
    :data:`MIN_RATIO` per positive, suffice.
    Returns: possibly with a single class, see :attr:`TrainingSet.usable`.
    """
    known = known_rows(rows, labels, start_ms=start_ms, complete_by_ms=complete_by_ms, as_of_ms=as_of_ms)
    positive = known & (labels.label == 1)
    negative = known & (labels.label == 0)
    priority = mix(mix(rows.tie, rows.time), seed_of(seed, "negatives"))

    ratio, thinned_to = negative_ratio, None
    if events_only:
        ratio = min(ratio, max(MAX_NEGATIVES // max(int(positive.sum()), 1), MIN_RATIO))
    while True:
        on_rows, on_weight = _on_grid(rows, positive & ~rows.augmented, negative & ~rows.augmented, ratio, priority)
        off_rows, off_weight, matched = _off_grid(
            rows, positive & rows.augmented, negative & rows.augmented, ratio, priority
        )
        on_positive = np.flatnonzero(positive & ~rows.augmented)
        positives = np.concatenate([on_positive, matched])
        chosen = np.concatenate([positives, on_rows, off_rows])
        if max_rows is None or len(chosen) <= max_rows or ratio == 1:
            break
        # odd quotas are halved upwards at each time, so a step may still exceed the limit
        ratio = thinned_to = min(ratio - 1, max((max_rows - len(positives)) // len(positives), 1))
    label = np.repeat([1, 0], [len(positives), len(on_rows) + len(off_rows)])
    weight = np.concatenate([np.ones(len(positives)), on_weight, off_weight])
    order = np.argsort(chosen, kind="stable")

    shift = 0.0
    if len(positives) and len(on_rows) + len(off_rows):
        # Half a positive replaces a count of zero: the incident has augmented rows in the span, but no grid row.
        true_odds = max(len(on_positive), 0.5) / max(int((negative & ~rows.augmented).sum()), 1)
        shift = float(np.log(true_odds) - np.log(len(positives) / (on_weight.sum() + off_weight.sum())))
    return TrainingSet(
        rows=chosen[order],
        label=label[order].astype(np.int64),
        weight=weight[order],
        prior_shift=shift,
        n_positive=len(positives),
        n_negative=len(on_rows) + len(off_rows),
        n_augmented=len(matched),
        n_incidents=count_incidents(rows.tie[positives], labels.incident[positives]),
        thinned_to=thinned_to,
    )


def count_incidents(tie: Hashes, incident: Ints) -> int:
    """Count distinct incidents among positive rows; a row without incident is counted by unit."""
    key = np.where(incident >= 0, incident.astype(np.uint64), tie)
    return len(np.unique(key))


def _on_grid(rows: TrainingRows, positive: Bools, negative: Bools, ratio: int, priority: Hashes) -> tuple[Ints, Floats]:
    quota = ratio * int(positive.sum())
    times, counts = np.unique(rows.time[positive], return_counts=True)
    matched = _draw_at(rows, negative, times, -(-ratio * counts // 2), priority)
    thinned = negative.copy()
    thinned[matched] = False
    unmatched = np.flatnonzero(thinned)
    unmatched = unmatched[np.lexsort((rows.time[unmatched], priority[unmatched]))][: max(quota - len(matched), 0)]
    chosen = np.concatenate([matched, unmatched])
    return chosen, np.full(len(chosen), quota / max(len(chosen), 1))


def _off_grid(
    rows: TrainingRows, positive: Bools, negative: Bools, ratio: int, priority: Hashes
) -> tuple[Ints, Floats, Ints]:
    times, counts = np.unique(rows.time[positive], return_counts=True)
    chosen = _draw_at(rows, negative, times, ratio * counts, priority)
    position = np.searchsorted(times, rows.time[chosen])
    chosen_counts = np.bincount(position, minlength=len(times))
    weight = (ratio * counts)[position] / chosen_counts[position]
    matched = np.flatnonzero(positive & np.isin(rows.time, times[chosen_counts > 0]))
    return chosen, weight.astype(np.float64), matched


def _draw_at(rows: TrainingRows, candidates: Bools, times: Ints, quotas: Ints, priority: Hashes) -> Ints:
    pool = np.flatnonzero(candidates & np.isin(rows.time, times))
    pool = pool[np.lexsort((priority[pool], rows.time[pool]))]
    place = position_in_group(rows.time[pool])
    return pool[place < quotas[np.searchsorted(times, rows.time[pool])]] if len(times) else pool


LabelsAt = Callable[[datetime | None], Labels]
"""Maps an instant to the labels of the predictions' rows as known then; None: with all data."""


def row_positions(matrix: Matrix, predictions: pd.DataFrame) -> Ints:
    """Return the matrix positions of a prediction frame's rows.

    ``predictions``: ``decision_time`` and ``unit``, all on the decision grid.
    Raises ``KeyError`` if a row is not in the matrix: the predictions belong to another.
    """
    rows = matrix.rows
    grid = np.flatnonzero(~rows["augmented"].to_numpy(dtype=bool))
    unit, names = name_codes(rows["unit"])
    unit_codes, unit_names = name_codes(predictions["unit"])
    key = milliseconds(rows["decision_time"])[grid] * len(names) + unit[grid]
    place = names.get_indexer(unit_names)[unit_codes]
    keys = milliseconds(predictions["decision_time"]) * len(names) + place
    order = np.argsort(key, kind="stable")
    position = np.searchsorted(key, keys, sorter=order)
    missing = (place < 0) | (key[order[np.minimum(position, len(order) - 1)]] != keys)
    if missing.any():
        first = int(np.flatnonzero(missing)[0])
        raise KeyError(
            f"{predictions['unit'].iloc[first]} at {predictions['decision_time'].iloc[first]} is not in the matrix"
        )
    return grid[order[position]]


def labels_of_rows(matrix: Matrix, rows: Ints, horizon: timedelta | None = None) -> LabelsAt:
    """Return a function that reads the labels of rows as known at any time."""

    def read(as_of: datetime | None) -> Labels:
        return Labels.of(matrix.labels(as_of, horizon=horizon, rows=rows))

    return read


@dataclass(frozen=True, slots=True)
class IncidentGroups:
    """Node incident and common cause by incident number, as of one time; shape (n_incidents,).

    Numbers without an incident map to -1.
    """

    node_incident: Ints
    common_cause: Ints

    @classmethod
    def of(cls, incidents: pd.DataFrame) -> "IncidentGroups":
        """Build from the result of :meth:`Matrix.incidents` as of the same time as the labels."""
        number = incidents["incident"].to_numpy(dtype=np.int64)

        def table(values: np.ndarray) -> Ints:
            out = np.full(int(number.max(initial=-1)) + 2, -1, dtype=np.int64)  # incident -1 reads the last entry
            out[number] = values
            return out

        return cls(table(incidents["node_incident"].to_numpy()), table(incidents["common_cause"].to_numpy()))
