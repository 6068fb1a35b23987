"""The runs of an existing dataset as blocks, with the codes and the open cells of the import that adds to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from telemetry.dataset.channel import Channel
from telemetry.dataset.dataset import Dataset
from telemetry.errors import InputError
from telemetry.importing.samples.block import Block, read_block
from telemetry.importing.samples.rollup import cell_end
from telemetry.importing.stays import Stays


class StoredBlocks:
    """Reads an existing dataset for a merge.

    ``stays``: names of the unit codes.
    ``nodes``: names of the node codes; grows by those that only the dataset names.
    ``newest``: newest raw sample in milliseconds of each unit code, -1 where it was not rolled up.
    """

    def __init__(
        self,
        existing: Dataset,
        stays: Stays,
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
