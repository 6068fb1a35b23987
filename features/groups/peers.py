"""Feature group ``peers``: deviation of a unit from the others of its node and of its model.

Two passes. The first computes one value per (decision time, unit, channel): a gauge's mean, or a counter's rise, over
``features.peer_window``. The second compares it with the node's other units at the same time, whose values are in the
same block, and with the median of all units of the model, which needs the first pass of every block. Live rows use the
same code.

Fleet medians exist on the decision grid only: an off-grid (augmented) row takes the fleet comparison of the last grid
time before it, so that the cost does not grow with the number of incidents. Its newest value is not compared with an
older median, because the fleet's load changes through the day.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import numpy as np
import numpy.typing as npt
import pandas as pd
from numba import njit

from features.fleet import Fleet
from features.vocabulary import FeatureColumn
from features.windows.blocks import FloatArray, IntArray, RowSpans
from features.windows.layout import ChannelLayout
from features.windows.pane_index import Panes
from features.windows.window_plan import WindowPlan

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """The columns of the group.

    ======================  ====================================================================================
    X, node_deviation       value minus the median of the node's other units (GPUs only)
    X, node_rank            share of the node's other units with a lower value, ties counting half (gauges only)
    X, fleet_deviation      value minus the median of all units of the same model in service, at the last grid time
    ======================  ====================================================================================

    NaN if the unit or every peer has no value, and on single-unit nodes for the node columns.

    ``deviation``, ``rank``, ``fleet``: column of each statistic; -1: none.
    """

    columns: tuple[FeatureColumn, ...]
    first: WindowPlan
    deviation: IntArray
    rank: IntArray
    fleet: IntArray

    @classmethod
    def of(cls, layout: ChannelLayout, window: timedelta, *, unit: str) -> Self:
        """Plan the group for a dataset with telemetry."""
        first = WindowPlan.peers(layout, window)
        columns: list[FeatureColumn] = []
        tables: dict[str, list[int]] = {"node_deviation": [], "node_rank": [], "fleet_deviation": []}
        for value in first.columns:
            applies = {
                "node_deviation": unit == "gpu",
                "node_rank": unit == "gpu" and value.statistic == "mean",
                "fleet_deviation": True,
            }
            assert value.channel is not None
            for statistic, table in tables.items():
                table.append(len(columns) if applies[statistic] else -1)
                if applies[statistic]:
                    in_unit = "" if statistic == "node_rank" else value.unit
                    columns.append(FeatureColumn.of("peers", value.channel, statistic, window=window, unit=in_unit))
        return cls(
            columns=tuple(columns),
            first=first,
            deviation=np.array(tables["node_deviation"], dtype=np.int64),
            rank=np.array(tables["node_rank"], dtype=np.int64),
            fleet=np.array(tables["fleet_deviation"], dtype=np.int64),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Channels of the first pass, in order."""
        return tuple(str(column.channel) for column in self.first.columns)

    def first_pass(
        self, panes: Panes, begins: IntArray, ends: IntArray, borders: IntArray, service: npt.NDArray[np.bool_]
    ) -> Float32Array:
        """Compute the values to compare; shape (times, pairs, values).

        ``begins``, ``ends``: samples of each pair; shape (pairs,).
        ``borders``: border of each decision time; shape (times,).
        ``service``: pairs out of service at a time have no value; shape (times, pairs).
        """
        time, pair = np.nonzero(service)
        computed = np.full((time.size, len(self.first.columns)), np.nan, dtype=np.float32)
        by_pair = np.lexsort((time, pair))  # unit by unit, to keep samples in the cache
        time, pair = time[by_pair], pair[by_pair]
        self.first.fill(panes, RowSpans(begins[pair], ends[pair], borders[time]), computed)
        values = np.full((borders.size, begins.size, len(self.first.columns)), np.nan, dtype=np.float32)
        values[time, pair] = computed
        return values

    def fill_own(
        self, values: Float32Array, row_time: IntArray, row_pair: IntArray, out: Float32Array, offset: int = 0
    ) -> None:
        """Write each row's own value at its last grid time, for :meth:`fill_fleet` to compare."""
        for value, column in enumerate(self.fleet.tolist()):
            out[:, offset + column] = values[row_time, row_pair, value]

    def fill_fleet(
        self, medians: FloatArray, row_time: IntArray, row_model: IntArray, out: Float32Array, offset: int = 0
    ) -> None:
        """Subtract the fleet medians in ``out[:, offset:]`` from the values that :meth:`fill_own` wrote.

        ``row_time``, ``row_model``: positions in ``medians`` (from :func:`fleet_medians`) of each row's last grid time
        and model; -1: no reference.
        """
        known = row_model >= 0
        for value, column in enumerate(self.fleet.tolist()):
            reference = np.where(known, medians[value][row_time, row_model], np.nan)
            out[:, offset + column] = out[:, offset + column].astype(np.float64) - reference


