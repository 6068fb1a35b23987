"""Raw windows: the recent steps of a few channels, for sequence models.

Stored next to a matrix's rows as one array of (pair, step, channel), so that overlapping windows cost nothing. Steps
end at the newest usable sample time of decisions (decision time less reporting delay): a window at t consists of whole
steps that ended by t - delay and holds nothing that was unknown at t. Off the decision grid, the newest whole step may
end up to one step earlier.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from features.config import DecisionSection
from features.fleet import Fleet
from features.matrix.meta import MatrixConfig
from features.vocabulary import FeatureColumn
from features.windows.blocks import FloatArray, IntArray, SampleBlock, blocks_of, key_columns
from features.windows.layout import ChannelLayout, unknown_channel
from foundation.errors import InputError
from foundation.times import duration_ms, instant_ms
from telemetry.dataset.channels import Channel
from telemetry.dataset.store import Dataset
from telemetry.importing.samples.rollup import reset_aware_rise

PAPER_CHANNELS = ("gpu_temp_c", "power_w", "gpu_util_pct", "mem_util_pct")
"""Channels of ``auto``: dynamic attributes of Liu et al., arXiv 2201.11853, Table 1, under our names."""

ARRAY_NAME = "sequences.npy"
"""Array file in the matrix folder: float32, shape (pairs, steps, channels), NaN where unknown."""

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """Composition of a raw window.

    ``channels``: gauges (mean per step) and counters (reset-aware increase per step), in the configured order.
    """

    channels: tuple[Channel, ...]
    window: timedelta
    step: timedelta
    delay_ms: int

    @classmethod
    def of(cls, config: MatrixConfig) -> Self:
        """Plan the windows of a dataset.

        Raises ``InputError`` if a channel does not exist or is neither gauge nor counter, or ``auto`` matches none.
        """
        section, channels = config.features.sequence, config.channels
        location = "parameter features.sequence.channels"
        if section.channels == "auto":
            names = [name for name in PAPER_CHANNELS if name in channels]
            if not names:
                raise InputError(
                    f"the dataset has none of the channels of 'auto': {', '.join(PAPER_CHANNELS)}",
                    location,
                    "Name channels of the dataset: " + (", ".join(sorted(channels)) or "it has none") + ".",
                )
        else:
            names = list(section.channels)
        for name in names:
            if name not in channels:
                raise unknown_channel(name, channels, location)
            if channels[name].kind not in ("gauge", "counter"):
                raise InputError(
                    f"channel '{name}' is of kind {channels[name].kind}, which has neither a mean nor a rise",
                    location,
                    "Name gauges and counters only.",
                )
        return cls(
            tuple(channels[name] for name in names), section.window, section.step, duration_ms(config.features.delay)
        )

    @property
    def steps(self) -> int:
        """Steps per window."""
        return int(self.window / self.step)

    @property
    def step_ms(self) -> int:
        """Length of a step in milliseconds."""
        return duration_ms(self.step)

    @property
    def columns(self) -> tuple[FeatureColumn, ...]:
        """Columns of a flattened window: oldest step first, channel by channel within a step.

        A column's ``window`` is the time from the start of its step to the newest usable sample.
        """
        return tuple(
            FeatureColumn.of(
                "telemetry",
                channel.name,
                "step_mean" if channel.kind == "gauge" else "step_rise",
                window=self.step * (self.steps - i),
                unit=channel.unit,
            )
            for i in range(self.steps)
            for channel in self.channels
        )


@dataclass(frozen=True, slots=True)
class StepAxis:
    """Steps of an array: step j covers the samples after ``first_ms + (j - 1) * step_ms`` up to its end.

    ``first_ms``: end of step 0, in milliseconds since the epoch.
    """

    first_ms: int
    step_ms: int
    count: int

    @classmethod
    def over(cls, plan: SequencePlan, decision: DecisionSection, begin_ms: int, end_ms: int) -> Self:
        """Divide a span into whole steps that end at grid times less the delay."""
        anchor = instant_ms(decision.origin) - plan.delay_ms
        first = begin_ms + (anchor - begin_ms) % plan.step_ms
        return cls(first, plan.step_ms, max((end_ms - first) // plan.step_ms + 1, 0))

    def newest(self, border_ms: IntArray) -> IntArray:
        """Return the newest step that ended by each border; may be negative or beyond the last step."""
        return (border_ms - self.first_ms) // self.step_ms

    def step_of(self, time_ms: IntArray) -> IntArray:
        """Return the step that covers each sample time."""
        return -((self.first_ms - time_ms) // self.step_ms)


def _fill_steps(
    plan: SequencePlan, layout: ChannelLayout, block: SampleBlock, fleet: Fleet, axis: StepAxis, out: Float32Array
) -> None:
    """Fill the steps of a block's pairs; skip pairs that are not in the fleet."""
    counters = [channel.name for channel in layout.counters]
    rise_of = {counters[owner]: rise for rise, owner in layout.rises.items()}
    column = {name: i for i, name in enumerate(layout.numbers)}
    for pair, (begin, end) in block.spans.items():
        number = fleet.index.get(pair)
        if number is None or begin == end:
            continue
        step = axis.step_of(block.times[begin:end])
        in_axis = (step >= 0) & (step < axis.count)
        for i, channel in enumerate(plan.channels):
            values = block.values[column[channel.name], begin:end]
            if channel.kind == "counter":
                rises = block.values[column[rise_of[channel.name]], begin:end] if channel.name in rise_of else None
                values = _rises(values, rises)
            known = in_axis & ~np.isnan(values)
            sums = np.bincount(step[known], values[known], minlength=axis.count)
            counts = np.bincount(step[known], minlength=axis.count)
            filled = counts > 0
            if channel.kind == "gauge":
                sums[filled] = sums[filled] / counts[filled]
            out[number, filled, i] = sums[filled]


