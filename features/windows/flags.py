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
    flags: BitArray, known: BoolArray, part_flag: IntArray, part_mask: BitArray, index: PaneIndex, levels: int
) -> FloatArray:
    """Count each part's samples in the panes, and join them level by level.

    ``flags``: Bitmasks; whatever where unknown; shape (masks, n).
    ``known``: whether the bitmask was reported; shape (masks, n).
    ``part_flag``: row of ``flags`` of each part; shape (parts,).
    ``part_mask``: bits of each part; shape (parts,).
    ``levels``: levels to fill, at most the index's.
    Returns shape (parts, nodes, 2).
    """
    nodes = np.empty((part_flag.size, index.nodes, 2))
    for p in range(part_flag.size):
        own, masks, told = nodes[p], flags[part_flag[p]], known[part_flag[p]]
        for run in range(index.run_first.size):
            base = index.run_node[run]
            start = index.run_start[run]
            panes = index.run_panes[run]
            for pane in range(panes):
                first, last = index.starts[start + pane], index.starts[start + pane + 1]
                own[base + pane, 0], own[base + pane, 1] = _count(masks, told, part_mask[p], first, last)
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
    part_flag: IntArray,
    part_mask: BitArray,
    nodes: FloatArray,
    visits: Visits,
    window_edge: IntArray,
    table: IntArray,
    out: npt.NDArray[np.float32],
) -> None:
    """Fill the share of a window's samples in which any bit of a mask is set.

    ``flags``, ``known``, ``part_flag``, ``part_mask``, ``nodes``: as for :func:`flag_nodes`, and what it gave.
    ``visits``, ``window_edge``, ``out``: as for :func:`features.windows.gauges.gauge_windows`.
    ``table``: column of ``out`` for each window and part; -1: not wanted; shape (w, parts).
    """
    rows, edges = visits.stops.shape
    share = np.empty(edges)
    for p in range(part_flag.size):
        own = nodes[p] if nodes.shape[0] > 0 else nodes[:, :, 0]
        masks, told, mask = flags[part_flag[p]], known[part_flag[p]], part_mask[p]
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
                        more, hits = _count(masks, told, mask, visits.first[at], visits.last[at])
                        seen += more
                        active += hits
                    at += 1
                share[edge] = active / seen if seen > 0.0 else np.nan
            for w in range(window_edge.shape[0]):
                if table[w, p] >= 0:
                    out[row, table[w, p]] = share[window_edge[w, 0]]
