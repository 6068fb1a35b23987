"""Aggregation of predictions of units to decisions about nodes.

A node ranks by its riskiest unit, is alerted if any unit is, and is labelled 1 if any unit is. Units with an unknown
label are ignored unless the labels of all units are unknown: a GPU that is inside an incident or was removed makes
an alert of its healthy neighbour neither right nor wrong. If the units are nodes, rows stay as predicted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import numpy as np
import pandas as pd

from evaluation.metrics.metrics import Bools, Ints, UnitFigures
from evaluation.metrics.scored import Incidents, NodeRows, Scored, Shared, clusters, shared_causes
from foundation.errors import InputError
from foundation.times import milliseconds, name_codes
from models.rows.ranking import group_starts, position_in_group
from models.rows.training_set import acted_on

COLUMNS: tuple[str, ...] = (
    "decision_time", "node", "unit", "model", "variant", "score", "risk", "rank", "alert",
    "label", "failure_class", "incident", "node_incident", "common_cause", "incident_start", "fold",
)  # fmt: skip
"""Required columns of a prediction frame."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Grouping of rows of units into rows of nodes.

    ``order``: rows of units sorted by group; ``starts``: start of each group in ``order``; shape (groups,).
    ``is_counted``: whether a unit counts for its node: its label is known, or no label of the node is; shape (rows,).
    """

    order: Ints
    starts: Ints
    is_counted: Bools

    @classmethod
    def of(cls, time: Ints, node: Ints, label: np.ndarray) -> Self:
        """Group rows by time and node."""
        order = np.lexsort((node, time))
        starts = np.flatnonzero(group_starts(time[order], node[order]))
        grouping = cls(order, starts, label >= 0)
        none = ~grouping.any(grouping.is_counted)
        is_counted = label >= 0
        is_counted[order] |= np.repeat(none, np.diff(np.append(starts, len(order))))
        return cls(order, starts, is_counted)

    @property
    def first(self) -> Ints:
        """First row of each group."""
        return self.order[self.starts]

    def any(self, values: Bools) -> Bools:
        """Return whether any row of each group is true."""
        return np.logical_or.reduceat(values[self.order], self.starts) if len(self.starts) else values[:0]

    def highest(self, values: np.ndarray) -> np.ndarray:
        """Return the maximum of each group over the units that ``is_counted`` selects; NaN if all are NaN."""
        if not len(self.starts):
            return values[:0]
        lowest = np.nan if values.dtype.kind == "f" else np.iinfo(values.dtype).min
        return np.fmax.reduceat(np.where(self.is_counted, values, lowest)[self.order], self.starts)

    def group_of(self, rows: Ints) -> Ints:
        """Return the group of each of these rows."""
        place = np.empty(len(self.order), dtype=np.int64)
        place[self.order] = np.arange(len(self.order))
        return np.searchsorted(self.starts, place[rows], side="right") - 1


def split_predictions(
    predictions: pd.DataFrame, k: int, reach: timedelta = timedelta(0), extra: pd.DataFrame | None = None
) -> list[Scored]:
    """Split a prediction frame by model and variant, and aggregate each part to nodes.

    ``predictions``: has :data:`COLUMNS`, and optionally ``drain_label`` (default: ``label``); ``decision_time`` and
    ``incident_start`` are aware UTC. Rows in any order.
    ``reach``: duration of an episode, see :attr:`evaluation.backtest.frames.BacktestResult.drain_reach`.
    ``extra``: predictions of additional models for the same units and times, for example the oracle's.
    Returns: one entry per model and variant, sorted by name. Models that scored the same units share ``rows``.
    Raises ``InputError`` if the frame is empty.
    """
    if predictions.empty:
        raise InputError(
            "no predictions to evaluate",
            "backtest",
            "Choose backtest.first_test and backtest.last_test inside the dataset.",
        )
    nodes, node = _node_names(predictions)
    failing = np.flatnonzero((predictions["label"] == 1).fillna(False).to_numpy(dtype=bool))
    cause = predictions["common_cause"].iloc[failing].to_numpy(dtype=np.int64)
    shared = Shared(
        nodes=nodes,
        units=name_codes(predictions["unit"])[1].size,
        times_ms=np.sort(milliseconds(predictions["decision_time"].drop_duplicates())),
        causes=shared_causes(node[failing], cause),
        k=k,
        reach_ms=reach // timedelta(milliseconds=1),
    )
    parts: list[Scored] = []
    for frame in (predictions,) if extra is None else (predictions, extra):
        parts += _split(frame, shared)
    return sorted(parts, key=lambda part: part.name)


def _node_names(predictions: pd.DataFrame) -> tuple[np.ndarray, Ints]:
    """Return sorted node names, and each row's position in them; a unit without a node is its own node."""
    place = acted_on(predictions)
    code, names = name_codes(place)
    if (code >= 0).all():
        return np.asarray(names, dtype=object), code
    node_names = place.astype(object)
    code, names = name_codes(node_names.where(node_names.notna(), predictions["unit"].astype(object)))
    return np.asarray(names, dtype=object), code


