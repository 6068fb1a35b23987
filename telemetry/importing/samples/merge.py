"""Merges spilled samples into those of an existing dataset, bucket by bucket."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.dataset.meta import instant_text
from telemetry.dataset.schema import ms_of
from telemetry.dataset.store import Dataset
from telemetry.importing.event_runs import event_frame
from telemetry.importing.quarantine import VALUES, Quarantine, row_text
from telemetry.importing.samples.block import ORDER_SHIFT, Block, ChannelValues, Spill, block_table, join, read_block
from telemetry.importing.samples.derived_events import CHANNEL, SOURCE, new_edges
from telemetry.importing.samples.instrument_rules import RULES
from telemetry.importing.samples.instruments import (
    DEAD_CHANNEL,
    EVENT_CODE,
    FROZEN,
    Instruments,
    has_values,
    read_instruments,
    without_dead_values,
)
from telemetry.importing.samples.merge_scope import MergePlan, read_merge_scope
from telemetry.importing.samples.rollup import (
    IMPOSSIBLE_RISE,
    STALE,
    add_rollup_columns,
    cell_end,
    impossible_rises,
    merge_duplicates,
    roll_up,
)


@dataclass(slots=True)
class SampleMerger:
    """Merges samples one bucket at a time.

    A cell that was incomplete after an earlier import is continued: ``newest.parquet`` keeps the time of the newest raw
    sample per rolled-up unit, which separates later raw samples from those already in the cell.
    """

    plan: MergePlan
    existing: Dataset | None
    delay: timedelta
    files: list[Path]
    quarantine: Quarantine
    counts: Counter[str] = field(default_factory=Counter)
    span_ms: list[int] = field(default_factory=list)
    newest: dict[str, int] = field(default_factory=dict)
    events: list[pd.DataFrame] = field(default_factory=list)
    instruments: Instruments = field(init=False)
    _edges: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        units = self.plan.installations.units
        state = None if self.existing is None else read_instruments(self.existing.path)
        self.instruments = Instruments(units, state)
        self.newest = {units[code]: int(self.plan.newest[code]) for code in np.flatnonzero(self.plan.newest >= 0)}
        if self.existing is not None:
            events = self.existing.events()
            events = events[(events["source"] == SOURCE) & (events["type"] == "xid")]
            codes = self.plan.installations.codes(events[self.plan.installations.unit].to_numpy(dtype=object)).tolist()
            for unit, xid, ms in zip(codes, events["code"], ms_of(events["timestamp"]).tolist(), strict=True):
                self._edges.setdefault((unit, int(xid)), []).append(ms)

    def run(self, spill: Spill) -> Iterator[tuple[int, pa.Table | None, list[int]]]:
        """Yield each bucket, the sorted samples of its rewritten runs, and its unchanged runs.

        The attributes are complete after the last bucket.
        """
        new_buckets = set(spill.buckets())
        old_buckets = set() if self.existing is None else set(self.existing.buckets())
        for bucket in sorted(new_buckets | old_buckets):
            new = read_block(spill.read(bucket), self.plan.channels) if bucket in new_buckets else None
            scope = read_merge_scope(self.existing, self.plan, bucket, new)
            self.counts["samples_past_retention"] += scope.dropped
            if new is None and not scope.written:
                yield bucket, None, scope.unchanged
                continue
            table = self._merge([*scope.blocks, *([] if new is None else [new])], sorted(scope.written))
            if len(table):
                times = pc.min_max(table.column("timestamp").cast(pa.int64())).as_py()
                self.span_ms = [min([*self.span_ms, times["min"]]), max([*self.span_ms, times["max"]])]
            yield bucket, table, scope.unchanged

    def _merge(self, blocks: list[Block], runs: list[int]) -> pa.Table:
        plan, block = self.plan, join(blocks)
        if plan.keep_ms is not None:
            # an incomplete cell is stored at its end, not at its newest raw sample
            cells = (block.order < 0) & self._to_roll(block)
            times = np.where(cells, cell_end(block.ms, plan.step_ms), block.ms)
            is_expired = times < plan.keep_ms
            self.counts["samples_past_retention"] += int(is_expired.sum())
            new_rows = int((is_expired & (block.order >= 0)).sum())
            self.quarantine.left_out("samples", "older than the retention of the dataset", new_rows)
            block = block.filter(~is_expired)
        block = block.take(np.lexsort((block.order, block.ms, block.unit)))
        block = self._without_closed(block)
        before_merge = block
        block, repeated, conflicting = merge_duplicates(block)
        self.counts["samples_repeated"] += repeated
        self._set_aside("conflicting duplicate sample", before_merge, np.isin(before_merge.order, conflicting))
        block, stale = self._without_stale(block)
        self._refuse_impossible_rises(block)
        stored = self._has_stored(before_merge, block)
        if CHANNEL in block.series:
            self._find_xids(block, stored.get(CHANNEL, np.zeros(len(block), dtype=bool)))
        self._note_newest(block)
        block, frozen = self._without_dead(block)
        new_rows = int((before_merge.order >= 0).sum())
        self.quarantine.used("samples", new_rows - len(conflicting) - stale - frozen)
        if plan.rolled:
            add_rollup_columns(block, plan.channels, stored)
            rows_before = len(block)
            block = roll_up(block, plan.channels, self._to_roll(block), plan.step_ms)
            self.counts["samples_rolled_up"] += rows_before - len(block)
        block = block.filter(np.isin(plan.runs.of(block.ms), runs))  # without runs that were only read
        block = block.filter(has_values(block))
        return block_table(block, plan.channels, plan.installations, plan.nodes, sample_count=plan.rolled)

    def _to_roll(self, block: Block) -> npt.NDArray[np.bool_]:
        """Mark rows to downsample: those of finer units, except cells completed by earlier imports."""
        finished = (block.order < 0) & (block.ms % self.plan.step_ms == 0) & (self.plan.newest[block.unit] >= 0)
        return self.plan.is_finer(block) & ~finished

    def _without_closed(self, block: Block) -> Block:
        """Quarantine raw samples of cells that are already rolled up in the dataset."""
        roll, stored = self._to_roll(block), block.order < 0
        if not stored.any() or not roll.any():
            return block
        step_ms = self.plan.step_ms
        end = cell_end(block.ms, step_ms)
        finished = stored & ~roll
        cells = pd.MultiIndex.from_arrays([block.unit[finished], block.ms[finished]])
        closed = np.asarray(pd.MultiIndex.from_arrays([block.unit, end]).isin(cells))
        newest = self.plan.newest[block.unit]
        # The cell of the newest raw sample still accepts later ones.
        closed |= (newest % step_ms != 0) & (newest >= 0) & (end == cell_end(newest, step_ms)) & (block.ms <= newest)
        closed &= roll & ~stored
        # Not a loss: the dataset has their step.
        self._set_aside("its step was rolled up by an earlier import", block, closed, lost=False)
        return block.take(np.flatnonzero(~closed))

    def _note_newest(self, block: Block) -> None:
        chosen = self._to_roll(block)  # including stored samples of newly finer units
        for code, ms in pd.Series(block.ms[chosen]).groupby(block.unit[chosen]).max().items():
            name = self.plan.installations.units[int(code)]
            self.newest[name] = max(int(ms), self.newest.get(name, 0))

    def _has_stored(self, rows: Block, merged: Block) -> dict[str, npt.NDArray[np.bool_]]:
        """Return which merged rows had a stored value, by counter and for the latched XID; new rows may fill others."""
        old, merged_old = rows.order < 0, merged.order < 0
        if not old.any():
            return {}
        stored = {}
        for name, channel in self.plan.channels.items():
            if channel.kind == "counter" or name == CHANNEL:
                stored[name] = np.zeros(len(merged), dtype=bool)
                # A stored row is the first of its key, so stored rows keep their order.
                stored[name][merged_old] = rows.series[name].valid[old]
        return stored

    def _without_dead(self, block: Block) -> tuple[Block, int]:
        """Remove frozen telemetry and dead channels, and add an event per frozen stretch.

        Returns: the block, and the number of frozen new rows.
        """
        findings = self.instruments.check(block, (block.order < 0) & ~self.plan.is_finer(block))
        self._set_aside(FROZEN, block, findings.frozen, lost=False)
        frozen = int((findings.frozen & (block.order >= 0)).sum())
        for name, rows in findings.dead.items():
            if rows.any():
                example = f"{name} of {self.plan.installations.units[block.unit[np.argmax(rows)]]}"
                self.quarantine.used(f"sample{VALUES}", -int(rows.sum()))
                self.quarantine.left_out(f"sample{VALUES}", DEAD_CHANNEL, int(rows.sum()), example)
        if len(findings.onsets):
            details = [self._repeated(block, row) for row in findings.onsets.tolist()]
            self._add_events(block, findings.onsets, "other", [EVENT_CODE] * len(details), details, "telemetry")
        return without_dead_values(block, findings), frozen

    def _repeated(self, block: Block, row: int) -> str:
        """List the values that a frozen GPU repeats."""
        channels = ((name, block.series.get(name)) for name in (*RULES.fluctuating, RULES.load))
        values = [f"{name} {s.values[row].item():g}" for name, s in channels if s is not None and s.valid[row]]
        return f"repeated to the digit: {', '.join(values)}"

    def _find_xids(self, block: Block, has_stored: npt.NDArray[np.bool_]) -> None:
        gauge = block.series[CHANNEL]
        read = gauge.values.astype(np.int32), gauge.valid
        rows = new_edges(block.unit, block.ms, read, block.order < 0, has_stored, self._edges)
        codes = [str(code) for code in gauge.values[rows].tolist()]
        self._add_events(block, rows, "xid", codes, "change of the latched XID gauge", SOURCE)

    def _add_events(
        self, block: Block, rows: npt.NDArray[np.int64], kind: str, codes: list[str], detail: object, source: str
    ) -> None:
        installations = self.plan.installations
        nodes = [self.plan.nodes[code] for code in block.node[rows].tolist()]
        gpus = [
            installations.units[code] if installations.unit == "gpu" else None for code in block.unit[rows].tolist()
        ]
        named = {"node": nodes, "gpu": gpus, "type": kind, "code": codes, "detail": detail, "source": source}
        self.events.append(event_frame(block.ms[rows], self.delay, **named))

    def _without_stale(self, block: Block) -> tuple[Block, int]:
        """Remove and count new rows with a counter's value of an earlier time: a second source is behind or frozen."""
        count = 0
        for name in RULES.large_counters:
            channel = self.plan.channels.get(name)
            if channel is None or channel.max_rise_per_s is None:
                continue
            series = block.series[name]
            values = series.values.astype(np.float64)
            _, stale, _ = impossible_rises(values, series.valid, block.unit, block.ms, channel.max_rise_per_s)
            stale &= (block.order >= 0) & ~block.mig
            self._set_aside(STALE, block, stale, lost=False)
            block, count = block.filter(~stale), count + int(stale.sum())
        return block, count

    def _refuse_impossible_rises(self, block: Block) -> None:
        """Null new counter values above the channel's maximum rate, in place."""
        for name, channel in self.plan.channels.items():
            series = block.series[name]
            if channel.kind != "counter" or channel.max_rise_per_s is None:
                continue
            values = series.values.astype(np.float64)
            is_new = block.order >= 0
            refused, _, plausible = impossible_rises(values, series.valid, block.unit, block.ms, channel.max_rise_per_s)
            refused &= is_new
            block.series[name] = series = ChannelValues(np.where(is_new, plausible, series.values), series.valid)
            number = int(refused.sum())
            if number:
                example = f"{name} = {values[refused][0]:.15g}"
                self._set_aside(IMPOSSIBLE_RISE, block, refused, rows=0)
                self.quarantine.values("samples", name, -number, {IMPOSSIBLE_RISE: (number, example)})
                block.series[name] = ChannelValues(np.where(refused, 0, series.values), series.valid & ~refused)

    def _set_aside(
        self, reason: str, block: Block, chosen: npt.NDArray[np.bool_], *, rows: int = 1, lost: bool = True
    ) -> None:
        for index in np.flatnonzero(chosen & (block.order >= 0)).tolist():
            order = int(block.order[index])
            content = {
                "timestamp": instant_text(datetime.fromtimestamp(block.ms[index] / 1000, UTC)),
                "node": self.plan.nodes[block.node[index]],
                self.plan.installations.unit: self.plan.installations.units[block.unit[index]],
                **{name: series.values[index].item() for name, series in block.series.items() if series.valid[index]},
            }
            file, row = self.files[order >> ORDER_SHIFT], order & ((1 << ORDER_SHIFT) - 1)
            self.quarantine.set_aside(reason, "samples", file, row, row_text(content), rows=rows, lost=lost)
