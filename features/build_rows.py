"""Which rows a build computes: all of a matrix, or those that a standing one does not have yet."""

from __future__ import annotations

import numpy as np
import pandas as pd

from features.config import DecisionSection, LabelSection
from features.drains import out_of_use
from features.errors import InputError
from features.evidence import Record
from features.grid import augmented_rows, decision_rows, decision_times, grid_time
from features.incidents import known_onsets
from features.service import instants, milliseconds
from telemetry.store import Dataset


def rows_of(
    dataset: Dataset,
    events: pd.DataFrame,
    inventory: pd.DataFrame,
    *,
    decision: DecisionSection,
    labels: LabelSection,
    augmentation: int,
    negative_ratio: int,
    seed: int,
    since: int | None,
    record: Record,
) -> pd.DataFrame:
    """List rows of a dataset, on the decision grid and off it.

    ``events``: from :func:`features.service.reported`.
    ``since``: only rows decided, or established, at this instant (ms) or later; of the times off the grid among them
    that are older, also the fleet at the last time of the grid before, which they are held against.
    Returns: key columns, sorted by (decision_time, augmented, unit).
    Raises ``InputError`` if all rows are asked for and no unit is in service at any decision time.
    """
    span = dataset.meta.span
    down = out_of_use(events, inventory, labels, record=record)
    times = decision_times(decision, span)
    extra = None
    if augmentation:  # finding the onsets is a tenth of a small build
        onsets = known_onsets(events, inventory, labels, record=record)
        if since is not None:
            onsets = onsets[milliseconds(onsets["known_at"], "known_at") >= since]
        if len(onsets):
            extra = augmented_rows(
                onsets,
                inventory,
                down,
                decision=decision,
                labels=labels,
                step=dataset.meta.step,
                span=span,
                augmentation=augmentation,
                negative_ratio=negative_ratio,
                seed=seed,
            )
    if since is not None:
        at = milliseconds(times, "decision time")
        wanted = at >= since
        if extra is not None:
            wanted |= np.isin(at, grid_time(decision, milliseconds(extra["decision_time"], "decision_time")))
        times = instants(at[wanted])
    grid = decision_rows(times, inventory, down)
    if not len(grid) and since is None:
        raise InputError(
            f"no unit is in service at any decision time from {span[0].isoformat()} to {span[1].isoformat()}",
            f"dataset {dataset.place}",
            "Check the inventory's installed_at and removed_at, and decision.every against the dataset's length.",
        )
    if extra is None or not len(extra):
        return grid  # sorted as it is
    both = pd.concat([grid, extra], ignore_index=True)
    return both.sort_values(["decision_time", "augmented", "unit"], kind="stable", ignore_index=True)
