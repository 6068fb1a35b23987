"""What a model was fitted on, in short: the yardstick that later rows are held against; kept in the bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from features.times import NEVER, duration_ms, milliseconds
from features.vocabulary import FeatureColumn
from models.rows.ranking import Ints, mix, seed_of
from models.rows.row_reader import RowReader
from models.rows.training_set import Labels, TrainingRows
from models.training.distribution import Distribution, summarise

SAMPLE = 20_000
"""Rows of a side that features are compared on, at most."""

BLOCK = timedelta(days=7)
"""Length of the blocks of the reference that give the usual fluctuation; also the least recent window."""

_DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Failures that a span of time saw.

    ``rows``: decision rows whose labels were complete, as exposure.
    ``incidents``: incidents by failure class; those of one unit within :data:`BLOCK` of the last counted one count
    once, so that a unit failing again and again does not pass for a rising rate.
    """

    rows: int
    incidents: Mapping[str, int]

    @property
    def total(self) -> int:
        """Incidents of all classes."""
        return sum(self.incidents.values())


@dataclass(frozen=True, slots=True)
class Reference:
    """What the rows that a model was fitted on were like.

    ``start_ms``, ``end_ms``: first and last decision time, milliseconds since the epoch (UTC).
    ``columns``: the features, in order.
    ``features``: one for each column. Ages and other days since a date are kept as dates, so that time's passing
    changes nothing.
    ``rows_per_time``: grid rows a decision time.
    ``times_per_day``: decision times a day.
    ``outcomes``: failures in that time, as known at the fit.
    """

    start_ms: int
    end_ms: int
    columns: tuple[FeatureColumn, ...]
    features: tuple[Distribution, ...]
    rows_per_time: float
    times_per_day: float
    outcomes: Outcomes

    def encode(self) -> bytes:
        """Give the reference as the bytes of a JSON file; the same reference gives the same bytes."""
        return bytes(_REFERENCE.dump_json(self)) + b"\n"

    @classmethod
    def decode(cls, content: bytes) -> Reference:
        """Read what :meth:`encode` wrote; raises pydantic's ``ValidationError``."""
        return _REFERENCE.validate_json(content)


_REFERENCE = TypeAdapter(Reference)


@dataclass(frozen=True, slots=True)
class LabelledRows(Labels):
    """The rows of a matrix with their labels as of one time, as the drift checks need them.

    ``positive``: rows whose label is 1, ascending; shape (n_positive,).
    ``starts``: start of their incidents, milliseconds since the epoch; shape (n_positive,).
    ``failure_class``: the classes of these; shape (n_positive,).
    """

    rows: TrainingRows
    positive: Ints
    starts: Ints
    failure_class: np.ndarray

    @classmethod
    def join(cls, rows: TrainingRows, frame: Any) -> LabelledRows:
        """Join the keys with what :meth:`models.rows.training_set.Matrix.labels` gives."""
        labels = Labels.of(frame)
        positive = np.flatnonzero(labels.label == 1)
        chosen = frame.iloc[positive]
        classes = chosen["failure_class"].fillna("other").astype(str).to_numpy()
        starts = milliseconds(chosen["incident_start"], "incident_start")
        return cls(labels.label, labels.complete, labels.incident, rows, positive, starts, classes)

    def outcomes(self, start_ms: int, end_ms: int, *, known_by_ms: int) -> Outcomes:
        """Count the failures behind the grid rows from ``start_ms`` to ``end_ms`` (both included) with known labels.

        An incident belongs to the earliest row that it makes a positive, in these times or not: so no two windows count
        it, and short windows count as many for each row as long ones. Rows of the matrix's first decision time are left
        out, since which of their incidents would have been seen before is not known.
        """
        rows = self.rows
        known = ~rows.augmented & (self.complete <= known_by_ms) & (self.label >= 0)
        inside = known & (rows.time >= start_ms) & (rows.time <= end_ms)
        inside &= rows.time > rows.time.min(where=~rows.augmented, initial=NEVER)
        at = np.flatnonzero(known[self.positive])
        rows_at = self.positive[at]
        order = np.lexsort((rows.time[rows_at], self.starts[at], rows.tie[rows_at]))
        counts: dict[str, int] = {}
        last: tuple[int, int] | None = None
        for place, row in zip(at[order], rows_at[order], strict=True):
            unit, start = int(rows.tie[row]), int(self.starts[place])
            if last is not None and last[0] == unit and start - last[1] < duration_ms(BLOCK):
                continue
            last = (unit, start)
            if inside[row]:
                name = str(self.failure_class[place])
                counts[name] = counts.get(name, 0) + 1
        return Outcomes(int(inside.sum()), dict(sorted(counts.items())))


