"""What single rows need to know of the whole fleet, as of the last decision time of the grid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import pandas as pd

from features.fleet import Fleet, NodeRows
from features.groups.onset import Kinds
from features.groups.peers import fleet_medians, model_codes
from features.labels.outages import out_of_use
from features.matrix.filling import (
    Float32Array,
    Rows,
    node_ranges,
    onset_amounts,
)
from features.matrix.grid import decision_rows, grid_time
from features.matrix.meta import MatrixConfig
from features.matrix.plan import FeaturePlan
from features.times import duration_ms, instant_ms, instants
from features.windows.blocks import IntArray, SampleBlock
from features.windows.panes import Panes


@dataclass(frozen=True, slots=True)
class FleetReference:
    """What one node's rows need to know of the whole fleet at a decision time.

    ``medians``: for the group ``peers``: one row a model (index; empty where the inventory does not say), one float64
    column a channel; NaN where no unit has a value. Empty where the group is off.
    ``onset``: for the group ``onset``: :meth:`features.groups.onset.Reference.to_frame` gives it; empty if the group is
    off.
    """

    medians: pd.DataFrame
    onset: pd.DataFrame


def take_reference(
    plan: FeaturePlan,
    config: MatrixConfig,
    blocks: Iterable[SampleBlock],
    events: pd.DataFrame,
    inventory: pd.DataFrame,
    fleet: Fleet,
    t: datetime,
) -> FleetReference:
    """Take it at the last decision time of the grid that is not later than ``t``, in one pass over the samples.

    ``plan``: of ``config``.
    ``events``: from :func:`features.times.reported`.
    ``fleet``: of ``inventory``.
    """
    last = grid_time(config.decision, np.array([instant_ms(t)], dtype=np.int64))
    keys = decision_rows(instants(last), inventory, out_of_use(events, inventory, config.labels))
    rows = Rows.of(keys, fleet, config.decision)
    amounts = np.full((len(keys), len(plan.onset.amounts.columns) if plan.onset else 0), np.nan, dtype=np.float32)
    names = plan.peers.names if plan.peers is not None else ()
    values = np.full((len(names), 1, len(fleet.pairs)), np.nan, dtype=np.float32)
    delay = duration_ms(plan.features.delay)
    own, ranges, service = NodeRows(keys["node"].tolist()), dict(node_ranges(fleet)), fleet.in_service(last)
    for block in blocks:
        panes = Panes(block, plan.panes)
        nodes = {name for name, _ in block.spans} & ranges.keys()
        if plan.onset is not None:
            mine = own.of(nodes)
            amounts[mine] = onset_amounts(plan.onset.amounts, delay, panes, fleet, rows.take(mine))
        if plan.peers is not None and nodes:
            pairs = np.sort(np.concatenate([np.arange(*ranges[name], dtype=np.int64) for name in nodes]))
            values[:, 0, pairs] = _first_pass(plan, panes, fleet, pairs, last, service).T
    onset, medians = pd.DataFrame(), pd.DataFrame(index=pd.Index([], name="model"))
    if plan.onset is not None:
        kinds = Kinds.of(fleet, inventory, events, rows.pair, rows.milliseconds)
        onset = plan.onset.reference(amounts, kinds, rows.milliseconds).to_frame()
    if plan.peers is not None:
        models, model = model_codes(fleet, inventory)
        found = fleet_medians(values, model, len(models))[:, 0, :]
        medians = pd.DataFrame(found.T, index=pd.Index(models, name="model"), columns=list(names))
    return FleetReference(medians, onset)


def _first_pass(
    plan: FeaturePlan, panes: Panes, fleet: Fleet, pairs: IntArray, time: IntArray, service: np.ndarray
) -> Float32Array:
    """Take the first pass of ``peers`` of some pairs at one time, shape (pairs, values)."""
    assert plan.peers is not None
    begins, ends = panes.block.ranges([fleet.pairs[pair] for pair in pairs.tolist()])
    border = time - duration_ms(plan.features.delay)
    found: Float32Array = plan.peers.first_pass(panes, begins, ends, border, np.ascontiguousarray(service[:, pairs]))[0]
    return found
