"""Reasons for the profile's alerts, computed fold by fold while the models of the fold are in memory."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa

from foundation.times import milliseconds
from models.explanation.contributions import ReasonPlan, explained_by, largest_reasons
from models.rows.ranking import Ints, position_in_group
from models.rows.row_reader import RowReader
from models.rows.training_set import Matrix
from models.training.fitted import FittedModels

_FLEET_UNITS = 2048
"""Maximum units per decision time that a value is ranked among, evenly spaced: enough for percentiles."""

_FLEET_ROWS = 65_536
"""Maximum fleet rows read per fold."""


@dataclass(frozen=True, slots=True)
class AlertReasons:
    """Reasons for the alert of one unit at one decision time.

    ``reasons``: as text with figures, largest contribution first.
    """

    decision_time: datetime
    unit: str
    reasons: tuple[str, ...]
    method: str


def riskiest_alerts(scored: pa.Table, *, model: int, variant: int, count: int) -> Ints:
    """Select the riskiest alerts of a fold for explanation."""
    columns = {name: scored.column(name).to_numpy() for name in ("row", "variant", "model", "score", "risk", "alert")}
    alerts = np.flatnonzero((columns["model"] == model) & (columns["variant"] == variant) & columns["alert"])
    order = np.lexsort((columns["row"][alerts], -columns["score"][alerts], -columns["risk"][alerts]))
    return columns["row"][alerts[order[:count]]].astype(np.int64)


def explain_rows(
    fitted: FittedModels,
    matrix: Matrix,
    model: str,
    rows: Ints,
    *,
    candidates: Ints,
    values: RowReader | None = None,
) -> list[AlertReasons]:
    """Explain alerted rows with the models that alerted them, compared with the fleet at the same time."""
    if rows.size == 0:
        return []
    read = values or matrix.values
    X, plan = read(rows), ReasonPlan.of(matrix.columns)
    added, method = explained_by(fitted, model, X)
    fleets, sampled = _fleets(matrix, read, rows, candidates)
    noun = "GPUs" if matrix.rows["gpu"].iloc[rows].notna().any() else "nodes"
    noun = f"{noun} sampled" if sampled else noun
    explained = []
    for number, row in enumerate(rows.tolist()):
        reasons, _ = largest_reasons(added[number], X[number], plan, fleet=fleets[number], noun=noun)
        key = matrix.rows.iloc[row]
        texts = tuple(reason.text for reason in reasons)
        explained.append(AlertReasons(key["decision_time"].to_pydatetime(), str(key["unit"]), texts, method))
    return explained


def _fleets(matrix: Matrix, read: RowReader, rows: Ints, pool: Ints) -> tuple[list[np.ndarray], bool]:
    """Read the units at each row's decision time, including itself; also return whether they are a sample."""
    times = milliseconds(matrix.rows["decision_time"].iloc[pool])
    row_times = milliseconds(matrix.rows["decision_time"].iloc[rows])
    wanted_times = np.unique(row_times)
    candidates = np.flatnonzero(np.isin(times, wanted_times))
    order = candidates[np.argsort(times[candidates], kind="stable")]
    time_index = np.searchsorted(wanted_times, times[order])
    max_units = max(2, min(_FLEET_UNITS, _FLEET_ROWS // len(wanted_times)))
    size = np.bincount(time_index, minlength=len(wanted_times))
    selected = (position_in_group(time_index) % (-(-size // max_units))[time_index] == 0) | np.isin(pool[order], rows)
    fleet = read(pool[order[selected]])
    ends = np.cumsum(np.bincount(time_index[selected], minlength=len(wanted_times)))
    # views, shared by alerts of the same decision time
    parts = np.split(fleet, ends[:-1])
    return [parts[position] for position in np.searchsorted(wanted_times, row_times)], bool((size > max_units).any())


SAMPLED_ROWS: Final = 256
"""Rows of a fold whose contributions are averaged: alerts, and others spread evenly over the fold."""

COLUMNS: Final = ("fold", "model", "feature", "group", "channel", "share", "rows")


def attribute(
    fitted: FittedModels, matrix: Matrix, model: str, alerted: Ints, tested: Ints, values: RowReader | None = None
) -> dict[str, Any]:
    """Compute the mean absolute contribution of each feature over a sample of a fold's rows.

    Returns: ``shares`` (list of float, one per feature, summing to 1; empty if no feature contributed) and ``rows``.
    """
    room = max(0, SAMPLED_ROWS - alerted.size)
    spread = tested[np.linspace(0, tested.size - 1, min(room, tested.size)).astype(np.int64)] if tested.size else tested
    rows = np.unique(np.concatenate([alerted, spread]))
    if rows.size == 0:
        return {"shares": [], "rows": 0}
    sizes = np.abs(explained_by(fitted, model, (values or matrix.values)(rows))[0]).mean(axis=0)
    total = float(sizes.sum())
    return {"shares": [float(size / total) for size in sizes] if total > 0 else [], "rows": int(rows.size)}


def attribution_frame(matrix: Matrix, model: str, folds: list[dict[str, Any]]) -> pd.DataFrame:
    """Convert the attributions of all folds to a table; folds without attributions are absent.

    ``share`` sums to 1 per fold; ``channel`` is null if the feature has none; ``rows``: rows explained.
    """
    parts = []
    for number, fold in enumerate(folds):
        if fold["shares"]:
            part = pd.DataFrame(
                {
                    "fold": np.int32(number),
                    "model": model,
                    "feature": [column.name for column in matrix.columns],
                    "group": [column.group for column in matrix.columns],
                    "channel": [column.channel for column in matrix.columns],
                    "share": fold["shares"],
                    "rows": np.int32(fold["rows"]),
                }
            )
            parts.append(part.astype({"channel": "str"}))
    if not parts:
        empty = {name: pd.Series(dtype="str") for name in COLUMNS}
        return pd.DataFrame(empty).astype({"fold": np.int32, "share": np.float64, "rows": np.int32})
    return pd.concat(parts, ignore_index=True)


def by_group(attributions: pd.DataFrame) -> pd.DataFrame:
    """Aggregate attributions to ``group``, ``share`` (mean over the folds) and ``channels``, largest share first.

    ``channels``: up to three channels (or event types of a history) with the largest shares in the group.
    """
    folds = attributions["fold"].nunique()
    if folds == 0:
        return pd.DataFrame({"group": [], "share": [], "channels": []})
    shares = attributions.groupby("group")["share"].sum() / folds
    inner = attributions.groupby(["group", "channel"])["share"].sum() / folds
    rows = []
    for group, share in shares.sort_values(ascending=False, kind="stable").items():
        channels = inner[group].sort_values(ascending=False, kind="stable").head(3) if group in inner else {}
        rows.append({"group": group, "share": share, "channels": dict(channels)})
    return pd.DataFrame(rows)
