"""Which stored runs of a bucket a merge rewrites, which it only looks at, and which stay as they are.

New rows change the runs that they fall into. Beyond those they reach in two ways. Their own rises and XIDs are measured
against the value before them, which may lie in an earlier run. And the first stored value after them, which was
measured against the one before the gap that they fill, is measured anew: where it lies in a later run, that run is
rewritten too. A merge of these runs gives their rows as one of the whole bucket would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from telemetry.dataset.channels import Channel
from telemetry.dataset.dataset import Dataset
from telemetry.dataset.layout import part_rows
from telemetry.dataset.runs import Runs
from telemetry.errors import InputError
from telemetry.importing.inventory import Installations
from telemetry.importing.samples.block import Block, read_block
from telemetry.importing.samples.rollup import cell_end
from telemetry.xids.xid_gauge import CHANNEL

_ANY_ROW = ""
"""Column for rows of whatever content, beside those of channels."""


@dataclass(frozen=True, slots=True)
class MergePlan:
    """How samples become the dataset's.

    ``channels``: the new dataset's channels in column order.
    ``finer``: codes of the units whose samples come faster than the step.
    ``rolled``: whether the dataset has roll-up columns and ``sample_count``.
    """

    channels: dict[str, Channel]
    finer: npt.NDArray[np.int32]
    rolled: bool
    runs: Runs
    step_ms: int


@dataclass(frozen=True, slots=True)
class Reach:
    """What a merge needs of a bucket.

    ``blocks``: stored rows, in order of time: whole runs that are rewritten, and of those only looked at the keys,
    counters and latched XIDs.
    ``written``: runs whose rows the merge gives anew, also ones that are not stored yet.
    ``kept``: stored runs that stay as they are, ascending.
    ``dropped``: rows of runs that are past retention.
    """

    blocks: list[Block]
    written: set[int]
    kept: list[int]
    dropped: int


class StoredSamples:
    """Reads of an existing dataset what a merge needs, bucket by bucket.

    ``stays``: names of the unit codes.
    ``nodes``: names of the node codes; grows by those that only the dataset names.
    ``newest``: newest raw sample in milliseconds of each unit code, -1 where it was not rolled up.
    ``keep_ms``: rows before are past retention.
    """

    def __init__(
        self,
        dataset: Dataset,
        plan: MergePlan,
        stays: Installations,
        nodes: list[str],
        newest: npt.NDArray[np.int64],
        keep_ms: int | None,
    ) -> None:
        self._dataset, self._plan, self._stays, self._nodes = dataset, plan, stays, nodes
        self._newest, self._keep_ms = newest, keep_ms
        self._newly_finer = plan.finer[newest[plan.finer] < 0]
        counters = [name for name, channel in plan.channels.items() if channel.kind == "counter"]
        self._counters = counters if plan.rolled else []
        meta = dataset.meta
        same_channels = list(meta.channels.values()) == list(plan.channels.values())
        self._other_layout = not same_channels or meta.sample_count != plan.rolled or meta.runs != plan.runs

    def reach(self, bucket: int, new: Block | None) -> Reach:
        """Find the reach of a bucket's new rows.

        Raises ``InputError`` if the dataset has samples of a unit that the inventory does not name, or is damaged.
        """
        runs, keep_ms = self._dataset.meta.runs, self._keep_ms
        if keep_ms is not None and len(self._newly_finer):  # their last sample may end a step in the next run
            keep_ms -= self._plan.step_ms
        stored = self._dataset.runs_of(bucket)
        left = [run for run in stored if runs.overlaps(run, keep_ms, None)]
        past = [path for run in stored if run not in left for path in self._dataset.parts_of_run(bucket, run)]
        run_of_row = np.empty(0, np.int64) if new is None else self._run_of(new)
        written = set(np.unique(run_of_row).tolist())
        # Stored rows of a unit that becomes finer are brought to the step: they may lie anywhere.
        rewrites_all = self._other_layout or (new is not None and bool(np.isin(new.unit, self._newly_finer).any()))
        if rewrites_all:
            written.update(left)
        elif self._keep_ms is not None:
            written.update(run for run in left[:1] if runs.days is None or runs.begin_ms(run) < self._keep_ms)
        blocks = {run: self._read(bucket, run) for run in left if run in written}
        if rewrites_all:  # a row that goes to the end of its step may go to the next run
            written.update(run for block in blocks.values() for run in np.unique(self._run_of(block)).tolist())
        elif new is not None and (self._counters or CHANNEL in new.series):
            for run in np.unique(run_of_row).tolist():
                self._look_around(bucket, run, new.take(np.flatnonzero(run_of_row == run)), left, blocks, written)
        return Reach(
            blocks=[blocks[run] for run in sorted(blocks)],
            written=written,
            kept=[run for run in left if run not in written],
            dropped=sum(part_rows(path) for path in past),
        )

    def _run_of(self, block: Block) -> npt.NDArray[np.int64]:
        """Return the run of each row: of the end of its cell, where it is rolled up."""
        rolled = np.isin(block.unit, self._plan.finer)
        return self._dataset.meta.runs.of(np.where(rolled, cell_end(block.ms, self._plan.step_ms), block.ms))

    def _look_around(
        self, bucket: int, run: int, new: Block, left: Sequence[int], blocks: dict[int, Block], written: set[int]
    ) -> None:
        """Look from the new rows of one run to both sides, until each channel that they report has been reported.

        ``blocks``, ``written``: grow by the runs that were read, and by those of them that are rewritten.
        """
        channels = [*self._counters, CHANNEL]
        units = np.unique(new.unit)

        def reported(other: int) -> pd.DataFrame:
            if other not in blocks:
                blocks[other] = self._read(bucket, other, channels)
            return _reports(blocks[other], units, channels)[0].notna()

        first, last = _reports(new, units, channels)
        own = blocks[run] if run in blocks else new.take(np.empty(0, np.int64))
        own_first, own_last = _reports(own, units, channels)
        # One row more, of whatever content, for a first latched XID after rows without one is news.
        sought = first.notna() & ~(own_first < first)
        for other in (other for other in reversed(left) if other < run):
            if not sought.any(axis=None):
                break
            sought &= ~reported(other)
        # Rows before all others of a unit make news of its first latched XID, though they do not report it.
        earliest = sought[_ANY_ROW] & first[CHANNEL].isna()
        last.loc[earliest, CHANNEL] = first.loc[earliest, _ANY_ROW]
        sought = (last.notna() & ~(own_last > last))[channels]
        for other in (other for other in left if other > run):
            if not sought.any(axis=None):
                break
            measured_anew = reported(other)[channels] & sought
            if measured_anew[self._counters].any(axis=None) and other not in written:
                blocks[other] = self._read(bucket, other)
                written.add(other)
            sought &= ~measured_anew

    def _read(self, bucket: int, run: int, channels: Sequence[str] | None = None) -> Block:
        """Read a run.

        ``channels``: those that are wanted; the others, and ones that the dataset lacks, are missing in the block.
        Returns: with order -1. A row of a cell that an earlier import left unfinished has the time of its newest raw
        sample.
        """
        wanted = None
        if channels is not None:
            there = self._dataset.schema.names
            wanted = ["timestamp", "node", "gpu", *(name for name in channels if name in there)]
        table = self._dataset.read_run(bucket, run, wanted)
        units = table.column(self._stays.unit).unify_dictionaries().combine_chunks()
        codes = self._stays.codes(units.dictionary.to_pylist())
        if (codes < 0).any():
            raise InputError(
                f"the dataset has samples of {units.dictionary[int(np.argmin(codes))].as_py()!r}, "
                "which the inventory does not name",
                str(self._dataset.path),
                "Give --inventory with a row for it (with removed_at, if it is gone).",
            )
        nodes = table.column("node").unify_dictionaries().combine_chunks()
        names = nodes.dictionary.to_pylist()
        self._nodes += sorted(set(names) - set(self._nodes))
        node_codes = pd.Index(self._nodes).get_indexer(names)
        keys = {
            "unit": pa.array(codes[units.indices.to_numpy()].astype(np.int32)),
            "node": pa.array(node_codes[nodes.indices.to_numpy()].astype(np.int32)),
            "ms": table.column("timestamp").cast(pa.int64()),
            "order": pa.array(np.full(len(table), -1, np.int64)),
            "mig": pa.array(np.zeros(len(table), dtype=bool)),
        }
        given = {name: table.column(name) for name in table.column_names if name not in ("timestamp", "node", "gpu")}
        block = read_block(pa.table({**keys, **given}), self._plan.channels)
        newest = self._newest[block.unit]
        unfinished = (newest >= 0) & (newest < block.ms) & (cell_end(newest, self._plan.step_ms) == block.ms)
        unfinished &= np.isin(block.unit, self._plan.finer)
        block.ms = np.where(unfinished, newest, block.ms)
        return block


def _reports(block: Block, units: npt.NDArray[np.int32], channels: Sequence[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return when each unit first and last reported each channel, and had any row; missing where it did not."""
    ms = pd.Series(block.ms, dtype=np.float64)
    times = {name: ms.where(block.series[name].valid) if name in block.series else np.nan for name in channels}
    by_unit = pd.DataFrame({**times, _ANY_ROW: ms}).groupby(block.unit)
    return by_unit.min().reindex(units), by_unit.max().reindex(units)
