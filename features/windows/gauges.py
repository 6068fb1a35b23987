"""Window statistics of gauges, from panes and single samples.

Statistics are computed in float64 and narrowed at the end. Sums are of differences from the newest value, first of a
pane and then of a row's look-back: that value is itself in the window, so the standard deviation does not suffer from
cancellation at any level.

Nodes store each field of all gauges contiguously: a row's visits are traversed once, and each node is merged for all
gauges in one branch-free loop. Selects replace branches for unknown values.
"""

import numpy as np
import numpy.typing as npt
from numba import njit

from features.windows.blocks import FloatArray, IntArray
from features.windows.pane_index import PaneIndex, Visits, level_offset

GAUGE_STATISTICS = ("last", "mean", "std", "min", "max", "slope", "delta")
_LAST, _MEAN, _STD, _MIN, _MAX, _SLOPE, _DELTA = range(7)

_PER_HOUR = 1.0 / 3_600_000.0

_BATCH_PANES = 16
"""Panes per batch whose nodes are filled gauge by gauge: few enough to stay in the L1 cache."""

# Fields of a node: known values, sum and sum of squares of (value - newest value), sum and sum of squares of hours
# before the newest value's time, sum of their products, lowest and highest value, newest value, its time (ms).
_COUNT, _TOTAL, _SQUARE, _HOURS, _HOURS_SQUARE, _PRODUCT, _LOW, _HIGH, _NEWEST, _TIME, _FIELDS = range(11)


@njit(cache=True, nogil=True)
def _empty(node: FloatArray) -> None:
    node[:] = 0.0
    node[_LOW] = np.inf
    node[_HIGH] = -np.inf


@njit(cache=True, nogil=True)
def _add_samples(
    times: IntArray, values: FloatArray, c: int, low_at: int, high_at: int, first: int, last: int, node: FloatArray
) -> None:
    """Add samples to one gauge, newest first. Rows are passed by index: slicing costs more than few samples."""
    count = node[_COUNT]
    total = node[_TOTAL]
    square = node[_SQUARE]
    hours = node[_HOURS]
    hours_square = node[_HOURS_SQUARE]
    product = node[_PRODUCT]
    low = node[_LOW]
    high = node[_HIGH]
    newest = node[_NEWEST]
    time = node[_TIME]
    if count == 0.0:  # hoisted out of the loop for speed
        for i in range(last - 1, first - 1, -1):
            if not np.isnan(values[c, i]):
                newest = values[c, i]
                time = np.float64(times[i])
                break
    for i in range(last - 1, first - 1, -1):
        value = values[c, i]
        if not np.isnan(value):
            change = value - newest
            hours_back = (time - times[i]) * _PER_HOUR
            count += 1.0
            total += change
            square += change * change
            hours += hours_back
            hours_square += hours_back * hours_back
            product += change * hours_back
            low = min(low, value)
            high = max(high, value)
        # False for NaN. Roll-ups count even at samples without a value.
        if low_at >= 0 and values[low_at, i] < low:
            low = values[low_at, i]
        if high_at >= 0 and values[high_at, i] > high:
            high = values[high_at, i]
    node[_COUNT] = count
    node[_TOTAL] = total
    node[_SQUARE] = square
    node[_HOURS] = hours
    node[_HOURS_SQUARE] = hours_square
    node[_PRODUCT] = product
    node[_LOW] = low
    node[_HIGH] = high
    node[_NEWEST] = newest
    node[_TIME] = time


@njit(cache=True, nogil=True)
def _add_means(values: FloatArray, c: int, first: int, last: int, node: FloatArray) -> None:
    """Add samples to one gauge if only its mean is wanted."""
    count = node[_COUNT]
    total = node[_TOTAL]
    newest = node[_NEWEST]
    for i in range(last - 1, first - 1, -1):
        value = values[c, i]
        if not np.isnan(value):
            if count == 0.0:
                newest = value
            count += 1.0
            total += value - newest
    node[_COUNT] = count
    node[_TOTAL] = total
    node[_NEWEST] = newest


