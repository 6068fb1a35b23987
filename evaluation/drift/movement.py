"""Feature drift: which features and channels shifted from the reference, and the effect of software changes."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from features.vocabulary import FeatureColumn
from features.wording import channel_words, decimal, percent
from models.rows.ranking import Bools, Floats, Ints
from models.training.reference import Distribution, Shift, shift_of, summarise

PSI_LIMIT = 0.2
"""Minimum population stability index (PSI) of drift, between Siddiqi's 0.1 (minor) and 0.25 (major)."""

KS_LIMIT = 0.1
"""Minimum Kolmogorov-Smirnov distance of drift: a few rows in a tail can inflate the PSI."""

USUAL = 2.0
"""Minimum ratio of the PSI to the largest PSI among the reference's own weeks."""

MISSING_LIMIT = 0.05
"""Minimum change of the missing share; it must also be three times the reference's own variation."""

MIN_EFFECT = 0.05
"""Minimum effect of a software change, as a change of the mean rank (0 to 1)."""

MIN_T = 5.0
"""Minimum t statistic of that effect, with clustered errors; high because many features are tested."""

_CHANNEL_SHARE = 0.15
_MAX_WORST_SHOWN = 12
_ROUNDS = 8
_MIN_NODES = 4
_MIN_VARIANCE_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Movement:
    """Shift of one feature from the reference.

    ``usual_psi``: largest PSI among the reference's own weeks; NaN: unknown.
    ``moved``, ``missing_moved``: whether its values, and its missing share, drifted.
    """

    column: FeatureColumn
    shift: Shift
    usual_psi: float
    moved: bool
    missing_moved: bool

    @property
    def summary(self) -> str:
        """The shift of the values as text."""
        median_before, median_now = (
            decimal(value) if math.isfinite(value) else "none"
            for value in (self.shift.median_before, self.shift.median_now)
        )
        return (
            f"{self.column.name}: median {median_before} before, {median_now} now; "
            f"stability index {self.shift.psi:.2f}, Kolmogorov-Smirnov distance {self.shift.ks:.2f}"
        )

    @property
    def missing_summary(self) -> str:
        """The change of the channel's missing share as text."""
        return (
            f"{channel_words(str(self.column.channel))}: missing in {percent(self.shift.missing_before)} of rows "
            f"before, in {percent(self.shift.missing_now)} now"
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to a JSON object: ``feature``, ``group``, the fields of ``shift`` and the flags; NaN is null."""
        labels = {"feature": self.column.name, "group": self.column.group, "moved": self.moved}
        numbers = asdict(self.shift) | {"usual_psi": self.usual_psi}
        rounded = {name: round(value, 6) if math.isfinite(value) else None for name, value in numbers.items()}
        return labels | {"missing_moved": self.missing_moved} | rounded


def movements(
    columns: Sequence[FeatureColumn],
    references: Sequence[Distribution],
    values: np.ndarray,
    same_makes: tuple[np.ndarray, np.ndarray] | None = None,
) -> list[Movement]:
    """Compare recent values with a reference.

    ``same_makes``: reference rows and recent rows with the same mix of GPU models. A feature must also have drifted
    between these, otherwise the change of mix explains it. Static features are exempt.
    """
    out = []
    for i, (column, reference) in enumerate(zip(columns, references, strict=True)):
        shift = shift_of(reference, values[:, i])
        moved, missing_moved = _has_moved(shift, reference)
        if same_makes is not None and column.group != "static" and (moved or missing_moved):
            same_make_reference = summarise(same_makes[0][:, i], every_value=bool(column.categories))
            within_makes = _has_moved(shift_of(same_make_reference, same_makes[1][:, i]), reference)
            moved, missing_moved = moved and within_makes[0], missing_moved and within_makes[1]
        out.append(Movement(column, shift, reference.usual_psi, moved, missing_moved))
    return out


def by_group(moves: Sequence[Movement]) -> list[dict[str, Any]]:
    """Summarize movements by feature group, in the order of the columns.

    Returns: ``group``, ``features``, ``moved``, ``psi`` and ``ks`` (maximum), and ``worst``, the feature with the
    largest PSI.
    """
    if not moves:
        return []
    table = pd.DataFrame([move.to_json() for move in moves])
    grouped = table.groupby("group", sort=False)
    summary = grouped.agg(features=("feature", "size"), moved=("moved", "sum"), psi=("psi", "max"), ks=("ks", "max"))
    summary["worst"] = table.loc[grouped["psi"].idxmax(), "feature"].to_numpy()
    return [{str(key): value for key, value in row.items()} for row in summary.reset_index().to_dict("records")]


def worst(moves: Sequence[Movement]) -> list[dict[str, Any]]:
    """Return the features that shifted most: those that drifted first, then by PSI."""
    ranked = sorted(moves, key=lambda move: (not move.moved, -move.shift.psi, move.column.name))
    return [move.to_json() for move in ranked[:_MAX_WORST_SHOWN]]


def moved_channels(moves: Sequence[Movement]) -> dict[str, list[Movement]]:
    """Return the channels whose readings drifted, with their drifted features by descending PSI.

    At least two features of a channel must have drifted, among them at least 15 % of those in the group ``telemetry``,
    because single features cross the limits occasionally on a stable fleet. Enumerations (such as the last XID) are
    excluded: they report events.
    """
    by_channel: dict[str, list[Movement]] = {}
    for move in moves:
        if move.column.group in ("telemetry", "peers") and move.column.channel:
            by_channel.setdefault(move.column.channel, []).append(move)
    out: dict[str, list[Movement]] = {}
    for channel, of_channel in by_channel.items():
        if any(move.column.statistic == "changes" for move in of_channel):
            continue
        telemetry = [move.moved for move in of_channel if move.column.group == "telemetry"]
        moved = [move for move in of_channel if move.moved]
        is_broad = len(moved) >= min(2, len(of_channel)) and sum(telemetry) >= _CHANNEL_SHARE * len(telemetry)
        if any(telemetry) and is_broad:
            out[channel] = sorted(moved, key=lambda move: (-move.shift.psi, move.column.name))
    return out


def shortest_windows(columns: Sequence[FeatureColumn]) -> dict[str, tuple[int, FeatureColumn]]:
    """Return each channel's feature with the shortest window, and its position; it goes missing with the channel."""
    shortest: dict[str, tuple[int, FeatureColumn]] = {}
    for index, column in enumerate(columns):
        if column.group != "telemetry" or not column.channel or column.window is None:
            continue
        # A feature that compares two windows is missing if either window is.
        if column.statistic in ("delta", "rise_delta", "slope", "std"):
            continue
        chosen = shortest.get(column.channel)
        if chosen is None or chosen[1].window is None or column.window < chosen[1].window:
            shortest[column.channel] = index, column
    return shortest


def vanished_channels(moves: Sequence[Movement]) -> dict[str, Movement]:
    """Return the channels whose missing share changed, each with its shortest-window feature."""
    shortest = shortest_windows([move.column for move in moves])
    return {channel: moves[index] for channel, (index, _) in shortest.items() if moves[index].missing_moved}


@dataclass(frozen=True, slots=True)
class FeatureShift:
    """Effect of a software change on one feature: change of the mean rank, and that over its standard error."""

    effect: float
    t: float

    @property
    def significant(self) -> bool:
        """Whether the effect is large enough and significant."""
        return abs(self.effect) >= MIN_EFFECT and abs(self.t) >= MIN_T


def changed_since_first(unit: Ints, time: Ints, code: Floats) -> Bools:
    """Return which rows have a different code from the earliest row of their unit; unknown codes count as unchanged."""
    rows = pd.DataFrame({"unit": unit, "code": code})[np.isfinite(code)]
    first = rows.iloc[np.argsort(time[rows.index], kind="stable")].groupby("unit")["code"].first()
    out = np.zeros(len(code), dtype=bool)
    out[rows.index] = rows["code"].to_numpy() != first[rows["unit"]].to_numpy()
    return out


def effect_of(changed: Bools, values: np.ndarray, *, unit: Ints, day: Ints, node: Ints) -> FeatureShift | None:
    """Estimate the effect of a software change on one feature by two-way fixed effects.

    The feature's rank among all rows, demeaned by unit and by day, is regressed on whether the unit's software has
    changed by then. Errors are clustered by node (Bertrand, Duflo and Mullainathan 2004), since an upgrade applies to
    a whole node.

    ``changed``: whether the row is after its unit's change; shape (n_rows,).
    ``values``: the feature; missing values are dropped; shape (n_rows,).
    ``unit``, ``day``, ``node``: codes from 0; shape (n_rows,).
    Returns: None if not identifiable: too few nodes, too few nodes that changed, or all changed on one day.
    """
    has_value = np.isfinite(values)
    if len(np.unique(node[has_value & changed])) < _MIN_NODES or len(np.unique(node[has_value])) < 2 * _MIN_NODES:
        return None
    rank = rankdata(values[has_value].astype(np.float64)) / has_value.sum()
    unit, day, node = unit[has_value], day[has_value], node[has_value]
    treated = changed[has_value].astype(np.float64)
    treated_left, rank_left = _without_means(treated, unit, day), _without_means(rank, unit, day)
    size = float(treated_left @ treated_left)
    if size < _MIN_VARIANCE_SHARE * len(treated) * float(treated.var()):
        return None
    slope = float(treated_left @ rank_left) / size
    scores = np.bincount(node, weights=treated_left * (rank_left - slope * treated_left))
    clusters = len(np.unique(node))
    error = float(np.sqrt((scores**2).sum() * clusters / max(clusters - 1, 1))) / size
    return FeatureShift(slope, slope / error if error > 0 else 0.0)


def _without_means(values: Floats, unit: Ints, day: Ints) -> Floats:
    """Demean by unit and by day in alternation until both means are close to zero."""
    residual = values - values.mean()
    for _ in range(_ROUNDS):
        for group in (unit, day):
            residual = residual - (np.bincount(group, weights=residual) / np.maximum(np.bincount(group), 1))[group]
    return residual


def _has_moved(shift: Shift, reference: Distribution) -> tuple[bool, bool]:
    usual_psi = reference.usual_psi if math.isfinite(reference.usual_psi) else PSI_LIMIT
    usual_missing = reference.usual_missing if math.isfinite(reference.usual_missing) else MISSING_LIMIT
    return (
        shift.psi >= max(PSI_LIMIT, USUAL * usual_psi) and shift.ks >= KS_LIMIT,
        abs(shift.missing_now - shift.missing_before) >= max(MISSING_LIMIT, 3 * usual_missing),
    )
