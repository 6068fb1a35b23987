"""Plan of window statistics: the statistics of each kind of channel, and the tables that drive the kernels."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import numpy.typing as npt

from features.vocabulary import FeatureColumn
from features.windows.blocks import IntArray, RowSpans
from features.windows.counters import (
    COUNTER_STATISTICS,
    ENUM_STATISTICS,
    counter_nodes,
    counter_windows,
    enum_nodes,
    enum_windows,
    flag_nodes,
    flag_windows,
)
from features.windows.gauges import GAUGE_STATISTICS, gauge_nodes, gauge_windows
from features.windows.layout import ChannelLayout
from features.windows.pane_index import Panes
from foundation.times import duration_ms
from telemetry.dataset.channels import CATALOGUE, Channel

FLAG_BITS: dict[str, tuple[tuple[str, int], ...]] = {
    "clocks_event_reasons": (("hw_slowdown", 0x8), ("sw_thermal", 0x20), ("hw_thermal", 0x40), ("power_brake", 0x80))
}
"""Bits of known bitmasks with columns of their own (nvml.h, nvmlClocksEventReasons): clocks reduced by hardware
slowdown, by software or hardware thermal slowdown, or by the power brake. Other bits are normal in healthy operation:
idle (0x1), application clocks (0x2) and the power cap (0x4) do not indicate a fault."""

PERSISTENT_COUNTERS = frozenset(
    {
        "ecc_sbe_aggregate_total",
        "ecc_dbe_aggregate_total",
        "retired_pages_sbe_total",
        "retired_pages_dbe_total",
        "row_remap_correctable_total",
        "row_remap_uncorrectable_total",
    }
)
"""Catalogue counters whose level is meaningful: stored on the board and never reset."""

_ALL_BITS = 0xFFFFFFFFFFFFFFFF
_Statistics = tuple[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """Window statistics of a layout: their columns and the kernel tables.

    ``edges``: every window and, if the window before it is needed, its double, in milliseconds, ascending.
    ``window_edge``: positions of each window and its double in ``edges``; -1 without doubles; shape (windows, 2).
    ``gauge_table``, ``counter_table``, ``enum_table``: column of each statistic; -1: not wanted; shape (statistics,
    windows, channels).
    ``flag_table``: column of each bit set's share; shape (windows, sets).
    ``bits_flag``, ``bits_mask``: flags channel and bits of each named bit set; shape (sets,).
    """

    columns: tuple[FeatureColumn, ...]
    layout: ChannelLayout
    edges: IntArray
    window_edge: IntArray
    gauge_table: IntArray
    counter_table: IntArray
    enum_table: IntArray
    flag_table: IntArray
    bits_flag: IntArray
    bits_mask: npt.NDArray[np.uint64]

    @classmethod
    def telemetry(cls, layout: ChannelLayout, windows: Sequence[timedelta]) -> "WindowPlan":
        """Plan the ``telemetry`` group.

        The smallest window has few samples and gets only robust statistics; spread, extremes and trends are computed
        over the larger ones ("larger": all but the smallest, or the only one).

        ========  =====================================================================================
        gauge     last (no older than the smallest window), mean (each window); std, min, max, slope per
                  hour, delta from the preceding window (larger windows)
        gauge     of unit ``bool``: last, and max (larger windows)
        counter   reset-aware rise (each window); rise_delta from the rise of the preceding window (larger
                  windows; for the largest window it omits the step into the preceding window's oldest
                  sample, as nothing older is read); last, the level, if stored on the board or unknown
                  to the catalogue
        flags     share of samples with the bit set (larger windows), for the bits of ``FLAG_BITS``; any bit
                  for bitmasks unknown to the catalogue
        enum      last (no older than the smallest window), number of changes (larger windows)
        ========  =====================================================================================

        ``layout``: channels; those without data still have columns.
        """
        all_windows = range(len(windows))
        larger = range(1, len(windows)) if len(windows) > 1 else range(1)
        gauge: list[_Statistics] = [("last", (0,)), ("mean", all_windows)]
        gauge += [(statistic, larger) for statistic in ("std", "min", "max", "slope", "delta")]
        state: list[_Statistics] = [("last", (0,)), ("max", larger)]
        counter: list[_Statistics] = [("rise", all_windows), ("rise_delta", larger)]
        enum: list[_Statistics] = [("last", (0,)), ("changes", larger)]
        return cls._build(
            layout,
            windows,
            gauge=lambda channel: state if channel.unit == "bool" else gauge,
            counter=lambda channel: [("last", (0,)), *counter] if _level_matters(channel) else counter,
            enum=lambda _: enum,
            flag_windows=larger,
        )

    @classmethod
    def peers(cls, layout: ChannelLayout, window: timedelta) -> "WindowPlan":
        """Plan the first pass of the ``peers`` group: each gauge's mean and each counter's rise over one window."""
        return cls._build(
            layout,
            (window,),
            gauge=lambda channel: [] if channel.unit == "bool" else [("mean", (0,))],
            counter=lambda _: [("rise", (0,))],
        )

    @classmethod
    def amounts(cls, layout: ChannelLayout, windows: Sequence[timedelta], counters: Collection[str]) -> "WindowPlan":
        """Plan the amounts of the ``onset`` group: rises of the named counters and shares of known bits by window."""
        all_windows = range(len(windows))
        return cls._build(
            layout,
            windows,
            counter=lambda channel: [("rise", all_windows)] if channel.name in counters else [],
            flag_windows=all_windows,
            look_further=False,
        )

    @classmethod
    def _build(
        cls,
        layout: ChannelLayout,
        windows: Sequence[timedelta],
        *,
        gauge: Callable[[Channel], Sequence[_Statistics]] = lambda _: (),
        counter: Callable[[Channel], Sequence[_Statistics]] = lambda _: (),
        enum: Callable[[Channel], Sequence[_Statistics]] = lambda _: (),
        flag_windows: Sequence[int] = (),
        look_further: bool = True,
    ) -> "WindowPlan":
        columns: list[FeatureColumn] = []

        def add(channel: str, statistic: str, window: int, unit: str) -> int:
            columns.append(FeatureColumn.of("telemetry", channel, statistic, window=windows[window], unit=unit))
            return len(columns) - 1

        def fill(
            channels: Sequence[Channel],
            statistics_of: Callable[[Channel], Sequence[_Statistics]],
            names: tuple[str, ...],
        ) -> IntArray:
            table = np.full((len(names), len(windows), len(channels)), -1, dtype=np.int64)
            for c, channel in enumerate(channels):
                for statistic, windows_of in statistics_of(channel):
                    for w in windows_of:
                        table[names.index(statistic), w, c] = add(channel.name, statistic, w, channel.unit)
            return table

        gauge_table = fill(layout.gauges, gauge, GAUGE_STATISTICS)
        counter_table = fill(layout.counters, counter, COUNTER_STATISTICS)
        enum_table = fill(layout.enums, enum, ENUM_STATISTICS)
        sets = [(f, name, bits) for f, channel in enumerate(layout.flags) for name, bits in _bits_of(channel)]
        flag_table = np.full((len(windows), len(sets)), -1, dtype=np.int64)
        for p, (_, name, _) in enumerate(sets):
            for w in flag_windows:
                flag_table[w, p] = add(name, "share", w, "")
        spans = [duration_ms(window) for window in windows]
        edges = sorted({*spans, *(2 * span for span in spans)} if look_further else spans)
        return cls(
            columns=tuple(columns),
            layout=layout,
            edges=np.array(edges, dtype=np.int64),
            window_edge=np.array(
                [[edges.index(span), edges.index(2 * span) if look_further else -1] for span in spans], dtype=np.int64
            ),
            gauge_table=gauge_table,
            counter_table=counter_table,
            enum_table=enum_table,
            flag_table=flag_table,
            bits_flag=np.array([f for f, _, _ in sets], dtype=np.int64),
            bits_mask=np.array([bits for _, _, bits in sets], dtype=np.uint64),
        )

    def fill(self, panes: Panes, rows: RowSpans, out: npt.NDArray[np.float32], offset: int = 0) -> None:
        """Write the statistics of ``rows`` into ``out[:, offset:]``."""
        block, layout, doubles, index = panes.block, self.layout, self.window_edge, panes.index
        visits, levels = panes.visits(rows, self.edges)
        times, values = block.times, block.values
        if _any(self.gauge_table):
            ends = (layout.low_at, layout.high_at)
            nodes = panes.nodes("gauge", levels, lambda: gauge_nodes(times, values, *ends, index, index.levels))
            gauge_windows(times, values, *ends, nodes, visits, doubles, _shift(self.gauge_table, offset), out)
        if _any(self.counter_table):
            counters = (layout.offset("counters"), layout.rise_at)
            nodes = panes.nodes("counter", levels, lambda: counter_nodes(values, *counters, index, index.levels))
            counter_windows(values, *counters, nodes, visits, doubles, _shift(self.counter_table, offset), out)
        if _any(self.enum_table):
            enums = (layout.offset("enums"), len(layout.enums))
            nodes = panes.nodes("enum", levels, lambda: enum_nodes(values, *enums, index, index.levels))
            enum_windows(values, *enums, nodes, visits, doubles, _shift(self.enum_table, offset), out)
        if _any(self.flag_table):
            flags, bits = (block.flags, block.flags_known), (self.bits_flag, self.bits_mask)
            nodes = panes.nodes("flags", levels, lambda: flag_nodes(*flags, *bits, index, index.levels))
            flag_windows(*flags, *bits, nodes, visits, doubles, _shift(self.flag_table, offset), out)


def _any(table: IntArray) -> bool:
    return bool((table >= 0).any())


def _shift(table: IntArray, offset: int) -> IntArray:
    return np.where(table >= 0, table + offset, -1)


def _level_matters(channel: Channel) -> bool:
    return channel.name in PERSISTENT_COUNTERS or channel.name not in CATALOGUE


def _bits_of(channel: Channel) -> list[tuple[str, int]]:
    if channel.name in FLAG_BITS:
        return [(f"{channel.name}_{name}", bits) for name, bits in FLAG_BITS[channel.name]]
    return [(channel.name, _ALL_BITS)]
