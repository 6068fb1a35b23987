"""The panes of one block of samples: their index, and their nodes as far as any group asks for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from features.windows.blocks import FloatArray, IntArray, RowSpans, SampleBlock
from features.windows.counters import counter_nodes, enum_nodes
from features.windows.flags import flag_nodes
from features.windows.gauges import gauge_nodes
from features.windows.pane_index import PaneIndex, PaneSpec, Visits, index_panes, levels_of, visit_windows


class Panes:
    """Panes of a block; the groups share their nodes."""

    def __init__(self, block: SampleBlock, spec: PaneSpec) -> None:
        self.block = block
        spans = np.array(sorted(block.spans.values()), dtype=np.int64).reshape(-1, 2)
        self.index: PaneIndex = index_panes(block.times, spans[:, 0], spans[:, 1], spec)
        self._kept: dict[str, FloatArray] = {}

    def visits(self, rows: RowSpans, edges: IntArray) -> tuple[Visits, int]:
        """List what the windows of rows are made of, and how many levels of nodes that takes; 0: samples alone."""
        index = self.index
        levels = min(levels_of(int(edges[-1]), index.length), index.levels) if edges.size else 0
        found = visit_windows(self.block.times, rows.begins, rows.ends, rows.borders, edges, index, levels)
        return found, levels

    def gauges(self, levels: int, low_at: IntArray, high_at: IntArray) -> FloatArray:
        """Nodes of all gauges: :func:`features.windows.gauges.gauge_nodes`; none if no level is used."""
        block = self.block

        def make() -> FloatArray:
            return gauge_nodes(block.times, block.values, low_at, high_at, self.index, self.index.levels)

        return self._once("gauges", levels, make)

    def counters(self, levels: int, counter_at: int, rise_at: IntArray) -> FloatArray:
        """Nodes of all counters, as :func:`features.windows.counters.counter_nodes` gives them."""
        block = self.block

        def make() -> FloatArray:
            return counter_nodes(block.values, counter_at, rise_at, self.index, self.index.levels)

        return self._once("counters", levels, make)

    def enums(self, levels: int, enum_at: int, count: int) -> FloatArray:
        """Nodes of all enums, as :func:`features.windows.counters.enum_nodes` gives them."""
        block = self.block

        def make() -> FloatArray:
            return enum_nodes(block.values, enum_at, count, self.index, self.index.levels)

        return self._once("enums", levels, make)

    def flags(self, levels: int, part_flag: IntArray, part_mask: npt.NDArray[np.uint64]) -> FloatArray:
        """Nodes of all parts of bitmasks, as :func:`features.windows.flags.flag_nodes` gives them."""
        block = self.block

        def make() -> FloatArray:
            return flag_nodes(block.flags, block.flags_known, part_flag, part_mask, self.index, self.index.levels)

        return self._once("flags", levels, make)

    def _once(self, kind: str, levels: int, make: Callable[[], FloatArray]) -> FloatArray:
        if levels == 0:
            return np.empty((0, 0, 0))
        if kind not in self._kept:
            self._kept[kind] = make()
        return self._kept[kind]
