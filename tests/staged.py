"""Rows that a collector has staged."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def staged_table(live: Path, kind: str) -> pa.Table:
    """Return the rows of a kind below DATASET.live, in the order of staging."""
    tables = [pq.read_table(path) for path in sorted((live / kind).glob("*.parquet"))]
    return pa.concat_tables(tables, promote_options="default") if tables else pa.table({})
