"""Samples of one bucket: in memory as arrays for merging and roll-up, and spilled to disk before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from foundation.files import disk_errors
from telemetry.dataset.channels import Channel, Kind
from telemetry.dataset.schema import CHANNEL_TYPES, INSTANT, NAME
from telemetry.importing.inventory import InstallationIndex

DTYPES: Final[Mapping[Kind, np.dtype[Any]]] = {
    "gauge": np.dtype(np.float32),
    "counter": np.dtype(np.float64),
    "flags": np.dtype(np.uint64),
    "enum": np.dtype(np.int32),
}
ORDER_SHIFT: Final = 40
"""A row's order is ``file number << 40 | row number``."""


_KEYS = ("unit", "node", "ms", "order", "mig", "count")


@dataclass(slots=True)
class ChannelValues:
    """Values of a channel with a validity mask; invalid values are zero."""

    values: npt.NDArray[np.generic]
    valid: npt.NDArray[np.bool_]

    def take(self, index: npt.NDArray[np.int64]) -> "ChannelValues":
        """Return the rows at ``index``."""
        if self.valid.strides == (0,) and not self.valid.any():
            return ChannelValues.absent(self.values.dtype, len(index))
        return ChannelValues(self.values[index], self.valid[index])

    @classmethod
    def absent(cls, dtype: np.dtype[Any], length: int) -> "ChannelValues":
        """Return a channel without values: a read-only broadcast zero, which takes no memory."""
        return cls(np.broadcast_to(np.zeros(1, dtype), length), np.broadcast_to(False, length))


@dataclass(slots=True)
class Block:
    """Samples of one bucket.

    ``unit``, ``node``: indices into the import's lists of units and nodes; shape (n,).
    ``ms``: Unix time in ms; shape (n,).
    ``order``: ``file << 40 | row``, or -1 for a stored row; shape (n,).
    ``mig``: whether the row describes a MIG instance; shape (n,).
    ``count``: number of raw samples in the row; shape (n,).
    """

    unit: npt.NDArray[np.int32]
    node: npt.NDArray[np.int32]
    ms: npt.NDArray[np.int64]
    order: npt.NDArray[np.int64]
    mig: npt.NDArray[np.bool_]
    count: npt.NDArray[np.int32]
    series: dict[str, ChannelValues] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ms)

    def take(self, index: npt.NDArray[np.int64]) -> "Block":
        """Return the rows at ``index``."""
        keys: dict[str, Any] = {key: getattr(self, key)[index] for key in _KEYS}
        return Block(**keys, series={name: series.take(index) for name, series in self.series.items()})

    def filter(self, chosen: npt.NDArray[np.bool_]) -> "Block":
        """Return the selected rows; the block itself if all are selected."""
        return self if chosen.all() else self.take(np.flatnonzero(chosen))


def read_block(table: pa.Table, channels: Mapping[str, Channel]) -> Block:
    """Convert a table with the columns of a :class:`Spill` to a block; missing channels have no values."""
    length = table.num_rows
    series: dict[str, ChannelValues] = {}
    for channel in channels.values():
        dtype = DTYPES[channel.kind]
        if channel.name in table.column_names:
            column = table.column(channel.name)
            valid = ~column.is_null().to_numpy(zero_copy_only=False).astype(bool)
            series[channel.name] = ChannelValues(column.fill_null(dtype.type(0).item()).to_numpy(), valid)
        else:
            series[channel.name] = ChannelValues.absent(dtype, length)
    count = np.ones(length, np.int32)
    if "sample_count" in table.column_names:
        count = table.column("sample_count").fill_null(1).to_numpy()
    keys = {name: table.column(name).to_numpy() for name in ("unit", "node", "ms", "order", "mig")}
    return Block(**keys, count=count, series=series)


def join(blocks: Sequence[Block]) -> Block:
    """Concatenate one or more blocks with the same channels."""
    if len(blocks) == 1:
        return blocks[0]
    columns: dict[str, Any] = {key: np.concatenate([getattr(block, key) for block in blocks]) for key in _KEYS}
    columns["series"] = {
        name: ChannelValues(
            np.concatenate([block.series[name].values for block in blocks]),
            np.concatenate([block.series[name].valid for block in blocks]),
        )
        for name in blocks[0].series
    }
    return Block(**columns)


