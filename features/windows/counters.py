"""Window statistics of counters, enums and bitmasks: steps between samples, and shares of set bits.

The step between two consecutive known values is dated by the newer one, so a window's rise includes the step from the
last value before the window if that value lies in the look-back. A decrease is a reset: the new value counts as the
rise. If a sample has its own rise within the step (``X_rise``, from a roll-up), that is used instead. A rise is NaN if
no step ended in the window; changes are NaN if the window has no known value.
"""

import numpy as np
import numpy.typing as npt
from numba import njit

from features.windows.blocks import FloatArray, IntArray
from features.windows.pane_index import PaneIndex, Visits, level_offset

COUNTER_STATISTICS = ("last", "rise", "rise_delta")
ENUM_STATISTICS = ("last", "changes")

# Fields of a counter node: newest and oldest known value (NaN: none); whether the oldest one's own rise is unknown, so
# that the step into it from an older value is pending; amount and number of steps at samples without a value that are
# newer than the newest value (ignored if a newer value's step is pending); amount and number of steps from the newest
# value back.
_NEWEST, _OLDEST, _PENDING, _HEAD, _HEAD_STEPS, _AMOUNT, _STEPS, _FIELDS = range(8)

# Fields of an enum node: newest and oldest known value (NaN: none), known values, changes among them.
_ENUM_NEWEST, _ENUM_OLDEST, _ENUM_KNOWN, _ENUM_CHANGES, _ENUM_FIELDS = range(5)


@njit(cache=True, nogil=True)
def _rise(newer: float, older: float) -> float:
    return newer - older if newer >= older else newer


@njit(cache=True, nogil=True)
def _sum_counter(series: FloatArray, rises: FloatArray, first: int, last: int, out: FloatArray) -> None:
    """Aggregate the samples ``first`` to ``last - 1``, newest first; ``rises`` may be empty."""
    newest = np.nan
    oldest = np.nan
    pending = False
    head = 0.0
    head_steps = 0.0
    amount = 0.0
    steps = 0.0
    for i in range(last - 1, first - 1, -1):
        value = series[i]
        rise = rises[i] if rises.size > 0 else np.nan
        if not np.isnan(value):
            if pending:
                amount += _rise(oldest, value)
                steps += 1.0
            if np.isnan(newest):
                newest = value
            oldest = value
            pending = np.isnan(rise)
            if not pending:
                amount += rise
                steps += 1.0
        elif not np.isnan(rise) and not pending:  # a pending step spans this sample, its rise included
            if np.isnan(newest):
                head += rise
                head_steps += 1.0
            else:
                amount += rise
                steps += 1.0
    out[_NEWEST] = newest
    out[_OLDEST] = oldest
    out[_PENDING] = 1.0 if pending else 0.0
    out[_HEAD] = head
    out[_HEAD_STEPS] = head_steps
    out[_AMOUNT] = amount
    out[_STEPS] = steps


@njit(cache=True, nogil=True)
def _take_node(nodes: FloatArray, node: int, out: FloatArray) -> None:
    for field in range(out.size):  # as in _join_counters
        out[field] = nodes[node, field]


@njit(cache=True, nogil=True)
def _join_counters(newer: FloatArray, older: FloatArray, out: FloatArray) -> None:
    has_newer = not np.isnan(newer[_NEWEST])
    has_older = not np.isnan(older[_NEWEST])
    for field in range(_FIELDS):  # numba assumes that slices may overlap, which is ten times slower
        out[field] = newer[field]
    if not has_newer:
        out[_HEAD] += older[_HEAD]
        out[_HEAD_STEPS] += older[_HEAD_STEPS]
        out[_AMOUNT] = older[_AMOUNT]
        out[_STEPS] = older[_STEPS]
        out[_NEWEST] = older[_NEWEST]
    elif newer[_PENDING] == 0.0:
        out[_AMOUNT] += older[_HEAD] + older[_AMOUNT]
        out[_STEPS] += older[_HEAD_STEPS] + older[_STEPS]
    # The pending step spans the older part's head, whose rises are therefore not added.
    elif has_older:
        out[_AMOUNT] += _rise(newer[_OLDEST], older[_NEWEST]) + older[_AMOUNT]
        out[_STEPS] += 1.0 + older[_STEPS]
    if has_older:
        out[_OLDEST] = older[_OLDEST]
        out[_PENDING] = older[_PENDING]


