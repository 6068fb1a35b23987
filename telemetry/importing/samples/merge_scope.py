"""Selects which stored runs of a bucket a merge rewrites, only reads, or leaves unchanged.

New rows change the runs that they fall into, and depend on others in two ways. Their rises and XIDs are relative to the
previous value, which may be in an earlier run. The first stored value after them was relative to the value before the
gap that they fill, so it is recomputed; if it is in a later run, that run is rewritten too. Merging these runs gives
the same rows as merging the whole bucket.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from foundation.errors import InputError
from foundation.files import disk_errors
from telemetry.dataset.channels import Channel, with_rollups
from telemetry.dataset.layout import Runs, choose_runs
from telemetry.dataset.parquet import part_rows, write_small
from telemetry.dataset.store import Dataset
from telemetry.importing.inventory import InstallationIndex
from telemetry.importing.samples.block import Block, Spill, read_block
from telemetry.importing.samples.derived_events import CHANNEL
from telemetry.importing.samples.intake import SampleIntake
from telemetry.importing.samples.rollup import cell_end, finer_units

NEWEST_NAME: Final = "newest.parquet"
"""Dataset file with the newest raw sample of each rolled-up unit."""

_ANY_ROW = ""
"""Pseudo-channel for rows with any content."""


@dataclass(frozen=True, slots=True)
class MergePlan:
    """Parameters of a merge.

    ``channels``: the new dataset's channels in column order.
    ``finer``: codes of units sampled more often than the step; ``newly_finer``: those that were not before.
    ``newest``: time (ms) of the newest raw sample by unit code, -1 if the unit was not rolled up before.
    ``rolled``: whether the dataset has roll-up columns and ``sample_count``.
    ``relaid``: whether columns or runs differ from the existing dataset, which is then rewritten completely.
    ``keep_ms``: earlier rows are past retention.
    ``nodes``: names by node code; extended by nodes that only the dataset names.
    """

    channels: dict[str, Channel]
    finer: npt.NDArray[np.int32]
    newly_finer: npt.NDArray[np.int32]
    newest: npt.NDArray[np.int64]
    rolled: bool
    relaid: bool
    runs: Runs
    step_ms: int
    keep_ms: int | None
    installations: InstallationIndex
    nodes: list[str]

    def is_finer(self, block: Block) -> npt.NDArray[np.bool_]:
        """Mark the rows of units that are rolled up."""
        return np.isin(block.unit, self.finer)

    @property
    def counters(self) -> list[str]:
        """Names of counters whose rises are stored."""
        return [name for name, channel in self.channels.items() if self.rolled and channel.kind == "counter"]


def plan_merge(
    spill: Spill, existing: Dataset | None, intake: SampleIntake, step: timedelta, keep_from: datetime | None = None
) -> MergePlan:
    """Determine the units sampled more often than the step, the resulting columns, and the runs.

    A unit that was rolled up before stays rolled up. A dataset with samples keeps its runs; otherwise runs are sized
    for one sample per unit and step.
    """
    installations, all_channels = intake.installations, intake.every_channel
    step_ms = step // timedelta(milliseconds=1)
    newest_of = {} if existing is None else read_newest(existing.path)
    newest = np.array([newest_of.get(name, -1) for name in installations.units], np.int64)
    finer = [np.flatnonzero(newest >= 0).astype(np.int32)]
    for bucket in spill.buckets():
        table = spill.read(bucket, ["unit", "ms"])
        finer.append(finer_units(table.column("unit").to_numpy(), table.column("ms").to_numpy(), step_ms))
    units = np.unique(np.concatenate(finer))
    old = {} if existing is None else existing.meta.channels
    rolled = bool(len(units)) or intake.sample_count or (existing is not None and existing.meta.sample_count)
    names = {*old, *intake.channels}
    if rolled:
        names |= set(with_rollups({name: channel for name, channel in all_channels.items() if name in names}))
    channels = {name: channel for name, channel in with_rollups(all_channels).items() if name in names}
    channels |= {name: channel for name, channel in old.items() if name not in channels}
    runs, relaid = choose_runs(len(installations.units) * (timedelta(days=1) / step) / spill.bucket_number), False
    if existing is not None:
        meta = existing.meta
        runs = meta.runs if meta.counts["samples"] else runs
        relaid = list(old.values()) != list(channels.values()) or meta.sample_count != rolled or meta.runs != runs
    return MergePlan(
        channels=channels,
        finer=units,
        newly_finer=units[newest[units] < 0],
        newest=newest,
        rolled=rolled,
        relaid=relaid,
        runs=runs,
        step_ms=step_ms,
        keep_ms=None if keep_from is None else int(keep_from.timestamp() * 1000),
        installations=installations,
        nodes=list(installations.node_names),
    )


def read_newest(root: Path) -> dict[str, int]:
    """Return the time (ms) of the newest raw sample by rolled-up unit; empty without one."""
    path = root / NEWEST_NAME
    if not path.exists():
        return {}
    return dict(zip(*pq.read_table(path, columns=["unit", "ms"]).to_pydict().values(), strict=True))


def write_newest(root: Path, newest: Mapping[str, int]) -> None:
    """Write the file for :func:`read_newest`, unless no unit is rolled up."""
    if newest:
        table = pa.table({"unit": sorted(newest), "ms": [newest[name] for name in sorted(newest)]})
        with disk_errors(root):
            write_small(root / NEWEST_NAME, table)


@dataclass(frozen=True, slots=True)
class MergeScope:
    """Stored rows of a bucket that a merge needs, and the fate of its runs.

    ``blocks``: stored rows in time order; runs that are only read have just keys, counters and latched XIDs.
    ``written``: runs to write, including new ones.
    ``unchanged``: stored runs left unchanged, ascending.
    ``dropped``: number of rows in runs past retention.
    """

    blocks: list[Block]
    written: set[int]
    unchanged: list[int]
    dropped: int


def read_merge_scope(dataset: Dataset | None, plan: MergePlan, bucket: int, new: Block | None) -> MergeScope:
    """Read the stored rows needed to merge a bucket's new rows.

    Raises ``InputError`` if the dataset is damaged or has samples of a unit that is not in the inventory.
    """
    runs, keep_ms = plan.runs, plan.keep_ms  # the runs of the dataset, if it has samples

    def run_of(block: Block) -> npt.NDArray[np.int64]:
        # A rolled-up row belongs to the run of its cell's end.
        return runs.of(np.where(plan.is_finer(block), cell_end(block.ms, plan.step_ms), block.ms))

    new_runs = np.empty(0, np.int64) if new is None else run_of(new)
    written = set(np.unique(new_runs).tolist())
    if dataset is None:
        return MergeScope([], written, [], 0)
    if keep_ms is not None and len(plan.newly_finer):  # the cell of their last sample may end in the next run
        keep_ms -= plan.step_ms
    stored = dataset.runs_of(bucket)
    retained = [run for run in stored if runs.overlaps(run, keep_ms, None)]
    expired = [path for run in stored if run not in retained for path in dataset.parts_of_run(bucket, run)]
    # Stored rows of a newly finer unit are downsampled, and may be in any run.
    rewrites_all = plan.relaid or (new is not None and bool(np.isin(new.unit, plan.newly_finer).any()))
    if rewrites_all:
        written.update(retained)
    elif plan.keep_ms is not None:
        written.update(run for run in retained[:1] if runs.days is None or runs.begin_ms(run) < plan.keep_ms)
    read = partial(_read_run, dataset, plan, bucket)
    blocks = {run: read(run) for run in retained if run in written}
    if rewrites_all:  # a row moved to the end of its cell may move to the next run
        written.update(run for block in blocks.values() for run in np.unique(run_of(block)).tolist())
    elif new is not None and (plan.counters or CHANNEL in new.series):
        for run in np.unique(new_runs).tolist():
            part = new.take(np.flatnonzero(new_runs == run))
            stored_rows = blocks.get(run, new.take(np.empty(0, np.int64)))
            earlier = [other for other in reversed(retained) if other < run]
            later_runs = [other for other in retained if other > run]
            written |= _read_neighbours(read, plan.counters, part, stored_rows, earlier, later_runs, blocks)
    return MergeScope(
        blocks=[blocks[run] for run in sorted(blocks)],
        written=written,
        unchanged=[run for run in retained if run not in written],
        dropped=sum(part_rows(path) for path in expired),
    )


def _read_neighbours(
    read: Callable[..., Block],
    counters: list[str],
    new: Block,
    stored_rows: Block,
    earlier: Sequence[int],
    later_runs: Sequence[int],
    blocks: dict[int, Block],
) -> set[int]:
    """Read runs before and after the new rows of one run until every channel that they report was found.

    ``stored_rows``: stored rows of the same run.
    ``blocks``: extended by the runs that were read.
    Returns: runs to rewrite, which are read completely.
    """
    channels = [*counters, CHANNEL]
    units = np.unique(new.unit)

    def reported(run: int) -> pd.DataFrame:
        if run not in blocks:
            blocks[run] = read(run, channels)
        return _reports(blocks[run], units, channels)[0].notna()

    first, last = _reports(new, units, channels)
    own_first, own_last = _reports(stored_rows, units, channels)
    # Also search for any earlier row, because a first latched XID after rows without one is an edge.
    missing = first.notna() & ~(own_first < first)
    for run in earlier:
        if not missing.any(axis=None):
            break
        missing &= ~reported(run)
    # Rows before all others of a unit turn its first latched XID into an edge, even without reporting the gauge.
    earliest = missing[_ANY_ROW] & first[CHANNEL].isna()
    last.loc[earliest, CHANNEL] = first.loc[earliest, _ANY_ROW]
    missing = (last.notna() & ~(own_last > last))[channels]
    rewritten = set()
    for run in later_runs:
        if not missing.any(axis=None):
            break
        measured_again = reported(run)[channels] & missing
        if measured_again[counters].any(axis=None):
            blocks[run] = read(run)
            rewritten.add(run)
        missing &= ~measured_again
    return rewritten


def _read_run(dataset: Dataset, plan: MergePlan, bucket: int, run: int, channels: Sequence[str] | None = None) -> Block:
    """Read a run, with order -1 and the time of the newest raw sample for incomplete cells.

    ``channels``: channels to read (default: all); the others have no values.
    """
    column_names = None
    if channels is not None:
        column_names = ["timestamp", "node", "gpu", *(name for name in channels if name in dataset.schema.names)]
    table = dataset.read_run(bucket, run, column_names)
    units = table.column(plan.installations.unit).unify_dictionaries().combine_chunks()
    codes = plan.installations.codes(units.dictionary.to_pylist())
    if (codes < 0).any():
        raise InputError(
            f"the dataset has samples of {units.dictionary[int(np.argmin(codes))].as_py()!r}, "
            "which the inventory does not name",
            str(dataset.path),
            "Give --inventory with a row for it (with removed_at, if it is gone).",
        )
    nodes = table.column("node").unify_dictionaries().combine_chunks()
    names = nodes.dictionary.to_pylist()
    plan.nodes.extend(sorted(set(names) - set(plan.nodes)))
    node_codes = pd.Index(plan.nodes).get_indexer(names)
    keys = {
        "unit": codes[units.indices.to_numpy()].astype(np.int32),
        "node": node_codes[nodes.indices.to_numpy()].astype(np.int32),
        "ms": table.column("timestamp").cast(pa.int64()),
        "order": np.full(len(table), -1, np.int64),
        "mig": np.zeros(len(table), dtype=bool),
    }
    values = {name: table.column(name) for name in table.column_names if name not in ("timestamp", "node", "gpu")}
    block = read_block(pa.table({**keys, **values}), plan.channels)
    newest = plan.newest[block.unit]
    unfinished = (newest >= 0) & (newest < block.ms) & (cell_end(newest, plan.step_ms) == block.ms)
    block.ms = np.where(unfinished, newest, block.ms)
    return block


def _reports(block: Block, units: npt.NDArray[np.int32], channels: Sequence[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the first and last time (ms) at which each unit reported each channel or any row; NaN if it did not."""
    ms = pd.Series(block.ms, dtype=np.float64)
    times = {name: ms.where(block.series[name].valid) if name in block.series else np.nan for name in channels}
    by_unit = pd.DataFrame({**times, _ANY_ROW: ms}).groupby(block.unit)
    return by_unit.min().reindex(units), by_unit.max().reindex(units)
