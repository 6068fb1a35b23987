"""The tables that collectors land: samples, events, observations of GPUs, jobs."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc

from telemetry.dataset.channels import Channel, with_rollups
from telemetry.dataset.schema import CHANNEL_TYPES, EVENTS, INSTANT, INVENTORY, JOBS, column_as

Kind = Literal["samples", "events", "inventory", "jobs"]
"""What a landed file holds."""

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

SAMPLE_KEYS: Final = pa.schema(
    [
        pa.field("timestamp", INSTANT, nullable=False),
        pa.field("node", pa.string(), nullable=False),
        pa.field("gpu", pa.string()),
        pa.field("mig_instance", pa.string()),
    ]
)
"""Key columns of landed samples, before the channels: ``gpu`` is null for a node without GPUs."""

LANDED_EVENTS: Final = EVENTS.append(pa.field("pci_bus_id", pa.string()))
"""Events as collectors know them: where only a PCI address is known, the GPU is found when they are compacted."""

LANDED_INVENTORY: Final = pa.schema(
    [
        *(field for field in INVENTORY if field.name not in ("installed_at", "removed_at")),
        pa.field("seen_at", INSTANT, nullable=False),
    ]
)
"""Observations: this GPU (null: this node) was seen here, so, at this time."""

_FIXED: Final = MappingProxyType({"events": LANDED_EVENTS, "inventory": LANDED_INVENTORY, "jobs": JOBS})

Rows = Sequence[Mapping[str, Any]]
"""Rows of one kind in JSON types, instants in milliseconds since 1970 UTC."""


def rows_table(kind: Kind, rows: Rows) -> pa.Table:
    """Return rows of events, of the inventory or of jobs as a table; keys that a row lacks are null."""
    schema = _FIXED[kind]
    arrays = [pa.array([row.get(field.name) for row in rows], type=field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def lay_out(kind: Kind, table: pa.Table, channels: Mapping[str, Channel]) -> pa.Table:
    """Bring a table into the schema in which it lands; absent columns are null, of samples only its own channels there.

    ``channels``: channels that may occur in samples.
    Raises ``ValueError`` if a column is unknown or missing, holds nulls where none may be, or values of another type.
    """
    if kind == "samples":
        known = with_rollups(channels)
        own = [name for name in table.column_names if name in known]
        fields = [pa.field(name, CHANNEL_TYPES[known[name].kind]) for name in own]
        if "sample_count" in table.column_names:
            fields.append(pa.field("sample_count", pa.int32()))
        schema = pa.schema([*SAMPLE_KEYS, *fields])
    else:
        schema = _FIXED[kind]
    unknown = [name for name in table.column_names if name not in schema.names]
    if unknown:
        raise ValueError(f"{kind} cannot be staged with the columns {unknown}; it knows {schema.names}")
    missing = [field.name for field in schema if not field.nullable and field.name not in table.column_names]
    if missing:
        raise ValueError(f"{kind} cannot be staged without the columns {missing}")
    arrays = []
    for field in schema:
        try:
            column = column_as(table, field)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{kind} cannot be staged: column {field.name!r}: {error}") from error
        if not field.nullable and column.null_count:
            raise ValueError(f"{kind} cannot be staged with {column.null_count} nulls in {field.name!r}")
        if field.name == "gpu":
            column = pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)  # it names no GPU
        arrays.append(column)
    return pa.Table.from_arrays(arrays, schema=schema)
