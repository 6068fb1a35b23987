"""Which stored runs of a bucket a merge rewrites, which it only looks at, and which stay as they are.

New rows change the runs that they fall into. Beyond those they reach in two ways. Their own rises and XIDs are measured
against the value before them, which may lie in an earlier run. And the first stored value after them, which was
measured against the one before the gap that they fill, is measured anew: where it lies in a later run, that run is
rewritten too. A merge of these runs gives their rows as one of the whole bucket would.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.dataset.channel import Channel
from telemetry.dataset.dataset import Dataset
from telemetry.dataset.layout import part_rows
from telemetry.errors import InputError
from telemetry.importing.inventory import Installations
from telemetry.importing.samples.block import Block, read_block
from telemetry.importing.samples.rollup import cell_end
from telemetry.xids.xid_gauge import CHANNEL


class StoredBlocks:
    """Reads an existing dataset for a merge.

    ``stays``: names of the unit codes.
    ``nodes``: names of the node codes; grows by those that only the dataset names.
    ``newest``: newest raw sample in milliseconds of each unit code, -1 where it was not rolled up.
    """

    def __init__(
        self,
        existing: Dataset,
        stays: Installations,
        nodes: list[str],
        channels: Mapping[str, Channel],
        finer: npt.NDArray[np.int32],
        newest: npt.NDArray[np.int64],
        step: timedelta,
    ) -> None:
        self.dataset = existing
        self._stays, self._nodes, self._channels = stays, nodes, channels
        self._finer, self._newest = finer, newest
        self._step_ms = step // timedelta(milliseconds=1)
        self._node_code: dict[str, int] = {}

    def read(self, bucket: int, run: int, channels: Sequence[str] | None = None) -> Block:
        """Read a run.

        ``channels``: those that are wanted; the others, and ones that the dataset lacks, are missing in the block.
        Returns: with order -1. A row of a cell that an earlier import left unfinished has the time of its newest raw
        sample.
        Raises ``InputError`` if the dataset has samples of a unit that the inventory does not name, or is damaged.
        """
        wanted = None
        if channels is not None:
            there = self.dataset.schema.names
            wanted = ["timestamp", "node", "gpu", *(name for name in channels if name in there)]
        block = self._block(self.dataset.read_run(bucket, run, wanted))
        self._reopen(block)
        return block

    def _reopen(self, block: Block) -> None:
        """Give the rows of unfinished cells the time of their newest raw sample."""
        newest = self._newest[block.unit]
        unfinished = (newest >= 0) & (newest < block.ms) & (cell_end(newest, self._step_ms) == block.ms)
        unfinished &= np.isin(block.unit, self._finer)
        if unfinished.any():
            block.ms = np.where(unfinished, newest, block.ms)

    def _block(self, table: pa.Table) -> Block:
        by_node = self._stays.unit == "node"
        names = table.column("node" if by_node else "gpu").unify_dictionaries().combine_chunks()
        nodes = table.column("node").unify_dictionaries().combine_chunks()
        code = self._stays.codes(names.dictionary.to_pylist())
        lost = [names.dictionary[index].as_py() for index in np.flatnonzero(code < 0).tolist()]
        if lost:
            raise InputError(
                f"the dataset has samples of {lost[0]!r}, which the inventory does not name",
                str(self.dataset.path),
                "Give --inventory with a row for it (with removed_at, if it is gone).",
            )
        for name in self._nodes[len(self._node_code) :]:
            self._node_code.setdefault(name, len(self._node_code))
        for name in nodes.dictionary.to_pylist():
            if name not in self._node_code:
                self._node_code[name] = len(self._nodes)
                self._nodes.append(name)
        node_code = np.array([self._node_code[name] for name in nodes.dictionary.to_pylist()], np.int32)
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
        return read_block(keyed, self._channels)


_NEVER = np.iinfo(np.int64).max

Instants = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Reach:
    """What a merge needs of a bucket.

    ``blocks``: stored rows, in order of time: whole runs that are rewritten, and of those only looked at the keys,
    counters and latched XIDs.
    ``written``: runs whose rows the merge gives anew, also ones that are not stored yet.
    ``kept``: stored runs that stay as they are, ascending.
    """

    blocks: list[Block] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    kept: list[int] = field(default_factory=list)
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Reaching:
    """Finds the reach of one bucket after the other.

    ``newly_finer``: those of them that no earlier import rolled up.
    ``counters``: channels that have rises; none where nothing is rolled up.
    """

    stored: StoredBlocks
    finer: npt.NDArray[np.int32]
    newly_finer: npt.NDArray[np.int32]
    counters: tuple[str, ...]
    step: timedelta
    everything: bool
    keep_ms: int | None

    def of(self, bucket: int, new: Block | None) -> Reach:
        """Find the reach of a bucket's new rows."""
        dataset = self.stored.dataset
        runs = dataset.meta.runs
        stored = dataset.runs_of(bucket)
        keep_ms = self.keep_ms
        if keep_ms is not None and len(self.newly_finer):  # their last sample may end a step in the next run
            keep_ms -= self.step // timedelta(milliseconds=1)
        past = [run for run in stored if not runs.overlaps(run, keep_ms, None)]
        left = [run for run in stored if run not in past]
        reach = Reach(dropped=sum(part_rows(path) for run in past for path in dataset.parts_of_run(bucket, run)))
        landing = np.empty(0, np.int64) if new is None else self._landing(new)
        reach.written.update(np.unique(landing).tolist())
        rewrites_all = self.everything or (new is not None and self._rolled_anew(bucket, new, left))
        if rewrites_all:
            reach.written.update(left)
        elif self.keep_ms is not None:
            reach.written.update(run for run in left[:1] if self._begins_before(bucket, run, self.keep_ms))
        whole = {run: self.stored.read(bucket, run) for run in left if run in reach.written}
        if rewrites_all:  # a row of a unit that has become finer goes to the end of its cell, perhaps in the next run
            reach.written.update(run for block in whole.values() for run in np.unique(self._landing(block)).tolist())
        seen: dict[int, Block] = {}
        told = new is not None and (bool(self.counters) or CHANNEL in new.series)
        if new is not None and told and len(whole) < len(left):
            look = _Look(self, bucket, left, whole, seen)
            for run in np.unique(landing).tolist():
                look.around(new.take(np.flatnonzero(landing == run)), run)
            reach.written.update(whole)
        reach.blocks = [block for _, block in sorted({**seen, **whole}.items())]
        reach.kept = [run for run in left if run not in reach.written]
        return reach

    def _landing(self, new: Block) -> Instants:
        """Return the run of each new row: of the end of its cell, where it is rolled up."""
        ends = cell_end(new.ms, self.step // timedelta(milliseconds=1))
        return self.stored.dataset.meta.runs.of(np.where(np.isin(new.unit, self.finer), ends, new.ms))

    def _begins_before(self, bucket: int, run: int, ms: int) -> bool:
        times = self.stored.dataset.read_run(bucket, run, ["timestamp"]).column("timestamp")
        return bool(pc.min(times.cast(pa.int64())).as_py() < ms)

    def _rolled_anew(self, bucket: int, new: Block, runs: Iterable[int]) -> bool:
        """Whether stored rows of a unit that has become finer must be brought to the step: they may lie anywhere."""
        units = np.intersect1d(new.unit, self.newly_finer)
        if not len(units):
            return False
        step_ms = self.step // timedelta(milliseconds=1)
        for run in runs:
            block = self.stored.read(bucket, run, [])
            if bool((np.isin(block.unit, units) & (block.ms % step_ms != 0)).any()):
                return True
        return False


@dataclass(frozen=True, slots=True)
class _Look:
    """Looks from new rows to both sides, until each channel that they report has been reported in a stored row."""

    reaching: Reaching
    bucket: int
    stored: list[int]
    whole: dict[int, Block]
    seen: dict[int, Block]

    @property
    def channels(self) -> list[str]:
        return [*self.reaching.counters, CHANNEL]

    def around(self, new: Block, run: int) -> None:
        """Look around the new rows of one run; read runs are put where they belong."""
        units = np.unique(new.unit)
        first, last = _edges(new, units, self.channels)
        own = _edges(self.whole[run], units, self.channels) if run in self.whole else None
        # Before: one row more, of whatever content, for a first latched XID after rows without one is news.
        sought = first != _NEVER
        if own is not None:
            sought &= ~(own[0] < first)
        for before in reversed([each for each in self.stored if each < run]):
            if not sought.any():
                break
            sought &= ~self._reported(before, units)
        # After: rows before all others of a unit make news of its first latched XID, though they do not report it.
        earliest = sought[:, -1] & (first[:, -2] == _NEVER)
        last[earliest, -2] = first[earliest, -1]
        sought = first[:, :-1] != _NEVER
        sought[:, -1] |= earliest
        if own is not None:
            sought &= ~(own[1] > last)[:, :-1]
        for after in (each for each in self.stored if each > run):
            if not sought.any():
                break
            found = self._reported(after, units)[:, :-1] & sought
            if found[:, : len(self.reaching.counters)].any() and after not in self.whole:
                self.seen.pop(after, None)
                self.whole[after] = self.reaching.stored.read(self.bucket, after)
            sought &= ~found

    def _reported(self, run: int, units: npt.NDArray[np.int32]) -> Bools:
        if run not in self.whole and run not in self.seen:
            self.seen[run] = self.reaching.stored.read(self.bucket, run, self.channels)
        block = self.whole[run] if run in self.whole else self.seen[run]
        return _edges(block, units, self.channels)[0] != _NEVER


def _edges(block: Block, units: npt.NDArray[np.int32], channels: Sequence[str]) -> tuple[Instants, Instants]:
    """Return when each unit first and last reported each channel; the last column is any row at all.

    Returns: the greatest and the least integer where it did not; shape (len(units), len(channels) + 1).
    """
    place = np.searchsorted(units, block.unit)
    mine = np.flatnonzero(units[np.minimum(place, len(units) - 1)] == block.unit)
    place, ms = place[mine], block.ms[mine]
    first = np.full((len(units), len(channels) + 1), _NEVER, np.int64)
    last = np.full_like(first, -_NEVER)
    for column, name in enumerate([*channels, None]):
        rows: npt.NDArray[np.int64] | slice = slice(None)
        if name is not None:
            if name not in block.series:
                continue
            rows = np.flatnonzero(block.series[name].valid[mine])
        np.minimum.at(first[:, column], place[rows], ms[rows])
        np.maximum.at(last[:, column], place[rows], ms[rows])
    return first, last
