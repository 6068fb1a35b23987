"""Window statistics of gauges, from panes and single samples.

Statistics are taken in float64 and narrowed at the very end. Sums are of differences from the newest value of a pane,
and then of a row's look-back: that value is itself a member of the window, so the standard deviation has no
cancellation to fear, whatever the level.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from features.blocks import FloatArray, IntArray
from features.pane_index import PaneIndex, Visits, level_offset

GAUGE_STATISTICS = ("last", "mean", "std", "min", "max", "slope", "delta")

_PER_HOUR = 1.0 / 3_600_000.0

# What a node holds: known values, sum and sum of squares of (value - newest value), sum and sum of squares of hours
# before the newest value's time, sum of their products, lowest and highest value, newest value, its time (ms).
_COUNT, _TOTAL, _SQUARE, _HOURS, _HOURS_SQUARE, _PRODUCT, _LOW, _HIGH, _NEWEST, _TIME, _FIELDS = range(11)


@njit(cache=True, nogil=True)
def _empty(into: FloatArray) -> None:
    into[:] = 0.0
    into[_LOW] = np.inf
    into[_HIGH] = -np.inf


@njit(cache=True, nogil=True)
def _add_samples(
    times: IntArray, series: FloatArray, lows: FloatArray, highs: FloatArray, first: int, last: int, into: FloatArray
) -> None:
    """Add samples, the newest first; ``lows`` and ``highs`` are empty where there are none."""
    count = into[_COUNT]
    total = into[_TOTAL]
    square = into[_SQUARE]
    hours = into[_HOURS]
    hours_square = into[_HOURS_SQUARE]
    product = into[_PRODUCT]
    low = into[_LOW]
    high = into[_HIGH]
    newest = into[_NEWEST]
    time = into[_TIME]
    for at in range(last - 1, first - 1, -1):
        value = series[at]
        if not np.isnan(value):
            if count == 0.0:
                newest = value
                time = np.float64(times[at])
            moved = value - newest
            back = (time - times[at]) * _PER_HOUR
            count += 1.0
            total += moved
            square += moved * moved
            hours += back
            hours_square += back * back
            product += moved * back
            low = min(low, value)
            high = max(high, value)
        if lows.size > 0 and lows[at] < low:
            low = lows[at]
        if highs.size > 0 and highs[at] > high:
            high = highs[at]
    into[_COUNT] = count
    into[_TOTAL] = total
    into[_SQUARE] = square
    into[_HOURS] = hours
    into[_HOURS_SQUARE] = hours_square
    into[_PRODUCT] = product
    into[_LOW] = low
    into[_HIGH] = high
    into[_NEWEST] = newest
    into[_TIME] = time


@njit(cache=True, nogil=True)
def _add_means(series: FloatArray, first: int, last: int, into: FloatArray) -> None:
    """Add samples of which only the mean is wanted."""
    count = into[_COUNT]
    total = into[_TOTAL]
    newest = into[_NEWEST]
    for at in range(last - 1, first - 1, -1):
        value = series[at]
        if not np.isnan(value):
            if count == 0.0:
                newest = value
            count += 1.0
            total += value - newest
    into[_COUNT] = count
    into[_TOTAL] = total
    into[_NEWEST] = newest


@njit(cache=True, nogil=True)
def _add_node(nodes: FloatArray, node: int, into: FloatArray) -> None:
    """Add a node that is older than everything added before."""
    into[_LOW] = min(into[_LOW], nodes[node, _LOW])
    into[_HIGH] = max(into[_HIGH], nodes[node, _HIGH])
    count = nodes[node, _COUNT]
    if count == 0.0:
        return
    total = nodes[node, _TOTAL]
    hours = nodes[node, _HOURS]
    if into[_COUNT] == 0.0:
        into[_NEWEST] = nodes[node, _NEWEST]
        into[_TIME] = nodes[node, _TIME]
    moved = nodes[node, _NEWEST] - into[_NEWEST]
    back = (into[_TIME] - nodes[node, _TIME]) * _PER_HOUR
    into[_COUNT] += count
    into[_TOTAL] += total + count * moved
    into[_SQUARE] += nodes[node, _SQUARE] + moved * (2.0 * total + count * moved)
    into[_HOURS] += hours + count * back
    into[_HOURS_SQUARE] += nodes[node, _HOURS_SQUARE] + back * (2.0 * hours + count * back)
    into[_PRODUCT] += nodes[node, _PRODUCT] + back * total + moved * (hours + count * back)


@njit(cache=True, nogil=True)
def _add_node_mean(nodes: FloatArray, node: int, into: FloatArray) -> None:
    """Add a node of which only the mean is wanted."""
    count = nodes[node, _COUNT]
    if count == 0.0:
        return
    if into[_COUNT] == 0.0:
        into[_NEWEST] = nodes[node, _NEWEST]
    into[_COUNT] += count
    into[_TOTAL] += nodes[node, _TOTAL] + count * (nodes[node, _NEWEST] - into[_NEWEST])


@njit(cache=True, nogil=True)
def gauge_nodes(
    times: IntArray, values: FloatArray, low_at: IntArray, high_at: IntArray, index: PaneIndex, levels: int
) -> FloatArray:
    """Sum up the panes of gauges, and join them level by level.

    Parameters
    ----------
    times : int64 array, shape (n,)
        Sample times in milliseconds.
    values : float64 array, shape (series, n)
        Gauges first; NaN where a value is missing.
    low_at, high_at : int64 arrays, shape (gauges,)
        Row of ``values`` with each gauge's lowest (highest) value within a sample's step; -1: it has none.
    index : PaneIndex
    levels : int
        Levels to fill, at most the index's.

    Returns
    -------
    float64 array, shape (gauges, nodes, fields)
    """
    nodes = np.empty((low_at.size, index.nodes, _FIELDS))
    sums = np.empty(_FIELDS)
    for c in range(low_at.size):
        own = nodes[c]
        series = values[c]
        lows = values[low_at[c]] if low_at[c] >= 0 else values[0, :0]
        highs = values[high_at[c]] if high_at[c] >= 0 else values[0, :0]
        for run in range(index.run_first.size):
            base = index.run_node[run]
            start = index.run_start[run]
            panes = index.run_panes[run]
            for pane in range(panes):
                _empty(sums)
                first = index.starts[start + pane]
                _add_samples(times, series, lows, highs, first, index.starts[start + pane + 1], sums)
                for field in range(_FIELDS):
                    own[base + pane, field] = sums[field]
            for level in range(1, levels):
                at = base + level_offset(panes, level)
                below = base + level_offset(panes, level - 1)
                for pane in range(panes >> level):
                    for field in range(_FIELDS):
                        sums[field] = own[below + 2 * pane + 1, field]
                    _add_node(own, below + 2 * pane, sums)
                    for field in range(_FIELDS):
                        own[at + pane, field] = sums[field]
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

    Parameters
    ----------
    times, values, low_at, high_at
        As for :func:`gauge_nodes`.
    nodes : float64 array
        From :func:`gauge_nodes`, with the levels that the visits use.
    visits : Visits
        Of the rows, with the edges that ``window_edge`` speaks of.
    window_edge : int64 array, shape (w, 2)
        For each window the edges at its own age and at its double; -1 where the double is not wanted.
    table : int64 array, shape (7, w, gauges)
        Column of ``out`` for each of ``GAUGE_STATISTICS``, window and gauge; -1: not wanted.
    out : float32 array, shape (rows, columns)
        Filled in place; NaN where a statistic is unknown.
    """
    rows = visits.begin.size
    windows = window_edge.shape[0]
    sums = np.empty(_FIELDS)
    own_count = np.zeros(windows)
    own_total = np.zeros(windows)
    for c in range(low_at.size):
        columns = table[:, :, c].copy()
        if not np.any(columns >= 0):
            continue
        last_full, last_mean = _reaches(window_edge, columns)
        own = nodes[c] if nodes.shape[0] > 0 else nodes[:, :, 0]
        series = values[c]
        lows = values[low_at[c]] if low_at[c] >= 0 else values[0, :0]
        highs = values[high_at[c]] if high_at[c] >= 0 else values[0, :0]
        for row in range(rows):
            _empty(sums)
            at = visits.begin[row]
            for edge in range(last_mean + 1):
                while at < visits.stops[row, edge]:
                    node = visits.node[at]
                    if node >= 0 and edge <= last_full:
                        _add_node(own, node, sums)
                    elif node >= 0:
                        _add_node_mean(own, node, sums)
                    elif edge <= last_full:
                        _add_samples(times, series, lows, highs, visits.first[at], visits.last[at], sums)
                    else:
                        _add_means(series, visits.first[at], visits.last[at], sums)
                    at += 1
                for w in range(windows):
                    if window_edge[w, 0] == edge:
                        own_count[w] = sums[_COUNT]
                        own_total[w] = sums[_TOTAL]
                        _emit(sums, columns, w, row, out)
                    if window_edge[w, 1] == edge and columns[6, w] >= 0:
                        n = own_count[w]
                        before = sums[_COUNT] - n
                        known = n > 0.0 and before > 0.0
                        delta = own_total[w] / n - (sums[_TOTAL] - own_total[w]) / before if known else np.nan
                        out[row, columns[6, w]] = delta


