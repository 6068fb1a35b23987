"""Feature group ``onset``: errors that have just started to increase, relative to the fleet and the unit's own past.

Many healthy units log errors all their life, and a driver can multiply a counter on every unit that runs it. Each
counter's rise over a window is therefore compared with the 95th percentile of units of the same model and driver at
that decision time, and with the rise expected from the unit's own past. A *surge* is the smaller of the two log ratios;
the largest surge of all counters lets a model generalize from one kind of failure to another.

Fleet percentiles exist on the decision grid only: an off-grid (augmented) row is compared with the last grid time
before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import pandas as pd
from numba import njit

from features.fleet import Fleet
from features.groups.peers import model_codes
from features.groups.static import StaticFacts, StaticPlan
from features.vocabulary import FeatureColumn
from features.windows.blocks import FloatArray, IntArray
from features.windows.layout import ChannelLayout
from features.windows.window_plan import WindowPlan

Float32Array = npt.NDArray[np.float32]

QUANTILE = 0.95
"""Quantile of the rises of comparable units above which an excess is measured. On development fleets the 50th and the
99th percentile were less predictive: half of all units always exceed the former, and few failing ones the latter."""

MIN_UNITS = 20
"""Minimum units for a percentile; with fewer of the same model and driver, use the model, then the fleet."""

ALL = "errors"
"""Channel name of the columns that aggregate all counters."""

_COMBINED = ("surge_max", "surge_sum", "excess_max", "excess_sum")
_TILE = 65_536
_NOT_ERRORS = frozenset({"mJ", "J", "ns", "us", "ms", "s", "B", "bytes", "MiB", "B/s", "MiB/s"})


@dataclass(frozen=True, slots=True)
class FleetKinds:
    """Models and drivers of a fleet."""

    model_of_pair: IntArray
    models: int
    driver: StaticFacts | None
    drivers: int

    @classmethod
    def of(cls, fleet: Fleet, inventory: pd.DataFrame, events: pd.DataFrame) -> "FleetKinds":
        """Read a fleet's inventory and events."""
        model_of_pair, models = model_codes(fleet, inventory)
        if "driver" not in inventory.columns:
            return cls(model_of_pair, models, None, 0)
        plan = StaticPlan.of(inventory, events, ("driver",))
        return cls(model_of_pair, models, plan.of_fleet(fleet, inventory, events), len(plan.columns[0].categories))

    def levels(self, pair: IntArray, time: IntArray) -> IntArray:
        """Return comparison groups of rows: by model and driver, by model, and the whole fleet; shape (3, rows).

        ``pair``, ``time``: of each row, time in ms; the driver is the one known at that time.
        """
        model = self.model_of_pair[pair]
        driver = np.zeros(pair.size, dtype=np.int64)
        if self.driver is not None:
            driver_code = self.driver.values(pair, time)[:, 0]
            driver = np.where(np.isnan(driver_code), 0, driver_code + 1).astype(np.int64)
        distinct, narrow = np.unique(model * (self.drivers + 1) + driver, return_inverse=True)
        everyone = np.full(pair.size, len(distinct) + self.models, dtype=np.int64)
        return np.stack((narrow.astype(np.int64), len(distinct) + model, everyone))