def model_codes(fleet: Fleet, inventory: pd.DataFrame) -> tuple[IntArray, int]:
    """Return each pair's model code, and the number of models.

    A pair's model is that of its first installation, which no later one changes; unknown models share the empty name.
    """
    models = inventory["model"] if "model" in inventory.columns else pd.Series([None] * len(inventory))
    named = np.array(["" if pd.isna(model) else str(model) for model in models], dtype=object)
    first = np.searchsorted(fleet.installation_pair, np.arange(len(fleet.pairs)))
    codes, distinct = pd.factorize(named[fleet.installation_row[first]], sort=True)
    return codes.astype(np.int64), len(distinct)


def fleet_medians(values: Float32Array, model: IntArray, n_models: int) -> FloatArray:
    """Return the median over the units of each model at each time.

    ``values``: first pass; NaN where a unit has no value or is not in service; shape (values, grid times, pairs).
    ``model``: model of each pair, 0 to n_models - 1; shape (pairs,).
    Returns: NaN where no unit of the model has a value; shape (values, grid times, models).
    """
    medians = np.full((values.shape[0], values.shape[1], n_models), np.nan)
    for value in range(values.shape[0]):
        _medians(np.ascontiguousarray(values[value]), model, medians[value])
    return medians


@njit(cache=True, nogil=True)
def _median(sorted_values: Float32Array) -> float:
    n = sorted_values.size
    upper = np.float64(sorted_values[n // 2])
    if n % 2 == 1:
        return upper
    return (np.float64(sorted_values[n // 2 - 1]) + upper) / 2.0


@njit(cache=True, nogil=True)
def _medians(values: Float32Array, model: IntArray, out: FloatArray) -> None:
    n_models = out.shape[1]
    counts = np.zeros(n_models, dtype=np.int64)
    buffer = np.empty((n_models, model.size), dtype=np.float32)
    for time in range(values.shape[0]):
        counts[:] = 0
        for pair in range(model.size):
            value = values[time, pair]
            if not np.isnan(value):
                buffer[model[pair], counts[model[pair]]] = value
                counts[model[pair]] += 1
        for m in range(n_models):
            if counts[m] > 0:
                out[time, m] = _median(np.sort(buffer[m, : counts[m]]))


@njit(cache=True, nogil=True)
def compare_with_node(
    values: Float32Array,
    row_time: IntArray,
    row_pair: IntArray,
    row_first: IntArray,
    row_last: IntArray,
    deviation: IntArray,
    rank: IntArray,
    offset: int,
    out: Float32Array,
) -> None:
    """Write the comparison with the node into ``out[:, offset:]``.

    ``row_time``, ``row_pair``: positions of each row in ``values`` (from :meth:`PeerPlan.first_pass`).
    ``row_first``, ``row_last``: pair range of each row's node.
    """
    widest = 1
    for row in range(row_time.size):
        widest = max(widest, row_last[row] - row_first[row])
    peer_values = np.empty(widest, dtype=np.float32)
    for row in range(row_time.size):
        time = row_time[row]
        for j in range(deviation.size):
            if deviation[j] < 0:
                continue
            own_value = values[time, row_pair[row], j]
            n = 0
            n_below = 0.0
            for pair in range(row_first[row], row_last[row]):
                value = values[time, pair, j]
                if pair != row_pair[row] and not np.isnan(value):
                    slot = n  # insertion sort: a node has few units
                    while slot > 0 and peer_values[slot - 1] > value:
                        peer_values[slot] = peer_values[slot - 1]
                        slot -= 1
                    peer_values[slot] = value
                    n += 1
                    if value < own_value:
                        n_below += 1.0
                    elif value == own_value:
                        n_below += 0.5
            known = n > 0 and not np.isnan(own_value)
            out[row, offset + deviation[j]] = np.float64(own_value) - _median(peer_values[:n]) if known else np.nan
            if rank[j] >= 0:
                out[row, offset + rank[j]] = n_below / n if known else np.nan
