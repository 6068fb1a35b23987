"""Bounds of every input that arrives by itself: instants that can be right, text that can be stored, whole rows.

Readers apply them before anything else sees the input, and count what they leave out by reason.
"""

from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa

from foundation.instants import to_ms

BAD_TIME: Final = "timestamp before 2000 or after 2100"
"""Reason for which a sample or row is left out: a counter, or another unit, was taken for a clock."""

EARLIEST_MS: Final = to_ms(datetime(2000, 1, 1, tzinfo=UTC))
LATEST_MS: Final = to_ms(datetime(2100, 1, 1, tzinfo=UTC))


def plausible_rows(table: pa.Table) -> tuple[pa.Table, dict[str, int], str | None]:
    """Split off the rows with an instant that cannot be right.

    Returns: the other rows; the number of rows left out by reason; one of them, as text.
    """
    plausible = np.ones(table.num_rows, np.bool_)
    reasons: dict[str, int] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if not pa.types.is_timestamp(column.type):
            continue
        # Divided as integers: a cast to another unit fails on the very instants that are to be found.
        per_ms = {"s": 0.001, "ms": 1, "us": 1_000, "ns": 1_000_000}[column.type.unit]
        ticks = column.cast(pa.int64()).fill_null(round(EARLIEST_MS * per_ms)).to_numpy()
        implausible = plausible & ~((ticks >= EARLIEST_MS * per_ms) & (ticks < LATEST_MS * per_ms))
        if implausible.any():
            reasons[f"{name}: {BAD_TIME}"] = int(implausible.sum())
            plausible &= ~implausible
    if not reasons:
        return table, {}, None
    first = table.slice(int(np.argmin(plausible)), 1)
    return table.filter(pa.array(plausible)), reasons, _row_text(first)


def _row_text(row: pa.Table) -> str:
    """Return a row as text: instants as numbers, which an impossible one can be shown as."""
    cells: dict[str, Any] = {}
    for name, column in zip(row.column_names, row.columns, strict=True):
        plain = column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
        value = plain[0].as_py()
        if value is not None:
            cells[name] = value
    return str(cells)[:300]
