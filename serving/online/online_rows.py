"""Rows from the online state: its frames as blocks of whole nodes, through the kernels of training."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from features.blocks import BLOCK_SAMPLES, SampleBlock
from features.errors import InputError
from features.fleet_reference import FleetReference
from features.layout import ChannelLayout
from features.live import Blocks, fleet_reference, live_plan, live_rows, look_back
from features.matrix_meta import ROW_COLUMNS, MatrixConfig
from features.pieces import Pair
from features.sequences import SequencePlan
from features.service import duration_ms, instant_ms
from serving.config import ScoringSettings
from serving.decision_times import stale_after
from serving.fleet_rows import FleetRows, in_service
from serving.freshness import Freshness, always_fresh, stays_at
from serving.online.blocks import has_value
from serving.online.frame import Frame
from serving.online.window import batches, read_frames
from serving.raw_windows import RawWindows
from telemetry.block import Block, block_table

_NONE = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class View:
    """What is held at one moment. Nothing of it changes any more.

    ``pairs``: node and unit of each unit number.
    ``unclosed``: samples that stand in no frame yet and count from ``features.delay`` on.
    """

    config: MatrixConfig
    inventory: pd.DataFrame
    events: pd.DataFrame
    pairs: tuple[Pair, ...]
    frames: tuple[Frame, ...]
    unclosed: Block

    def blocks_of_nodes(
        self, t_ms: int, nodes: Collection[str] | None = None
    ) -> Iterator[tuple[NDArray[np.int32], Block]]:
        """Yield the samples that are usable at a time and not out of the look-back, some nodes at a time.

        Yields ``units``: numbers of all pairs of those nodes that have a number, ascending.
        Yields ``block``: their samples, sorted by (unit, time).
        """
        config = self.config
        upto = t_ms - duration_ms(config.features.delay)
        after = t_ms - duration_ms(look_back(config))
        by_node: dict[str, list[int]] = {}
        for number, (node, _) in enumerate(self.pairs):
            if nodes is None or node in nodes:
                by_node.setdefault(node, []).append(number)
        names = sorted(by_node)
        counted = self._counted()
        sizes = np.array([int(counted[by_node[name]].sum()) for name in names], dtype=np.int64)
        for begin, end in batches(sizes, BLOCK_SAMPLES):
            units = np.array(sorted(unit for name in names[begin:end] for unit in by_node[name]), dtype=np.int32)
            yield (
                units,
                read_frames(self.frames, units, config.channels, after_ms=after, upto_ms=upto, further=self.unclosed),
            )

    def _counted(self) -> NDArray[np.int64]:
        counted = np.zeros(len(self.pairs), dtype=np.int64)
        for frame in self.frames:
            counted[frame.units] += np.diff(frame.starts)
        return counted


@dataclass(slots=True)
class _Tally:
    """How fresh the samples that pass by are; see :class:`serving.freshness.FreshnessWatch`."""

    config: MatrixConfig
    t_ms: int
    newest: dict[Pair, int] = field(default_factory=dict)
    counted: dict[Pair, int] = field(default_factory=dict)

    def add(self, block: Block, pairs: tuple[Pair, ...]) -> None:
        """Count a block of usable samples. A row without any value is no sample."""
        if not len(block):
            return
        since = self.t_ms - duration_ms(self.config.features.delay) - duration_ms(self.config.decision.every)
        starts = np.flatnonzero(np.concatenate(([True], block.unit[1:] != block.unit[:-1])))
        real = has_value(block)
        newest = np.maximum.reduceat(np.where(real, block.ms, _NONE), starts)
        counted = np.add.reduceat((real & (block.ms > since)).astype(np.int64), starts)
        units = block.unit[starts].tolist()
        for unit, last, count in zip(units, newest.tolist(), counted.tolist(), strict=True):
            if last != _NONE:
                self.newest[pairs[unit]] = last
            self.counted[pairs[unit]] = count

    def of(self, keys: pd.DataFrame) -> Freshness:
        """Give the freshness of units at their present nodes."""
        expected = max(duration_ms(self.config.decision.every) // duration_ms(self.config.step), 1)
        pairs = list(zip(keys["node"].tolist(), keys["unit"].tolist(), strict=True))
        newest = np.array([self.newest.get(pair, np.nan) for pair in pairs], dtype=np.float64)
        counted = np.array([self.counted.get(pair, 0) for pair in pairs], dtype=np.float64)
        return Freshness((self.t_ms - newest) / 1000.0, np.minimum(counted / expected, 1.0))


def online_rows(
    view: View,
    t: datetime,
    settings: ScoringSettings,
    windows: SequencePlan | None = None,
    nodes: Collection[str] | None = None,
    reference: FleetReference | None = None,
) -> FleetRows:
    """Make the rows of one decision time; the parameters are those of :meth:`serving.online.state.OnlineState.rows`."""
    config, t_ms = view.config, instant_ms(t)
    chosen = None if nodes is None else frozenset(nodes)
    everyone = in_service(view.inventory, t_ms)
    if chosen is not None:
        everyone = everyone[everyone["node"].isin(chosen)].reset_index(drop=True)
    if not len(everyone):
        raise InputError(
            f"no unit is in service at {t.isoformat()}",
            "the online state",
            "Check the inventory's installed_at and removed_at.",
        )
    plan = live_plan(config)
    sampled = plan.reads_samples or windows is not None
    if chosen is not None and reference is None and (plan.peers is not None or plan.onset is not None):
        raise InputError(
            "the features compare with the fleet, and no reference is given for single nodes",
            "rows of the online state",
            "Take one with reference(), and give it along.",
        )
    tally = _Tally(config, t_ms)
    raw = None if windows is None else RawWindows(windows, config, everyone, view.inventory, t)

    def blocks() -> Iterator[SampleBlock]:
        for _, block in view.blocks_of_nodes(t_ms, chosen):
            tally.add(block, view.pairs)
            if raw is not None:
                _take(raw, block, view)
            yield sample_block(block, plan.layout, view.pairs)

    frame = live_rows(
        Blocks(blocks) if sampled else None, view.events, view.inventory, t, config, reference, nodes=chosen
    )
    if sampled and not plan.reads_samples:
        for _ in blocks():
            pass
    keys = frame[list(ROW_COLUMNS)]
    values: Any = frame.drop(columns=list(ROW_COLUMNS)).to_numpy(np.float32)
    if raw is not None:
        values = np.concatenate([values, raw.of(keys["unit"].tolist())], axis=1)
    fresh = always_fresh(len(keys))
    why: list[str | None] = [None] * len(keys)
    if sampled:
        fresh = tally.of(keys)
        why = fresh.why_unknown(
            stale_after=stale_after(config, settings.stale_after),
            least=settings.least_completeness,
            interval=config.decision.every,
        )
    return FleetRows(
        keys=keys,
        values=values,
        fresh=fresh,
        why=why,
        idle=everyone[~everyone["unit"].isin(set(keys["unit"]))],
        slots=stays_at(view.inventory, t_ms, config.unit),
        newest_ms=max(tally.newest.values(), default=None),
    )


def fleet_reference_of(view: View, t: datetime) -> FleetReference:
    """Take what rows of single nodes must know of the whole fleet; see :func:`features.live.fleet_reference`."""
    plan = live_plan(view.config)

    def blocks() -> Iterator[SampleBlock]:
        for _, block in view.blocks_of_nodes(instant_ms(t)):
            yield sample_block(block, plan.layout, view.pairs)

    return fleet_reference(Blocks(blocks), view.events, view.inventory, t, view.config)


def sample_block(block: Block, layout: ChannelLayout, pairs: tuple[Pair, ...]) -> SampleBlock:
    """Lay a block out as the kernels read it."""
    values = np.empty((len(layout.numbers), len(block)), dtype=np.float64)
    for at, name in enumerate(layout.numbers):
        series = block.series[name]
        values[at] = np.where(series.valid, series.values, np.nan)
    flags = np.zeros((len(layout.masks), len(block)), dtype=np.uint64)
    known = np.zeros(flags.shape, dtype=np.bool_)
    for at, name in enumerate(layout.masks):
        flags[at], known[at] = block.series[name].values, block.series[name].valid
    fresh = block.unit[1:] != block.unit[:-1]
    borders = [0, *(np.flatnonzero(fresh) + 1).tolist(), len(block)] if len(block) else []
    spans = {pairs[block.unit[begin]]: (begin, end) for begin, end in pairwise(borders)}
    return SampleBlock(np.ascontiguousarray(block.ms), values, flags, known, spans)


def _take(raw: RawWindows, block: Block, view: View) -> None:
    """Let the windows of a block's nodes be taken."""
    if not len(block):
        return
    unit = view.config.unit
    wanted = {name: view.config.channels[name] for name in raw.numbers}
    names, nodes = [name for _, name in view.pairs], [node for node, _ in view.pairs]
    table: pa.Table = block_table(block, wanted, names, nodes, unit_is_node=unit == "node", sample_count=False)
    raw.take(table)
