"""Raw samples wait until their step is over, and are then brought to it as the import would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.online.blocks import blank_block, concat, empty_block, settle
from telemetry.block import Block
from telemetry.channel import ROLLUP_SUFFIXES, Channel
from telemetry.rollup import FINER_THAN, add_rollup_columns, cell_end, finer_units, roll_up

LEAST_GAPS = 3
"""Intervals between samples that it takes to tell whether a unit reports faster than the step."""

_NEVER = -(1 << 62)
_SMALL = 20_000  # rows
_REMEMBERED = 24  # intervals


class Stepper:
    """Raw samples that wait, and what must be known of those before them; used under its owner's lock.

    ``channels``: Columns, roll-ups among them where the bundle's dataset has any.
    ``closed_ms``: a multiple of the step: samples up to here are not waited for.
    ``waiting``: rows of open steps, as they came.
    ``units``: what is known of each unit, by its number.

    A step is closed ``features.delay`` after its end. No decision can use it before, and whatever arrives within the
    delay, in whatever order, is in it. The import looks at all of a unit's samples to tell whether they come faster
    than the step (:func:`telemetry.rollup.finer_units`); here it is told from those seen so far, and stays told.
    """

    def __init__(self, channels: Mapping[str, Channel], step_ms: int, closed_ms: int) -> None:
        self._channels = dict(channels)
        self.step_ms = step_ms
        self.closed_ms = closed_ms
        self.waiting: list[Block] = []
        counters = [channel for channel in channels.values() if channel.kind == "counter"]
        self._rolled = [
            channel.name + suffix
            for channel in channels.values()
            for suffix in ROLLUP_SUFFIXES[channel.kind]
            if channel.name + suffix in channels
        ]
        self._counters = tuple(each.name for each in counters if each.name + "_rise" in channels)
        self.units: dict[str, NDArray[Any]] = {
            "finer": np.zeros(0, dtype=np.bool_),
            "gaps": np.zeros(0, np.int64),
            "short": np.zeros(0, np.int64),
            "last": np.zeros(0, np.int64),
            "carry": np.zeros((0, len(self._counters)), np.float64),
        }

    @property
    def finer(self) -> NDArray[np.bool_]:
        """Which units report faster than the step, by their number."""
        return self.units["finer"]

    def grow(self, units: int) -> None:
        """Make room for units up to a number."""
        have = len(self.units["finer"])
        if units <= have:
            return
        more = max(units - have, have // 2, 64)
        fill = {"finer": False, "gaps": 0, "short": 0, "last": _NEVER, "carry": np.nan}
        for name, value in fill.items():
            old = self.units[name]
            new = np.full((have + more, *old.shape[1:]), value, dtype=old.dtype)
            new[:have] = old
            self.units[name] = new

    @property
    def has_rises(self) -> bool:
        """Whether counters come with their rise within the step."""
        return bool(self._counters)

    def is_closed(self, ms: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell which times lie in a step that has been closed."""
        return cell_end(ms, self.step_ms) <= self.closed_ms

    def wait(self, block: Block) -> None:
        """Let rows wait for the end of their step; small blocks are put together, for thousands may come."""
        if not len(block):
            return
        self.waiting.append(block)
        while len(self.waiting) > 1 and len(self.waiting[-2]) <= 2 * len(self.waiting[-1]) < _SMALL:
            self.waiting[-2:] = [concat(self.waiting[-2:], self._channels)]

    def all_waiting(self) -> Block:
        """Give every row that waits, in the order of arrival."""
        return concat(self.waiting, self._channels)

    def close(self, closed_ms: int) -> Block:
        """Close the steps that end at or before a time, and give their samples.

        Returns: sorted by (unit, time), none twice.
        """
        ready, rest = [], []
        for block in self.waiting:
            over = cell_end(block.ms, self.step_ms) <= closed_ms
            if over.all():
                ready.append(block)
            elif not over.any():
                rest.append(block)
            else:
                ready.append(block.take(np.flatnonzero(over)))
                rest.append(block.take(np.flatnonzero(~over)))
        self.waiting = rest
        self.closed_ms = closed_ms
        raw, _ = settle(concat(ready, self._channels))
        if not len(raw):
            return raw
        self.units = {**self.units, **self._gaps(raw)}
        made, carry = self._made(raw)
        self.units["carry"][carry[0]] = carry[1]
        last = np.flatnonzero(np.append(raw.unit[1:] != raw.unit[:-1], True))
        self.units["last"][raw.unit[last]] = np.maximum(self.units["last"][raw.unit[last]], raw.ms[last])
        return made

    def unclosed(self) -> Block:
        """Give what waits of units that are not rolled up: their samples count from ``features.delay`` on.

        Returns: sorted by (unit, time), none twice.
        """
        raw, _ = settle(concat(self.waiting, self._channels))
        if not len(raw):
            return raw
        finer = self._gaps(raw)["finer"]
        made, _ = self._made(raw, finer=finer, roll=False)
        return made.take(np.flatnonzero(~finer[made.unit]))

    def beside(self, block: Block, *, between: NDArray[np.bool_], again: NDArray[np.bool_]) -> Block:
        """Bring late samples of closed steps to the dataset's columns, of units that are not rolled up.

        ``block``: sorted by (unit, time), none twice; changed in place.
        ``between``: rows that come between two that are held: the newer one's rise reaches over them already, so theirs
        is nought.
        """
        if not self._rolled:
            return block
        given = {name: block.series[name + "_rise"].valid.copy() for name in self._counters}
        add_rollup_columns(block, self._channels)
        for name in self._counters:
            rise = block.series[name + "_rise"]
            made = ~given[name] & block.series[name].valid
            rise.values[made & (between | again)] = 0
            rise.valid[made & between] = True
            rise.valid[made & again] = False
        return block

    def replay(self, block: Block) -> Block:
        """Bring samples of closed steps, read again, to the step, as an import of nothing else would.

        ``block``: sorted by (unit, time), none twice; changed in place. Rows that a dataset holds stay as they are.
        """
        if self._rolled:
            add_rollup_columns(block, self._channels)
        finer = self.finer[block.unit] | np.isin(block.unit, finer_units(block.unit, block.ms, self.step_ms))
        return roll_up(block, self._channels, finer, self.step_ms) if finer.any() else block

    def _gaps(self, raw: Block) -> dict[str, NDArray[Any]]:
        """Count the intervals between samples, and tell which units report faster than the step."""
        first = np.concatenate(([True], raw.unit[1:] != raw.unit[:-1]))
        before = np.where(first, self.units["last"][raw.unit], np.concatenate(([0], raw.ms[:-1])))
        known = (before > _NEVER) & (raw.ms > before)
        short = known & (raw.ms - before < FINER_THAN * self.step_ms)
        gaps, shorts = self.units["gaps"].copy(), self.units["short"].copy()
        np.add.at(gaps, raw.unit[known], 1)
        np.add.at(shorts, raw.unit[short], 1)
        finer = self.units["finer"] | ((gaps >= LEAST_GAPS) & (2 * shorts > gaps))
        many = gaps > _REMEMBERED  # a source that is made faster after weeks must be noticed within hours
        gaps[many] //= 2
        shorts[many] //= 2
        return {"gaps": gaps, "short": shorts, "finer": finer}

    def _made(
        self, raw: Block, *, finer: NDArray[np.bool_] | None = None, roll: bool = True
    ) -> tuple[Block, tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """Bring closed samples to the step; also gives each counter's newest value, by unit."""
        finer = self.finer if finer is None else finer
        none = np.zeros(0, np.int64), np.zeros((0, len(self._counters)))
        carry = none
        if self._rolled:
            past = self._past(np.unique(raw.unit))
            both = concat([past, raw], self._channels)
            order = np.argsort(both.unit, kind="stable")  # each unit's past before its samples
            both = both.take(order)
            add_rollup_columns(both, self._channels)
            carry = self._newest(both)
            raw = both.take(np.flatnonzero(order >= len(past)))
        rolled = finer[raw.unit] if roll else np.zeros(len(raw), dtype=np.bool_)
        if rolled.any():
            raw = roll_up(raw, self._channels, rolled, self.step_ms)
        return raw, carry

    def _past(self, units: NDArray[np.int32]) -> Block:
        """Give each unit's newest counters as a row of their own."""
        carry = self.units["carry"][units]
        known = np.flatnonzero(~np.isnan(carry).all(axis=1))
        if not known.size:
            return empty_block(self._channels)
        block = blank_block(units[known], self.units["last"][units[known]], self._channels)
        for at, name in enumerate(self._counters):
            values = carry[known, at]
            block.series[name].valid[:] = ~np.isnan(values)
            block.series[name].values[:] = np.nan_to_num(values)
        return block

    def _newest(self, block: Block) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        starts = np.flatnonzero(np.concatenate(([True], block.unit[1:] != block.unit[:-1])))
        units = block.unit[starts].astype(np.int64)
        newest = np.full((units.size, len(self._counters)), np.nan)
        place = np.arange(len(block))
        for at, name in enumerate(self._counters):
            series = block.series[name]
            where = np.maximum.reduceat(np.where(series.valid, place, -1), starts)
            newest[:, at] = np.where(where >= 0, series.values[np.maximum(where, 0)], np.nan)
        return units, newest
