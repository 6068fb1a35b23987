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
    """Return the position of the newest sample in ``times[begin:end]`` (ascending) at or before ``border``, or begin - 1."""
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
    n_windows = window_edge.shape[0]
    last_full = 0
    for w in range(n_windows):
        last_full = max(last_full, window_edge[w, 0])
    count = np.zeros(n_gauges)
    first = np.zeros(n_gauges)
    first_time = np.zeros(n_gauges, dtype=np.int64)
    total = np.zeros(n_gauges)
    square = np.zeros(n_gauges)
    hours = np.zeros(n_gauges)
    hours_square = np.zeros(n_gauges)
    product = np.zeros(n_gauges)
    low = np.zeros(n_gauges)
    high = np.zeros(n_gauges)
    noted = np.zeros((n_edges, 9, n_gauges))
    n_lows = low_of.size
    n_highs = high_of.size
    for row in range(borders.size):
        border = borders[row]
        begin = begins[row]
        for c in range(n_gauges):
            count[c] = 0.0
            total[c] = 0.0
            square[c] = 0.0
            hours[c] = 0.0
            hours_square[c] = 0.0
            product[c] = 0.0
            low[c] = np.inf
            high[c] = -np.inf
        edge = 0
        at = newest_usable(times, begin, ends[row], border)
        while edge < n_edges:
            age = border - times[at] if at >= begin else edges[n_edges - 1]
            while edge < n_edges and age >= edges[edge]:
                for c in range(n_gauges):
                    noted[edge, 0, c] = count[c]
                    noted[edge, 1, c] = total[c]
                if edge <= last_full:
                    for c in range(n_gauges):
                        noted[edge, 2, c] = square[c]
                        noted[edge, 3, c] = hours[c]
                        noted[edge, 4, c] = hours_square[c]
                        noted[edge, 5, c] = product[c]
                        noted[edge, 6, c] = low[c]
                        noted[edge, 7, c] = high[c]
                edge += 1
            if edge == n_edges:
                break
            if edge <= last_full:
                for c in range(n_gauges):
                    value = values[at, c]
                    if value == value:
                        if count[c] == 0.0:
                            first[c] = value
                            first_time[c] = times[at]
                        moved = value - first[c]
                        back = (first_time[c] - times[at]) / _HOUR_MS
                        count[c] += 1.0
                        total[c] += moved
                        square[c] += moved * moved
                        hours[c] += back
                        hours_square[c] += back * back
                        product[c] += moved * back
                        low[c] = min(low[c], value)
                        high[c] = max(high[c], value)
                for j in range(n_lows):
                    value = values[at, n_gauges + j]
                    if value == value:
                        low[low_of[j]] = min(low[low_of[j]], value)
                for j in range(n_highs):
                    value = values[at, n_gauges + n_lows + j]
                    if value == value:
                        high[high_of[j]] = max(high[high_of[j]], value)
            else:  # beyond the largest window only the mean of the window before is still wanted
                for c in range(n_gauges):
                    value = values[at, c]
                    if value == value:
                        if count[c] == 0.0:
                            first[c] = value
                            first_time[c] = times[at]
                        count[c] += 1.0
                        total[c] += value - first[c]
            at -= 1
        for w in range(n_windows):
            own = window_edge[w, 0]
            double = window_edge[w, 1]
            for c in range(n_gauges):
                n = noted[own, 0, c]
                mean = noted[own, 1, c] / n if n > 0 else np.nan
                column = table[0, w, c]
                if column >= 0:
                    out[row, column] = first[c] if n > 0 else np.nan
                column = table[1, w, c]
                if column >= 0:
                    out[row, column] = first[c] + mean
                column = table[2, w, c]
                if column >= 0:
                    spread = np.nan
                    if n > 1:
                        spread = np.sqrt(max(noted[own, 2, c] - noted[own, 1, c] * mean, 0.0) / (n - 1.0))
                    out[row, column] = spread
                column = table[3, w, c]
                if column >= 0:
                    out[row, column] = noted[own, 6, c] if noted[own, 6, c] < np.inf else np.nan
                column = table[4, w, c]
                if column >= 0:
                    out[row, column] = noted[own, 7, c] if noted[own, 7, c] > -np.inf else np.nan
                column = table[5, w, c]
                if column >= 0:
                    slope = np.nan
                    if n > 1:
                        below = noted[own, 4, c] - noted[own, 3, c] * noted[own, 3, c] / n
                        if below > 0.0:
                            slope = -(noted[own, 5, c] - noted[own, 3, c] * mean) / below
                    out[row, column] = slope
                column = table[6, w, c]
                if column >= 0:
                    before = noted[double, 0, c] - n
                    change = np.nan
                    if n > 0 and before > 0:
                        change = mean - (noted[double, 1, c] - noted[own, 1, c]) / before
                    out[row, column] = change


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
    n_windows = window_edge.shape[0]
    n_rises = rise_of.size
    n = n_counters + n_enums
    next_value = np.zeros(n)
    next_edge = np.zeros(n, dtype=np.int64)
    pending = np.zeros(n, dtype=np.bool_)
    first = np.zeros(n)
    first_edge = np.zeros(n, dtype=np.int64)
    steps = np.zeros((n_edges, n))
    amount = np.zeros((n_edges, n))
    own_rise = np.zeros(n_counters)
    for row in range(borders.size):
        border = borders[row]
        begin = begins[row]
        for c in range(n):
            pending[c] = False
            first[c] = np.nan
            first_edge[c] = n_edges
            for e in range(n_edges):
                steps[e, c] = 0.0
                amount[e, c] = 0.0
        for c in range(n_counters):
            own_rise[c] = np.nan
        edge = 0
        at = newest_usable(times, begin, ends[row], border)
        while at >= begin:
            age = border - times[at]
            while edge < n_edges and age >= edges[edge]:
                edge += 1
            if edge == n_edges:
                break
            for j in range(n_rises):
                own_rise[rise_of[j]] = values[at, counter_at + n_counters + j]
            for c in range(n_counters):
                value = values[at, counter_at + c]
                rise = own_rise[c]
                if value == value:
                    if pending[c]:
                        newer = next_value[c]
                        amount[next_edge[c], c] += newer - value if newer >= value else newer
                        steps[next_edge[c], c] += 1.0
                    if first_edge[c] == n_edges:
                        first[c] = value
                        first_edge[c] = edge
                    next_value[c] = value
                    next_edge[c] = edge
                    pending[c] = not (rise == rise)
                    if rise == rise:
                        amount[edge, c] += rise
                        steps[edge, c] += 1.0
                elif rise == rise and not pending[c]:  # a pending step spans this sample and has its rise in it
                    amount[edge, c] += rise
                    steps[edge, c] += 1.0
            for k in range(n_enums):
                c = n_counters + k
                value = values[at, enum_at + k]
                if value == value:
                    if first_edge[c] == n_edges:
                        first[c] = value
                        first_edge[c] = edge
                    elif next_value[c] != value:
                        amount[next_edge[c], c] += 1.0
                    steps[edge, c] += 1.0
                    next_value[c] = value
                    next_edge[c] = edge
            at -= 1
        for w in range(n_windows):
            own = window_edge[w, 0]
            double = window_edge[w, 1]
            for c in range(n):
                known = 0.0
                happened = 0.0
                for e in range(own + 1):
                    known += steps[e, c]
                    happened += amount[e, c]
                if c >= n_counters:
                    column = enum_table[0, w, c - n_counters]
                    if column >= 0:
                        out[row, column] = first[c] if first_edge[c] <= own else np.nan
                    column = enum_table[1, w, c - n_counters]
                    if column >= 0:
                        out[row, column] = happened if known > 0 else np.nan
                    continue
                column = counter_table[0, w, c]
                if column >= 0:
                    out[row, column] = first[c]
                column = counter_table[1, w, c]
                if column >= 0:
                    out[row, column] = happened if known > 0 else np.nan
                column = counter_table[2, w, c]
                if column >= 0:
                    known_before = 0.0
                    happened_before = 0.0
                    for e in range(own + 1, double + 1):
                        known_before += steps[e, c]
                        happened_before += amount[e, c]
                    both = known > 0 and known_before > 0
                    out[row, column] = happened - happened_before if both else np.nan


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
    n_windows = window_edge.shape[0]
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
        for w in range(n_windows):
            for p in range(n_parts):
                column = table[w, p]
                if column >= 0:
                    samples = 0.0
                    hits = 0.0
                    for e in range(window_edge[w, 0] + 1):
                        samples += seen[e, p]
                        hits += active[e, p]
                    out[row, column] = hits / samples if samples > 0 else np.nan