@njit(cache=True, nogil=True)
def counter_nodes(values: FloatArray, counter_at: int, rise_at: IntArray, index: PaneIndex, levels: int) -> FloatArray:
    """Aggregate the panes of counters, and merge them level by level.

    ``values``: NaN where a value is missing; shape (series, n).
    ``counter_at``: row of the first counter in ``values``.
    ``rise_at``: row of each counter's rise within a sample's step; -1: none; shape (counters,).
    Returns shape (counters, nodes, fields).
    """
    nodes = np.empty((rise_at.size, index.nodes, _FIELDS))
    for c in range(rise_at.size):
        series = values[counter_at + c]
        rises = values[rise_at[c]] if rise_at[c] >= 0 else values[0, :0]
        for run in range(index.run_first.size):
            base = index.run_node[run]
            start = index.run_start[run]
            panes = index.run_panes[run]
            for pane in range(panes):
                first, last = index.starts[start + pane], index.starts[start + pane + 1]
                _sum_counter(series, rises, first, last, nodes[c, base + pane])
            for level in range(1, levels):
                upper = base + level_offset(panes, level)
                children = base + level_offset(panes, level - 1)
                for pane in range(panes >> level):
                    _join_counters(
                        nodes[c, children + 2 * pane + 1], nodes[c, children + 2 * pane], nodes[c, upper + pane]
                    )
    return nodes


@njit(cache=True, nogil=True, error_model="numpy")
def counter_windows(
    values: FloatArray,
    counter_at: int,
    rise_at: IntArray,
    nodes: FloatArray,
    visits: Visits,
    window_edge: IntArray,
    table: IntArray,
    out: npt.NDArray[np.float32],
) -> None:
    """Fill the statistics of counters; parameters as for :func:`counter_nodes` and ``gauge_windows``.

    ``table``: as there, for ``COUNTER_STATISTICS``. The last value of a counter has no age limit within the look-back:
    only persistent levels are requested.
    """
    rows, edges = visits.stops.shape
    amount = np.empty(edges)
    steps = np.empty(edges)
    fields = np.empty(_FIELDS)
    for c in range(rise_at.size):
        columns = table[:, :, c].copy()
        if not np.any(columns >= 0):
            continue
        tree = nodes[c] if nodes.shape[0] > 0 else nodes[:, :, 0]
        series = values[counter_at + c]
        rises = values[rise_at[c]] if rise_at[c] >= 0 else values[0, :0]
        for row in range(rows):
            newest = np.nan
            waiting = np.nan  # value whose step from an older one is pending, in its interval
            waiting_edge = 0
            pending = False
            visit = visits.begin[row]
            for edge in range(edges):
                amount[edge] = 0.0
                steps[edge] = 0.0
                while visit < visits.stops[row, edge]:
                    node = visits.node[visit]
                    if node >= 0:
                        _take_node(tree, node, fields)
                    else:
                        _sum_counter(series, rises, visits.first[visit], visits.last[visit], fields)
                    visit += 1
                    known = not np.isnan(fields[_NEWEST])
                    if pending:
                        if known:
                            amount[waiting_edge] += _rise(waiting, fields[_NEWEST])
                            steps[waiting_edge] += 1.0
                    else:
                        amount[edge] += fields[_HEAD]
                        steps[edge] += fields[_HEAD_STEPS]
                    if known:
                        amount[edge] += fields[_AMOUNT]
                        steps[edge] += fields[_STEPS]
                        if np.isnan(newest):
                            newest = fields[_NEWEST]
                        waiting = fields[_OLDEST]
                        waiting_edge = edge
                        pending = fields[_PENDING] > 0.0
            _emit_counter(amount, steps, newest, window_edge, columns, row, out)


@njit(cache=True, nogil=True)
def _within(bins: FloatArray, low: int, high: int) -> float:
    # Not a difference of running sums: a small rise would vanish behind a large one.
    total = 0.0
    for e in range(low, high):
        total += bins[e]
    return total