@dataclass(frozen=True, slots=True)
class OnsetPlan:
    """The columns of the group.

    ====================  ========================================================================================
    X, surge              smaller log ratio of the rise of X over the window to (a) the 95th percentile of units of
                          its model and driver and (b) the rise expected from its own past
    errors, surge_max     largest surge of any X
    errors, surge_sum     sum of the positive surges
    errors, excess_max    largest log ratio (a) of any X
    errors, excess_sum    sum of the positive ones
    ====================  ========================================================================================

    X is an error counter (energy, time and traffic are excluded) or a known bit of a bitmask, counted in samples. Log
    ratios are of rises plus one. NaN if the counter, the fleet or the past is unknown. Nothing older than the longest
    past counts, not even as the base value of its first sample, nor anything before the end of a planned maintenance:
    windows that contain it are NaN, and pasts are shortened.

    ``amounts``: rises and shares over every window and past.
    ``now``, ``past``: columns of ``amounts``: the window and its past; shape (surges,).
    ``hours_now``, ``hours_past``: shape (surges,).
    ``steps_now``, ``steps_past``: factor that turns an amount into a count: 1 for a counter, samples in the window for
    a share; shape (surges,).
    ``window_of``: number of each surge's window; shape (surges,).
    """

    columns: tuple[FeatureColumn, ...]
    amounts: WindowPlan
    now: IntArray
    past: IntArray
    hours_now: FloatArray
    hours_past: FloatArray
    steps_now: FloatArray
    steps_past: FloatArray
    window_of: IntArray
    windows: int

    @classmethod
    def of(
        cls, layout: ChannelLayout, pairs: Sequence[tuple[timedelta, timedelta]], *, step: timedelta
    ) -> "OnsetPlan | None":
        """Plan the group; None if the dataset has no error counter."""
        spans = sorted({span for pair in pairs for span in pair})
        errors = {channel.name for channel in layout.counters if channel.unit not in _NOT_ERRORS}
        amounts = WindowPlan.amounts(layout, spans, errors)
        if not amounts.columns:
            return None
        place = {(str(column.channel), column.window): i for i, column in enumerate(amounts.columns)}
        channels = list(dict.fromkeys(str(column.channel) for column in amounts.columns))
        shares = {str(column.channel) for column in amounts.columns if column.statistic == "share"}
        columns = [
            FeatureColumn.of("onset", channel, "surge", window=window) for window, _ in pairs for channel in channels
        ]
        for window, _ in pairs:
            columns += [FeatureColumn.of("onset", ALL, statistic, window=window) for statistic in _COMBINED]
        hour, counted = timedelta(hours=1), np.tile([channel in shares for channel in channels], len(pairs))

        def by_surge(values: Sequence[float]) -> FloatArray:
            return np.repeat(np.array(values), len(channels))

        return cls(
            columns=tuple(columns),
            amounts=amounts,
            now=np.array([place[channel, window] for window, _ in pairs for channel in channels], dtype=np.int64),
            past=np.array([place[channel, baseline] for _, baseline in pairs for channel in channels], dtype=np.int64),
            hours_now=by_surge([window / hour for window, _ in pairs]),
            hours_past=by_surge([baseline / hour for _, baseline in pairs]),
            steps_now=np.where(counted, by_surge([window / step for window, _ in pairs]), 1.0),
            steps_past=np.where(counted, by_surge([baseline / step for _, baseline in pairs]), 1.0),
            window_of=np.repeat(np.arange(len(pairs)), len(channels)),
            windows=len(pairs),
        )

    def fill(
        self,
        amounts: Float32Array,
        levels: IntArray,
        time: IntArray,
        augmented: npt.NDArray[np.bool_],
        grid_times: IntArray,
        observed_hours: FloatArray,
        out: Float32Array,
        offset: int,
    ) -> None:
        """Write the group's columns into ``out[:, offset:]``, for all rows of some decision times.

        ``time``, ``grid_times``: decision time of each row, and the last grid time at or before it (ms).
        ``observed_hours``: hours of samples available to each row since a maintenance ended; infinite without one.
        """
        grid = np.flatnonzero(~augmented)
        times, percentiles = self._reference(amounts[grid], levels[:, grid], time[grid], observed_hours[grid])
        position = np.searchsorted(times, grid_times, side="right") - 1
        on_grid = position >= 0
        on_grid[on_grid] = times[position[on_grid]] == grid_times[on_grid]
        surges = self.now.size
        for begin in range(0, grid_times.size, _TILE):
            tile = slice(begin, min(begin + _TILE, grid_times.size))
            logs, known = self._logs(amounts[tile], observed_hours[tile]), on_grid[tile]
            reference = np.full(logs.shape, np.nan)
            for level in levels:
                percentile = np.full(logs.shape, np.nan)
                percentile[known] = percentiles[position[tile][known], level[tile][known]]
                reference = np.where(np.isnan(reference), percentile, reference)
            excess = logs - reference
            surge = np.minimum(excess, logs - self._expected(amounts[tile], observed_hours[tile]))
            out[tile, offset : offset + surges] = surge
            for window in range(self.windows):
                of_window = self.window_of == window
                combined = np.column_stack([*_combine(surge[:, of_window]), *_combine(excess[:, of_window])])
                first = offset + surges + window * len(_COMBINED)
                out[tile, first : first + len(_COMBINED)] = combined

    def _reference(
        self, amounts: Float32Array, levels: IntArray, time: IntArray, observed_hours: FloatArray
    ) -> tuple[IntArray, FloatArray]:
        """Return percentiles of log rises at each distinct time, by comparison group; NaN with too few units."""
        times, code = np.unique(time, return_inverse=True)
        kinds = int(levels.max(initial=-1)) + 1
        values = np.full((times.size, kinds, self.now.size), np.nan)
        order = np.argsort(code, kind="stable")
        bounds = np.searchsorted(code[order], np.arange(times.size + 1))
        for i in range(times.size):
            chosen = order[bounds[i] : bounds[i + 1]]
            logs = self._logs(amounts[chosen], observed_hours[chosen])
            for level in levels:
                _percentiles(logs, level[chosen], QUANTILE, MIN_UNITS, values[i])
        return times, values

    def _logs(self, amounts: Float32Array, observed_hours: FloatArray) -> FloatArray:
        logs = np.log1p(amounts[:, self.now].astype(np.float64) * self.steps_now)
        cut = np.flatnonzero(observed_hours < self.hours_now.max(initial=0.0))
        logs[cut] = np.where(observed_hours[cut, None] < self.hours_now, np.nan, logs[cut])
        return logs

    def _expected(self, amounts: Float32Array, observed_hours: FloatArray) -> FloatArray:
        """Return the log of one plus the rise expected at the rate of the preceding past."""
        now = amounts[:, self.now].astype(np.float64) * self.steps_now
        # Amounts are float32, so the difference may be slightly negative.
        earlier = np.maximum(amounts[:, self.past].astype(np.float64) * self.steps_past - now, 0.0)
        expected = np.log1p(earlier / (self.hours_past - self.hours_now) * self.hours_now)
        cut = np.flatnonzero(observed_hours < self.hours_past.max(initial=0.0))
        hours = np.minimum(observed_hours[cut, None], self.hours_past) - self.hours_now
        known = np.where(hours > 0, earlier[cut] / np.where(hours > 0, hours, 1.0), np.nan)
        expected[cut] = np.log1p(known * self.hours_now)
        return expected


