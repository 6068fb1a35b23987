"""Feature group ``gaps``: what is missing from the telemetry, which is itself a sign.

A GPU that is about to fall off the bus often stops answering first; a hung exporter repeats its last values; a driver
in trouble stops reporting single channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import numpy.typing as npt
from numba import njit

from features.blocks import RowSpans, SampleBlock
from features.kernel import FloatArray, IntArray, newest_usable
from features.layout import ChannelLayout
from features.service import duration_ms
from features.vocabulary import FeatureColumn

_HOUR_MS = 3_600_000.0


@dataclass(frozen=True, slots=True)
class GapPlan:
    """The columns of the group.

    ========================  ==================================================================================
    samples, missing          share of the samples expected by the dataset's step that did not come (each window);
                              from a source slower than the step it is a constant near one
    samples, longest_gap      longest time without a sample in the largest window, hours
    samples, age              hours from the newest sample to the decision; the look-back where there is none
    samples, repeated         share of samples in which no gauge moved against the sample before (larger windows)
    channels, vanished        channels that reported in the look-back but not in the smallest window
    node_units, fresh         share of the node's units in service with a sample in the smallest window
    ========================  ==================================================================================

    Parameters
    ----------
    columns : tuple of FeatureColumn
    layout : ChannelLayout
    windows : int64 array
        Windows in milliseconds, ascending.
    look_back, step, delay : int
        Milliseconds.
    repeated_from : int
        First window over which repeats are counted.
    with_node : bool
        Whether units share nodes, and ``fresh`` is a column.
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
        cls,
        layout: ChannelLayout,
        windows: Sequence[timedelta],
        *,
        step: timedelta,
        delay: timedelta,
        unit: str,
    ) -> GapPlan:
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
        self, block: SampleBlock, rows: RowSpans, since: IntArray, out: npt.NDArray[np.float32], offset: int = 0
    ) -> None:
        """Write every column but ``fresh`` into ``out[:, offset:]``.

        Parameters
        ----------
        block : SampleBlock
            The samples.
        rows : RowSpans
            For each row its unit's samples and its border.
        since : int64 array, shape (rows,)
            When the unit came into service (ms): samples are expected from then on.
        out : float32 array, shape (rows, columns), C order
        offset : int
        """
        _gap_windows(
            block.times,
            block.values,
            block.flags_known,
            len(self.layout.gauges),
            np.array([*range(len(self.layout.gauges)), *self._steppers()], dtype=np.int64),
            rows.begins,
            rows.ends,
            rows.borders,
            since,
            self.windows,
            self.look_back,
            self.step,
            self.delay,
            self.repeated_from,
            offset,
            out,
        )

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

    Parameters
    ----------
    times : int64 array
        Sample times of the block.
    begins, ends : int64 arrays, shape (pairs,)
        Samples of each pair.
    service : bool array, shape (times, pairs)
        Which pairs are in service at which decision time.
    row_time : int64 array, shape (rows,)
        Each row's position among the decision times.
    row_first, row_last : int64 arrays, shape (rows,)
        Range of the pairs of each row's node.
    borders : int64 array, shape (rows,)
    window : int
        Milliseconds.
    column : int
        Column of ``out``, float32 of shape (rows, columns).
    """
    for row in range(borders.size):
        present = 0
        fresh = 0
        for pair in range(row_first[row], row_last[row]):
            if service[row_time[row], pair]:
                present += 1
                at = newest_usable(times, begins[pair], ends[pair], borders[row])
                if at >= begins[pair] and borders[row] - times[at] < window:
                    fresh += 1
        out[row, column] = fresh / present if present > 0 else np.nan


@njit(cache=True, nogil=True, error_model="numpy")
def _gap_windows(
    times: IntArray,
    values: FloatArray,
    flags_known: npt.NDArray[np.bool_],
    n_gauges: int,
    watched: IntArray,
    begins: IntArray,
    ends: IntArray,
    borders: IntArray,
    since: IntArray,
    windows: IntArray,
    look_back: int,
    step: int,
    delay: int,
    repeated_from: int,
    offset: int,
    out: npt.NDArray[np.float32],
) -> None:
    n_windows = windows.size
    n_watched = watched.size + flags_known.shape[1]
    largest = windows[n_windows - 1]
    samples = np.zeros(n_windows)
    pairs = np.zeros(n_windows)
    repeats = np.zeros(n_windows)
    now = np.zeros(n_watched, dtype=np.bool_)
    before = np.zeros(n_watched, dtype=np.bool_)
    for row in range(borders.size):
        border = borders[row]
        begin = begins[row]
        samples[:] = 0.0
        pairs[:] = 0.0
        repeats[:] = 0.0
        now[:] = False
        before[:] = False
        longest = 0
        reached = 0  # age up to which gaps have been looked at
        youngest = look_back
        at = newest_usable(times, begin, ends[row], border)
        while at >= begin:
            age = border - times[at]
            if age >= look_back:
                break
            youngest = min(youngest, age)
            if age < largest:
                longest = max(longest, age - reached)
                reached = age
                paired = at > begin and border - times[at - 1] < look_back
                repeated = paired and _repeats(values, at, at - 1, n_gauges)
                _count(age, windows, paired, repeated, samples, pairs, repeats)
            _note_known(values, flags_known, watched, at, now if age < windows[0] else before)
            at -= 1
        in_service = border - since[row]
        for w in range(n_windows):
            expected = min(windows[w], in_service) // step
            share = min(max(1.0 - samples[w] / expected, 0.0), 1.0) if expected > 0 else np.nan
            out[row, offset + w] = share
        # the stretch from the oldest sample in the window back to its beginning is a gap like any other
        longest = max(longest, min(largest, max(in_service, 0)) - reached)
        column = offset + n_windows
        out[row, column] = longest / _HOUR_MS
        out[row, column + 1] = (youngest + delay) / _HOUR_MS
        column += 2
        for w in range(repeated_from, n_windows):
            out[row, column] = repeats[w] / pairs[w] if pairs[w] > 0 and n_gauges > 0 else np.nan
            column += 1
        out[row, column] = np.sum(before & ~now)


@njit(cache=True, nogil=True)
def _count(
    age: int,
    windows: IntArray,
    paired: bool,
    repeated: bool,
    samples: FloatArray,
    pairs: FloatArray,
    repeats: FloatArray,
) -> None:
    for w in range(windows.size):
        if age < windows[w]:
            samples[w] += 1.0
            if paired:
                pairs[w] += 1.0
            if repeated:
                repeats[w] += 1.0


@njit(cache=True, nogil=True)
def _note_known(
    values: FloatArray,
    flags_known: npt.NDArray[np.bool_],
    watched: IntArray,
    at: int,
    seen: npt.NDArray[np.bool_],
) -> None:
    for j in range(watched.size):
        if not np.isnan(values[at, watched[j]]):
            seen[j] = True
    for j in range(flags_known.shape[1]):
        if flags_known[at, j]:
            seen[watched.size + j] = True


@njit(cache=True, nogil=True)
def _repeats(values: FloatArray, newer: int, older: int, n_gauges: int) -> bool:
    alike = False
    for c in range(n_gauges):
        a = values[newer, c]
        b = values[older, c]
        if a == b:
            alike = True
        elif not (np.isnan(a) and np.isnan(b)):  # one of them moved, came or went
            return False
    return alike
