"""Panes: spans of absolute time whose samples are aggregated once, so that long windows need not read them again.

A pane is ``(phase + k * length, phase + (k + 1) * length]``. Panes are merged pairwise into nodes, level by level; a
window then consists of a few nodes, plus single samples at its ends. Which nodes form a window depends on time alone,
never on the start of the dataset, so a live row computed from its look-back alone sums in the same order as a training
row and is bit-identical to it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numba import njit

from features.windows.blocks import FloatArray, IntArray, RowSpans, SampleBlock

MIN_STEPS = 6
"""Minimum length of a pane in steps of the dataset: shorter panes cost more than the samples they replace."""


@dataclass(frozen=True, slots=True)
class PaneSpec:
    """Division of time into panes.

    ``phase``: panes end at ``phase`` plus multiples of the length, milliseconds since 1970.
    ``look_back``: longest age that any window covers, milliseconds. Samples further apart never share a window.
    """

    length: int
    phase: int
    look_back: int

    @classmethod
    def of(cls, *, interval: int, origin: int, delay: int, step: int, look_back: int) -> Self:
        """Align panes to a decision grid: windows of grid rows end at pane borders and, if possible, start there.

        ``interval``, ``origin``: ``decision.every`` and ``decision.origin``, milliseconds.
        ``delay``, ``step``: ``features.delay`` and the dataset's step, milliseconds.
        """
        length = interval * max(1, -(-MIN_STEPS * step // interval))
        return cls(length, (origin - delay) % length, look_back)

    @property
    def levels(self) -> int:
        """Levels of nodes that the longest window can use; 0 if no window holds a pane."""
        return levels_of(self.look_back, self.length)


def levels_of(look_back: int, length: int) -> int:
    """Return how many levels of nodes fit into a window of ``look_back``; 0 if it is shorter than a pane."""
    return (look_back // length).bit_length()


class PaneIndex(NamedTuple):
    """Positions of each pane's samples in a block, and of its nodes in node tables.

    A run is a sequence of a unit's samples without a gap longer than the look-back; each run has its own panes, so that
    a silence of years costs nothing.

    ``length``, ``phase``: as in :class:`PaneSpec`.
    ``run_first``: first sample of each run, ascending; shape (runs,).
    ``run_pane``: number k of each run's first pane, a multiple of ``2 ** (levels - 1)``; shape (runs,).
    ``run_panes``: panes of each run, a multiple of the same; shape (runs,).
    ``run_node``: first node of each run; shape (runs,).
    ``run_start``: first entry of each run in ``starts``, which has one more entry than panes; shape (runs,).
    ``starts``: first sample of each pane.
    """

    length: int
    phase: int
    levels: int
    run_first: IntArray
    run_pane: IntArray
    run_panes: IntArray
    run_node: IntArray
    run_start: IntArray
    starts: IntArray
    nodes: int


def index_panes(times: IntArray, begins: IntArray, ends: IntArray, spec: PaneSpec) -> PaneIndex:
    """Index the panes of a block.

    ``times``: sample times in milliseconds, ascending within each unit; shape (n,).
    ``begins``, ``ends``: sample range of each unit, ascending and disjoint, possibly empty; shape (units,).
    """
    levels = spec.levels
    if levels == 0:
        none = np.zeros(0, dtype=np.int64)
        return PaneIndex(spec.length, spec.phase, 0, none, none, none, none, none, none, 0)
    nonempty = ends > begins
    begins, ends = begins[nonempty], ends[nonempty]
    if times.size:
        after_gap = np.flatnonzero(np.diff(times) > spec.look_back) + 1
        run_first = np.unique(np.concatenate((begins, after_gap)))
        last_of_unit = ends[np.searchsorted(begins, run_first, side="right") - 1]
        run_last = np.minimum(last_of_unit, np.append(run_first[1:], times.size))
    else:
        run_first = run_last = np.zeros(0, dtype=np.int64)
    alignment = 1 << (levels - 1)
    # Minus 1, because a pane includes its end: a sample at a border belongs to the pane before it.
    first_pane = (times[run_first] - spec.phase - 1) // spec.length // alignment * alignment
    last_pane = -(-((times[run_last - 1] - spec.phase - 1) // spec.length + 1) // alignment) * alignment
    panes = last_pane - first_pane
    # The panes of all levels, a geometric series. With one level they may be odd, which the shift would round.
    nodes = 2 * (panes - (panes >> levels)) if levels > 1 else panes
    run_node = np.concatenate(([0], np.cumsum(nodes)))
    run_start = np.concatenate(([0], np.cumsum(panes + 1)))
    starts = np.empty(int(run_start[-1]), dtype=np.int64)
    _find_starts(times, run_first, run_last, first_pane, panes, run_start, spec.length, spec.phase, starts)
    return PaneIndex(
        spec.length, spec.phase, levels, run_first, first_pane, panes, run_node[:-1], run_start[:-1], starts,
        int(run_node[-1]),
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _find_starts(
    times: IntArray,
    run_first: IntArray,
    run_last: IntArray,
    run_pane: IntArray,
    run_panes: IntArray,
    run_start: IntArray,
    length: int,
    phase: int,
    starts: IntArray,
) -> None:
    for run in range(run_first.size):
        sample = run_first[run]
        for pane in range(run_panes[run] + 1):
            begin = phase + (run_pane[run] + pane) * length
            while sample < run_last[run] and times[sample] <= begin:
                sample += 1
            starts[run_start[run] + pane] = sample


@njit(cache=True, nogil=True)
def level_offset(panes: int, level: int) -> int:
    """Return the offset of a level among a run's nodes, given its number of panes."""
    return 2 * (panes - (panes >> level))


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