@njit(cache=True, nogil=True)
def _emit_counter(
    amount: FloatArray,
    steps: FloatArray,
    newest: float,
    window_edge: IntArray,
    columns: IntArray,
    row: int,
    out: npt.NDArray[np.float32],
) -> None:
    for w in range(window_edge.shape[0]):
        edge_of_window = window_edge[w, 0] + 1
        if columns[0, w] >= 0:
            out[row, columns[0, w]] = newest
        if columns[1, w] >= 0 or columns[2, w] >= 0:
            rise = _within(amount, 0, edge_of_window) if _within(steps, 0, edge_of_window) > 0.0 else np.nan
            if columns[1, w] >= 0:
                out[row, columns[1, w]] = rise
            if columns[2, w] >= 0:
                double = window_edge[w, 1] + 1
                known = _within(steps, edge_of_window, double) > 0.0
                out[row, columns[2, w]] = rise - _within(amount, edge_of_window, double) if known else np.nan


@njit(cache=True, nogil=True)
def _sum_enum(series: FloatArray, first: int, last: int, out: FloatArray) -> None:
    newest = np.nan
    oldest = np.nan
    known = 0.0
    changes = 0.0
    for i in range(last - 1, first - 1, -1):
        value = series[i]
        if not np.isnan(value):
            if known == 0.0:
                newest = value
            elif value != oldest:
                changes += 1.0
            oldest = value
            known += 1.0
    out[_ENUM_NEWEST] = newest
    out[_ENUM_OLDEST] = oldest
    out[_ENUM_KNOWN] = known
    out[_ENUM_CHANGES] = changes


@njit(cache=True, nogil=True)
def enum_nodes(values: FloatArray, enum_at: int, n_enums: int, index: PaneIndex, levels: int) -> FloatArray:
    """Aggregate the panes of enums as :func:`counter_nodes` does for counters; shape (enums, nodes, fields)."""
    nodes = np.empty((n_enums, index.nodes, _ENUM_FIELDS))
    for c in range(n_enums):
        for run in range(index.run_first.size):
            base = index.run_node[run]
            start = index.run_start[run]
            panes = index.run_panes[run]
            for pane in range(panes):
                first, last = index.starts[start + pane], index.starts[start + pane + 1]
                _sum_enum(values[enum_at + c], first, last, nodes[c, base + pane])
            for level in range(1, levels):
                upper = base + level_offset(panes, level)
                children = base + level_offset(panes, level - 1)
                for pane in range(panes >> level):
                    newer = nodes[c, children + 2 * pane + 1]
                    older = nodes[c, children + 2 * pane]
                    node = nodes[c, upper + pane]
                    for field in range(_ENUM_FIELDS):
                        node[field] = newer[field]
                    if newer[_ENUM_KNOWN] == 0.0:
                        for field in range(_ENUM_FIELDS):
                            node[field] = older[field]
                    elif older[_ENUM_KNOWN] > 0.0:
                        changed = 1.0 if newer[_ENUM_OLDEST] != older[_ENUM_NEWEST] else 0.0
                        node[_ENUM_CHANGES] += older[_ENUM_CHANGES] + changed
                        node[_ENUM_KNOWN] += older[_ENUM_KNOWN]
                        node[_ENUM_OLDEST] = older[_ENUM_OLDEST]
    return nodes


@njit(cache=True, nogil=True, error_model="numpy")
def enum_windows(
    values: FloatArray,
    enum_at: int,
    n_enums: int,
    nodes: FloatArray,
    visits: Visits,
    window_edge: IntArray,
    table: IntArray,
    out: npt.NDArray[np.float32],
) -> None:
    """Fill the statistics of enums; parameters as for :func:`enum_nodes` and ``gauge_windows``."""
    rows, edges = visits.stops.shape
    changes = np.empty(edges)
    known = np.empty(edges)
    fields = np.empty(_ENUM_FIELDS)
    for c in range(n_enums):
        tree = nodes[c] if nodes.shape[0] > 0 else nodes[:, :, 0]
        series = values[enum_at + c]
        for row in range(rows):
            newest = np.nan
            newest_edge = edges
            oldest = np.nan
            oldest_edge = 0
            visit = visits.begin[row]
            for edge in range(edges):
                changes[edge] = 0.0
                known[edge] = 0.0
                while visit < visits.stops[row, edge]:
                    node = visits.node[visit]
                    if node >= 0:
                        _take_node(tree, node, fields)
                    else:
                        _sum_enum(series, visits.first[visit], visits.last[visit], fields)
                    visit += 1
                    if fields[_ENUM_KNOWN] == 0.0:
                        continue
                    if newest_edge == edges:
                        newest = fields[_ENUM_NEWEST]
                        newest_edge = edge
                    elif oldest != fields[_ENUM_NEWEST]:
                        changes[oldest_edge] += 1.0
                    changes[edge] += fields[_ENUM_CHANGES]
                    known[edge] += fields[_ENUM_KNOWN]
                    oldest = fields[_ENUM_OLDEST]
                    oldest_edge = edge
            for w in range(window_edge.shape[0]):
                smallest = window_edge[w, 0]
                if table[0, w, c] >= 0:
                    out[row, table[0, w, c]] = newest if newest_edge <= smallest else np.nan
                if table[1, w, c] >= 0:
                    counted = _within(known, 0, smallest + 1) > 0.0
                    out[row, table[1, w, c]] = _within(changes, 0, smallest + 1) if counted else np.nan