def block_table(
    block: Block,
    channels: Mapping[str, Channel],
    installations: InstallationIndex,
    nodes: Sequence[str],
    *,
    sample_count: bool,
) -> pa.Table:
    """Convert a block to the dataset's sample table, in the same order; ``nodes``: names by node code."""

    def named(codes: npt.NDArray[np.int32], names: Sequence[str]) -> pa.Array:
        used, indices = np.unique(codes, return_inverse=True)
        dictionary = pa.array([names[code] for code in used.tolist()], pa.string())
        return pa.DictionaryArray.from_arrays(pa.array(indices.astype(np.int32)), dictionary).cast(NAME)

    columns: dict[str, pa.Array] = {
        "timestamp": pa.array(block.ms, pa.int64()).cast(INSTANT),
        "node": named(block.node, nodes),
        "gpu": pa.nulls(len(block), NAME) if installations.unit == "node" else named(block.unit, installations.units),
    }
    for channel in channels.values():
        series = block.series[channel.name]
        columns[channel.name] = pa.array(series.values, CHANNEL_TYPES[channel.kind], mask=~series.valid)
    if sample_count:
        columns["sample_count"] = pa.array(block.count, pa.int32())
    return pa.table(columns)


class Spill:
    """Samples by bucket in temporary Arrow files.

    Columns: ``unit``, ``node``, ``ms``, ``order``, ``mig``, channels, and ``sample_count`` if known.

    ``folder``: created with the first row; the caller removes it.
    ``renamed``: (unit, node) codes to another unit code, applied when reading.
    ``strays``: (unit, node, ms) of rows to skip when reading.
    """

    def __init__(self, folder: Path, buckets: int) -> None:
        self._folder = folder
        self._writers: dict[int, pa.RecordBatchFileWriter] = {}
        self.bucket_number = buckets
        self.renamed: dict[tuple[int, int], int] = {}
        self.strays = pd.MultiIndex.from_arrays([[], [], []])

    def add(self, bucket_of_row: npt.NDArray[np.int64], table: pa.Table) -> None:
        """Append rows to their buckets, in order."""
        with disk_errors(self._folder):
            for bucket in np.flatnonzero(np.bincount(bucket_of_row)).tolist():
                if bucket not in self._writers:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    options = pa.ipc.IpcWriteOptions(compression="lz4")
                    self._writers[bucket] = pa.ipc.new_file(str(self._path(bucket)), table.schema, options=options)
                self._writers[bucket].write_table(table.take(np.flatnonzero(bucket_of_row == bucket)))

    def close(self) -> None:
        """Close the files, which can be read afterwards."""
        with disk_errors(self._folder):
            for writer in self._writers.values():
                writer.close()

    def buckets(self) -> list[int]:
        """Return the non-empty buckets, ascending."""
        return sorted(self._writers)

    def read(self, bucket: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the rows of a non-empty bucket."""
        with pa.ipc.open_file(str(self._path(bucket))) as reader:
            fields = reader.schema.names
        names = list(columns or fields)
        if len(self.strays):
            names += [name for name in ("unit", "node", "ms") if name not in names]
        options = pa.ipc.IpcReadOptions(included_fields=[fields.index(name) for name in names])
        with pa.ipc.open_file(str(self._path(bucket)), options=options) as reader:
            table = reader.read_all()
        if len(self.strays):
            keys = pd.MultiIndex.from_arrays([table.column(name).to_numpy() for name in ("unit", "node", "ms")])
            table = table.filter(pa.array(~keys.isin(self.strays))).select(list(columns or fields))
        if not self.renamed or "unit" not in table.column_names:
            return table
        unit = table.column("unit").to_numpy().copy()
        node = (table if "node" in table.column_names else self.read(bucket, ["node"])).column("node").to_numpy()
        for (old, of_node), new in self.renamed.items():
            unit[(unit == old) & (node == of_node)] = new
        place = table.column_names.index("unit")
        return table.set_column(place, table.schema.field(place), pa.array(unit, pa.int32()))

    def _path(self, bucket: int) -> Path:
        return self._folder / f"bucket-{bucket:04d}.arrow"