@njit(cache=True, nogil=True)
def _reaches(window_edge: IntArray, columns: IntArray) -> tuple[int, int]:
    """Return the last edge of any window, and the last one up to which the mean of the window before is wanted."""
    last_full = 0
    last_mean = 0
    for w in range(window_edge.shape[0]):
        if np.any(columns[:, w] >= 0):
            last_full = max(last_full, window_edge[w, 0])
            last_mean = max(last_mean, window_edge[w, 1 if columns[6, w] >= 0 else 0])
    return last_full, last_mean


@njit(cache=True, nogil=True, error_model="numpy")
def _emit(sums: FloatArray, columns: IntArray, w: int, row: int, out: npt.NDArray[np.float32]) -> None:
    n = sums[_COUNT]
    newest = sums[_NEWEST]
    total = sums[_TOTAL]
    mean = total / n if n > 0.0 else np.nan
    if columns[0, w] >= 0:
        out[row, columns[0, w]] = newest if n > 0.0 else np.nan
    if columns[1, w] >= 0:
        out[row, columns[1, w]] = newest + mean
    if columns[2, w] >= 0:
        spread = max(sums[_SQUARE] - total * mean, 0.0)
        out[row, columns[2, w]] = np.sqrt(spread / (n - 1.0)) if n > 1.0 else np.nan
    if columns[3, w] >= 0:  # from roll-ups also where the value itself is missing
        low = sums[_LOW]
        out[row, columns[3, w]] = low if low < np.inf else np.nan
    if columns[4, w] >= 0:
        high = sums[_HIGH]
        out[row, columns[4, w]] = high if high > -np.inf else np.nan
    if columns[5, w] >= 0:
        hours = sums[_HOURS]
        below = sums[_HOURS_SQUARE] - hours * hours / n if n > 1.0 else 0.0
        out[row, columns[5, w]] = -(sums[_PRODUCT] - hours * mean) / below if below > 0.0 else np.nan
