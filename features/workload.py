"""Feature group ``workload``: how the unit is used, which wears it and explains what it reports."""

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

IDLE_BELOW_PCT = 5.0
"""Utilisation below which a sample counts as idle (assumption: display and monitoring stay under it)."""

BUSY_FROM_PCT = 80.0
"""Utilisation from which a sample counts as busy (assumption: training jobs sit above it)."""


@dataclass(frozen=True, slots=True)
class WorkloadPlan:
    """The columns of the group; none where a dataset has neither utilisation nor power.

    ==========================  ==============================================================================
    gpu_util_pct, idle_share    share of samples below 5 % (larger windows)
    gpu_util_pct, busy_share    share of samples from 80 % on: the duty cycle (larger windows)
    gpu_util_pct, transitions   changes between idle and not idle from one sample to the next (larger windows)
    power_w, swing              highest minus lowest power in the smallest window, W
    power_w, swing_ratio        that swing as a share of the largest window's (NaN if that is 0)
    power_w, step_change        mean change of power from one sample to the next (larger windows), W
    ==========================  ==============================================================================

    Parameters
    ----------
    columns : tuple of FeatureColumn
    windows : int64 array
        Milliseconds, ascending.
    larger : int
        Position of the first of the larger windows.
    utilisation, power, power_low, power_high : int
        Columns of a block's value array; -1 where a dataset has none.
    """

    columns: tuple[FeatureColumn, ...]
    windows: IntArray
    larger: int
    utilisation: int
    power: int
    power_low: int
    power_high: int

    @classmethod
    def of(cls, layout: ChannelLayout, windows: Sequence[timedelta]) -> WorkloadPlan:
        """Plan the group."""
        larger = 1 if len(windows) > 1 else 0
        gauges = {channel.name for channel in layout.gauges}
        where = {name: position for position, name in enumerate(layout.numbers)}
        columns = []
        if "gpu_util_pct" in gauges:
            for statistic in ("idle_share", "busy_share", "transitions"):
                columns += [
                    FeatureColumn.of("workload", "gpu_util_pct", statistic, window=window)
                    for window in windows[larger:]
                ]
        if "power_w" in gauges:
            columns.append(FeatureColumn.of("workload", "power_w", "swing", window=windows[0], unit="W"))
            columns.append(FeatureColumn.of("workload", "power_w", "swing_ratio", window=windows[-1]))
            columns += [
                FeatureColumn.of("workload", "power_w", "step_change", window=window, unit="W")
                for window in windows[larger:]
            ]
        return cls(
            columns=tuple(columns),
            windows=np.array([duration_ms(window) for window in windows], dtype=np.int64),
            larger=larger,
            utilisation=where["gpu_util_pct"] if "gpu_util_pct" in gauges else -1,
            power=where["power_w"] if "power_w" in gauges else -1,
            power_low=where["power_w_min"] if "power_w_min" in layout.lows else -1,
            power_high=where["power_w_max"] if "power_w_max" in layout.highs else -1,
        )

    def fill(self, block: SampleBlock, rows: RowSpans, out: npt.NDArray[np.float32], offset: int = 0) -> None:
        """Write the columns into ``out[:, offset:]`` (float32, shape (rows, columns), C order)."""
        column = offset
        if self.utilisation >= 0:
            _utilisation(
                block.times, block.values, self.utilisation, rows.begins, rows.ends, rows.borders, self.windows,
                self.larger, column, out,
            )  # fmt: skip
            column += 3 * (self.windows.size - self.larger)
        if self.power >= 0:
            _power(
                block.times, block.values, self.power, self.power_low, self.power_high, rows.begins, rows.ends,
                rows.borders, self.windows, self.larger, column, out,
            )  # fmt: skip


