"""Validated samples on their way to a dataset, kept on disk by bucket so that an import may exceed memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from telemetry.atomic import disk_errors
from telemetry.dataset.channels import Channel
from telemetry.dataset.schema import CHANNEL_TYPES

ORDER_SHIFT = 40
"""A row's order is ``file number << 40 | row number``."""


def spill_schema(channels: Mapping[str, Channel], *, sample_count: bool) -> pa.Schema:
    """Return the columns of a spilled sample: codes of unit and node, milliseconds, order, MIG part, channels."""
    fields = [
        pa.field("unit", pa.int32()),
        pa.field("node", pa.int32()),
        pa.field("ms", pa.int64()),
        pa.field("order", pa.int64()),
        pa.field("mig", pa.bool_()),
        *(pa.field(channel.name, CHANNEL_TYPES[channel.kind]) for channel in channels.values()),
    ]
    if sample_count:
        fields.append(pa.field("sample_count", pa.int32()))
    return pa.schema(fields)


class Spill:
    """Samples by bucket in Arrow files under a temporary folder.

    ``folder``: made by the first row; whoever gave it removes it.
    ``schema``: from :func:`spill_schema`.
    """

    def __init__(self, folder: Path, schema: pa.Schema, buckets: int) -> None:
        self._folder = folder
        self._schema = schema
        self._writers: dict[int, pa.RecordBatchFileWriter] = {}
        self.bucket_number = buckets

    def add(self, bucket_of_row: npt.NDArray[np.int64], table: pa.Table) -> None:
        """Append rows to their buckets, in the order they are given."""
        with disk_errors(self._folder):
            for bucket in np.unique(bucket_of_row).tolist():
                if bucket not in self._writers:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    options = pa.ipc.IpcWriteOptions(compression="lz4")
                    self._writers[bucket] = pa.ipc.new_file(str(self._path(bucket)), self._schema, options=options)
                self._writers[bucket].write_table(table.take(np.flatnonzero(bucket_of_row == bucket)))

    def close(self) -> None:
        """End writing; reading may begin."""
        with disk_errors(self._folder):
            for writer in self._writers.values():
                writer.close()

    def buckets(self) -> list[int]:
        """Return the buckets that got rows, ascending."""
        return sorted(self._writers)

    def read(self, bucket: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the rows of a bucket that got some."""
        options = pa.ipc.IpcReadOptions()
        if columns is not None:
            options.included_fields = [self._schema.get_field_index(name) for name in columns]
        with pa.ipc.open_file(str(self._path(bucket)), options=options) as reader:
            return reader.read_all()

    def _path(self, bucket: int) -> Path:
        return self._folder / f"bucket-{bucket:04d}.arrow"
