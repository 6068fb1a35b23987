"""What to do with rows that wait when this machine's clock, which was ahead, has been set back."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from telemetry.exporters.holding import Holding
from telemetry.landing.tables import Kind

_TOLD_AT: Final[dict[Kind, tuple[str, ...]]] = {"events": ("timestamp", "known_at"), "inventory": ("seen_at",)}


def without_future(holding: Holding, now: datetime, latest_ms: int) -> int:
    """Drop the held samples that are stamped after ``latest_ms``; return how many.

    ``latest_ms``: milliseconds since 1970 UTC; later ones cannot be right.

    Events and sightings are kept, at ``now``: they were found since the last landing, and are not told twice.
    """
    batch = holding.take()
    dropped = 0
    latest = pa.scalar(latest_ms, pa.int64()).cast(pa.timestamp("ms", "UTC"))
    for number, table in enumerate(batch.tables["samples"]):
        kept = table.filter(pc.less_equal(table.column("timestamp"), latest))
        dropped += table.num_rows - kept.num_rows
        batch.tables["samples"][number] = kept
    batch.tables["samples"] = [table for table in batch.tables["samples"] if table.num_rows]
    for kind, names in _TOLD_AT.items():
        tables = batch.tables[kind]
        tables[:] = [_at_most(table, names, now, latest) for table in tables]
    holding.give_back(batch)
    for page in batch.pages:
        kept = page.samples.filter(pc.less_equal(page.samples.column("timestamp"), latest))
        dropped += page.samples.num_rows - kept.num_rows
        holding.add(replace(page, samples=kept))
    return dropped


def _at_most(table: pa.Table, names: tuple[str, ...], now: datetime, latest: pa.Scalar) -> pa.Table:
    for name in names:
        column = table.column(name)
        put = pc.if_else(pc.greater(column, latest), pa.scalar(now, column.type), column)
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), put)
    return table