def _combine(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    known = ~np.isnan(values).all(axis=1)
    filled = np.where(np.isnan(values), -np.inf, values)
    largest = np.where(known, filled.max(axis=1), np.nan)
    total = np.where(known, np.maximum(filled, 0.0).sum(axis=1), np.nan)
    return largest, total


@njit(cache=True, nogil=True)
def _percentiles(logs: FloatArray, kind: IntArray, quantile: float, min_units: int, out: FloatArray) -> None:
    """Write the percentile (linear interpolation) of each group and column into ``out``, shape (kinds, columns)."""
    rows, columns = logs.shape
    order = np.argsort(kind)
    buffer = np.empty(rows, dtype=np.float64)
    begin = 0
    while begin < rows:
        end = begin
        group = kind[order[begin]]
        while end < rows and kind[order[end]] == group:
            end += 1
        for column in range(columns):
            n = 0
            for i in range(begin, end):
                value = logs[order[i], column]
                if not np.isnan(value):
                    buffer[n] = value
                    n += 1
            if n >= min_units:
                ordered = np.sort(buffer[:n])
                place = quantile * (n - 1)
                low = int(place)
                high = min(low + 1, n - 1)
                out[group, column] = ordered[low] + (place - low) * (ordered[high] - ordered[low])
        begin = end