@njit(cache=True, nogil=True, error_model="numpy")
def _utilisation(
    times: IntArray,
    values: FloatArray,
    channel: int,
    begins: IntArray,
    ends: IntArray,
    borders: IntArray,
    windows: IntArray,
    larger: int,
    offset: int,
    out: npt.NDArray[np.float32],
) -> None:
    n_windows = windows.size
    n_larger = n_windows - larger
    samples = np.zeros(n_windows)
    idle = np.zeros(n_windows)
    busy = np.zeros(n_windows)
    changes = np.zeros(n_windows)
    for row in range(borders.size):
        border = borders[row]
        samples[:] = 0.0
        idle[:] = 0.0
        busy[:] = 0.0
        changes[:] = 0.0
        newer = np.nan
        newer_age = np.int64(0)
        at = newest_usable(times, begins[row], ends[row], border)
        while at >= begins[row]:
            age = border - times[at]
            if age >= 2 * windows[n_windows - 1]:
                break
            value = values[at, channel]
            at -= 1
            if np.isnan(value):
                continue
            changed = not np.isnan(newer) and (newer < IDLE_BELOW_PCT) != (value < IDLE_BELOW_PCT)
            for w in range(n_windows):
                if changed and newer_age < windows[w]:
                    changes[w] += 1.0
                if age < windows[w]:
                    samples[w] += 1.0
                    idle[w] += 1.0 if value < IDLE_BELOW_PCT else 0.0
                    busy[w] += 1.0 if value >= BUSY_FROM_PCT else 0.0
            newer = value
            newer_age = age
        for w in range(larger, n_windows):
            n = samples[w]
            out[row, offset + w - larger] = idle[w] / n if n > 0 else np.nan
            out[row, offset + n_larger + w - larger] = busy[w] / n if n > 0 else np.nan
            out[row, offset + 2 * n_larger + w - larger] = changes[w] if n > 0 else np.nan


@njit(cache=True, nogil=True, error_model="numpy")
def _power(
    times: IntArray,
    values: FloatArray,
    channel: int,
    low_channel: int,
    high_channel: int,
    begins: IntArray,
    ends: IntArray,
    borders: IntArray,
    windows: IntArray,
    larger: int,
    offset: int,
    out: npt.NDArray[np.float32],
) -> None:
    n_windows = windows.size
    low = np.zeros(n_windows)
    high = np.zeros(n_windows)
    steps = np.zeros(n_windows)
    moved = np.zeros(n_windows)
    for row in range(borders.size):
        border = borders[row]
        low[:] = np.inf
        high[:] = -np.inf
        steps[:] = 0.0
        moved[:] = 0.0
        newer = np.nan
        newer_age = np.int64(0)
        at = newest_usable(times, begins[row], ends[row], border)
        while at >= begins[row]:
            age = border - times[at]
            if age >= 2 * windows[n_windows - 1]:
                break
            value = values[at, channel]
            lowest = values[at, low_channel] if low_channel >= 0 else value
            highest = values[at, high_channel] if high_channel >= 0 else value
            at -= 1
            stepped = not np.isnan(newer) and not np.isnan(value)
            # fmin and fmax take the known one of two: a roll-up's extreme, the value itself, or neither.
            bottom = np.fmin(value, lowest)
            top = np.fmax(value, highest)
            for w in range(n_windows):
                if stepped and newer_age < windows[w]:
                    steps[w] += 1.0
                    moved[w] += abs(newer - value)
                if age < windows[w]:
                    low[w] = np.fmin(low[w], bottom)
                    high[w] = np.fmax(high[w], top)
            if not np.isnan(value):
                newer = value
                newer_age = age
        swing = high[0] - low[0] if high[0] >= low[0] else np.nan
        widest = high[n_windows - 1] - low[n_windows - 1]
        out[row, offset] = swing
        out[row, offset + 1] = swing / widest if widest > 0.0 else np.nan
        for w in range(larger, n_windows):
            out[row, offset + 2 + w - larger] = moved[w] / steps[w] if steps[w] > 0 else np.nan
