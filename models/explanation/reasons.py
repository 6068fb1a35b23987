"""Reasons, as text, of what each feature added to a score; knows nothing of learners, nor of their libraries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Self

import numpy as np

from features.vocabulary import FeatureColumn, describe, describe_percentile

Floats = np.ndarray[Any, np.dtype[np.float64]]

TREES: Final = "exact tree contributions"
LINEAR: Final = "coefficient times distance from the median"
GRADIENTS: Final = "gradients summed on the way from the median"
UNKNOWN: Final = "change in points when the feature is put to unknown"
OCCLUSION: Final = "change when a channel is put to its median"

ADDITIVE: Final = frozenset({TREES, LINEAR, GRADIENTS})
"""Methods whose contributions add up to a difference of log-odds."""

_KINDS = {
    "last": "level", "mean": "level", "min": "level", "max": "level", "std": "spread", "slope": "trend",
    "delta": "trend", "rise": "rise", "rise_delta": "rise",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScoreReason:
    """One thing that raised a score.

    ``column``: name of the feature that is named: of those that say the same over other windows, the one that added
    most; where that one joins all counters, the counter that its value comes from.
    ``contribution``: what all of them added to the log-odds, positive.
    """

    column: str
    contribution: float
    text: str


def reason_group(column: FeatureColumn) -> tuple[str | None, ...]:
    """Give what a column is reported together with: its group, scope, channel and kind, whatever the window.

    A rise over 1 h, 6 h and 24 h is one thing to a reader; how high, how unsteady, and how fast are three. What is
    known of one history (how often, how long ago) is one, and so is what joins the onsets of all counters.

    >>> reason_group(FeatureColumn.of("telemetry", "gpu_temp_c", "max"))
    ('telemetry', None, 'gpu_temp_c', 'level')
    """
    kind = "history" if column.group == "history" else _KINDS.get(column.statistic, column.statistic)
    if column.group in ("peers", "onset"):
        kind = column.group
    return (column.group, column.scope, column.channel, kind)


@dataclass(frozen=True, slots=True)
class ReasonPlan:
    """How the columns of a matrix become reasons.

    ``group``: number of each column's :func:`reason_group`; shape (features,).
    ``surges``: columns of each counter's surge, by window.
    ``most``: columns that join all counters, by statistic and window.
    """

    columns: tuple[FeatureColumn, ...]
    group: np.ndarray
    surges: Mapping[timedelta | None, np.ndarray]
    most: Mapping[tuple[str, timedelta | None], int]

    @classmethod
    def of(cls, columns: Sequence[FeatureColumn]) -> Self:
        """Plan the reasons of a matrix's columns."""
        keys = [reason_group(column) for column in columns]
        number = {key: at for at, key in enumerate(dict.fromkeys(keys))}
        surges: dict[timedelta | None, list[int]] = {}
        most = {}
        for at, column in enumerate(columns):
            if column.group == "onset" and column.statistic == "surge":
                surges.setdefault(column.window, []).append(at)
            elif column.group == "onset":
                most[column.statistic, column.window] = at
        group = np.array([number[key] for key in keys])
        return cls(tuple(columns), group, {window: np.array(positions) for window, positions in surges.items()}, most)

    def counters(self, row: np.ndarray) -> dict[int, int]:
        """Say for columns that join all counters which counter's column their value in a row comes from.

        Returns: joining column to the surge of the one counter; without those of which the row does not tell the
        counter.
        """
        counter_of = {}
        for (statistic, window), at in self.most.items():
            own = self.surges.get(window)
            if own is None or np.isnan(row[own]).all():
                continue
            highest = int(own[np.nanargmax(row[own])])
            if not row[highest] > 0:
                continue
            # how far above the fleet one counter is, is known of the one whose own past does not tell less
            excess = self.most.get(("excess_max", window))
            if statistic.startswith("surge") or (excess is not None and row[excess] == row[highest]):
                counter_of[at] = highest
        return counter_of


def largest_reasons(
    values: Floats, row: np.ndarray, plan: ReasonPlan, *, top: int = 3, fleet: np.ndarray | None = None, noun: str = ""
) -> tuple[tuple[ScoreReason, ...], float]:
    """Describe the largest positive contributions to one row's score; give also the sum of all positive ones.

    ``fleet``: to rank a value in the fleet; shape (units, features).
    """
    group, counters = plan.group.copy(), plan.counters(row)
    for at, counter in counters.items():  # what joins all counters is reported with the one that leads them
        group[at] = group[counter]
    sums = np.bincount(group, weights=values)
    # ties go to the earlier column, so that a report is the same on every run
    order = np.argsort(-sums, kind="stable")[:top]
    reasons = []
    for key in order[sums[order] > 0]:
        own = np.flatnonzero(group == key)
        at = int(own[np.argmax(values[own])])
        at = counters.get(at, at)
        column, value = plan.columns[at], float(row[at])
        text = describe(column, value)
        if fleet is not None:
            text += f" ({describe_percentile(column, value, fleet[:, at], noun)})"
        reasons.append(ScoreReason(column.name, float(sums[key]), text))
    return tuple(reasons), float(sums.clip(min=0).sum())
