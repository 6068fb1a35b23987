"""What the values of features were like: a compact summary, and how far other values lie from it.

Two measures, both of the values alone: the population stability index, sum of (q - p) ln(q / p) over bins holding the
shares p before and q now (Lewis 1994; Siddiqi 2006, who reads 0.1 as little and 0.25 as much), and the two-sample
Kolmogorov-Smirnov distance. What is missing is measured apart, as a change of share.

Rows of one GPU resemble each other, and jobs move many GPUs at once, so textbook limits cry wolf on small fleets. A
summary therefore holds a yardstick of its own: how far blocks of the reference of the recent window's length lay from
the rest of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import BeforeValidator, PlainSerializer, PlainValidator

from models.rows.ranking import Floats, Ints

KNOTS = 64
"""Values at which a feature's distribution is kept; the Kolmogorov-Smirnov distance is taken at these, so that it lies
at most 1/64 below the exact one, and is exact for features of fewer values."""

# Values are float32: the shortest text that gives the same one again.
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
_LEAST_ROWS = 200


@dataclass(frozen=True, slots=True)
class Distribution:
    """One feature's values in the reference.

    ``knots``: Values, ascending and distinct; empty if all are missing; shape (n,).
    ``cumulative``: share of the present values at or below each knot; the last is 1; shape (n,).
    ``present``, ``missing``: rows with a value and without.
    ``usual_psi``, ``usual_missing``: largest index, and largest change of the missing share, of a block of the
    reference against the rest; NaN where the reference has too few rows for blocks.
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
        """Give the share of the values in (knot before, knot], one for each knot."""
        return np.diff(self.cumulative, prepend=0.0)

    def edges(self) -> Floats:
        """Give upper edges of the bins: at least a tenth of the values each where ties allow, and what lies outside.

        The first bin is what lies below all values of the reference, the last what lies above.
        """
        if not len(self.knots):
            return np.zeros(0)
        chosen = [float(np.nextafter(self.knots[0], -np.inf))]
        taken = 0.0
        for knot, share in zip(self.knots, self.cumulative, strict=True):
            if share - taken >= _BIN_SHARE - 1e-9 or share == 1.0:
                chosen.append(float(knot))
                taken = share
        return np.array(chosen)


@dataclass(frozen=True, slots=True)
class Shift:
    """How far recent values of one feature lie from the reference.

    ``psi``, ``ks``: population stability index and Kolmogorov-Smirnov distance of the values present; 0 where either
    side has none.
    ``missing_before``, ``missing_now``: shares of rows without a value.
    ``median_before``, ``median_now``: Medians; NaN without values.
    """

    psi: float
    ks: float
    missing_before: float
    missing_now: float
    median_before: float
    median_now: float


def summarise(values: np.ndarray, *, blocks: Ints | None = None, every_value: bool = False) -> Distribution:
    """Summarise one feature.

    ``values``: Values; NaN: missing; shape (n,).
    ``blocks``: number of each row's block of time, from 0; without, or with fewer than two blocks of 200 rows, there is
    no yardstick; shape (n,).
    ``every_value``: keep every distinct value, for codes of categories.
    """
    there = np.isfinite(values)
    ordered = np.sort(values[there].astype(np.float64))
    knots, cumulative = _knots(ordered, every_value=every_value)
    plain = Distribution(knots, cumulative, len(ordered), int((~there).sum()))
    if blocks is None or not len(values):
        return plain
    usual_psi, usual_missing = _usual(plain, values, there, blocks)
    return Distribution(knots, cumulative, plain.present, plain.missing, usual_psi, usual_missing)


def shift_of(reference: Distribution, values: np.ndarray) -> Shift:
    """Measure how far values lie from a reference.

    ``values``: recent values; NaN: missing; shape (n,).
    """
    there = np.isfinite(values)
    ordered = np.sort(values[there].astype(np.float64))
    missing = 1.0 - len(ordered) / max(len(values), 1)
    median = float(ordered[(len(ordered) - 1) // 2]) if len(ordered) else float("nan")
    psi = ks = 0.0
    if len(ordered) and reference.present:
        edges = reference.edges()
        psi = stability_index(_reference_counts(reference, edges), _counts(ordered, edges))
        now = np.searchsorted(ordered, reference.knots, side="right") / len(ordered)
        below = np.searchsorted(ordered, reference.knots, side="left") / len(ordered)
        # The largest gap lies at a knot or just below one.
        before = np.r_[0.0, reference.cumulative[:-1]]
        exact = len(reference.knots) < KNOTS
        ks = float(np.abs(now - reference.cumulative).max())
        if exact:
            ks = max(ks, float(np.abs(below - before).max()))
        ks = max(ks, float(below[0]))
    return Shift(psi, ks, reference.missing_share, missing, reference.median, median)


def stability_index(before: Floats, now: Floats) -> float:
    """Give the population stability index of two rows of counts; half a row is added to each bin of either side.

    >>> round(stability_index(np.array([500.0, 500.0]), np.array([200.0, 800.0])), 2)
    0.41
    """
    p = (before + 0.5) / (before.sum() + 0.5 * len(before))
    q = (now + 0.5) / (now.sum() + 0.5 * len(now))
    return float(((q - p) * np.log(q / p)).sum())


def _knots(ordered: Floats, *, every_value: bool) -> tuple[Floats, Floats]:
    if not len(ordered):
        return np.zeros(0), np.zeros(0)
    last = np.flatnonzero(np.r_[ordered[1:] != ordered[:-1], True])  # position of each distinct value's last occurrence
    if len(last) > KNOTS and not every_value:
        at = np.linspace(0, len(ordered) - 1, KNOTS).round().astype(np.int64)
        last = np.unique(last[np.searchsorted(last, at)])
    # Rounded as a bundle's file holds it, so that a summary read back gives the same bins.
    return ordered[last], np.round((last + 1) / len(ordered), 6)


def _counts(ordered: Floats, edges: Floats) -> Floats:
    upto = np.searchsorted(ordered, edges, side="right")
    return np.diff(np.r_[0, upto, len(ordered)]).astype(np.float64)


def _reference_counts(reference: Distribution, edges: Floats) -> Floats:
    at = np.searchsorted(reference.knots, edges, side="right")
    upto = np.r_[0.0, reference.cumulative][at] * reference.present
    return np.diff(np.r_[0.0, upto, reference.present])


def _usual(plain: Distribution, values: np.ndarray, there: np.ndarray, blocks: Ints) -> tuple[float, float]:
    rows = np.bincount(blocks)
    held = np.flatnonzero(rows >= _LEAST_ROWS)
    if len(held) < 2:
        return float("nan"), float("nan")
    gone = np.bincount(blocks, weights=~there)
    others = (gone.sum() - gone[held]) / (rows.sum() - rows[held])
    usual_missing = float(np.abs(gone[held] / rows[held] - others).max())
    edges = plain.edges()
    if not len(edges):
        return 0.0, usual_missing
    bins = len(edges) + 1
    code = np.searchsorted(edges, values[there].astype(np.float64), side="left")
    counts = np.bincount(blocks[there] * bins + code, minlength=len(rows) * bins).reshape(-1, bins).astype(np.float64)
    whole = counts.sum(axis=0)
    psi = [stability_index(whole - counts[at], counts[at]) for at in held if counts[at].sum()]
    return max(psi, default=0.0), usual_missing
