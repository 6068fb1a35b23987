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
import pyarrow.compute as pc
import pyarrow.parquet as pq

from telemetry.atomic import disk_errors
from telemetry.dataset.channels import Channel, with_rollups
from telemetry.dataset.dataset import Dataset
from telemetry.dataset.layout import write_small
from telemetry.dataset.meta import instant_text
from telemetry.dataset.runs import choose_runs
from telemetry.dataset.schema import ms_of
from telemetry.importing.instants import times_of
from telemetry.importing.inventory import Installations
from telemetry.importing.quarantine import Quarantine, row_text
from telemetry.importing.samples.block import ORDER_SHIFT, Block, Spill, block_table, join, read_block
from telemetry.importing.samples.reach import MergePlan, Reach, StoredSamples
from telemetry.importing.samples.rollup import add_rollup_columns, cell_end, finer_units, merge_duplicates, roll_up
from telemetry.xids.xid_gauge import CHANNEL, SOURCE, event_rows, untold_edges

NEWEST_NAME = "newest.parquet"
"""File of a dataset with rolled-up units: their newest raw samples."""


def plan_merge(
    spill: Spill,
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
    step_ms = step // timedelta(milliseconds=1)
    finer: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)]
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
    runs = choose_runs(len(stays.units) * (timedelta(days=1) / step) / spill.bucket_number)
    if existing is not None and existing.meta.counts["samples"]:
        runs = existing.meta.runs
    return MergePlan(channels, units, rolled, runs, step_ms)


