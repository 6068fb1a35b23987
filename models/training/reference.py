"""Reference: summary of the training data for drift checks, stored in the bundle."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, PlainSerializer, PlainValidator, TypeAdapter

from features.vocabulary import FeatureColumn
from foundation.times import NEVER, duration_ms, milliseconds
from models.rows.ranking import Floats, Ints, mix, seed_of
from models.rows.row_reader import RowReader
from models.rows.training_set import Labels, TrainingRows

KNOTS = 64
"""Maximum knots of a feature's distribution. The Kolmogorov-Smirnov distance evaluated at them is at most 1/64 below
the exact one, and exact for features with fewer distinct values."""

# Values are float32: write the shortest text that round-trips.
Knots = Annotated[
    Floats,
    PlainValidator(lambda value: np.array(value, dtype=np.float32).astype(np.float64)),
    PlainSerializer(lambda value: [float(str(knot)) for knot in value.astype(np.float32)]),
]
Shares = Annotated[
    Floats,
    PlainValidator(lambda value: np.array(value, dtype=np.float64)),
    PlainSerializer(lambda value: [float(share) for share in value]),
]
MaybeNaN = Annotated[float, BeforeValidator(lambda value: float("nan") if value is None else value)]

_BIN_SHARE = 0.1
_MIN_ROWS = 200


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distribution of one feature in the reference.

    ``knots``: values, ascending and distinct; empty if all are missing; shape (n,).
    ``cumulative``: share of the present values at or below each knot; the last is 1; shape (n,).
    ``usual_psi``, ``usual_missing``: largest stability index, and largest change of the missing share, of a block of
    the reference against the rest; NaN if the reference has too few rows for blocks.
    """

    knots: Knots
    cumulative: Shares
    present: int
    missing: int
    usual_psi: MaybeNaN = float("nan")
    usual_missing: MaybeNaN = float("nan")

    @property
    def missing_share(self) -> float:
        """Share of rows without a value."""
        return self.missing / max(self.present + self.missing, 1)

    @property
    def median(self) -> float:
        """Median of the values; NaN without any."""
        return float(self.knots[np.searchsorted(self.cumulative, 0.5)]) if len(self.knots) else float("nan")

    def shares(self) -> Floats:
        """Return the share of the values in (previous knot, knot] for each knot."""
        return np.diff(self.cumulative, prepend=0.0)

    def edges(self) -> Floats:
        """Return upper edges of bins with at least a tenth of the values each, where ties allow.

        The first bin holds what lies below all values of the reference; an extra last bin, what lies above.
        """
        if not len(self.knots):
            return np.zeros(0)
        chosen = [float(np.nextafter(self.knots[0], -np.inf))]
        covered = 0.0
        for knot, share in zip(self.knots, self.cumulative, strict=True):
            if share - covered >= _BIN_SHARE - 1e-9 or share == 1.0:
                chosen.append(float(knot))
                covered = share
        return np.array(chosen)


@dataclass(frozen=True, slots=True)
class Shift:
    """Distance of recent values of one feature from the reference.

    ``psi``, ``ks``: population stability index and Kolmogorov-Smirnov distance of the present values; 0 if either side
    has none.
    """

    psi: float
    ks: float
    missing_before: float
    missing_now: float
    median_before: float
    median_now: float


def summarise(values: np.ndarray, *, blocks: Ints | None = None, every_value: bool = False) -> Distribution:
    """Summarize one feature.

    ``blocks``: time block of each row, from 0; None, or fewer than two blocks of 200 rows: no usual fluctuation; shape
    (n,).
    ``every_value``: keep every distinct value, for category codes.
    """
    is_finite = np.isfinite(values)
    ordered = np.sort(values[is_finite].astype(np.float64))
    knots, cumulative = _knots(ordered, every_value=every_value)
    plain = Distribution(knots, cumulative, len(ordered), int((~is_finite).sum()))
    if blocks is None or not len(values):
        return plain
    usual_psi, usual_missing = _fluctuation(plain, values, is_finite, blocks)
    return Distribution(knots, cumulative, plain.present, plain.missing, usual_psi, usual_missing)


