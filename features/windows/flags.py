"""Window statistics of bitmasks: the share of samples in which a bit is set, from panes and single samples."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from features.windows.blocks import FloatArray, IntArray
from features.windows.pane_index import PaneIndex, Visits, level_offset

BitArray = npt.NDArray[np.uint64]
BoolArray = npt.NDArray[np.bool_]


@njit(cache=True, nogil=True)
def _count(flags: BitArray, known: BoolArray, mask: int, first: int, last: int) -> tuple[float, float]:
    seen = 0.0
    active = 0.0
    for at in range(first, last):
        if known[at]:
            seen += 1.0
            if flags[at] & mask:
                active += 1.0
    return seen, active


@njit(cache=True, nogil=True)
def flag_nodes(
    flags: BitArray, known: BoolArray, bits_flag: IntArray, bits_mask: BitArray, index: PaneIndex, levels: int
) -> FloatArray:
    """Count the samples in the panes with any bit of each set, and join them level by level.

    ``flags``, ``known``: bitmasks, and where they were reported; shape (masks, n).
    ``bits_flag``, ``bits_mask``: row of ``flags`` and bits of each set; shape (sets,).
    ``levels``: levels to fill, at most the index's.
    Returns shape (sets, nodes, 2).
    """
    nodes = np.empty((bits_flag.size, index.nodes, 2))
    for p in range(bits_flag.size):
        own, masks, seen = nodes[p], flags[bits_flag[p]], known[bits_flag[p]]
        for run in range(index.run_first.size):
            base = index.run_node[run]
            start = index.run_start[run]
            panes = index.run_panes[run]
            for pane in range(panes):
                first, last = index.starts[start + pane], index.starts[start + pane + 1]
                own[base + pane, 0], own[base + pane, 1] = _count(masks, seen, bits_mask[p], first, last)
            for level in range(1, levels):
                at = base + level_offset(panes, level)
                below = base + level_offset(panes, level - 1)
                for pane in range(panes >> level):
                    for k in range(2):
                        own[at + pane, k] = own[below + 2 * pane, k] + own[below + 2 * pane + 1, k]
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
    """Fill the share of a window's samples in which any bit of a set is set.

    Parameters as for :func:`flag_nodes` and :func:`features.windows.gauges.gauge_windows`; ``table`` has the shape
    (windows, sets).
    """
    rows, edges = visits.stops.shape
    share = np.empty(edges)
    for p in range(bits_flag.size):
        own = nodes[p] if nodes.shape[0] > 0 else nodes[:, :, 0]
        masks, reported, mask = flags[bits_flag[p]], known[bits_flag[p]], bits_mask[p]
        for row in range(rows):
            seen = 0.0
            active = 0.0
            at = visits.begin[row]
            for edge in range(edges):
                while at < visits.stops[row, edge]:
                    node = visits.node[at]
                    if node >= 0:
                        seen += own[node, 0]
                        active += own[node, 1]
                    else:
                        more, hits = _count(masks, reported, mask, visits.first[at], visits.last[at])
                        seen += more
                        active += hits
                    at += 1
                share[edge] = active / seen if seen > 0.0 else np.nan
            for w in range(window_edge.shape[0]):
                if table[w, p] >= 0:
                    out[row, table[w, p]] = share[window_edge[w, 0]]