class Visits(NamedTuple):
    """Composition of each row's windows: nodes and ranges of single samples, from newest to oldest.

    A sample at time s has the age ``border - s``; it is usable if that is zero or more, and belongs to the age interval
    ``e`` if ``edges[e - 1] <= age < edges[e]`` (from zero for the first).

    ``node``: node of each visit, or -1 for a range of samples; shape (visits,).
    ``first``, ``last``: samples of each visit, also of a node: first, and one past the last; shape (visits,).
    ``begin``: first visit of each row; shape (rows,).
    ``stops``: one past the last visit of each row's age intervals; shape (rows, edges).
    """

    node: IntArray
    first: IntArray
    last: IntArray
    begin: IntArray
    stops: IntArray


@njit(cache=True, nogil=True)
def visit_windows(
    times: IntArray, begins: IntArray, ends: IntArray, borders: IntArray, edges: IntArray, index: PaneIndex, levels: int
) -> Visits:
    """List the nodes and sample ranges that make up the windows of rows.

    ``begins``, ``ends``: samples of each row's unit; shape (rows,).
    ``borders``: newest usable time of each row: decision time minus reporting delay, milliseconds; shape (rows,).
    ``edges``: ages, ascending, milliseconds.
    ``levels``: levels of nodes to use, at most the index's; 0: samples only.
    """
    rows = borders.size
    begin = np.empty(rows, dtype=np.int64)
    stops = np.empty((rows, edges.size), dtype=np.int64)
    max_visits = edges[edges.size - 1] // index.length + 3 * edges.size + 2  # of one row
    room = max_visits + rows * (2 * edges.size + 2)
    node = np.empty(room, dtype=np.int64)
    first = np.empty(room, dtype=np.int64)
    last = np.empty(room, dtype=np.int64)
    visits = 0
    for row in range(rows):
        if visits + max_visits > room:
            room = 2 * room
            node = _grown(node, room)
            first = _grown(first, room)
            last = _grown(last, room)
        begin[row] = visits
        border = borders[row]
        remaining = newest_usable(times, begins[row], ends[row], border) + 1
        oldest = begins[row]
        run = 0
        if levels > 0 and remaining > oldest:
            run = np.searchsorted(index.run_first, remaining - 1, side="right") - 1
            oldest = max(oldest, index.run_first[run])
        high = border
        for e in range(edges.size):
            low = border - edges[e]
            while remaining > oldest and high > low:
                newest = times[remaining - 1]
                if newest <= low:
                    high = low
                    break
                k = (newest - index.phase - 1) // index.length + 1  # pane after the newest remaining sample
                pane_end = index.phase + k * index.length
                if levels > 0 and pane_end <= high and pane_end - index.length >= low:
                    level = _level(k, levels, (pane_end - low) // index.length)
                    local = k - index.run_pane[run]
                    offset = level_offset(index.run_panes[run], level)
                    node[visits] = index.run_node[run] + offset + (local >> level) - 1
                    first[visits] = index.starts[index.run_start[run] + local - (1 << level)]
                    high = pane_end - (index.length << level)
                else:
                    high = max(low, pane_end - index.length) if levels > 0 else low
                    pane = remaining - 1
                    while pane > oldest and times[pane - 1] > high:
                        pane -= 1
                    node[visits] = -1
                    first[visits] = pane
                last[visits] = remaining
                remaining = first[visits]
                visits += 1
            stops[row, e] = visits
    return Visits(node, first, last, begin, stops)


@njit(cache=True, nogil=True)
def _level(k: int, levels: int, room: int) -> int:
    """Return the highest level whose node ends before pane ``k`` and spans at most ``room`` panes."""
    level = 0
    while level + 1 < levels and k & ((2 << level) - 1) == 0 and (2 << level) <= room:
        level += 1
    return level


@njit(cache=True, nogil=True)
def _grown(array: IntArray, room: int) -> IntArray:
    wider = np.empty(room, dtype=np.int64)
    wider[: array.size] = array
    return wider


class Panes:
    """Panes of one block of samples; feature groups share their nodes."""

    def __init__(self, block: SampleBlock, spec: PaneSpec) -> None:
        self.block = block
        spans = np.array(sorted(block.spans.values()), dtype=np.int64).reshape(-1, 2)
        self.index: PaneIndex = index_panes(block.times, spans[:, 0], spans[:, 1], spec)
        self._nodes_of: dict[str, FloatArray] = {}

    def visits(self, rows: RowSpans, edges: IntArray) -> tuple[Visits, int]:
        """List the visits of rows, and the number of node levels they use; 0: samples only."""
        index = self.index
        levels = min(levels_of(int(edges[-1]), index.length), index.levels) if edges.size and not rows.cut else 0
        visits = visit_windows(self.block.times, rows.begins, rows.ends, rows.borders, edges, index, levels)
        return visits, levels

    def nodes(self, kind: str, levels: int, make: Callable[[], FloatArray]) -> FloatArray:
        """Return the nodes of a kind of channel, computed once; empty if no level is used."""
        if levels == 0:
            return np.empty((0, 0, 0))
        if kind not in self._nodes_of:
            self._nodes_of[kind] = make()
        return self._nodes_of[kind]