@njit(cache=True, nogil=True)
def _add_node(node: FloatArray, summed: FloatArray) -> None:
    """Add a node older than everything added so far, for all gauges."""
    for c in range(summed.shape[1]):
        count = node[_COUNT, c]
        total = node[_TOTAL, c]
        hours = node[_HOURS, c]
        is_empty = summed[_COUNT, c] == 0.0  # an empty node's newest and time are 0, the initial values
        newest = node[_NEWEST, c] if is_empty else summed[_NEWEST, c]
        time = node[_TIME, c] if is_empty else summed[_TIME, c]
        change = node[_NEWEST, c] - newest if count > 0.0 else 0.0
        hours_back = (time - node[_TIME, c]) * _PER_HOUR if count > 0.0 else 0.0
        summed[_NEWEST, c] = newest
        summed[_TIME, c] = time
        summed[_COUNT, c] += count
        summed[_TOTAL, c] += total + count * change
        summed[_SQUARE, c] += node[_SQUARE, c] + change * (2.0 * total + count * change)
        summed[_HOURS, c] += hours + count * hours_back
        summed[_HOURS_SQUARE, c] += node[_HOURS_SQUARE, c] + hours_back * (2.0 * hours + count * hours_back)
        summed[_PRODUCT, c] += node[_PRODUCT, c] + hours_back * total + change * (hours + count * hours_back)
        summed[_LOW, c] = min(summed[_LOW, c], node[_LOW, c])
        summed[_HIGH, c] = max(summed[_HIGH, c], node[_HIGH, c])


@njit(cache=True, nogil=True)
def _add_node_mean(node: FloatArray, summed: FloatArray) -> None:
    """Add a node for all gauges if only the mean is wanted."""
    for c in range(summed.shape[1]):
        count = node[_COUNT, c]
        newest = node[_NEWEST, c] if summed[_COUNT, c] == 0.0 else summed[_NEWEST, c]
        change = node[_NEWEST, c] - newest if count > 0.0 else 0.0
        summed[_NEWEST, c] = newest
        summed[_COUNT, c] += count
        summed[_TOTAL, c] += node[_TOTAL, c] + count * change


@njit(cache=True, nogil=True)
def gauge_nodes(
    times: IntArray, values: FloatArray, low_at: IntArray, high_at: IntArray, index: PaneIndex, levels: int
) -> FloatArray:
    """Aggregate the panes of gauges, and merge them level by level.

    ``times``: sample times in milliseconds; shape (n,).
    ``values``: gauges first; NaN where a value is missing; shape (series, n).
    ``low_at``, ``high_at``: row of each gauge's minimum (maximum) within a sample's step; -1: none; shape (gauges,).
    Returns shape (nodes, fields, gauges).
    """
    nodes = np.empty((index.nodes, _FIELDS, low_at.size))
    scratch = np.empty(_FIELDS)
    for run in range(index.run_first.size):
        base = index.run_node[run]
        start = index.run_start[run]
        panes = index.run_panes[run]
        for begin in range(0, panes, _BATCH_PANES):
            for c in range(low_at.size):
                for pane in range(begin, min(begin + _BATCH_PANES, panes)):
                    first, last = index.starts[start + pane], index.starts[start + pane + 1]
                    _empty(scratch)
                    _add_samples(times, values, c, low_at[c], high_at[c], first, last, scratch)
                    for field in range(_FIELDS):
                        nodes[base + pane, field, c] = scratch[field]
        for level in range(1, levels):
            upper = base + level_offset(panes, level)
            lower = base + level_offset(panes, level - 1)
            for pane in range(panes >> level):
                sums = nodes[upper + pane]
                _empty(sums)
                _add_node(nodes[lower + 2 * pane + 1], sums)
                _add_node(nodes[lower + 2 * pane], sums)
    return nodes


@njit(cache=True, nogil=True, error_model="numpy")
def gauge_windows(
    times: IntArray,
    values: FloatArray,
    low_at: IntArray,
    high_at: IntArray,
    nodes: FloatArray,
    visits: Visits,
    window_edge: IntArray,
    table: IntArray,
    out: npt.NDArray[np.float32],
) -> None:
    """Fill the statistics of gauges.

    ``nodes``: from :func:`gauge_nodes` for the same ``values``, with the levels that the visits use.
    ``window_edge``: edges of the visits at each window's age and at its double; -1: double not wanted; shape (windows,
    2).
    ``table``: column of ``out`` for each of ``GAUGE_STATISTICS``, window and gauge; -1: not wanted; shape (7, windows,
    gauges).
    ``out``: NaN where a statistic is unknown; shape (rows, columns).
    """
    gauges = low_at.size
    windows = window_edge.shape[0]
    last_full, last_mean = _reaches(window_edge, table)
    sums = np.empty((_FIELDS, gauges))
    scratch = np.empty(_FIELDS)
    window_count = np.zeros((windows, gauges))
    window_total = np.zeros((windows, gauges))
    statistics = np.empty((len(GAUGE_STATISTICS), gauges))
    for row in range(visits.begin.size):
        _empty(sums)
        visit = visits.begin[row]
        for edge in range(last_mean + 1):
            while visit < visits.stops[row, edge]:
                node = visits.node[visit]
                if node >= 0 and edge <= last_full:
                    _add_node(nodes[node], sums)
                elif node >= 0:
                    _add_node_mean(nodes[node], sums)
                else:
                    stretch = (visits.first[visit], visits.last[visit])
                    _add_stretch(times, values, low_at, high_at, stretch, edge <= last_full, sums, scratch)
                visit += 1
            for w in range(windows):
                if window_edge[w, 0] == edge:
                    window_count[w] = sums[_COUNT]
                    window_total[w] = sums[_TOTAL]
                    _statistics(sums, statistics)
                    _emit(statistics, table[:_DELTA, w], row, out)
                if window_edge[w, 1] == edge:
                    _delta(sums, window_count[w], window_total[w], statistics[_DELTA])
                    _emit(statistics[_DELTA:], table[_DELTA:, w], row, out)


