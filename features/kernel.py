"""The compiled window kernel: for each row one walk back in time over the samples of its unit.

Everything a row gets is made of the samples inside its own look-back, in the order newest to oldest, so a live row that
is given only those samples is bit-identical with the row of a training matrix.

Age and windows: with ``border = decision time - reporting delay``, a sample at time s has age ``border - s``; it is
usable if its age is zero or more, and lies in a window w if its age is below w. Statistics are taken in float64 and
narrowed at the very end. Sums are of differences from the channel's newest value: that value is itself a member of the
window, so the standard deviation has no cancellation to fear, whatever the level.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

GAUGE_STATISTICS = ("last", "mean", "std", "min", "max", "slope", "delta")
COUNTER_STATISTICS = ("last", "rise", "rise_delta")
ENUM_STATISTICS = ("last", "changes")

_HOUR_MS = 3_600_000.0

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@njit(cache=True, nogil=True)
def newest_usable(times: IntArray, begin: int, end: int, border: int) -> int:
    """Return the position of the newest of ``times[begin:end]`` (ascending) at or before ``border``, or begin - 1."""
    low = begin
    high = end
    while low < high:
        middle = (low + high) // 2
        if times[middle] <= border:
            low = middle + 1
        else:
            high = middle
    return low - 1


@njit(cache=True, nogil=True, error_model="numpy")
def gauge_windows(
    times: IntArray,
    values: FloatArray,
    n_gauges: int,
    low_of: IntArray,
    high_of: IntArray,
    begins: IntArray,
    ends: IntArray,
    borders: IntArray,
    edges: IntArray,
    window_edge: IntArray,
    table: IntArray,
    out: npt.NDArray[np.float32],
) -> None:
    """Fill the statistics of gauges.

    Parameters
    ----------
    times : int64, shape (n,)
        Sample times in milliseconds, ascending within each unit.
    values : float64, shape (n, m), C order
        Gauges, then their lows, then their highs; NaN where a value is missing.
    n_gauges : int
        Number of gauges.
    low_of, high_of : int64
        For each low (high) column the gauge it belongs to.
    begins, ends : int64, shape (r,)
        For each row the range of its unit's samples.
    borders : int64, shape (r,)
        Decision time minus reporting delay, in milliseconds.
    edges : int64, ascending
        Ages at which sums are noted: every window and twice every window, in milliseconds.
    window_edge : int64, shape (w, 2)
        For each window the positions in ``edges`` of itself and of its double.
    table : int64, shape (7, w, n_gauges)
        Column of ``out`` for each of ``GAUGE_STATISTICS``, window and gauge; -1: not wanted.
    out : float32, shape (r, columns)
        Filled in place; NaN where a statistic is unknown.
    """
    n_edges = edges.size
    last_full = window_edge[:, 0].max()
    first = np.zeros(n_gauges)
    first_time = np.zeros(n_gauges, dtype=np.int64)
    sums = np.zeros((_SUMS, n_gauges))
    noted = np.zeros((n_edges, _SUMS, n_gauges))
    for row in range(borders.size):
        border = borders[row]
        begin = begins[row]
        sums[:] = 0.0
        sums[_LOW] = np.inf
        sums[_HIGH] = -np.inf
        edge = 0
        at = newest_usable(times, begin, ends[row], border)
        while edge < n_edges:
            age = border - times[at] if at >= begin else edges[n_edges - 1]
            while edge < n_edges and age >= edges[edge]:
                noted[edge] = sums
                edge += 1
            if edge == n_edges:
                break
            if edge <= last_full:
                _add_gauges(times, values, at, n_gauges, first, first_time, sums)
                _widen(values, at, n_gauges, low_of, high_of, sums)
            else:  # beyond the largest window only the mean of the window before is still wanted
                _add_means(values, at, n_gauges, first, sums)
            at -= 1
        _emit_gauges(noted, first, window_edge, table, row, out)


# Rows of the running sums: count, sum and sum of squares of (value - newest value), sum and sum of squares of hours
# before the newest value, sum of their products, lowest and highest value.
_COUNT, _TOTAL, _SQUARE, _HOURS, _HOURS_SQUARE, _PRODUCT, _LOW, _HIGH, _SUMS = 0, 1, 2, 3, 4, 5, 6, 7, 8


@njit(cache=True, nogil=True)
def _add_gauges(
    times: IntArray,
    values: FloatArray,
    at: int,
    n_gauges: int,
    first: FloatArray,
    first_time: IntArray,
    sums: FloatArray,
) -> None:
    for c in range(n_gauges):
        value = values[at, c]
        if not np.isnan(value):
            if sums[_COUNT, c] == 0.0:
                first[c] = value
                first_time[c] = times[at]
            moved = value - first[c]
            back = (first_time[c] - times[at]) / _HOUR_MS
            sums[_COUNT, c] += 1.0
            sums[_TOTAL, c] += moved
            sums[_SQUARE, c] += moved * moved
            sums[_HOURS, c] += back
            sums[_HOURS_SQUARE, c] += back * back
            sums[_PRODUCT, c] += moved * back
            sums[_LOW, c] = min(sums[_LOW, c], value)
            sums[_HIGH, c] = max(sums[_HIGH, c], value)


@njit(cache=True, nogil=True)
def _add_means(values: FloatArray, at: int, n_gauges: int, first: FloatArray, sums: FloatArray) -> None:
    for c in range(n_gauges):
        value = values[at, c]
        if not np.isnan(value):
            if sums[_COUNT, c] == 0.0:
                first[c] = value
            sums[_COUNT, c] += 1.0
            sums[_TOTAL, c] += value - first[c]


@njit(cache=True, nogil=True)
def _widen(values: FloatArray, at: int, n_gauges: int, low_of: IntArray, high_of: IntArray, sums: FloatArray) -> None:
    for j in range(low_of.size):
        value = values[at, n_gauges + j]
        if not np.isnan(value):
            sums[_LOW, low_of[j]] = min(sums[_LOW, low_of[j]], value)
    for j in range(high_of.size):
        value = values[at, n_gauges + low_of.size + j]
        if not np.isnan(value):
            sums[_HIGH, high_of[j]] = max(sums[_HIGH, high_of[j]], value)


@njit(cache=True, nogil=True, error_model="numpy")
def _emit_gauges(
    noted: FloatArray,
    first: FloatArray,
    window_edge: IntArray,
    table: IntArray,
    row: int,
    out: npt.NDArray[np.float32],
) -> None:
    statistics = np.empty(7)
    for w in range(window_edge.shape[0]):
        own = noted[window_edge[w, 0]]
        double = noted[window_edge[w, 1]]
        for c in range(first.size):
            statistics[:] = np.nan
            n = own[_COUNT, c]
            if n > 0.0:
                mean = own[_TOTAL, c] / n
                statistics[0] = first[c]
                statistics[1] = first[c] + mean
                before = double[_COUNT, c] - n
                statistics[6] = mean - (double[_TOTAL, c] - own[_TOTAL, c]) / before if before > 0.0 else np.nan
                if n > 1.0:
                    statistics[2] = np.sqrt(max(own[_SQUARE, c] - own[_TOTAL, c] * mean, 0.0) / (n - 1.0))
                    below = own[_HOURS_SQUARE, c] - own[_HOURS, c] * own[_HOURS, c] / n
                    if below > 0.0:
                        statistics[5] = -(own[_PRODUCT, c] - own[_HOURS, c] * mean) / below
            if own[_LOW, c] < np.inf:  # from roll-ups also where the value itself is missing
                statistics[3] = own[_LOW, c]
            if own[_HIGH, c] > -np.inf:
                statistics[4] = own[_HIGH, c]
            for k in range(7):
                if table[k, w, c] >= 0:
                    out[row, table[k, w, c]] = statistics[k]


@njit(cache=True, nogil=True, error_model="numpy")
def step_windows(
    times: IntArray,
    values: FloatArray,
    counter_at: int,
    n_counters: int,
    rise_of: IntArray,
    enum_at: int,
    n_enums: int,
    begins: IntArray,
    ends: IntArray,
    borders: IntArray,
    edges: IntArray,
    window_edge: IntArray,
    counter_table: IntArray,
    enum_table: IntArray,
    out: npt.NDArray[np.float32],
) -> None:
    """Fill the statistics of counters and enums: what happened between one sample and the next.

    The step between two consecutive known values belongs to the newer one's time, so a window's rise includes the step
    from the last value before the window if that value lies in the look-back. A fall is a reset: the new value counts
    as the rise. Where a sample has its own rise within the step (``X_rise``, from a roll-up), that is taken instead.
    A rise is NaN if no step ended in the window; changes are NaN if no value is known in it.

    Parameters
    ----------
    times, begins, ends, borders, edges, window_edge, out
        As for :func:`gauge_windows`.
    values : float64, shape (n, m), C order
        Counters from column ``counter_at``, their rises right after them, enums from ``enum_at``.
    rise_of : int64
        For each rise column the counter it belongs to.
    counter_table : int64, shape (3, w, n_counters)
        Column of ``out`` for each of ``COUNTER_STATISTICS``, window and counter; -1: not wanted. The last value of a
        counter has no age limit within the look-back: only levels that persist are asked for.
    enum_table : int64, shape (2, w, n_enums)
        The same for ``ENUM_STATISTICS``.
    """
    n_edges = edges.size
    n = n_counters + n_enums
    newer = np.zeros(n)
    newer_edge = np.zeros(n, dtype=np.int64)
    pending = np.zeros(n, dtype=np.bool_)
    first = np.zeros(n)
    first_edge = np.zeros(n, dtype=np.int64)
    steps = np.zeros((n_edges, n))
    amount = np.zeros((n_edges, n))
    own_rise = np.full(n_counters, np.nan)
    for row in range(borders.size):
        border = borders[row]
        begin = begins[row]
        pending[:] = False
        first[:] = np.nan
        first_edge[:] = n_edges
        steps[:] = 0.0
        amount[:] = 0.0
        edge = 0
        at = newest_usable(times, begin, ends[row], border)
        while at >= begin:
            age = border - times[at]
            while edge < n_edges and age >= edges[edge]:
                edge += 1
            if edge == n_edges:
                break
            for j in range(rise_of.size):
                own_rise[rise_of[j]] = values[at, counter_at + n_counters + j]
            _add_rises(values, at, counter_at, own_rise, edge, first, newer, newer_edge, pending, steps, amount)
            for c in range(n_counters, n):
                value = values[at, enum_at + c - n_counters]
                if not np.isnan(value):
                    if first_edge[c] == n_edges:
                        first[c] = value
                        first_edge[c] = edge
                    elif newer[c] != value:
                        amount[newer_edge[c], c] += 1.0
                    steps[edge, c] += 1.0
                    newer[c] = value
                    newer_edge[c] = edge
            at -= 1
        _emit_counters(steps, amount, first, window_edge, counter_table, row, out)
        _emit_enums(steps, amount, first, first_edge, n_counters, window_edge, enum_table, row, out)


@njit(cache=True, nogil=True)
def _add_rises(
    values: FloatArray,
    at: int,
    counter_at: int,
    own_rise: FloatArray,
    edge: int,
    first: FloatArray,
    newer: FloatArray,
    newer_edge: IntArray,
    pending: npt.NDArray[np.bool_],
    steps: FloatArray,
    amount: FloatArray,
) -> None:
    # All counters of a sample in one call: a call counts references to its arrays, which costs more than the work.
    for c in range(own_rise.size):
        value = values[at, counter_at + c]
        rise = own_rise[c]
        has_rise = not np.isnan(rise)
        if not np.isnan(value):
            if pending[c]:  # the step from this value to the newer one ends at the newer one's time
                amount[newer_edge[c], c] += newer[c] - value if newer[c] >= value else newer[c]
                steps[newer_edge[c], c] += 1.0
            if np.isnan(first[c]):
                first[c] = value
            newer[c] = value
            newer_edge[c] = edge
            pending[c] = not has_rise
        elif pending[c]:  # the pending step will span this sample, its rise included
            has_rise = False
        if has_rise:
            amount[edge, c] += rise
            steps[edge, c] += 1.0


@njit(cache=True, nogil=True)
def _within(bins: FloatArray, c: int, low: int, high: int) -> float:
    total = 0.0
    for e in range(low, high):
        total += bins[e, c]
    return total


@njit(cache=True, nogil=True)
def _emit_counters(
    steps: FloatArray,
    amount: FloatArray,
    first: FloatArray,
    window_edge: IntArray,
    table: IntArray,
    row: int,
    out: npt.NDArray[np.float32],
) -> None:
    for w in range(window_edge.shape[0]):
        own = window_edge[w, 0] + 1
        double = window_edge[w, 1] + 1
        for c in range(table.shape[2]):
            rise = np.nan
            before = np.nan
            if _within(steps, c, 0, own) > 0.0:
                rise = _within(amount, c, 0, own)
            if _within(steps, c, own, double) > 0.0:
                before = _within(amount, c, own, double)
            if table[0, w, c] >= 0:
                out[row, table[0, w, c]] = first[c]
            if table[1, w, c] >= 0:
                out[row, table[1, w, c]] = rise
            if table[2, w, c] >= 0:
                out[row, table[2, w, c]] = rise - before


@njit(cache=True, nogil=True)
def _emit_enums(
    steps: FloatArray,
    amount: FloatArray,
    first: FloatArray,
    first_edge: IntArray,
    n_counters: int,
    window_edge: IntArray,
    table: IntArray,
    row: int,
    out: npt.NDArray[np.float32],
) -> None:
    for w in range(window_edge.shape[0]):
        own = window_edge[w, 0]
        for k in range(table.shape[2]):
            c = n_counters + k
            if table[0, w, k] >= 0:
                out[row, table[0, w, k]] = first[c] if first_edge[c] <= own else np.nan
            if table[1, w, k] >= 0:
                known = _within(steps, c, 0, own + 1) > 0.0
                out[row, table[1, w, k]] = _within(amount, c, 0, own + 1) if known else np.nan


@njit(cache=True, nogil=True, error_model="numpy")
def flag_windows(
    times: IntArray,
    flags: npt.NDArray[np.uint64],
    known: npt.NDArray[np.bool_],
    part_flag: IntArray,
    part_mask: npt.NDArray[np.uint64],
    begins: IntArray,
    ends: IntArray,
    borders: IntArray,
    edges: IntArray,
    window_edge: IntArray,
    table: IntArray,
    out: npt.NDArray[np.float32],
) -> None:
    """Fill the share of a window's samples in which any bit of a mask is set.

    Parameters
    ----------
    times, begins, ends, borders, edges, window_edge, out
        As for :func:`gauge_windows`.
    flags : uint64, shape (n, f)
        Bitmasks; whatever where unknown.
    known : bool, shape (n, f)
        Whether the bitmask was reported.
    part_flag : int64, shape (p,)
        Flags column of each part.
    part_mask : uint64, shape (p,)
        Bits of each part.
    table : int64, shape (w, p)
        Column of ``out`` for each window and part; -1: not wanted.
    """
    n_edges = edges.size
    n_parts = part_flag.size
    seen = np.zeros((n_edges, n_parts))
    active = np.zeros((n_edges, n_parts))
    for row in range(borders.size):
        border = borders[row]
        begin = begins[row]
        seen[:] = 0.0
        active[:] = 0.0
        edge = 0
        at = newest_usable(times, begin, ends[row], border)
        while at >= begin:
            age = border - times[at]
            while edge < n_edges and age >= edges[edge]:
                edge += 1
            if edge == n_edges:
                break
            for p in range(n_parts):
                if known[at, part_flag[p]]:
                    seen[edge, p] += 1.0
                    if flags[at, part_flag[p]] & part_mask[p]:
                        active[edge, p] += 1.0
            at -= 1
        for w in range(window_edge.shape[0]):
            for p in range(n_parts):
                if table[w, p] >= 0:
                    samples = _within(seen, p, 0, window_edge[w, 0] + 1)
                    hits = _within(active, p, 0, window_edge[w, 0] + 1)
                    out[row, table[w, p]] = hits / samples if samples > 0.0 else np.nan