def _split(predictions: pd.DataFrame, shared: Shared) -> Iterator[Scored]:
    model, models = name_codes(predictions["model"])
    variant, variants = name_codes(predictions["variant"])
    key = model * len(variants) + variant
    labels: dict[str, np.ndarray] = {}
    grouping: Grouping | None = None
    rows: NodeRows | None = None
    for number in np.flatnonzero(np.bincount(key)):
        name = str(models[number // len(variants)]), str(variants[number % len(variants)])
        part = _ordered(predictions.iloc[_as_slice(np.flatnonzero(key == number))], shared)
        latest = _labels_of(part, shared)
        if grouping is None or rows is None or not all(np.array_equal(labels[key], latest[key]) for key in latest):
            labels = latest
            grouping = Grouping.of(labels["time"], labels["node"], labels["label"])
            rows = _node_rows(part, labels, grouping, shared)
        yield _scored(part, name, labels, grouping, rows, shared)


def _ordered(part: pd.DataFrame, shared: Shared) -> pd.DataFrame:
    """Sort rows by decision time and unit, so that all models share one order."""
    time = np.searchsorted(shared.times_ms, milliseconds(part["decision_time"]))
    key = time * shared.units + name_codes(part["unit"])[0]
    return part if (np.diff(key) > 0).all() else part.iloc[np.argsort(key, kind="stable")]


def _labels_of(part: pd.DataFrame, shared: Shared) -> dict[str, np.ndarray]:
    """Return the columns that are equal for all models that scored the same units."""
    names, node = _node_names(part)
    label = part["label"].to_numpy(dtype=np.int8, na_value=-1)
    return {
        "time": np.searchsorted(shared.times_ms, milliseconds(part["decision_time"])),
        "node": np.searchsorted(shared.nodes.astype("str"), names.astype("str"))[node],
        "unit": name_codes(part["unit"])[0],
        "label": label,
        "drain_label": part.get("drain_label", part["label"]).to_numpy(dtype=np.int8, na_value=-1),
        "incident": _numbers(part["node_incident"], label == 1),
        "cause": _numbers(part["common_cause"], label == 1),
        "fold": part["fold"].to_numpy(dtype=np.int64),
    }


def _node_rows(part: pd.DataFrame, labels: dict[str, np.ndarray], grouping: Grouping, shared: Shared) -> NodeRows:
    time, node = labels["time"][grouping.first], labels["node"][grouping.first]
    failing = np.flatnonzero(labels["incident"] >= 0)
    start_ms = milliseconds(part["incident_start"].iloc[failing])
    row = grouping.group_of(failing)
    incidents = Incidents.of(
        row=row,
        number=labels["incident"][failing],
        cause=labels["cause"][failing],
        node=labels["node"][failing],
        start_ms=start_ms,
        failure_class=part["failure_class"].iloc[failing],
        shared=shared.causes,
        nodes=len(shared.nodes),
    )
    cause = np.full(len(time), -1, dtype=np.int64)
    latest_first = np.argsort(-start_ms, kind="stable")
    cause[row[latest_first]] = labels["cause"][failing][latest_first]  # the earliest is written last
    return NodeRows(
        time=time,
        node=node,
        label=grouping.highest(labels["label"]),
        drain_label=grouping.highest(labels["drain_label"]),
        fold=labels["fold"][grouping.first],
        cluster=clusters(node, cause, shared.causes, len(shared.nodes)),
        incidents=incidents,
    )


def _scored(
    part: pd.DataFrame,
    name: tuple[str, str],
    labels: dict[str, np.ndarray],
    grouping: Grouping,
    rows: NodeRows,
    shared: Shared,
) -> Scored:
    rank = part["rank"].to_numpy(dtype=np.int64)
    risk = part["risk"].to_numpy(dtype=np.float64, na_value=np.nan)
    alert = part["alert"].to_numpy(dtype=np.bool_)
    best = -grouping.highest(-rank)
    order = np.lexsort((best, rows.time))
    node_rank = np.empty(len(best), dtype=np.int64)
    node_rank[order] = position_in_group(rows.time[order]) + 1
    cluster = np.empty(len(rank), dtype=np.int64)
    cluster[grouping.order] = np.repeat(rows.cluster, np.diff(np.append(grouping.starts, len(rank))))
    incident = _numbers(part["incident"], labels["label"] == 1)
    return Scored(
        model=name[0],
        variant=name[1],
        shared=shared,
        rows=rows,
        rank=node_rank,
        risk=grouping.highest(risk),
        alert=grouping.any(alert & grouping.is_counted),
        units=UnitFigures.of(labels["label"], risk, alert, incident, cluster, shared.n_clusters),
    )


def _numbers(values: pd.Series, chosen: Bools) -> Ints:
    """Return the values of the chosen rows, and -1 for the others."""
    out = np.full(len(values), -1, dtype=np.int64)
    out[chosen] = values[chosen].to_numpy(dtype=np.int64)
    return out


def _as_slice(rows: Ints) -> Ints | slice:
    """Return contiguous rows as a slice, which needs no copy."""
    contiguous = rows[-1] - rows[0] + 1 == len(rows)
    return slice(int(rows[0]), int(rows[-1]) + 1) if contiguous else rows