@njit(cache=True, nogil=True)
def _add_stretch(
    times: IntArray,
    values: FloatArray,
    low_at: IntArray,
    high_at: IntArray,
    stretch: tuple[int, int],
    full: bool,
    sums: FloatArray,
    scratch: FloatArray,
) -> None:
    """Add samples outside of tree nodes, for all gauges; ``scratch`` is overwritten."""
    for c in range(low_at.size):
        for field in range(_FIELDS):
            scratch[field] = sums[field, c]
        if full:
            _add_samples(times, values, c, low_at[c], high_at[c], stretch[0], stretch[1], scratch)
        else:
            _add_means(values, c, stretch[0], stretch[1], scratch)
        for field in range(_FIELDS):
            sums[field, c] = scratch[field]


@njit(cache=True, nogil=True)
def _reaches(window_edge: IntArray, table: IntArray) -> tuple[int, int]:
    """Return the last edge of any window, and the last edge up to which means are needed."""
    last_full = 0
    last_mean = 0
    for w in range(window_edge.shape[0]):
        if np.any(table[:, w] >= 0):
            last_full = max(last_full, window_edge[w, 0])
            last_mean = max(last_mean, window_edge[w, 1 if np.any(table[_DELTA, w] >= 0) else 0])
    return last_full, last_mean


@njit(cache=True, nogil=True, error_model="numpy")
def _statistics(sums: FloatArray, out: FloatArray) -> None:
    """Compute the statistics of one window, for all gauges."""
    for c in range(sums.shape[1]):
        n = sums[_COUNT, c]
        newest = sums[_NEWEST, c]
        total = sums[_TOTAL, c]
        mean = total / n if n > 0.0 else np.nan
        out[_LAST, c] = newest if n > 0.0 else np.nan
        out[_MEAN, c] = newest + mean
        # Rounding can make it slightly negative.
        spread = max(sums[_SQUARE, c] - total * mean, 0.0)
        out[_STD, c] = np.sqrt(spread / (n - 1.0)) if n > 1.0 else np.nan
        low = sums[_LOW, c]  # roll-ups have it even if the value itself is missing
        out[_MIN, c] = low if low < np.inf else np.nan
        high = sums[_HIGH, c]
        out[_MAX, c] = high if high > -np.inf else np.nan
        hours = sums[_HOURS, c]
        denominator = sums[_HOURS_SQUARE, c] - hours * hours / n if n > 1.0 else 0.0
        out[_SLOPE, c] = -(sums[_PRODUCT, c] - hours * mean) / denominator if denominator > 0.0 else np.nan


@njit(cache=True, nogil=True, error_model="numpy")
def _delta(sums: FloatArray, window_count: FloatArray, window_total: FloatArray, out: FloatArray) -> None:
    """Compute the mean of a window minus that of the preceding window, for all gauges."""
    for c in range(sums.shape[1]):
        n = window_count[c]
        preceding_count = sums[_COUNT, c] - n
        delta = window_total[c] / n - (sums[_TOTAL, c] - window_total[c]) / preceding_count
        out[c] = delta if n > 0.0 and preceding_count > 0.0 else np.nan


@njit(cache=True, nogil=True)
def _emit(statistics: FloatArray, columns: IntArray, row: int, out: npt.NDArray[np.float32]) -> None:
    for k in range(columns.shape[0]):
        for c in range(columns.shape[1]):
            if columns[k, c] >= 0:
                out[row, columns[k, c]] = statistics[k, c]