def sample_rows(rows: TrainingRows, start_ms: int, end_ms: int, *, most: int, seed: int) -> Ints:
    """Draw grid rows from ``start_ms`` to ``end_ms`` (both included).

    ``seed``: seed of the draw, which depends on a row's unit and time and on nothing else.
    Returns: Positions, ascending.
    """
    among = np.flatnonzero((rows.time >= start_ms) & (rows.time <= end_ms) & ~rows.augmented)
    if len(among) <= most:
        return among
    priority = mix(mix(rows.tie[among], rows.time[among]), seed_of(seed, "drift"))
    return np.sort(among[np.lexsort((rows.time[among], priority))[:most]])


def dated(values: np.ndarray, time_ms: Ints, columns: Sequence[FeatureColumn]) -> np.ndarray:
    """Replace days since a date by that date, in days since the epoch, in a copy of the rows' values.

    ``values``: Features; shape (n_rows, n_features).
    ``time_ms``: decision times; shape (n_rows,).
    Returns: the same, but for columns of the group ``static`` in days; shape (n_rows, n_features).
    """
    out = np.array(values, dtype=np.float32, copy=True)
    for at, column in enumerate(columns):
        if column.group == "static" and column.statistic == "days":
            out[:, at] = (time_ms / _DAY_MS - out[:, at]).round(1)
    return out


def warm_from(rows: TrainingRows, columns: Sequence[FeatureColumn], start_ms: int, end_ms: int) -> int:
    """Give the first time at which trailing windows are full, or ``start_ms`` if later; at most half of the span on."""
    windows = [column.window for column in columns if column.window is not None and column.group != "history"]
    first = int(rows.time.min()) + 2 * max((duration_ms(window) for window in windows), default=0)
    return max(start_ms, min(first, (start_ms + end_ms) // 2))


def make_reference(
    labelled: LabelledRows,
    read: RowReader,
    columns: Sequence[FeatureColumn],
    *,
    start_ms: int,
    end_ms: int,
    as_of_ms: int,
    seed: int,
) -> Reference:
    """Summarise the rows that a model is fitted on."""
    rows = labelled.rows
    begin = warm_from(rows, columns, start_ms, end_ms)
    chosen = sample_rows(rows, begin, end_ms, most=SAMPLE, seed=seed)
    values = dated(read(chosen), rows.time[chosen], columns)
    blocks = (end_ms - rows.time[chosen]) // duration_ms(BLOCK)
    features = tuple(
        summarise(values[:, at], blocks=blocks, every_value=bool(column.categories))
        for at, column in enumerate(columns)
    )
    inside = rows.time[(rows.time >= begin) & (rows.time <= end_ms) & ~rows.augmented]
    times = np.unique(inside)
    days = max(float(times[-1] - times[0]) / _DAY_MS, 1.0) if len(times) else 1.0
    return Reference(
        start_ms=start_ms,
        end_ms=end_ms,
        columns=tuple(columns),
        features=features,
        rows_per_time=len(inside) / max(len(times), 1),
        times_per_day=max(len(times) - 1, 1) / days,
        outcomes=labelled.outcomes(start_ms, end_ms, known_by_ms=as_of_ms),
    )
