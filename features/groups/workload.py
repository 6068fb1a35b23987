"""Feature group ``workload``: utilization and power changes, which wear a unit and explain its readings."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import numpy as np
import numpy.typing as npt
from numba import njit

from features.vocabulary import FeatureColumn
from features.windows.blocks import FloatArray, IntArray, RowSpans
from features.windows.counters import enum_nodes, enum_windows, flag_nodes, flag_windows
from features.windows.layout import ChannelLayout
from features.windows.pane_index import PaneIndex, Panes, Visits, level_offset
from foundation.times import duration_ms

IDLE_BELOW_PCT = 5.0
"""Utilization below which a sample counts as idle (assumption: display and monitoring stay below it)."""

BUSY_FROM_PCT = 80.0
"""Utilization from which a sample counts as busy (assumption: training jobs exceed it)."""


@dataclass(frozen=True, slots=True)
class WorkloadPlan:
    """Return the group's columns; empty if the dataset has neither utilization nor power.

    ==========================  ==============================================================================
    gpu_util_pct, idle_share    share of samples below 5 % (larger windows)
    gpu_util_pct, busy_share    duty cycle: share of samples at or above 80 % (larger windows)
    gpu_util_pct, transitions   changes between idle and not idle from sample to sample (larger windows)
    power_w, swing              highest minus lowest power in the smallest window, W
    power_w, swing_ratio        that swing as a share of the largest window's (NaN if that is 0)
    power_w, step_change        mean absolute change of power from sample to sample (larger windows), W
    ==========================  ==============================================================================

    ``windows``: lengths in milliseconds, ascending.
    ``utilisation``, ``power``, ``power_low``, ``power_high``: rows of a block's value array; -1: not in the dataset.
    """

    columns: tuple[FeatureColumn, ...]
    windows: IntArray
    larger: int
    utilisation: int
    power: int
    power_low: int
    power_high: int

    @classmethod
    def of(cls, layout: ChannelLayout, windows: Sequence[timedelta]) -> Self:
        """Plan the group."""
        larger = 1 if len(windows) > 1 else 0
        gauges = {channel.name for channel in layout.gauges}
        position_of = {name: position for position, name in enumerate(layout.numbers)}
        columns = []
        if "gpu_util_pct" in gauges:
            for statistic in ("idle_share", "busy_share", "transitions"):
                columns += [
                    FeatureColumn.of("workload", "gpu_util_pct", statistic, window=window)
                    for window in windows[larger:]
                ]
        if "power_w" in gauges:
            columns.append(FeatureColumn.of("workload", "power_w", "swing", window=windows[0], unit="W"))
            columns.append(FeatureColumn.of("workload", "power_w", "swing_ratio", window=windows[-1]))
            columns += [
                FeatureColumn.of("workload", "power_w", "step_change", window=window, unit="W")
                for window in windows[larger:]
            ]
        return cls(
            columns=tuple(columns),
            windows=np.array([duration_ms(window) for window in windows], dtype=np.int64),
            larger=larger,
            utilisation=position_of["gpu_util_pct"] if "gpu_util_pct" in gauges else -1,
            power=position_of["power_w"] if "power_w" in gauges else -1,
            power_low=position_of["power_w_min"] if "power_w_min" in layout.lows else -1,
            power_high=position_of["power_w_max"] if "power_w_max" in layout.highs else -1,
        )

    def fill(self, panes: Panes, rows: RowSpans, out: npt.NDArray[np.float32], offset: int = 0) -> None:
        """Write the columns into ``out[:, offset:]`` (float32, shape (rows, columns), C order)."""
        block, index = panes.block, panes.index
        edges = np.unique(np.append(self.windows, 2 * self.windows[-1]))
        visits, levels = panes.visits(rows, edges)
        built = index.levels if levels else 0
        window_edge = np.searchsorted(edges, self.windows)
        column = offset
        none = np.empty(0, dtype=block.values.dtype)
        if self.utilisation >= 0:
            self._fill_utilisation(panes, visits, levels, window_edge, out, column)
            column += 3 * (self.windows.size - self.larger)
        if self.power >= 0:
            series = block.values[self.power]
            lows = block.values[self.power_low] if self.power_low >= 0 else none
            highs = block.values[self.power_high] if self.power_high >= 0 else none
            nodes = _power_nodes(series, lows, highs, index, built)
            _power(series, lows, highs, nodes, visits, window_edge, self.larger, column, out)

    def _fill_utilisation(
        self,
        panes: Panes,
        visits: Visits,
        levels: int,
        window_edge: IntArray,
        out: npt.NDArray[np.float32],
        offset: int,
    ) -> None:
        """Compute shares as those of two bits, idle and busy, and transitions as changes of an enum."""
        use, index = panes.block.values[self.utilisation], panes.index
        known, idle = ~np.isnan(use), use < IDLE_BELOW_PCT
        states = idle.astype(np.uint64) | (use >= BUSY_FROM_PCT).astype(np.uint64) << np.uint64(1)
        flags = (states[np.newaxis], known[np.newaxis])
        bits = (np.zeros(2, dtype=np.int64), np.array([1, 2], dtype=np.uint64))
        enums = (np.where(known, idle, np.nan)[np.newaxis], 0, 1)
        columns = np.full((3, self.windows.size), -1, dtype=np.int64)
        columns[:, self.larger :] = offset + np.arange(3 * (self.windows.size - self.larger)).reshape(3, -1)
        ends = np.stack([window_edge, np.full_like(window_edge, -1)], axis=1)
        nodes = panes.nodes("utilization shares", levels, lambda: flag_nodes(*flags, *bits, index, index.levels))
        flag_windows(*flags, *bits, nodes, visits, ends, np.ascontiguousarray(columns[:2].T), out)
        nodes = panes.nodes("utilization changes", levels, lambda: enum_nodes(*enums, index, index.levels))
        changes = np.stack([np.full(self.windows.size, -1), columns[2]])[:, :, np.newaxis]
        enum_windows(*enums, nodes, visits, ends, changes, out)


# Fields of a power node: lowest and highest value, steps between known values, their absolute sum, newest and oldest
# known value (NaN: none).
_LOW, _HIGH, _STEPS, _CHANGED, _NEWEST, _OLDEST, _POWER_FIELDS = range(7)


@njit(cache=True, nogil=True)
def _sum_power(series: FloatArray, lows: FloatArray, highs: FloatArray, first: int, last: int, out: FloatArray) -> None:
    out[_LOW] = np.inf
    out[_HIGH] = -np.inf
    out[_STEPS] = 0.0
    out[_CHANGED] = 0.0
    out[_NEWEST] = np.nan
    out[_OLDEST] = np.nan
    for i in range(last - 1, first - 1, -1):
        value = series[i]
        # comparisons with NaN are false: a roll-up's extreme, the value itself, or neither
        out[_LOW] = min(out[_LOW], value)
        out[_HIGH] = max(out[_HIGH], value)
        if lows.size > 0 and lows[i] < out[_LOW]:
            out[_LOW] = lows[i]
        if highs.size > 0 and highs[i] > out[_HIGH]:
            out[_HIGH] = highs[i]
        if not np.isnan(value):
            if np.isnan(out[_NEWEST]):
                out[_NEWEST] = value
            else:
                out[_STEPS] += 1.0
                out[_CHANGED] += abs(out[_OLDEST] - value)
            out[_OLDEST] = value


@njit(cache=True, nogil=True)
def _power_nodes(series: FloatArray, lows: FloatArray, highs: FloatArray, index: PaneIndex, levels: int) -> FloatArray:
    nodes = np.empty((index.nodes if levels > 0 else 0, _POWER_FIELDS))
    if levels == 0:
        return nodes
    for run in range(index.run_first.size):
        base = index.run_node[run]
        start = index.run_start[run]
        panes = index.run_panes[run]
        for pane in range(panes):
            _sum_power(
                series, lows, highs, index.starts[start + pane], index.starts[start + pane + 1], nodes[base + pane]
            )
        for level in range(1, levels):
            parents = base + level_offset(panes, level)
            children = base + level_offset(panes, level - 1)
            for pane in range(panes >> level):
                node = nodes[parents + pane]
                older = nodes[children + 2 * pane]
                for field in range(_POWER_FIELDS):
                    node[field] = nodes[children + 2 * pane + 1, field]
                node[_LOW] = min(node[_LOW], older[_LOW])
                node[_HIGH] = max(node[_HIGH], older[_HIGH])
                if not np.isnan(older[_NEWEST]):
                    if not np.isnan(node[_OLDEST]):
                        node[_STEPS] += 1.0
                        node[_CHANGED] += abs(node[_OLDEST] - older[_NEWEST])
                    else:
                        node[_NEWEST] = older[_NEWEST]
                    node[_STEPS] += older[_STEPS]
                    node[_CHANGED] += older[_CHANGED]
                    node[_OLDEST] = older[_OLDEST]
    return nodes


@njit(cache=True, nogil=True, error_model="numpy")
def _power(
    series: FloatArray,
    lows: FloatArray,
    highs: FloatArray,
    nodes: FloatArray,
    visits: Visits,
    window_edge: IntArray,
    larger: int,
    offset: int,
    out: npt.NDArray[np.float32],
) -> None:
    rows, edges = visits.stops.shape
    n_windows = window_edge.size
    low = np.zeros(edges)
    high = np.zeros(edges)
    steps = np.zeros(edges)
    changed = np.zeros(edges)
    fields = np.empty(_POWER_FIELDS)
    for row in range(rows):
        steps[:] = 0.0
        changed[:] = 0.0
        lowest = np.inf
        highest = -np.inf
        oldest = np.nan
        oldest_edge = 0
        visit = visits.begin[row]
        for edge in range(edges):
            while visit < visits.stops[row, edge]:
                if visits.node[visit] >= 0:
                    for field in range(_POWER_FIELDS):
                        fields[field] = nodes[visits.node[visit], field]
                else:
                    _sum_power(series, lows, highs, visits.first[visit], visits.last[visit], fields)
                visit += 1
                lowest = min(lowest, fields[_LOW])
                highest = max(highest, fields[_HIGH])
                if not np.isnan(fields[_NEWEST]):
                    if not np.isnan(oldest):
                        steps[oldest_edge] += 1.0
                        changed[oldest_edge] += abs(oldest - fields[_NEWEST])
                    steps[edge] += fields[_STEPS]
                    changed[edge] += fields[_CHANGED]
                    oldest = fields[_OLDEST]
                    oldest_edge = edge
            low[edge] = lowest
            high[edge] = highest
        for edge in range(1, edges):
            steps[edge] += steps[edge - 1]
            changed[edge] += changed[edge - 1]
        smallest = window_edge[0]
        swing = high[smallest] - low[smallest] if high[smallest] >= low[smallest] else np.nan
        widest = high[window_edge[n_windows - 1]] - low[window_edge[n_windows - 1]]
        out[row, offset] = swing
        out[row, offset + 1] = swing / widest if widest > 0.0 else np.nan
        for w in range(larger, n_windows):
            n = steps[window_edge[w]]
            out[row, offset + 2 + w - larger] = changed[window_edge[w]] / n if n > 0 else np.nan
