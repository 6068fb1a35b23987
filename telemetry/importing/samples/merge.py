"""Spilled samples and an existing dataset's samples, bucket by bucket, to what the new dataset holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from telemetry.atomic import disk_errors
from telemetry.dataset.channel import Channel
from telemetry.dataset.channels import with_rollups
from telemetry.dataset.dataset import Dataset
from telemetry.dataset.layout import write_small
from telemetry.dataset.meta import instant_text
from telemetry.dataset.runs import Runs, choose_runs
from telemetry.importing.inventory import Installations
from telemetry.importing.quarantine import Quarantine, row_text
from telemetry.importing.samples.block import Block, block_table, join, read_block
from telemetry.importing.samples.duplicates import merge_duplicates
from telemetry.importing.samples.reach import Reach, Reaching, StoredBlocks
from telemetry.importing.samples.rollup import add_rollup_columns, cell_end, finer_units, roll_up
from telemetry.importing.samples.spill import ORDER_SHIFT, Spill
from telemetry.xids.xid_gauge import CHANNEL, SOURCE, event_rows, untold_edges

NEWEST_NAME = "newest.parquet"
"""File of a dataset with rolled-up units: their newest raw samples."""


@dataclass(frozen=True, slots=True)
class MergePlan:
    """How samples become the dataset's.

    ``channels``: the new dataset's channels in column order.
    ``rolled``: whether the dataset has roll-up columns and ``sample_count``.
    """

    channels: dict[str, Channel]
    finer: npt.NDArray[np.int32]
    rolled: bool
    runs: Runs


@dataclass(frozen=True, slots=True)
class MergedBucket:
    """A bucket of the new dataset.

    ``table``: samples of the runs that are made anew, sorted; None where there is none.
    """

    bucket: int
    table: pa.Table | None
    kept: list[int]


def plan_merge(
    spill: Spill | None,
    existing: Dataset | None,
    present: Mapping[str, Channel],
    every: Mapping[str, Channel],
    step: timedelta,
    stays: Installations,
    *,
    sample_count: bool,
) -> MergePlan:
    """Find which units are finer than the step, and from that the dataset's columns; and how its time is cut.

    A dataset that has samples keeps its runs; others get runs for a sample of each unit a step.

    ``every``: all channels that may occur, in the catalogue's order.
    ``stays``: codes of the units; one that an earlier import rolled up stays rolled up.
    """
    step_ms = _milliseconds(step)
    finer: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)]
    if spill is not None:
        for bucket in spill.buckets():
            table = spill.read(bucket, ["unit", "ms"])
            unit, ms = table.column("unit").to_numpy(), table.column("ms").to_numpy()
            finer.append(finer_units(unit, ms, step_ms))
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
    if existing is not None and existing.meta.counts["samples"]:
        runs = existing.meta.runs
    else:
        runs = choose_runs(
            0.0 if spill is None else len(stays.units) * (timedelta(days=1) / step) / spill.bucket_number
        )
    return MergePlan(channels, units, rolled, runs)


@dataclass(slots=True)
class SampleMerger:
    """Merges one bucket after the other.

    ``stays``: names of the unit codes.

    A cell that an earlier import left unfinished (its raw samples ended inside it) goes on: ``newest.parquet`` keeps
    the newest raw sample of each rolled-up unit, so that later raw samples can be told from ones that the cell holds.
    """

    plan: MergePlan
    stays: Installations
    nodes: list[str]
    step: timedelta
    delay: timedelta
    files: list[Path]
    quarantine: Quarantine
    keep_from: datetime | None = None
    counts: Counter[str] = field(default_factory=Counter)
    first_ms: int | None = None
    last_ms: int | None = None
    newest: dict[str, int] = field(default_factory=dict)
    _before: dict[str, int] = field(default_factory=dict)
    _rolled_before: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    _told: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    events: list[pd.DataFrame] = field(default_factory=list)

    def run(self, spill: Spill | None, existing: Dataset | None) -> Iterator[MergedBucket]:
        """Yield each bucket; after the last one, the attributes are complete."""
        self._before = {} if existing is None else read_newest(existing.path)
        self._rolled_before = self.stays.codes(list(self._before)).astype(np.int32)
        self.newest = dict(self._before)
        self._told = {} if existing is None else self._told_edges(existing)
        reaching = None if existing is None else self._reaching(existing)
        buckets = set() if spill is None else set(spill.buckets())
        old_buckets = set() if existing is None else set(existing.buckets())
        for bucket in sorted(buckets | old_buckets):
            new = None if spill is None or bucket not in buckets else read_block(spill.read(bucket), self.plan.channels)
            reach = None if reaching is None else reaching.of(bucket, new)
            if reach is not None and reach.dropped:
                self.counts["samples_past_retention"] += reach.dropped
            kept = [] if reach is None else reach.kept
            if new is None and (reach is None or not reach.written):
                yield MergedBucket(bucket, None, kept)
                continue
            table = self._merge(new, reach)
            times = table.column("timestamp").cast(pa.int64()).to_numpy()
            if len(times):
                self.first_ms = min(int(times.min()), self.first_ms if self.first_ms is not None else int(times.min()))
                self.last_ms = max(int(times.max()), self.last_ms if self.last_ms is not None else int(times.max()))
            yield MergedBucket(bucket, table, kept)

    def _reaching(self, existing: Dataset) -> Reaching:
        plan = self.plan
        newest = np.array([self._before.get(name, -1) for name in self.stays.units], np.int64)
        stored = StoredBlocks(existing, self.stays, self.nodes, plan.channels, plan.finer, newest, self.step)
        same = list(existing.meta.channels.values()) == list(plan.channels.values())
        counters = [name for name, channel in plan.channels.items() if channel.kind == "counter"]
        return Reaching(
            stored=stored,
            finer=plan.finer,
            newly_finer=plan.finer[newest[plan.finer] < 0],
            counters=tuple(counters) if plan.rolled else (),
            step=self.step,
            everything=not same or existing.meta.sample_count != plan.rolled or existing.meta.runs != plan.runs,
            keep_ms=None if self.keep_from is None else int(self.keep_from.timestamp() * 1000),
        )

    def _merge(self, new: Block | None, reach: Reach | None) -> pa.Table:
        block = join([*([] if reach is None else reach.blocks), *([] if new is None else [new])])
        if self.keep_from is not None:
            # an unfinished cell stands at the end of its step, whatever its newest raw sample was
            cells = (block.order < 0) & self._to_roll(block)
            times = np.where(cells, cell_end(block.ms, _milliseconds(self.step)), block.ms)
            kept = np.flatnonzero(times >= int(self.keep_from.timestamp() * 1000))
            self.counts["samples_past_retention"] += len(block) - len(kept)
            block = block.take(kept)
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
        if reach is not None and self.plan.runs.days is not None:
            made = np.isin(self.plan.runs.of(block.ms), sorted(reach.written))
            block = block if made.all() else block.take(np.flatnonzero(made))
        return block_table(
            block,
            self.plan.channels,
            self.stays.units,
            self.nodes,
            unit_is_node=self.stays.unit == "node",
            sample_count=self.plan.rolled,
        )

    def _to_roll(self, block: Block) -> npt.NDArray[np.bool_]:
        """Rows to bring to the step: those of finer units, without the cells that earlier imports finished."""
        finished = (block.order < 0) & (block.ms % _milliseconds(self.step) == 0)
        finished &= np.isin(block.unit, self._rolled_before)
        return np.isin(block.unit, self.plan.finer) & ~finished

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
        # Not lost: the dataset has their step.
        self._set_aside("its step was rolled up by an earlier import", block, closed, lost_rows=0)
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

    def _set_aside(self, reason: str, block: Block, chosen: npt.NDArray[np.bool_], *, lost_rows: int = 1) -> None:
        for index in np.flatnonzero(chosen & (block.order >= 0)).tolist():
            order = int(block.order[index])
            content = {
                "timestamp": instant_text(datetime.fromtimestamp(block.ms[index] / 1000, UTC)),
                "node": self.nodes[block.node[index]],
                self.stays.unit: self.stays.units[block.unit[index]],
                **{name: each.values[index].item() for name, each in block.series.items() if each.valid[index]},
            }
            file, row = self.files[order >> ORDER_SHIFT], order & ((1 << ORDER_SHIFT) - 1)
            self.quarantine.add(reason, "samples", file, row, row_text(content), lost_rows=lost_rows)


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