def shift_of(reference: Distribution, values: np.ndarray) -> Shift:
    """Measure the distance of values from a reference."""
    is_finite = np.isfinite(values)
    ordered = np.sort(values[is_finite].astype(np.float64))
    missing = 1.0 - len(ordered) / max(len(values), 1)
    median = float(ordered[(len(ordered) - 1) // 2]) if len(ordered) else float("nan")
    psi = ks = 0.0
    if len(ordered) and reference.present:
        edges = reference.edges()
        psi = stability_index(_reference_counts(reference, edges), _counts(ordered, edges))
        now = np.searchsorted(ordered, reference.knots, side="right") / len(ordered)
        share_below = np.searchsorted(ordered, reference.knots, side="left") / len(ordered)
        # The largest distance is at a knot or just below one.
        reference_below = np.r_[0.0, reference.cumulative[:-1]]
        exact = len(reference.knots) < KNOTS
        ks = float(np.abs(now - reference.cumulative).max())
        if exact:
            ks = max(ks, float(np.abs(share_below - reference_below).max()))
        ks = max(ks, float(share_below[0]))
    return Shift(psi, ks, reference.missing_share, missing, reference.median, median)


def stability_index(reference: Floats, current: Floats) -> float:
    """Return the population stability index of two histograms; half a row is added to every bin."""
    p = (reference + 0.5) / (reference.sum() + 0.5 * len(reference))
    q = (current + 0.5) / (current.sum() + 0.5 * len(current))
    return float(((q - p) * np.log(q / p)).sum())


def _knots(ordered: Floats, *, every_value: bool) -> tuple[Floats, Floats]:
    if not len(ordered):
        return np.zeros(0), np.zeros(0)
    last = np.flatnonzero(np.r_[ordered[1:] != ordered[:-1], True])  # position of each distinct value's last occurrence
    if len(last) > KNOTS and not every_value:
        positions = np.linspace(0, len(ordered) - 1, KNOTS).round().astype(np.int64)
        last = np.unique(last[np.searchsorted(last, positions)])
    # Rounded as in a bundle's file, so that a loaded summary has the same bins.
    return ordered[last], np.round((last + 1) / len(ordered), 6)


def _counts(ordered: Floats, edges: Floats) -> Floats:
    cumulative = np.searchsorted(ordered, edges, side="right")
    return np.diff(np.r_[0, cumulative, len(ordered)]).astype(np.float64)


def _reference_counts(reference: Distribution, edges: Floats) -> Floats:
    position = np.searchsorted(reference.knots, edges, side="right")
    cumulative = np.r_[0.0, reference.cumulative][position] * reference.present
    return np.diff(np.r_[0.0, cumulative, reference.present])


def _fluctuation(plain: Distribution, values: np.ndarray, is_finite: np.ndarray, blocks: Ints) -> tuple[float, float]:
    rows = np.bincount(blocks)
    filled = np.flatnonzero(rows >= _MIN_ROWS)
    if len(filled) < 2:
        return float("nan"), float("nan")
    missing = np.bincount(blocks, weights=~is_finite)
    missing_elsewhere = (missing.sum() - missing[filled]) / (rows.sum() - rows[filled])
    usual_missing = float(np.abs(missing[filled] / rows[filled] - missing_elsewhere).max())
    edges = plain.edges()
    if not len(edges):
        return 0.0, usual_missing
    bins = len(edges) + 1
    code = np.searchsorted(edges, values[is_finite].astype(np.float64), side="left")
    counts = (
        np.bincount(blocks[is_finite] * bins + code, minlength=len(rows) * bins).reshape(-1, bins).astype(np.float64)
    )
    total = counts.sum(axis=0)
    psi = [stability_index(total - counts[block], counts[block]) for block in filled if counts[block].sum()]
    return max(psi, default=0.0), usual_missing


SAMPLE = 20_000
"""Maximum rows per side in a comparison of features."""

BLOCK = timedelta(days=7)
"""Length of the reference blocks that measure the usual fluctuation; also the minimum recent window."""

_DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Failures within a time span.

    ``rows``: decision rows with complete labels, as exposure.
    ``incidents``: incidents by failure class; those of one unit within :data:`BLOCK` of the last counted one count
    once, so that a unit that fails repeatedly does not look like a rising rate.
    """

    rows: int
    incidents: Mapping[str, int]

    @property
    def total(self) -> int:
        """Incidents of all classes."""
        return sum(self.incidents.values())


@dataclass(frozen=True, slots=True)
class Reference:
    """Summary of the rows that a model was fitted on.

    ``start_ms``, ``end_ms``: first and last decision time, milliseconds since the epoch (UTC).
    ``features``: one per column. Ages and other days since a date are stored as dates, so that the passage of time is
    no drift.
    ``rows_per_time``: grid rows per decision time.
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
        """Return the reference as JSON bytes; the same reference gives the same bytes."""
        return bytes(_REFERENCE.dump_json(self)) + b"\n"

    @classmethod
    def decode(cls, content: bytes) -> "Reference":
        """Read the result of :meth:`encode`; raises pydantic's ``ValidationError``."""
        return _REFERENCE.validate_json(content)


_REFERENCE = TypeAdapter(Reference)


@dataclass(frozen=True, slots=True)
class LabelledRows(Labels):
    """Rows of a matrix with their labels as of one time, for drift checks.

    ``positive``: rows whose label is 1, ascending; shape (n_positive,).
    ``starts``: start of their incidents, milliseconds since the epoch; shape (n_positive,).
    """

    rows: TrainingRows
    positive: Ints
    starts: Ints
    failure_class: np.ndarray

    @classmethod
    def join(cls, rows: TrainingRows, frame: Any) -> "LabelledRows":
        """Join row keys with the result of :meth:`models.rows.training_set.Matrix.labels`."""
        labels = Labels.of(frame)
        positive = np.flatnonzero(labels.label == 1)
        chosen = frame.iloc[positive]
        classes = chosen["failure_class"].fillna("other").astype(str).to_numpy()
        starts = milliseconds(chosen["incident_start"], "incident_start")
        return cls(labels.label, labels.complete, labels.incident, rows, positive, starts, classes)

    def outcomes(self, start_ms: int, end_ms: int, *, known_by_ms: int) -> Outcomes:
        """Count the failures behind the grid rows from ``start_ms`` to ``end_ms`` (both included) with known labels.

        An incident belongs to the earliest row that it makes positive, inside this span or not: no two spans count it,
        and short spans count as many per row as long ones. Rows of the matrix's first decision time are excluded, since
        earlier rows of their incidents may be missing.
        """
        rows = self.rows
        known = ~rows.augmented & (self.complete <= known_by_ms) & (self.label >= 0)
        in_window = known & (rows.time >= start_ms) & (rows.time <= end_ms)
        in_window &= rows.time > rows.time.min(where=~rows.augmented, initial=NEVER)
        rows_positive = np.flatnonzero(known[self.positive])
        rows_at = self.positive[rows_positive]
        order = np.lexsort((rows.time[rows_at], self.starts[rows_positive], rows.tie[rows_at]))
        counts: dict[str, int] = {}
        last: tuple[int, int] | None = None
        for place, row in zip(rows_positive[order], rows_at[order], strict=True):
            unit, start = int(rows.tie[row]), int(self.starts[place])
            if last is not None and last[0] == unit and start - last[1] < duration_ms(BLOCK):
                continue
            last = (unit, start)
            if in_window[row]:
                name = str(self.failure_class[place])
                counts[name] = counts.get(name, 0) + 1
        return Outcomes(int(in_window.sum()), dict(sorted(counts.items())))


def sample_rows(rows: TrainingRows, start_ms: int, end_ms: int, *, limit: int, seed: int) -> Ints:
    """Draw grid rows from ``start_ms`` to ``end_ms`` (both included); return their positions, ascending.

    The draw depends on ``seed`` and a row's unit and time only.
    """
    candidates = np.flatnonzero((rows.time >= start_ms) & (rows.time <= end_ms) & ~rows.augmented)
    if len(candidates) <= limit:
        return candidates
    priority = mix(mix(rows.tie[candidates], rows.time[candidates]), seed_of(seed, "drift"))
    return np.sort(candidates[np.lexsort((rows.time[candidates], priority))[:limit]])


def dated(values: np.ndarray, time_ms: Ints, columns: Sequence[FeatureColumn]) -> np.ndarray:
    """Replace days since a date by the date, in days since the epoch, in a copy of the rows' values.

    Returns: only columns of the group ``static`` in days change; shape (n_rows, n_features).
    """
    out = np.array(values, dtype=np.float32, copy=True)
    for i, column in enumerate(columns):
        if column.group == "static" and column.statistic == "days":
            out[:, i] = (time_ms / _DAY_MS - out[:, i]).round(1)
    return out


def warm_from(rows: TrainingRows, columns: Sequence[FeatureColumn], start_ms: int, end_ms: int) -> int:
    """Return the first time with full trailing windows, at least ``start_ms`` and at most mid-span."""
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
    """Summarize the rows that a model is fitted on."""
    rows = labelled.rows
    begin = warm_from(rows, columns, start_ms, end_ms)
    chosen = sample_rows(rows, begin, end_ms, limit=SAMPLE, seed=seed)
    values = dated(read(chosen), rows.time[chosen], columns)
    blocks = (end_ms - rows.time[chosen]) // duration_ms(BLOCK)
    features = tuple(
        summarise(values[:, i], blocks=blocks, every_value=bool(column.categories)) for i, column in enumerate(columns)
    )
    span_times = rows.time[(rows.time >= begin) & (rows.time <= end_ms) & ~rows.augmented]
    times = np.unique(span_times)
    days = max(float(times[-1] - times[0]) / _DAY_MS, 1.0) if len(times) else 1.0
    return Reference(
        start_ms=start_ms,
        end_ms=end_ms,
        columns=tuple(columns),
        features=features,
        rows_per_time=len(span_times) / max(len(times), 1),
        times_per_day=max(len(times) - 1, 1) / days,
        outcomes=labelled.outcomes(start_ms, end_ms, known_by_ms=as_of_ms),
    )