def layout_of(plan: SequencePlan, channels: Mapping[str, Channel]) -> ChannelLayout:
    """Return the layout of a plan's channels, including the roll-up increases of its counters."""
    chosen = {channel.name: channel for channel in plan.channels}
    for channel in plan.channels:
        rise = f"{channel.name}_rise"
        if channel.kind == "counter" and rise in channels:
            chosen[rise] = channels[rise]
    return ChannelLayout.of(chosen)


def write_sequences(dataset: Dataset, fleet: Fleet, config: MatrixConfig, folder: Path) -> None:
    """Write the raw windows of a dataset into the folder of a matrix under construction.

    One bucket of samples is in memory at a time; the array is memory-mapped.
    """
    plan = SequencePlan.of(config)
    axis = StepAxis.over(plan, config.decision, *map(instant_ms, config.span))
    shape = (len(fleet.pairs), axis.count, len(plan.channels))
    layout = layout_of(plan, config.channels)
    out = np.lib.format.open_memmap(folder / ARRAY_NAME, mode="w+", dtype=np.float32, shape=shape)
    out[:] = np.nan
    columns = [*key_columns(dataset.meta.unit), *layout.numbers]
    for bucket in sorted({dataset.bucket_of(node) for node, _ in fleet.pairs}):
        for block in blocks_of(dataset.read_runs(bucket, columns), layout, unit=dataset.meta.unit):
            _fill_steps(plan, layout, block, fleet, axis, out)
    out.flush()


class Sequences:
    """Memory-mapped raw windows of a matrix; see :func:`open_sequences`.

    ``array``: shape (pairs, steps, channels).
    """

    def __init__(self, plan: SequencePlan, axis: StepAxis, array: Float32Array, fleet: Fleet) -> None:
        self.plan = plan
        self.axis = axis
        self._array = array
        self._fleet = fleet

    def pairs(self, node: Sequence[str], unit: Sequence[str]) -> IntArray:
        """Return the number of each (node, unit); -1 if it is not in the inventory."""
        return self._fleet.numbers(node, unit)

    def windows(self, pair: IntArray, time_ms: IntArray) -> Float32Array:
        """Read windows.

        ``pair``: from :meth:`pairs`; -1: all values unknown; shape (n,).
        ``time_ms``: decision times in milliseconds since the epoch, on or off the grid; shape (n,).
        Returns: oldest step first; NaN where unknown; shape (n, steps, channels).
        """
        steps = self.plan.steps
        newest = self.axis.newest(time_ms - self.plan.delay_ms)
        step = newest[:, np.newaxis] + np.arange(1 - steps, 1)
        usable = (step >= 0) & (step < self.axis.count) & (pair >= 0)[:, np.newaxis]
        out = np.full((len(pair), steps, len(self.plan.channels)), np.nan, dtype=np.float32)
        if usable.any():
            row, column = np.nonzero(usable)
            out[row, column] = self._array[pair[row], step[row, column]]
        return out


def open_sequences(folder: Path, config: MatrixConfig, inventory: pd.DataFrame) -> Sequences:
    """Open the raw windows in a matrix folder.

    Raises ``InputError`` if the file is missing or damaged.
    """
    plan = SequencePlan.of(config)
    fleet = Fleet.of(inventory)
    axis = StepAxis.over(plan, config.decision, *map(instant_ms, config.span))
    advice = "Run the features stage again: `predrain features` or `dvc repro features`."
    try:
        array = np.load(folder / ARRAY_NAME, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"the raw windows cannot be read: {error}", str(folder / ARRAY_NAME), advice) from None
    if array.dtype != np.float32 or array.shape != (len(fleet.pairs), axis.count, len(plan.channels)):
        raise InputError("the raw windows do not belong to this matrix", str(folder / ARRAY_NAME), advice)
    return Sequences(plan, axis, array, fleet)


def live_windows(
    table: pa.Table, rows: pd.DataFrame, inventory: pd.DataFrame, t: datetime, config: MatrixConfig
) -> Float32Array:
    """Compute the windows of one decision time from recent samples, identical to those of a matrix.

    ``table``: at least the samples of the last ``plan.window + plan.step + delay``; counters need one more before that.
    """
    plan, fleet = SequencePlan.of(config), Fleet.of(inventory)
    border = instant_ms(t) - plan.delay_ms
    axis = StepAxis.over(plan, config.decision, border - duration_ms(plan.window) - plan.step_ms, border)
    array = np.full((len(fleet.pairs), axis.count, len(plan.channels)), np.nan, dtype=np.float32)
    layout = layout_of(plan, config.channels)
    for block in blocks_of(table, layout, unit=config.unit):
        _fill_steps(plan, layout, block, fleet, axis, array)
    sequences = Sequences(plan, axis, array, fleet)
    pair = sequences.pairs(rows["node"].astype(str).tolist(), rows["unit"].astype(str).tolist())
    return sequences.windows(pair, np.full(len(rows), instant_ms(t), dtype=np.int64))


def _rises(values: FloatArray, stored: FloatArray | None) -> FloatArray:
    """Return each sample's increase since the last known value, or the roll-up's stored increase if known."""
    rise = reset_aware_rise(values, ~np.isnan(values), np.zeros(len(values), dtype=np.int32))
    out = np.where(rise.valid, rise.values, np.nan)
    return out if stored is None else np.where(np.isnan(stored), out, stored)