BitArray = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]


@njit(cache=True, nogil=True)
def _count(flags: BitArray, known: BoolArray, mask: int, first: int, last: int) -> tuple[float, float]:
    n_known = 0.0
    active = 0.0
    for i in range(first, last):
        if known[i]:
            n_known += 1.0
            if flags[i] & mask:
                active += 1.0
    return n_known, active


@njit(cache=True, nogil=True)
def flag_nodes(
    flags: BitArray, known: BoolArray, bits_flag: IntArray, bits_mask: BitArray, index: PaneIndex, levels: int
) -> FloatArray:
    """Count the samples of each pane with any bit of each set, and merge panes level by level.

    ``flags``, ``known``: bitmasks, and whether they were reported; shape (masks, n).
    ``bits_flag``, ``bits_mask``: row of ``flags`` and bits of each set; shape (sets,).
    ``levels``: levels to fill, at most the index's.
    Returns shape (sets, nodes, 2).
    """
    nodes = np.empty((bits_flag.size, index.nodes, 2))
    for p in range(bits_flag.size):
        tree, masks, is_known = nodes[p], flags[bits_flag[p]], known[bits_flag[p]]
        for run in range(index.run_first.size):
            base = index.run_node[run]
            start = index.run_start[run]
            panes = index.run_panes[run]
            for pane in range(panes):
                first, last = index.starts[start + pane], index.starts[start + pane + 1]
                tree[base + pane, 0], tree[base + pane, 1] = _count(masks, is_known, bits_mask[p], first, last)
            for level in range(1, levels):
                first_node = base + level_offset(panes, level)
                children = base + level_offset(panes, level - 1)
                for pane in range(panes >> level):
                    for k in range(2):
                        tree[first_node + pane, k] = tree[children + 2 * pane, k] + tree[children + 2 * pane + 1, k]
    return nodes


@njit(cache=True, nogil=True, error_model="numpy")
def flag_windows(
    flags: BitArray,
    known: BoolArray,
    bits_flag: IntArray,
    bits_mask: BitArray,
    nodes: FloatArray,
    visits: Visits,
    window_edge: IntArray,
    table: IntArray,
    out: npt.NDArray[np.float32],
) -> None:
    """Fill the share of a window's samples with any bit of a set.

    Parameters as for :func:`flag_nodes` and :func:`features.windows.gauges.gauge_windows`; ``table`` has shape
    (windows, sets).
    """
    rows, edges = visits.stops.shape
    share = np.empty(edges)
    for p in range(bits_flag.size):
        # numba needs the same type in both cases; without levels no node is read.
        tree = nodes[p] if nodes.shape[0] > 0 else nodes[:, :, 0]
        masks, reported, mask = flags[bits_flag[p]], known[bits_flag[p]], bits_mask[p]
        for row in range(rows):
            n_known = 0.0
            active = 0.0
            visit = visits.begin[row]
            for edge in range(edges):
                while visit < visits.stops[row, edge]:
                    node = visits.node[visit]
                    if node >= 0:
                        n_known += tree[node, 0]
                        active += tree[node, 1]
                    else:
                        n_more, hits = _count(masks, reported, mask, visits.first[visit], visits.last[visit])
                        n_known += n_more
                        active += hits
                    visit += 1
                share[edge] = active / n_known if n_known > 0.0 else np.nan
            for w in range(window_edge.shape[0]):
                if table[w, p] >= 0:
                    out[row, table[w, p]] = share[window_edge[w, 0]]
