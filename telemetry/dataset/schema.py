"""The tables of a dataset: column names, types and constants.

All times are UTC in milliseconds. Null means "not reported" in samples and "unknown" elsewhere.
"""

from collections.abc import Mapping
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from telemetry.dataset.channels import Channel, Kind

SCHEMA_VERSION: Final = 1
"""Version of a dataset with one run per bucket; incremented when older versions can no longer read a dataset."""

RUNS_SCHEMA_VERSION: Final = 3
"""Version of a dataset with several runs: an older reader would assume that a bucket's files form one sorted table.

In version 2 the file of a run is sorted as a whole; since 3 each row group is sorted, in order of time.
"""

READ_SCHEMA_VERSIONS: Final = range(SCHEMA_VERSION, RUNS_SCHEMA_VERSION + 1)
"""Supported versions."""

Unit = Literal["gpu", "node"]
"""What a row describes: a GPU, or a node in a fleet without GPUs."""

INSTANT: Final = pa.timestamp("ms", tz="UTC")
"""Arrow type of all times."""

NAME: Final = pa.dictionary(pa.int32(), pa.string())
"""Arrow type of ``node`` and ``gpu`` in samples."""

CHANNEL_TYPES: Final[Mapping[Kind, pa.DataType]] = {
    "gauge": pa.float32(),
    "counter": pa.float64(),
    "flags": pa.uint64(),
    "enum": pa.int32(),
}
"""Arrow type of a channel by kind. Counters are float64: float32 loses an increment of 1 above 2**24."""

MAINTENANCE_BEGIN: Final = "begin"
MAINTENANCE_END: Final = "end"
"""Codes of ``maintenance`` events with a separate end event; otherwise the code is the planned end in ISO 8601."""

EVENTS: Final = pa.schema(
    [
        pa.field("timestamp", INSTANT, nullable=False),
        pa.field("node", pa.string(), nullable=False),
        pa.field("gpu", pa.string()),
        pa.field("type", pa.string(), nullable=False),
        pa.field("code", pa.string()),
        pa.field("detail", pa.string()),
        pa.field("source", pa.string()),
        pa.field("known_at", INSTANT, nullable=False),
    ]
)
"""events.parquet: ``gpu`` null is the whole node; ``known_at`` is when the event could first have been used."""

EVENT_RUNS: Final = EVENTS.append(pa.field("last_at", INSTANT)).append(pa.field("count", pa.int64()))
"""events.parquet with repeated events condensed: a row represents ``count`` events until ``last_at``."""

INVENTORY: Final = pa.schema(
    [
        pa.field("gpu", pa.string()),
        pa.field("node", pa.string(), nullable=False),
        pa.field("slot", pa.string()),
        pa.field("pci_bus_id", pa.string()),
        pa.field("serial", pa.string()),
        pa.field("model", pa.string()),
        pa.field("driver", pa.string()),
        pa.field("cluster", pa.string()),
        pa.field("group", pa.string()),
        pa.field("rack", pa.string()),
        pa.field("nvlink_domain", pa.string()),
        pa.field("installed_at", INSTANT, nullable=False),
        pa.field("removed_at", INSTANT),
    ]
)
"""inventory.parquet: one row per installation, plus further static columns. ``gpu`` null is a node without GPUs."""

JOBS: Final = pa.schema(
    [
        pa.field("job", pa.string(), nullable=False),
        pa.field("node", pa.string(), nullable=False),
        pa.field("gpu", pa.string()),
        pa.field("started_at", INSTANT, nullable=False),
        pa.field("ended_at", INSTANT),
        pa.field("gpus", pa.int32()),
        pa.field("checkpointed_at", INSTANT),
        pa.field("outcome", pa.string()),
    ]
)
"""jobs.parquet: one row per job and node; ``gpu`` null is the whole node, ``ended_at`` null is still running."""

JOB_OPTIONS: Final = ("checkpoint_every_s", "min_gpus")
"""Optional columns of jobs.parquet: the job's checkpoint interval (0: it never loses work), and the minimum number of
GPUs of an elastic job (null: not elastic)."""


def samples_schema(channels: Mapping[str, Channel], *, sample_count: bool = False) -> pa.Schema:
    """Return the schema of the sample table: ``timestamp``, ``node``, ``gpu``, the channels, ``sample_count``."""
    fields = [pa.field("timestamp", INSTANT), pa.field("node", NAME), pa.field("gpu", NAME)]
    fields += [pa.field(channel.name, CHANNEL_TYPES[channel.kind]) for channel in channels.values()]
    if sample_count:
        fields.append(pa.field("sample_count", pa.int32()))
    return pa.schema(fields)


def ms_of(times: pd.Series, *, unknown: int = 0) -> npt.NDArray[np.int64]:
    """Convert aware times to milliseconds since the epoch, missing ones to ``unknown``."""
    values = times.dt.tz_convert("UTC").dt.tz_localize(None).to_numpy().astype("datetime64[ms]")
    return np.where(np.isnat(values), unknown, values.astype(np.int64))


def column_as(table: pa.Table, field: pa.Field) -> pa.ChunkedArray:
    """Return a column cast to a field's type, null if it is missing; raises ``pa.ArrowInvalid`` if it does not fit."""
    if field.name not in table.column_names:
        return pa.chunked_array([pa.nulls(table.num_rows, field.type)])
    column = table.column(field.name)
    if column.type == field.type:
        return column
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_dictionary(field.type):
        column = column.cast(pa.string()).dictionary_encode()
    # Times are stored in milliseconds: truncating microseconds is intended.
    return column.cast(field.type, safe=not pa.types.is_timestamp(field.type) and not pa.types.is_float32(field.type))


def conform(frame: pd.DataFrame, schema: pa.Schema) -> pa.Table:
    """Convert a frame with aware times to ``schema``: missing columns become null, further columns follow."""
    fields: list[pa.Field] = []
    arrays: list[pa.Array] = []
    for name in dict.fromkeys([*schema.names, *map(str, frame.columns)]):
        field = schema.field(name) if name in schema.names else None
        kind = None if field is None else field.type
        array = _array(frame[name], kind) if name in frame.columns else pa.nulls(len(frame), kind)
        fields.append(field or pa.field(name, array.type))
        arrays.append(array)
        if not fields[-1].nullable and array.null_count:
            raise ValueError(f"column {name!r} has {array.null_count} nulls and may have none")
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _array(column: pd.Series, kind: pa.DataType | None) -> pa.Array:
    if isinstance(column.dtype, pd.DatetimeTZDtype):
        plain = pa.array(column.dt.tz_convert(None).to_numpy()).cast(pa.timestamp("ms"), safe=False)
        return plain.cast(INSTANT if kind is None else kind)
    is_text = pd.api.types.is_object_dtype(column.dtype) or isinstance(column.dtype, pd.StringDtype)
    if kind == pa.string() or (kind is None and is_text):
        return pa.Array.from_pandas(column.astype("str").where(column.notna(), None), type=pa.string())
    if kind != INSTANT:
        return pa.Array.from_pandas(column, type=kind, safe=kind is None)
    if column.notna().any():
        raise TypeError(f"column {column.name!r} holds naive or non-time values; make it aware UTC first")
    return pa.nulls(len(column), kind)
