"""Spilled samples and an existing dataset's samples, bucket by bucket, to what the new dataset holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from telemetry.atomic import disk_errors
from telemetry.block import Block, block_table, join, read_block
from telemetry.channel import Channel
from telemetry.channels import with_rollups
from telemetry.dataset import Dataset
from telemetry.duplicates import merge_duplicates
from telemetry.errors import InputError
from telemetry.layout import write_small
from telemetry.meta import instant_text
from telemetry.quarantine import Quarantine, row_text
from telemetry.rollup import add_rollup_columns, cell_end, finer_units, roll_up
from telemetry.spill import ORDER_SHIFT, Spill
from telemetry.stays import Stays
from telemetry.xid_gauge import CHANNEL, SOURCE, event_rows, untold_edges

NEWEST_NAME = "newest.parquet"
"""File of a dataset with rolled-up units: their newest raw samples."""


@dataclass(frozen=True, slots=True)
class MergePlan:
    """How samples become the dataset's.

    Parameters
    ----------
    channels : dict of str to Channel
        The new dataset's channels in column order.
    finer : ndarray of int32
        Codes of units that are rolled up.
    rolled : bool
        Whether the dataset has roll-up columns and ``sample_count``.
    """

    channels: dict[str, Channel]
    finer: npt.NDArray[np.int32]
    rolled: bool


def plan_merge(
    spill: Spill | None,
    existing: Dataset | None,
    present: Mapping[str, Channel],
    every: Mapping[str, Channel],
    step: timedelta,
    stays: Stays,
    *,
    sample_count: bool,
) -> MergePlan:
    """Find which units are finer than the step, and from that the dataset's columns.

    Parameters
    ----------
    spill : Spill or None
        The new samples.
    existing : Dataset or None
    present : mapping of str to Channel
        Channels of the new samples.
    every : mapping of str to Channel
        All channels that may occur, in the catalogue's order.
    step : datetime.timedelta
    stays : Stays
        Codes of the units; one that an earlier import rolled up stays rolled up.
    sample_count : bool
        Whether the new samples come with counts, that is, rolled up already.
    """
    step_ms = _milliseconds(step)
    finer: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)]
    if spill is not None:
        for bucket in spill.buckets():
            table = spill.read(bucket, ["unit", "ms"])
            finer.append(finer_units(table.column("unit").to_numpy(), table.column("ms").to_numpy(), step_ms))
    if existing is not None:
        known = stays.codes(list(read_newest(existing.path)))
        finer.append(known[known >= 0].astype(np.int32))
    units = np.unique(np.concatenate(finer))
    old = {} if existing is None else existing.meta.channels
    rolled = bool(len(units)) or sample_count or (existing is not None and existing.meta.sample_count)
    names = {*old, *present}
    if rolled:
        bases = {name: channel for name, channel in every.items() if name in names}
        names |= set(with_rollups(bases))
    order = with_rollups(every)
    channels = {name: channel for name, channel in order.items() if name in names}
    channels |= {name: channel for name, channel in old.items() if name not in channels}
    return MergePlan(channels, units, rolled)


@dataclass(slots=True)
class SampleMerger:
    """Merges one bucket after the other.

    Parameters
    ----------
    plan : MergePlan
    stays : Stays
        Names of the unit codes.
    nodes : list of str
        Names of the node codes.
    step, delay : datetime.timedelta
    files : list of str
        Names of the sample files by number.
    quarantine : Quarantine
    keep_from : datetime, optional
        Samples before this instant are left out.

    Notes
    -----
    A cell that an earlier import left unfinished (its raw samples ended inside it) goes on: ``newest.parquet`` keeps
    the newest raw sample of each rolled-up unit, so that later raw samples can be told from ones that the cell holds.
    """

    plan: MergePlan
    stays: Stays
    nodes: list[str]
    step: timedelta
    delay: timedelta
    files: list[str]
    quarantine: Quarantine
    keep_from: datetime | None = None
    counts: Counter[str] = field(default_factory=Counter)
    first_ms: int | None = None
    last_ms: int | None = None
    newest: dict[str, int] = field(default_factory=dict)
    _before: dict[str, int] = field(default_factory=dict)
    _told: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    events: list[pd.DataFrame] = field(default_factory=list)

    def run(
        self, spill: Spill | None, existing: Dataset | None, untouched: Sequence[int] = ()
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield each bucket's number and sorted samples; after the last one, the attributes are complete.

        Parameters
        ----------
        spill : Spill or None
        existing : Dataset or None
        untouched : sequence of int
            Buckets of ``existing`` that are taken over as they are.
        """
        self._before = {} if existing is None else read_newest(existing.path)
        self.newest = dict(self._before)
        self._told = {} if existing is None else self._told_edges(existing)
        buckets = set() if spill is None else set(spill.buckets())
        old_buckets = set() if existing is None else set(existing.buckets())
        for bucket in sorted(buckets | (old_buckets - set(untouched))):
            old = None if existing is None or bucket not in old_buckets else self._old_block(existing, bucket)
            new = None if spill is None or bucket not in buckets else read_block(spill.read(bucket), self.plan.channels)
            table = self._merge(new, old)
            times = table.column("timestamp").cast(pa.int64()).to_numpy()
            if len(times):
                self.first_ms = min(int(times.min()), self.first_ms if self.first_ms is not None else int(times.min()))
                self.last_ms = max(int(times.max()), self.last_ms if self.last_ms is not None else int(times.max()))
            yield bucket, table

    def _merge(self, new: Block | None, old: Block | None) -> pa.Table:
        blocks = [block for block in (old, new) if block is not None]
        block = blocks[0] if len(blocks) == 1 else join(*blocks)
        if self.keep_from is not None:
            kept = np.flatnonzero(block.ms >= int(self.keep_from.timestamp() * 1000))
            self.counts["samples_past_retention"] += len(block) - len(kept)
            block = block.take(kept)
        self._reopen(block)
        block = block.take(np.lexsort((block.order, block.ms, block.unit)))
        block = self._without_closed(block)
        before_merge = block
        merged = merge_duplicates(block)
        self.counts["samples_repeated"] += merged.repeated
        self._set_aside("conflicting duplicate sample", block, np.isin(block.order, merged.conflicting))
        block = merged.block
        held = self._held(before_merge, block)
        if CHANNEL in block.series:
            self._find_xids(block, held.get(CHANNEL, np.zeros(len(block), dtype=bool)))
        self._note_newest(block)
        if self.plan.rolled:
            add_rollup_columns(block, self.plan.channels, held)
            before = len(block)
            block = roll_up(block, self.plan.channels, self._to_roll(block), _milliseconds(self.step))
            self.counts["samples_rolled_up"] += before - len(block)
        return block_table(
            block,
            self.plan.channels,
            self.stays.units,
            self.nodes,
            unit_is_node=self.stays.unit == "node",
            sample_count=self.plan.rolled,
        )

    def _reopen(self, block: Block) -> None:
        """Give the old rows of unfinished cells the time of their newest raw sample."""
        old = np.flatnonzero((block.order < 0) & np.isin(block.unit, self.plan.finer))
        if len(old) == 0 or not self._before:
            return
        step_ms = _milliseconds(self.step)
        newest = np.array([self._before.get(self.stays.units[code], -1) for code in block.unit[old].tolist()], np.int64)
        unfinished = (newest >= 0) & (cell_end(newest, step_ms) == block.ms[old]) & (newest < block.ms[old])
        block.ms = block.ms.copy()
        block.ms[old[unfinished]] = newest[unfinished]

    def _to_roll(self, block: Block) -> npt.NDArray[np.bool_]:
        """Rows to bring to the step: those of finer units, without the existing dataset's finished cells."""
        aligned = block.ms % _milliseconds(self.step) == 0
        return np.isin(block.unit, self.plan.finer) & ~((block.order < 0) & aligned)

    def _without_closed(self, block: Block) -> Block:
        """Set aside raw samples of a cell that the existing dataset has rolled up already."""
        roll = self._to_roll(block)
        if not (block.order < 0).any() or not roll.any():
            return block
        step_ms = _milliseconds(self.step)
        codes = np.unique(block.unit)
        newest = np.full(len(self.stays.units), -1, np.int64)
        newest[codes] = [self._before.get(self.stays.units[code], -1) for code in codes.tolist()]
        open_ms = np.where(newest % step_ms == 0, -1, newest)[block.unit]
        end = cell_end(block.ms, step_ms)
        old = (block.order < 0) & ~roll
        cells = pd.MultiIndex.from_arrays([block.unit[old], block.ms[old]])
        closed = np.asarray(pd.MultiIndex.from_arrays([block.unit, end]).isin(cells))
        in_open = (open_ms >= 0) & (end == cell_end(open_ms, step_ms)) & (block.ms <= open_ms)
        closed = roll & (block.order >= 0) & (closed | in_open)
        self._set_aside("its step was rolled up by an earlier import", block, closed)
        return block.take(np.flatnonzero(~closed))

    def _note_newest(self, block: Block) -> None:
        chosen = (block.order >= 0) & np.isin(block.unit, self.plan.finer)
        for code, ms in pd.Series(block.ms[chosen]).groupby(block.unit[chosen]).max().items():
            name = self.stays.units[int(code)]
            self.newest[name] = max(int(ms), self.newest.get(name, 0))

    def _held(self, given: Block, merged: Block) -> dict[str, npt.NDArray[np.bool_]]:
        """Return the merged rows whose counters, or latched XID, the existing dataset held: a new row may fill one."""
        old, into = given.order < 0, merged.order < 0
        if not old.any():
            return {}
        held = {}
        for name, channel in self.plan.channels.items():
            if channel.kind == "counter" or name == CHANNEL:
                held[name] = np.zeros(len(merged), dtype=bool)
                # An old row is the first of its key, so the old rows stay in their order.
                held[name][into] = given.series[name].valid[old]
        return held

    def _told_edges(self, existing: Dataset) -> dict[tuple[int, int], list[int]]:
        events = existing.events()
        events = events[(events["source"] == SOURCE) & (events["type"] == "xid")]
        told: dict[tuple[int, int], list[int]] = {}
        units = self.stays.codes(events["node" if self.stays.unit == "node" else "gpu"].tolist()).tolist()
        for code, xid, stamp in zip(units, events["code"], events["timestamp"], strict=True):
            told.setdefault((code, int(xid)), []).append(round(stamp.timestamp() * 1000))
        return told

    def _find_xids(self, block: Block, held: npt.NDArray[np.bool_]) -> None:
        gauge = block.series[CHANNEL]
        read = gauge.values.astype(np.int32), gauge.valid
        rows = untold_edges(block.unit, block.ms, read, block.order < 0, held, self._told)
        if len(rows) == 0:
            return
        by_node = self.stays.unit == "node"
        gpus = [None if by_node else self.stays.units[code] for code in block.unit[rows].tolist()]
        found = event_rows(
            pd.Series(pd.to_datetime(block.ms[rows], unit="ms", utc=True)).dt.as_unit("ms"),
            pd.Series([self.nodes[code] for code in block.node[rows].tolist()], dtype=object),
            pd.Series(gpus, dtype=object),
            gauge.values[rows].astype(np.int32),
            self.delay,
        )
        self.events.append(found)

    def _set_aside(self, reason: str, block: Block, chosen: npt.NDArray[np.bool_]) -> None:
        for index in np.flatnonzero(chosen & (block.order >= 0)).tolist():
            order = int(block.order[index])
            content = {
                "timestamp": instant_text(datetime.fromtimestamp(block.ms[index] / 1000, UTC)),
                "node": self.nodes[block.node[index]],
                self.stays.unit: self.stays.units[block.unit[index]],
                **{name: each.values[index].item() for name, each in block.series.items() if each.valid[index]},
            }
            file, row = self.files[order >> ORDER_SHIFT], order & ((1 << ORDER_SHIFT) - 1)
            self.quarantine.add(reason, "samples", file, row, row_text(content))

    def _old_block(self, existing: Dataset, bucket: int) -> Block:
        table = existing.read_bucket(bucket)
        by_node = self.stays.unit == "node"
        names = table.column("node" if by_node else "gpu").unify_dictionaries().combine_chunks()
        nodes = table.column("node").unify_dictionaries().combine_chunks()
        code = self.stays.codes(names.dictionary.to_pylist())
        lost = [names.dictionary[index].as_py() for index in np.flatnonzero(code < 0).tolist()]
        if lost:
            raise InputError(
                f"the dataset has samples of {lost[0]!r}, which the inventory does not name",
                str(existing.path),
                "Give --inventory with a row for it (with removed_at, if it is gone).",
            )
        known = {name: index for index, name in enumerate(self.nodes)}
        for name in nodes.dictionary.to_pylist():
            if name not in known:
                known[name] = len(self.nodes)
                self.nodes.append(name)
        node_code = np.array([known[name] for name in nodes.dictionary.to_pylist()], np.int32)
        length = table.num_rows
        keyed = table.drop_columns(["timestamp", "node", "gpu"])
        keys = {
            "unit": pa.array(code[names.indices.to_numpy()].astype(np.int32)),
            "node": pa.array(node_code[nodes.indices.to_numpy()]),
            "ms": table.column("timestamp").cast(pa.int64()),
            "order": pa.array(np.full(length, -1, np.int64)),
            "mig": pa.array(np.zeros(length, dtype=bool)),
        }
        for name, column in keys.items():
            keyed = keyed.append_column(name, column)
        return read_block(keyed, self.plan.channels)


def read_newest(root: Path) -> dict[str, int]:
    """Return the newest raw sample, in milliseconds, of each unit that was rolled up; empty where none was."""
    path = root / NEWEST_NAME
    if not path.exists():
        return {}
    table = pq.read_table(path)
    return dict(zip(table.column("unit").to_pylist(), table.column("ms").to_pylist(), strict=True))


def write_newest(root: Path, newest: Mapping[str, int]) -> None:
    """Write what :func:`read_newest` reads; nothing where no unit is rolled up."""
    if newest:
        names = sorted(newest)
        table = pa.table({"unit": pa.array(names), "ms": pa.array([newest[name] for name in names], pa.int64())})
        with disk_errors(root):
            write_small(root / NEWEST_NAME, table)


def _milliseconds(duration: timedelta) -> int:
    return int(duration.total_seconds() * 1000)
