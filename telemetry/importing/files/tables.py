"""The one reader of tables: Parquet, CSV and JSON in batches that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from foundation.errors import InputError
from foundation.files import check_regular
from telemetry.importing.batch import Batch
from telemetry.importing.date_forms import DateOrder
from telemetry.importing.files.csv_rows import read_csv, read_header
from telemetry.importing.files.json_rows import json_columns, read_json
from telemetry.importing.files.long_format import OTHER_METRIC, long_columns, widen
from telemetry.importing.files.rows import BATCH_ROWS, FileRows
from telemetry.importing.files.sources import kind_of, read_errors
from telemetry.importing.mapping import LongFormat
from telemetry.importing.quarantine import Quarantine
from telemetry.values.numbers import Decimal


def read_batches(
    path: Path,
    table: str,
    quarantine: Quarantine,
    long: LongFormat | None = None,
    wanted: Callable[[str], bool] = lambda _name: True,
) -> Iterator[Batch]:
    """Read a source file in batches that fit into memory.

    ``path``: ``.parquet``, ``.csv``, ``.tsv``, ``.json`` (a list of objects) or ``.jsonl``; text may be compressed
    (``.csv.gz``). Objects inside an object become columns named ``outer.inner``.
    ``long``: set for a file with a row for each value; ``wanted`` tells the metrics that become columns.
    Raises ``InputError`` if the file is of another kind, damaged, or not UTF-8.
    """
    kind = _table_kind(path, table)
    known_orders: dict[str, DateOrder] = {}

    def leave_out(metric: str, number: int) -> None:
        quarantine.read(table, path, number)
        quarantine.leave_out(table, path, OTHER_METRIC, number, metric)

    with read_errors(path):
        decimal: Decimal = "."
        if kind == "csv":
            header = read_header(path)
            decimal = "," if header.separator == ";" else "."
            batches = read_csv(path, header, table, quarantine)
        else:
            batches = _read_parquet(path) if kind == "parquet" else read_json(path, table, quarantine)
        if long is not None:
            batches = widen(batches, long, wanted, leave_out)
        for rows, content, disagreeing in batches:
            quarantine.read(table, path, len(rows))
            batch = Batch(
                path, table, rows, content, quarantine, decimal=decimal, disagreeing=disagreeing, orders=known_orders
            )
            if kind == "parquet":  # text formats are checked while they are parsed
                batch.refuse_unstorable()
            yield batch


def column_names(
    path: Path,
    table: str = "samples",
    long: LongFormat | None = None,
    wanted: Callable[[str], bool] = lambda _name: True,
) -> list[str]:
    """Return the columns of a file; JSON, and tables with a row for each value, are read once for it."""
    kind = _table_kind(path, table)
    with read_errors(path):
        if long is not None:
            for name in (long.metric, long.value):
                if name not in (names := column_names(path, table)):
                    problem = f"the mapping names a column {name!r} that is not there"
                    raise InputError(problem, f"{path}, mapping, long", f"It has {names}.")
            quarantine = Quarantine()
            if kind == "csv":
                return long_columns(read_csv(path, read_header(path), table, quarantine), long, wanted)
            batches = _read_parquet(path) if kind == "parquet" else read_json(path, table, quarantine)
            return long_columns(batches, long, wanted)
        if kind == "parquet":
            return list(pq.read_schema(path).names)
        return read_header(path).names if kind == "csv" else json_columns(path)


def _table_kind(path: Path, table: str) -> str:
    kind = kind_of(path)
    if path.exists():
        check_regular(path)
    if kind == "other":
        problem = f"files of the kind {path.suffix or path.name!r} are not read as {table}"
        raise InputError(problem, str(path), "Give Parquet, CSV, TSV or JSON.")
    return kind


def _read_parquet(path: Path) -> Iterator[FileRows]:
    first = 1
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=BATCH_ROWS):
            table = pa.Table.from_batches([batch])
            for place, name in enumerate(table.column_names):
                if pa.types.is_string_view(table.schema.types[place]):  # which Arrow can hardly filter
                    table = table.set_column(place, name, table.column(place).cast(pa.string()))
            yield FileRows(np.arange(first, first + batch.num_rows), table, {})
            first += batch.num_rows
        if file.metadata.num_rows == 0:
            yield FileRows(np.empty(0, np.int64), file.schema_arrow.empty_table(), {})