@dataclass(slots=True)
class SampleMerger:
    """Merges one bucket after the other.

    ``stays``: names of the unit codes.

    A cell that an earlier import left unfinished (its raw samples ended inside it) goes on: ``newest.parquet`` keeps
    the newest raw sample of each rolled-up unit, so that later raw samples can be told from ones that the cell holds.
    """

    plan: MergePlan
    stays: Installations
    existing: Dataset | None
    delay: timedelta
    files: list[Path]
    quarantine: Quarantine
    keep_from: datetime | None = None
    counts: Counter[str] = field(default_factory=Counter)
    span_ms: list[int] = field(default_factory=list)
    newest: dict[str, int] = field(default_factory=dict)
    events: list[pd.DataFrame] = field(default_factory=list)
    _nodes: list[str] = field(init=False)
    _newest_before: npt.NDArray[np.int64] = field(init=False)
    _edges: dict[tuple[int, int], list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.newest = {} if self.existing is None else read_newest(self.existing.path)
        self._newest_before = np.array([self.newest.get(name, -1) for name in self.stays.units], np.int64)
        self._nodes = list(self.stays.node_names)
        self._edges = {} if self.existing is None else self._stored_edges(self.existing)

    def run(self, spill: Spill) -> Iterator[tuple[int, pa.Table | None, list[int]]]:
        """Yield each bucket, the samples of its runs that are made anew, sorted, and its runs that are kept.

        After the last one, the attributes are complete.
        """
        stored, old_buckets = None, set()
        if self.existing is not None:
            stored = StoredSamples(
                self.existing, self.plan, self.stays, self._nodes, self._newest_before, self._keep_ms
            )
            old_buckets = set(self.existing.buckets())
        new_buckets = set(spill.buckets())
        for bucket in sorted(new_buckets | old_buckets):
            new = read_block(spill.read(bucket), self.plan.channels) if bucket in new_buckets else None
            reach = None if stored is None else stored.reach(bucket, new)
            self.counts["samples_past_retention"] += 0 if reach is None else reach.dropped
            kept = [] if reach is None else reach.kept
            if new is None and (reach is None or not reach.written):
                yield bucket, None, kept
                continue
            table = self._merge(new, reach)
            if len(table):
                times = pc.min_max(table.column("timestamp").cast(pa.int64())).as_py()
                self.span_ms = [min([*self.span_ms, times["min"]]), max([*self.span_ms, times["max"]])]
            yield bucket, table, kept

    @property
    def _keep_ms(self) -> int | None:
        return None if self.keep_from is None else int(self.keep_from.timestamp() * 1000)

    def _merge(self, new: Block | None, reach: Reach | None) -> pa.Table:
        plan = self.plan
        block = join([*([] if reach is None else reach.blocks), *([] if new is None else [new])])
        if self._keep_ms is not None:
            # an unfinished cell stands at the end of its step, whatever its newest raw sample was
            cells = (block.order < 0) & self._to_roll(block)
            times = np.where(cells, cell_end(block.ms, plan.step_ms), block.ms)
            self.counts["samples_past_retention"] += int((times < self._keep_ms).sum())
            block = block.take(np.flatnonzero(times >= self._keep_ms))
        block = block.take(np.lexsort((block.order, block.ms, block.unit)))
        block = self._without_closed(block)
        before_merge = block
        block, repeated, conflicting = merge_duplicates(block)
        self.counts["samples_repeated"] += repeated
        self._set_aside("conflicting duplicate sample", before_merge, np.isin(before_merge.order, conflicting))
        held = self._held(before_merge, block)
        if CHANNEL in block.series:
            self._find_xids(block, held.get(CHANNEL, np.zeros(len(block), dtype=bool)))
        self._note_newest(block)
        if plan.rolled:
            add_rollup_columns(block, plan.channels, held)
            before = len(block)
            block = roll_up(block, plan.channels, self._to_roll(block), plan.step_ms)
            self.counts["samples_rolled_up"] += before - len(block)
        if reach is not None:  # without the rows that were only looked at
            block = block.take(np.flatnonzero(np.isin(plan.runs.of(block.ms), sorted(reach.written))))
        return block_table(block, plan.channels, self.stays, self._nodes, sample_count=plan.rolled)

    def _to_roll(self, block: Block) -> npt.NDArray[np.bool_]:
        """Rows to bring to the step: those of finer units, without the cells that earlier imports finished."""
        finished = (block.order < 0) & (block.ms % self.plan.step_ms == 0) & (self._newest_before[block.unit] >= 0)
        return np.isin(block.unit, self.plan.finer) & ~finished

    def _without_closed(self, block: Block) -> Block:
        """Set aside raw samples of a cell that the existing dataset has rolled up already."""
        roll, stored = self._to_roll(block), block.order < 0
        if not stored.any() or not roll.any():
            return block
        step_ms = self.plan.step_ms
        end = cell_end(block.ms, step_ms)
        finished = stored & ~roll
        cells = pd.MultiIndex.from_arrays([block.unit[finished], block.ms[finished]])
        closed = np.asarray(pd.MultiIndex.from_arrays([block.unit, end]).isin(cells))
        newest = self._newest_before[block.unit]
        # The cell of the newest raw sample is open for later ones.
        closed |= (newest % step_ms != 0) & (newest >= 0) & (end == cell_end(newest, step_ms)) & (block.ms <= newest)
        closed &= roll & ~stored
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

    def _stored_edges(self, existing: Dataset) -> dict[tuple[int, int], list[int]]:
        events = existing.events()
        events = events[(events["source"] == SOURCE) & (events["type"] == "xid")]
        edges: dict[tuple[int, int], list[int]] = {}
        units = self.stays.codes(events[self.stays.unit].to_numpy(dtype=object)).tolist()
        for unit, xid, ms in zip(units, events["code"], ms_of(events["timestamp"]).tolist(), strict=True):
            edges.setdefault((unit, int(xid)), []).append(ms)
        return edges

    def _find_xids(self, block: Block, held: npt.NDArray[np.bool_]) -> None:
        gauge = block.series[CHANNEL]
        read = gauge.values.astype(np.int32), gauge.valid
        rows = untold_edges(block.unit, block.ms, read, block.order < 0, held, self._edges)
        units = self.stays.units
        events = event_rows(
            pd.Series(times_of(block.ms[rows])),
            pd.Series([self._nodes[code] for code in block.node[rows].tolist()], dtype=object),
            pd.Series([units[code] if self.stays.unit == "gpu" else None for code in block.unit[rows]], dtype=object),
            gauge.values[rows].astype(np.int32),
            self.delay,
        )
        self.events.append(events)

    def _set_aside(self, reason: str, block: Block, chosen: npt.NDArray[np.bool_], *, lost_rows: int = 1) -> None:
        for index in np.flatnonzero(chosen & (block.order >= 0)).tolist():
            order = int(block.order[index])
            content = {
                "timestamp": instant_text(datetime.fromtimestamp(block.ms[index] / 1000, UTC)),
                "node": self._nodes[block.node[index]],
                self.stays.unit: self.stays.units[block.unit[index]],
                **{name: kept.values[index].item() for name, kept in block.series.items() if kept.valid[index]},
            }
            file, row = self.files[order >> ORDER_SHIFT], order & ((1 << ORDER_SHIFT) - 1)
            self.quarantine.add(reason, "samples", file, row, row_text(content), lost_rows=lost_rows)


def read_newest(root: Path) -> dict[str, int]:
    """Return the newest raw sample, in milliseconds, of each unit that was rolled up; empty where none was."""
    path = root / NEWEST_NAME
    if not path.exists():
        return {}
    return dict(zip(*pq.read_table(path, columns=["unit", "ms"]).to_pydict().values(), strict=True))


def write_newest(root: Path, newest: Mapping[str, int]) -> None:
    """Write what :func:`read_newest` reads; nothing where no unit is rolled up."""
    if newest:
        table = pa.table({"unit": sorted(newest), "ms": [newest[name] for name in sorted(newest)]})
        with disk_errors(root):
            write_small(root / NEWEST_NAME, table)
