"""Which features moved, which channels that makes, and the summary by feature group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from features.vocabulary import FeatureColumn
from features.wording import channel_words, decimal, percent
from models.training.distribution import Distribution, Shift, shift_of, summarise

PSI_LIMIT = 0.2
"""Index from which a feature counts as moved, between Siddiqi's 0.1 (little) and 0.25 (much); the two below as well."""

KS_LIMIT = 0.1
"""Distance that it must have as well: the index alone can be driven by a few rows in a tail."""

USUAL = 2.0
"""And the index must be so many times the largest that the reference's own weeks had."""

MISSING_LIMIT = 0.05
"""Change of the missing share that counts, if it also is three times the reference's own."""

_CHANNEL_SHARE = 0.15
_WORST_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Movement:
    """One feature against the reference.

    ``usual_psi``: largest index among the reference's own weeks; NaN: unknown.
    ``missing_moved``: whether its missing share did.
    """

    column: FeatureColumn
    shift: Shift
    usual_psi: float
    moved: bool
    missing_moved: bool

    @property
    def summary(self) -> str:
        """The move as text, with its numbers."""
        shift = self.shift
        return (
            f"{self.column.name}: median {_value(shift.median_before)} before, {_value(shift.median_now)} now; "
            f"stability index {shift.psi:.2f}, Kolmogorov-Smirnov distance {shift.ks:.2f}"
        )

    def to_json(self) -> dict[str, Any]:
        """Give the move as a row of :attr:`evaluation.drift.verdict.Findings.features`."""
        shift = self.shift
        return {
            "feature": self.column.name,
            "group": self.column.group,
            "psi": round(shift.psi, 6),
            "usual_psi": _plain(self.usual_psi),
            "ks": round(shift.ks, 6),
            "moved": self.moved,
            "missing_before": round(shift.missing_before, 6),
            "missing_now": round(shift.missing_now, 6),
            "median_before": _plain(shift.median_before),
            "median_now": _plain(shift.median_now),
        }


def movements(columns: Sequence[FeatureColumn], before: Sequence[Distribution], values: np.ndarray) -> list[Movement]:
    """Hold recent values against a reference.

    ``before``: the reference, one for each.
    ``values``: recent rows; shape (n_rows, n_features).
    Returns: one for each feature.
    """
    out = []
    for at, (column, reference) in enumerate(zip(columns, before, strict=True)):
        shift = shift_of(reference, values[:, at])
        moved, missing_moved = _judged(shift, reference)
        out.append(Movement(column, shift, reference.usual_psi, moved, missing_moved))
    return out


def moved_within_makes(
    moves: Sequence[Movement], before: Sequence[Distribution], earlier: np.ndarray, now: np.ndarray
) -> list[Movement]:
    """Take back moves that another mix of makes explains: what counts must have moved within the same makes, too.

    ``before``: the reference, one for each feature.
    ``earlier``, ``now``: rows of the reference's time and recent ones, with the same share of each make; shape (n_rows,
    n_features).
    Returns: the same, with the numbers of the whole fleet; static facts, which say who is there, as they were.
    """
    out = []
    for at, (move, reference) in enumerate(zip(moves, before, strict=True)):
        if move.column.group == "static" or not (move.moved or move.missing_moved):
            out.append(move)
            continue
        own = summarise(earlier[:, at], every_value=bool(move.column.categories))
        moved, missing_moved = _judged(shift_of(own, now[:, at]), reference)
        out.append(replace(move, moved=move.moved and moved, missing_moved=move.missing_moved and missing_moved))
    return out


def by_group(moves: Sequence[Movement]) -> list[dict[str, Any]]:
    """Sum movements up by feature group, in the order of the columns."""
    out = []
    for group in dict.fromkeys(move.column.group for move in moves):
        mine = [move for move in moves if move.column.group == group]
        worst = max(mine, key=lambda move: move.shift.psi)
        out.append(
            {
                "group": group,
                "features": len(mine),
                "moved": sum(move.moved for move in mine),
                "psi": round(worst.shift.psi, 6),
                "ks": round(max(move.shift.ks for move in mine), 6),
                "worst": worst.column.name,
                "missing_before": round(float(np.mean([move.shift.missing_before for move in mine])), 6),
                "missing_now": round(float(np.mean([move.shift.missing_now for move in mine])), 6),
                "missing_moved": sum(move.missing_moved for move in mine),
            }
        )
    return out


def worst(moves: Sequence[Movement]) -> list[dict[str, Any]]:
    """Give the features furthest from the reference: those that moved first, then by index."""
    ranked = sorted(moves, key=lambda move: (not move.moved, -move.shift.psi, move.column.name))
    return [move.to_json() for move in ranked[:_WORST_SHOWN]]


def moved_channels(moves: Sequence[Movement]) -> dict[str, list[Movement]]:
    """Give the channels whose readings moved, with the moved features, the furthest first.

    A channel counts if at least two of its features moved, one of them of the group ``telemetry``, and at least 15 % of
    those of this group: single features stray now and then on a fleet where nothing changes. The last value
    of an enumeration (such as the last XID) tells of events, not of readings, and is left out.
    """
    mine: dict[str, list[Movement]] = {}
    for move in moves:
        if move.column.group in ("telemetry", "peers") and move.column.channel:
            mine.setdefault(move.column.channel, []).append(move)
    out: dict[str, list[Movement]] = {}
    for channel, of_channel in mine.items():
        if any(move.column.statistic == "changes" for move in of_channel):
            continue
        own = [move for move in of_channel if move.column.group == "telemetry"]
        moved = [move for move in of_channel if move.moved]
        moved_own = sum(move.moved for move in own)
        least = min(2, len(of_channel))
        if moved_own and len(moved) >= least and moved_own >= _CHANNEL_SHARE * len(own):
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
    """Give the channels whose missing share moved, each with its feature of the shortest window."""
    shortest = shortest_windows([move.column for move in moves])
    return {channel: moves[index] for channel, (index, _) in shortest.items() if moves[index].missing_moved}


def channel_facts(channels: dict[str, list[Movement]], most: int = 4) -> list[str]:
    """Say for each channel, the furthest first, what moved most."""
    ranked = sorted(channels.items(), key=lambda item: (-item[1][0].shift.psi, item[0]))
    facts = [f"{channel_words(channel)}, {len(moved)} features: {moved[0].summary}" for channel, moved in ranked[:most]]
    if len(ranked) > most:
        facts.append(f"and {len(ranked) - most} more: {', '.join(channel_words(name) for name, _ in ranked[most:])}")
    return facts


def missing_fact(channel: str, move: Movement) -> str:
    """Say how a channel's missing share moved."""
    shift = move.shift
    return (
        f"{channel_words(channel)}: missing in {percent(shift.missing_before)} of rows before, in "
        f"{percent(shift.missing_now)} now"
    )


def _judged(shift: Shift, reference: Distribution) -> tuple[bool, bool]:
    usual = reference.usual_psi if math.isfinite(reference.usual_psi) else PSI_LIMIT
    usual_missing = reference.usual_missing if math.isfinite(reference.usual_missing) else MISSING_LIMIT
    return (
        shift.psi >= max(PSI_LIMIT, USUAL * usual) and shift.ks >= KS_LIMIT,
        abs(shift.missing_now - shift.missing_before) >= max(MISSING_LIMIT, 3 * usual_missing),
    )


def _value(value: float) -> str:
    return decimal(value) if math.isfinite(value) else "none"


def _plain(value: float) -> float | None:
    return round(float(value), 6) if math.isfinite(value) else None
