"""Which features and channels moved against the reference, and which did so because a driver or exporter changed."""

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
"""Index from which a feature counts as moved, between Siddiqi's 0.1 (little) and 0.25 (much); the two below as well."""

KS_LIMIT = 0.1
"""Distance that it must have as well: the index alone can be driven by a few rows in a tail."""

USUAL = 2.0
"""And the index must be so many times the largest that the reference's own weeks had."""

MISSING_LIMIT = 0.05
"""Change of the missing share that counts, if it also is three times the reference's own."""

LEAST_EFFECT = 0.05
"""Change of the mean rank (0 to 1) after a software change that counts."""

LEAST_T = 5.0
"""Size of that effect over its clustered error that counts: many features are tested."""

_CHANNEL_SHARE = 0.15
_WORST_SHOWN = 12
_ROUNDS = 8
_LEAST_NODES = 4
_LEFT = 0.02


@dataclass(frozen=True, slots=True)
class Movement:
    """One feature against the reference.

    ``usual_psi``: largest index among the reference's own weeks; NaN: unknown.
    ``moved``, ``missing_moved``: whether its values, and its missing share, did.
    """

    column: FeatureColumn
    shift: Shift
    usual_psi: float
    moved: bool
    missing_moved: bool

    @property
    def summary(self) -> str:
        """The movement as text, with its numbers."""
        before, now = (
            decimal(value) if math.isfinite(value) else "none"
            for value in (self.shift.median_before, self.shift.median_now)
        )
        return (
            f"{self.column.name}: median {before} before, {now} now; "
            f"stability index {self.shift.psi:.2f}, Kolmogorov-Smirnov distance {self.shift.ks:.2f}"
        )

    @property
    def missing_summary(self) -> str:
        """How the missing share of the channel moved, as text."""
        return (
            f"{channel_words(str(self.column.channel))}: missing in {percent(self.shift.missing_before)} of rows "
            f"before, in {percent(self.shift.missing_now)} now"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the movement as a JSON object: ``feature``, ``group``, the fields of the shift and of this; no NaN."""
        own = {"feature": self.column.name, "group": self.column.group, "moved": self.moved}
        numbers = asdict(self.shift) | {"usual_psi": self.usual_psi}
        rounded = {name: round(value, 6) if math.isfinite(value) else None for name, value in numbers.items()}
        return own | {"missing_moved": self.missing_moved} | rounded


def movements(
    columns: Sequence[FeatureColumn],
    before: Sequence[Distribution],
    values: np.ndarray,
    same_makes: tuple[np.ndarray, np.ndarray] | None = None,
) -> list[Movement]:
    """Compare recent values with a reference.

    ``same_makes``: rows of the reference's time and recent ones with the same share of each make. What counts must have
    moved within the same makes too, or another mix of makes explains it. Static facts describe the units and may
    move with the mix.
    """
    out = []
    for i, (column, reference) in enumerate(zip(columns, before, strict=True)):
        shift = shift_of(reference, values[:, i])
        moved, missing_moved = _has_moved(shift, reference)
        if same_makes is not None and column.group != "static" and (moved or missing_moved):
            own = summarise(same_makes[0][:, i], every_value=bool(column.categories))
            within = _has_moved(shift_of(own, same_makes[1][:, i]), reference)
            moved, missing_moved = moved and within[0], missing_moved and within[1]
        out.append(Movement(column, shift, reference.usual_psi, moved, missing_moved))
    return out


def by_group(moves: Sequence[Movement]) -> list[dict[str, Any]]:
    """Summarize movements by feature group, in the order of the columns.

    Returns: ``group``, ``features``, ``moved``, ``psi`` and ``ks`` (the largest), ``missing_before`` and
    ``missing_now`` (means), ``missing_moved`` (features) and ``worst``, the feature of the largest index.
    """
    if not moves:
        return []
    table = pd.DataFrame([move.to_json() for move in moves])
    grouped = table.groupby("group", sort=False)
    summary = grouped.agg(
        features=("feature", "size"),
        moved=("moved", "sum"),
        psi=("psi", "max"),
        ks=("ks", "max"),
        missing_before=("missing_before", "mean"),
        missing_now=("missing_now", "mean"),
        missing_moved=("missing_moved", "sum"),
    )
    summary["worst"] = table.loc[grouped["psi"].idxmax(), "feature"].to_numpy()
    return [{str(key): value for key, value in row.items()} for row in summary.reset_index().to_dict("records")]


def worst(moves: Sequence[Movement]) -> list[dict[str, Any]]:
    """Return the features furthest from the reference: those that moved first, then by index."""
    ranked = sorted(moves, key=lambda move: (not move.moved, -move.shift.psi, move.column.name))
    return [move.to_json() for move in ranked[:_WORST_SHOWN]]


def moved_channels(moves: Sequence[Movement]) -> dict[str, list[Movement]]:
    """Return the channels whose readings moved, with the moved features, the furthest first.

    A channel counts if at least two of its features moved, one of them of the group ``telemetry``, and at least 15 % of
    those of this group: single features stray now and then on a fleet where nothing changes. The last value
    of an enumeration (such as the last XID) tells of events, not of readings, and is left out.
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
        enough = len(moved) >= min(2, len(of_channel)) and sum(telemetry) >= _CHANNEL_SHARE * len(telemetry)
        if any(telemetry) and enough:
            out[channel] = sorted(moved, key=lambda move: (-move.shift.psi, move.column.name))
    return out


def shortest_windows(columns: Sequence[FeatureColumn]) -> dict[str, tuple[int, FeatureColumn]]:
    """Return the feature of each channel's shortest window, with its position: it is missing once the channel is."""
    shortest: dict[str, tuple[int, FeatureColumn]] = {}
    for index, column in enumerate(columns):
        if column.group != "telemetry" or not column.channel or column.window is None:
            continue
        # A feature that compares two windows is missing where either of them is.
        if column.statistic in ("delta", "rise_delta", "slope", "std"):
            continue
        chosen = shortest.get(column.channel)
        if chosen is None or chosen[1].window is None or column.window < chosen[1].window:
            shortest[column.channel] = index, column
    return shortest


def vanished_channels(moves: Sequence[Movement]) -> dict[str, Movement]:
    """Return the channels whose missing share moved, each with its feature of the shortest window."""
    shortest = shortest_windows([move.column for move in moves])
    return {channel: moves[index] for channel, (index, _) in shortest.items() if moves[index].missing_moved}


@dataclass(frozen=True, slots=True)
class FeatureShift:
    """What a software change did to one feature.

    ``effect``: change of the mean rank, -1 to 1.
    ``t``: the effect over its error.
    """

    effect: float
    t: float

    @property
    def found(self) -> bool:
        """Whether it counts."""
        return abs(self.effect) >= LEAST_EFFECT and abs(self.t) >= LEAST_T


def changed_since_first(unit: Ints, time: Ints, code: Floats) -> Bools:
    """Tell which rows of a unit have another code than its earliest row; unknown codes count as unchanged."""
    rows = pd.DataFrame({"unit": unit, "code": code})[np.isfinite(code)]
    first = rows.iloc[np.argsort(time[rows.index], kind="stable")].groupby("unit")["code"].first()
    out = np.zeros(len(code), dtype=bool)
    out[rows.index] = rows["code"].to_numpy() != first[rows["unit"]].to_numpy()
    return out


def effect_of(changed: Bools, values: np.ndarray, *, unit: Ints, day: Ints, node: Ints) -> FeatureShift | None:
    """Measure what a software change did to one feature.

    Two-way fixed effects: the feature's rank among all rows, freed of the means of units and of days, is regressed on
    whether the unit's software has changed by then. Errors are clustered by node (Bertrand, Duflo and Mullainathan
    2004), since an upgrade reaches a node as a whole.

    ``changed``: whether the row comes after its unit's change; shape (n_rows,).
    ``values``: the feature; rows without a value are left out; shape (n_rows,).
    ``unit``, ``day``, ``node``: numbers from 0; shape (n_rows,).
    Returns: None where it is unknown: too few nodes changed or stayed, or all changed on one day.
    """
    there = np.isfinite(values)
    if len(np.unique(node[there & changed])) < _LEAST_NODES or len(np.unique(node[there])) < 2 * _LEAST_NODES:
        return None
    rank = rankdata(values[there].astype(np.float64)) / there.sum()
    unit, day, node = unit[there], day[there], node[there]
    treated = changed[there].astype(np.float64)
    treated_left, rank_left = _without_means(treated, unit, day), _without_means(rank, unit, day)
    size = float(treated_left @ treated_left)
    if size < _LEFT * len(treated) * float(treated.var()):
        return None
    slope = float(treated_left @ rank_left) / size
    scores = np.bincount(node, weights=treated_left * (rank_left - slope * treated_left))
    clusters = len(np.unique(node))
    error = float(np.sqrt((scores**2).sum() * clusters / max(clusters - 1, 1))) / size
    return FeatureShift(slope, slope / error if error > 0 else 0.0)


def _without_means(values: Floats, unit: Ints, day: Ints) -> Floats:
    """Subtract the means of units and of days in turn, until little is left of either."""
    left = values - values.mean()
    for _ in range(_ROUNDS):
        for group in (unit, day):
            left = left - (np.bincount(group, weights=left) / np.maximum(np.bincount(group), 1))[group]
    return left


def _has_moved(shift: Shift, reference: Distribution) -> tuple[bool, bool]:
    usual = reference.usual_psi if math.isfinite(reference.usual_psi) else PSI_LIMIT
    usual_missing = reference.usual_missing if math.isfinite(reference.usual_missing) else MISSING_LIMIT
    return (
        shift.psi >= max(PSI_LIMIT, USUAL * usual) and shift.ks >= KS_LIMIT,
        abs(shift.missing_now - shift.missing_before) >= max(MISSING_LIMIT, 3 * usual_missing),
    )
