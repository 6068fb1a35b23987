"""Feature group ``gaps``: missing telemetry, which is itself a sign of failure.

A GPU that is about to fall off the bus often stops responding first; a hung exporter repeats its last values; a faulty
driver stops reporting single channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from numba import njit

from features.vocabulary import FeatureColumn
from features.windows.blocks import FloatArray, IntArray, RowSpans, SampleBlock
from features.windows.layout import ChannelLayout
from features.windows.pane_index import PaneIndex, Panes, Visits, level_offset, newest_usable
from foundation.times import duration_ms

BoolArray = npt.NDArray[np.bool_]

_HOUR_MS = 3_600_000.0


_BATCH = 2048
"""Samples per batch, in which all channels are examined."""


class SampleFacts(NamedTuple):
    """Time of each sample, whether it repeats the previous one, and a bit per channel that it reports."""

    times: IntArray
    is_repeat: BoolArray
    known: npt.NDArray[np.uint64]


class GapNodes(NamedTuple):
    """Per node: longest interval between two samples, repeated samples, and a bit per reported channel."""

    longest: IntArray
    repeats: IntArray
    words: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class GapPlan:
    """The columns of the group.

    ========================  ==================================================================================
    samples, missing          share of the samples expected by the dataset's step that are missing (each window);
                              nearly constant, close to one, if the source is slower than the step
    samples, longest_gap      longest time without a sample in the largest window, hours
    samples, age              hours from the newest sample to the decision; without samples, the look-back
    samples, repeated         share of samples in which no gauge changed from the previous one (larger windows)
    channels, vanished        channels that reported in the look-back but not in the smallest window
    node_units, fresh         share of the node's units in service with a sample in the smallest window
    ========================  ==================================================================================

    After planned maintenance, all of them look back to its end, as for a unit that entered service then; ``fresh``
    excludes units that were in maintenance during the smallest window.

    ``windows``: in milliseconds, ascending.
    ``with_node``: whether units share nodes, so that ``fresh`` is a column.
    """

    columns: tuple[FeatureColumn, ...]
    layout: ChannelLayout
    windows: IntArray
    look_back: int
    step: int
    delay: int
    repeated_from: int
    with_node: bool

    @classmethod
    def of(
        cls, layout: ChannelLayout, windows: Sequence[timedelta], *, step: timedelta, delay: timedelta, unit: str
    ) -> Self:
        """Plan the group for a dataset with telemetry."""
        larger = 1 if len(windows) > 1 else 0
        columns = [FeatureColumn.of("gaps", "samples", "missing", window=window) for window in windows]
        columns.append(FeatureColumn.of("gaps", "samples", "longest_gap", window=windows[-1], unit="h"))
        columns.append(FeatureColumn.of("gaps", "samples", "age", unit="h"))
        columns += [FeatureColumn.of("gaps", "samples", "repeated", window=window) for window in windows[larger:]]
        columns.append(FeatureColumn.of("gaps", "channels", "vanished", window=windows[0]))
        if unit == "gpu":
            columns.append(FeatureColumn.of("gaps", "node_units", "fresh", window=windows[0]))
        return cls(
            columns=tuple(columns),
            layout=layout,
            windows=np.array([duration_ms(window) for window in windows], dtype=np.int64),
            look_back=2 * duration_ms(windows[-1]),
            step=duration_ms(step),
            delay=duration_ms(delay),
            repeated_from=larger,
            with_node=unit == "gpu",
        )

    def fill(
        self, panes: Panes, rows: RowSpans, since: IntArray, out: npt.NDArray[np.float32], offset: int = 0
    ) -> None:
        """Write every column but ``fresh`` into ``out[:, offset:]``.

        ``rows``: sample range and border of each row.
        ``since``: when the unit entered service (ms), from when on samples are expected; shape (rows,).
        ``out``: shape (rows, columns).
        """
        block, index = panes.block, panes.index
        edges = np.unique(np.append(self.windows, self.look_back))
        visits, levels = panes.visits(rows, edges)
        facts = self._sample_facts(block)
        nodes = _gap_nodes(facts, index, index.levels if levels else 0)
        _gap_windows(
            facts,
            nodes,
            visits,
            len(self.layout.gauges) > 0,
            rows.borders,
            since,
            self.windows,
            edges,
            self.step,
            self.delay,
            self.repeated_from,
            offset,
            out,
        )

    def _sample_facts(self, block: SampleBlock) -> SampleFacts:
        gauges = len(self.layout.gauges)
        watched = np.array([*range(gauges), *self._steppers()], dtype=np.int64)
        is_repeat = np.zeros(block.times.size, dtype=np.bool_)
        changed = np.zeros(block.times.size, dtype=np.bool_)
        known = np.zeros((-(-(watched.size + len(block.flags_known)) // 64), block.times.size), dtype=np.uint64)
        _note_samples(block.values, gauges, watched, block.flags_known, is_repeat, changed, known)
        return SampleFacts(block.times, is_repeat & ~changed, known)

    def _steppers(self) -> list[int]:
        layout = self.layout
        counters = range(layout.offset("counters"), layout.offset("counters") + len(layout.counters))
        return [*counters, *range(layout.offset("enums"), layout.offset("enums") + len(layout.enums))]


@njit(cache=True, nogil=True, error_model="numpy")
def fresh_share(
    times: IntArray,
    begins: IntArray,
    ends: IntArray,
    service: npt.NDArray[np.bool_],
    row_time: IntArray,
    row_first: IntArray,
    row_last: IntArray,
    borders: IntArray,
    window: int,
    column: int,
    out: npt.NDArray[np.float32],
) -> None:
    """Fill the share of a node's units in service that have a sample in the window.

    ``begins``, ``ends``: samples of each pair; shape (pairs,).
    ``service``: which pairs are in service at which decision time; shape (times, pairs).
    ``row_time``, ``row_first``, ``row_last``: each row's position among the times, and its node's pair range.
    """
    for row in range(borders.size):
        present = 0
        fresh = 0
        for pair in range(row_first[row], row_last[row]):
            if service[row_time[row], pair]:
                present += 1
                newest = newest_usable(times, begins[pair], ends[pair], borders[row])
                if newest >= begins[pair] and borders[row] - times[newest] < window:
                    fresh += 1
        out[row, column] = fresh / present if present > 0 else np.nan


@njit(cache=True, nogil=True)
def _note_samples(
    values: FloatArray,
    gauges: int,
    watched: IntArray,
    flags_known: npt.NDArray[np.bool_],
    is_repeat: BoolArray,
    changed: BoolArray,
    known: npt.NDArray[np.uint64],
) -> None:
    """Process all channels for a batch of samples at a time, so that results stay in the L1 cache."""
    for begin in range(0, is_repeat.size, _BATCH):
        end = min(begin + _BATCH, is_repeat.size)
        previous = max(begin - 1, 0)
        for c in range(gauges):
            _compare(values[c, previous:end], is_repeat[previous:end], changed[previous:end])
        for bit in range(watched.size):
            _note_values(values[watched[bit], begin:end], bit % 64, known[bit // 64, begin:end])
        for flag in range(flags_known.shape[0]):
            bit = watched.size + flag
            _note(flags_known[flag, begin:end], bit % 64, known[bit // 64, begin:end])


@njit(cache=True, nogil=True)
def _compare(series: FloatArray, is_repeat: BoolArray, changed: BoolArray) -> None:
    """Record where a gauge equals its previous sample, and where it changed, appeared or disappeared."""
    for i in range(1, series.size):
        a = series[i]
        b = series[i - 1]
        # At a unit's first sample, b belongs to another unit; `_gap_windows` leaves that comparison out.
        same = a == b
        is_repeat[i] |= same
        changed[i] |= not same and (not np.isnan(a) or not np.isnan(b))


@njit(cache=True, nogil=True)
def _note_values(series: FloatArray, bit: int, words: npt.NDArray[np.uint64]) -> None:
    for i in range(series.size):
        words[i] |= np.uint64(not np.isnan(series[i])) << np.uint64(bit)


@njit(cache=True, nogil=True)
def _note(known: BoolArray, bit: int, words: npt.NDArray[np.uint64]) -> None:
    for i in range(known.size):
        words[i] |= np.uint64(known[i]) << np.uint64(bit)


@njit(cache=True, nogil=True)
def _gap_nodes(facts: SampleFacts, index: PaneIndex, levels: int) -> GapNodes:
    """Aggregate the panes, and merge them level by level; the longest interval of an empty node is 0."""
    times, known = facts.times, facts.known
    count = index.nodes if levels > 0 else 0
    longest = np.zeros(count, dtype=np.int64)
    repeats = np.zeros(count, dtype=np.int64)
    words = np.zeros((known.shape[0], count), dtype=np.uint64)
    if levels == 0:
        return GapNodes(longest, repeats, words)
    for run in range(index.run_first.size):
        start = index.run_start[run]
        panes = index.run_panes[run]
        for pane in range(panes):
            node = index.run_node[run] + pane
            first = index.starts[start + pane]
            for i in range(first, index.starts[start + pane + 1]):
                if i > first:
                    longest[node] = max(longest[node], times[i] - times[i - 1])
                repeats[node] += facts.is_repeat[i]
                for word in range(known.shape[0]):
                    words[word, node] |= known[word, i]
        for level in range(1, levels):
            for pane in range(panes >> level):
                node = index.run_node[run] + level_offset(panes, level) + pane
                older = index.run_node[run] + level_offset(panes, level - 1) + 2 * pane
                begin = index.starts[start + (pane << level)]
                middle = index.starts[start + (pane << level) + (1 << (level - 1))]
                end = index.starts[start + ((pane + 1) << level)]
                longest[node] = max(longest[older], longest[older + 1])
                if begin < middle < end:
                    longest[node] = max(longest[node], times[middle] - times[middle - 1])
                repeats[node] = repeats[older] + repeats[older + 1]
                for word in range(known.shape[0]):
                    words[word, node] = words[word, older] | words[word, older + 1]
    return GapNodes(longest, repeats, words)


@njit(cache=True, nogil=True, error_model="numpy")
def _gap_windows(
    facts: SampleFacts,
    nodes: GapNodes,
    visits: Visits,
    has_gauges: bool,
    borders: IntArray,
    since: IntArray,
    windows: IntArray,
    edges: IntArray,
    step: int,
    delay: int,
    repeated_from: int,
    offset: int,
    out: npt.NDArray[np.float32],
) -> None:
    n_windows = windows.size
    window_edge = np.searchsorted(edges, windows)
    largest = window_edge[n_windows - 1]
    samples = np.zeros(edges.size)
    repeats = np.zeros(edges.size)
    now = np.zeros(facts.known.shape[0], dtype=np.uint64)
    earlier = np.zeros(facts.known.shape[0], dtype=np.uint64)
    for row in range(borders.size):
        border = borders[row]
        in_service = border - since[row]
        _count(facts, nodes, visits, row, samples, repeats)
        for w in range(n_windows):
            expected = min(windows[w], in_service) // step
            missing_share = 1.0 - samples[window_edge[w]] / expected if expected > 0 else np.nan
            out[row, offset + w] = min(max(missing_share, 0.0), 1.0) if expected > 0 else np.nan
        window_end = visits.stops[row, largest]
        longest, reached = _longest_gap(facts, nodes, visits, visits.begin[row], window_end, border)
        # the time from the start of the window to its oldest sample is a gap, too
        longest = max(longest, min(windows[n_windows - 1], max(in_service, 0)) - reached)
        column = offset + n_windows
        out[row, column] = longest / _HOUR_MS
        begin, end = visits.begin[row], visits.stops[row, edges.size - 1]
        youngest = border - facts.times[visits.last[begin] - 1] if end > begin else edges[edges.size - 1]
        out[row, column + 1] = (youngest + delay) / _HOUR_MS
        column += 2
        for w in range(repeated_from, n_windows):
            pairs = samples[window_edge[w]]
            hits = repeats[window_edge[w]]
            if end > begin and visits.stops[row, window_edge[w]] == end:
                pairs -= 1.0  # the oldest sample's predecessor lies beyond the look-back
                hits -= facts.is_repeat[visits.first[end - 1]]
            out[row, column] = hits / pairs if pairs > 0.0 and has_gauges else np.nan
            column += 1
        middle = visits.stops[row, 0]
        _known_words(facts, nodes, visits, begin, middle, now)
        _known_words(facts, nodes, visits, middle, end, earlier)
        vanished = 0
        for word in range(now.size):
            missing_bits = earlier[word] & ~now[word]
            while missing_bits:
                missing_bits &= missing_bits - np.uint64(1)
                vanished += 1
        out[row, column] = vanished


@njit(cache=True, nogil=True)
def _count(
    facts: SampleFacts, nodes: GapNodes, visits: Visits, row: int, samples: FloatArray, repeats: FloatArray
) -> None:
    """Count a row's samples, and those that repeat the previous one, up to each edge."""
    count = 0.0
    same = 0.0
    visit = visits.begin[row]
    for edge in range(samples.size):
        while visit < visits.stops[row, edge]:
            count += visits.last[visit] - visits.first[visit]
            if visits.node[visit] >= 0:
                same += nodes.repeats[visits.node[visit]]
            else:
                for sample in range(visits.first[visit], visits.last[visit]):
                    same += facts.is_repeat[sample]
            visit += 1
        samples[edge] = count
        repeats[edge] = same


@njit(cache=True, nogil=True)
def _longest_gap(
    facts: SampleFacts, nodes: GapNodes, visits: Visits, begin: int, end: int, border: int
) -> tuple[int, int]:
    """Return the longest time without a sample before a border, and the age of the oldest sample visited."""
    times = facts.times
    longest = 0
    reached = 0
    for i in range(begin, end):
        first = visits.first[i]
        last = visits.last[i]
        longest = max(longest, border - times[last - 1] - reached)
        reached = border - times[first]
        if visits.node[i] >= 0:
            longest = max(longest, nodes.longest[visits.node[i]])
        else:
            for sample in range(first + 1, last):
                longest = max(longest, times[sample] - times[sample - 1])
    return longest, reached


@njit(cache=True, nogil=True)
def _known_words(
    facts: SampleFacts, nodes: GapNodes, visits: Visits, begin: int, end: int, out: npt.NDArray[np.uint64]
) -> None:
    """Write which channels the samples of some visits report."""
    out[:] = 0
    for i in range(begin, end):
        for word in range(out.size):
            if visits.node[i] >= 0:
                out[word] |= nodes.words[word, visits.node[i]]
            else:
                for sample in range(visits.first[i], visits.last[i]):
                    out[word] |= facts.known[word, sample]
