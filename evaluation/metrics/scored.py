"""The predictions of one model and variant as plain arrays, over units and decision times that all models share."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import pandas as pd

from evaluation.metrics.metrics import Bools, Floats, Ints
from features.times import coded
from foundation.errors import InputError
from policy.episodes import openings

COLUMNS: tuple[str, ...] = (
    "decision_time", "unit", "model", "variant", "score", "risk", "rank", "alert",
    "label", "failure_class", "incident", "incident_start", "fold",
)  # fmt: skip
"""Columns that an evaluation needs of a prediction frame."""

_MS_PER_DAY = 86_400_000
_COMMON = frozenset(
    {"time", "unit", "known", "positive", "incident", "incident_start_ms", "failure_class", "fold", "drain_label"}
)
# What models scored on the same rows have alike: of a large fleet most of the memory.


@dataclass(frozen=True, slots=True)
class Shared:
    """What the models of one evaluation have in common.

    ``units``: names of the units, sorted; rows carry positions in it; shape (units,).
    ``times_ms``: decision times in milliseconds since the epoch (UTC), ascending; rows carry positions in it; shape
    (times,).
    ``k``: alert budget a decision time.
    ``reach_ms``: how long an episode lasts, in milliseconds; 0: every alert is one by itself.
    """

    units: np.ndarray
    times_ms: Ints
    k: int
    reach_ms: int = 0

    @property
    def budget(self) -> Ints:
        """Alert budget of each decision time, shape (times,)."""
        return np.full(len(self.times_ms), self.k)


@dataclass(frozen=True, slots=True)
class Scored:
    """Rows of one model and variant, ordered by decision time and then unit. All arrays have shape (rows,).

    ``shared``: units and decision times that ``unit`` and ``time`` index.
    ``time``, ``unit``: positions of the row's decision time and unit.
    ``rank``: rank within the decision time, 1 the riskiest.
    ``risk``: calibrated probability of the label; NaN where the model gives none.
    ``alert``: whether the model alerts the row.
    ``known``: whether the row has a label; rows without one count nowhere.
    ``positive``: whether the label is 1.
    ``incident``: the incident that makes the label positive; -1: none.
    ``incident_start_ms``: its start; 0 where there is none.
    ``failure_class``: its class; empty where there is none.
    ``fold``: the fold that scored the row.
    ``drain_label``: label within the drain horizon: 1, 0, or -1 where it is not known.
    """

    model: str
    variant: str
    shared: Shared
    time: Ints
    unit: Ints
    rank: Ints
    risk: Floats
    alert: Bools
    known: Bools
    positive: Bools
    incident: Ints
    incident_start_ms: Ints
    failure_class: np.ndarray
    fold: Ints
    drain_label: Ints

    @property
    def name(self) -> tuple[str, str]:
        """Model and variant."""
        return self.model, self.variant

    @property
    def n_units(self) -> int:
        """Number of units of the evaluation."""
        return len(self.shared.units)

    @property
    def day(self) -> Ints:
        """UTC day of each row's decision time, counted from the epoch."""
        return (self.shared.times_ms // _MS_PER_DAY)[self.time]

    def episodes(self) -> tuple[Ints, Ints]:
        """Find the alerts that open an episode (:func:`policy.episodes.openings`).

        Returns: their rows, and whether an incident followed within the drain horizon: 1, 0, or -1 where it is not
        known; shape (episodes,).
        """
        alerts = np.flatnonzero(self.alert)
        times = self.shared.times_ms[self.time[alerts]]
        rows = alerts[openings(self.unit[alerts], times, self.shared.reach_ms)]
        return rows, self.drain_label[rows]

    def per_unit(self, chosen: Bools | Ints) -> Floats:
        """Count rows by unit.

        ``chosen``: rows to count: a mask of shape (rows,), or their positions.
        Returns shape (units,).
        """
        return np.bincount(self.unit[chosen], minlength=self.n_units).astype(np.float64)

    def top(self, budget: Ints) -> Bools:
        """Rows among the riskiest of their decision time.

        ``budget``: how many rows to take at each decision time; shape (times,).
        Returns: whether the row is taken; shape (rows,).
        """
        return self.rank <= budget[self.time]

    def per_time(self, chosen: Bools) -> Ints:
        """Count rows by decision time.

        ``chosen``: rows to count; shape (rows,).
        Returns shape (times,).
        """
        return np.bincount(self.time[chosen], minlength=len(self.shared.times_ms)).astype(np.int64)


def split_predictions(
    predictions: pd.DataFrame, k: int, reach: timedelta = timedelta(0), more: pd.DataFrame | None = None
) -> list[Scored]:
    """Split a prediction frame by model and variant.

    What models have in common (rows, labels) is held once: parts may share arrays, so they must not be written to.

    ``predictions``: has :data:`COLUMNS`, and may have ``drain_label`` (else ``label`` is taken); ``decision_time`` and
    ``incident_start`` are aware UTC. Rows in any order.
    ``reach``: how long an episode lasts, see :attr:`evaluation.backtest.frames.BacktestResult.drain_reach`.
    ``more``: predictions of other models for all of these units and times, such as the oracle's.
    Returns: one for each model and variant, sorted by these names.
    Raises ``InputError`` if the frame is empty, lacks a column, or scores a unit twice at one decision time.
    """
    missing = [name for name in COLUMNS if name not in predictions.columns]
    if missing:
        raise InputError(
            f"no column {', '.join(missing)}",
            "predictions to evaluate",
            "Give predictions as `predrain backtest` makes them.",
        )
    if predictions.empty:
        raise InputError(
            "no predictions to evaluate",
            "backtest",
            "Choose backtest.first_test and backtest.last_test inside the dataset.",
        )
    units = coded(predictions["unit"])[1]
    times_ms = np.sort(milliseconds(predictions["decision_time"].drop_duplicates()))
    reach_ms = reach // timedelta(milliseconds=1)
    shared = Shared(units=np.asarray(units, dtype=object), times_ms=times_ms, k=k, reach_ms=reach_ms)
    parts: list[Scored] = []
    for frame in (predictions,) if more is None else (predictions, more):
        parts += _split(frame, shared, parts)
    return sorted(parts, key=lambda part: part.name)


def _split(predictions: pd.DataFrame, shared: Shared, before: list[Scored]) -> list[Scored]:
    model, models = coded(predictions["model"])
    variant, variants = coded(predictions["variant"])
    key = model * len(variants) + variant
    parts: list[Scored] = []
    for number in np.flatnonzero(np.bincount(key)):
        part = predictions.iloc[_as_slice(np.flatnonzero(key == number))]
        time = np.searchsorted(shared.times_ms, milliseconds(part["decision_time"]))
        mine, names = coded(part["unit"])
        mine = np.searchsorted(shared.units.astype("str"), names.to_numpy(dtype="str"))[mine]
        order = np.lexsort((mine, time))
        columns = {"time": time, "unit": mine} | _arrays(part)
        if (np.diff(order) != 1).any():
            columns = {name: values[order] for name, values in columns.items()}
        name = str(models[number // len(variants)]), str(variants[number % len(variants)])
        scored = Scored(model=name[0], variant=name[1], shared=shared, **_held_once(columns, [*before, *parts]))
        _refuse_duplicates(scored)
        parts.append(scored)
    return parts


def milliseconds(values: pd.Series) -> Ints:
    """Give times as milliseconds since the epoch; missing ones as 0."""
    known = values.notna().to_numpy()
    out = np.zeros(len(values), np.int64)
    out[known] = values[known].to_numpy(dtype="datetime64[ms]").astype(np.int64)
    return out


def _as_slice(rows: Ints) -> Ints | slice:
    """Rows that stand together need not be copied."""
    together = rows[-1] - rows[0] + 1 == len(rows)
    return slice(int(rows[0]), int(rows[-1]) + 1) if together else rows


def _held_once(columns: dict[str, np.ndarray], parts: list[Scored]) -> dict[str, np.ndarray]:
    """Give the arrays, each that an earlier part holds alike by that part's: labels repeat for every model."""
    if not parts:
        return columns
    held = {name: getattr(parts[-1], name) for name in columns}
    return {
        name: held[name] if name in _COMMON and np.array_equal(held[name], values) else values
        for name, values in columns.items()
    }


def _arrays(predictions: pd.DataFrame) -> dict[str, np.ndarray]:
    label = predictions["label"].to_numpy(dtype=np.float64, na_value=np.nan)
    positive = label == 1
    incident = predictions["incident"].to_numpy(dtype=np.float64, na_value=-1.0)
    # an incident belongs to a row only as the reason of its positive label
    incident = np.where(positive & np.isfinite(incident), incident, -1).astype(np.int64)
    failure_class, classes = pd.factorize(predictions["failure_class"])
    return {
        "rank": predictions["rank"].to_numpy(dtype=np.int64),
        "risk": predictions["risk"].to_numpy(dtype=np.float64, na_value=np.nan),
        "alert": predictions["alert"].to_numpy(dtype=np.bool_),
        "known": ~np.isnan(label),
        "positive": positive,
        "incident": incident,
        "incident_start_ms": milliseconds(predictions["incident_start"]),
        "failure_class": np.append(np.asarray(classes, dtype=object), "")[failure_class],
        "fold": predictions["fold"].to_numpy(dtype=np.int64),
        "drain_label": predictions.get("drain_label", predictions["label"]).to_numpy(dtype=np.int8, na_value=-1),
    }


def _refuse_duplicates(scored: Scored) -> None:
    same = (np.diff(scored.time) == 0) & (np.diff(scored.unit) == 0)
    if same.any():
        at = int(np.flatnonzero(same)[0])
        when = pd.Timestamp(int(scored.shared.times_ms[scored.time[at]]), unit="ms", tz="UTC").isoformat()
        raise InputError(
            f"unit {scored.shared.units[scored.unit[at]]} is scored twice at {when}",
            f"predictions of {scored.model} ({scored.variant})",
            "Give one row for each unit and decision time.",
        )
