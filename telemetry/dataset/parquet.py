"""Parquet files of a dataset: settings, row groups by time, and the digests of days in the footer.

The encodings were chosen by measurement: dictionary for columns with few distinct values, BYTE_STREAM_SPLIT for other
numbers, delta encoding for timestamps, zstd level 1. A row of 20 channels takes about 14 bytes.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from telemetry.dataset.layout import DAY_MS, instants_ms, node_hash, split_by
from telemetry.dataset.schema import NAME

ROW_GROUP_ROWS = 1 << 19
"""Rows of a row group; 256 k to 1 M measured best."""

_EARLIEST, _LATEST = -(1 << 63), (1 << 63) - 1  # range of a timestamp

_PROBE_ROWS = 1 << 14
_DICTIONARY_DISTINCT = 1 << 11
# Above about 2,000 distinct values a dictionary is as large as BYTE_STREAM_SPLIT, and slower to build.

_DAYS_KEY: Final = "predrain.days"
_HEX: Final = 16


def write_part(path: Path, tables: Sequence[pa.Table], footer: Mapping[str, str]) -> None:
    """Write one Parquet file of samples with the settings of this module.

    ``tables``: each sorted, in order of time; each has its own row groups, so that readers can skip them.
    ``footer``: key-value metadata of the file, not of the table read from it.
    """
    dictionary, encoding = _encodings(pa.concat_tables(tables))
    with pq.ParquetWriter(
        path,
        tables[0].schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=dictionary,
        column_encoding=encoding,
        write_statistics=["timestamp", "node", "gpu"],
        data_page_size=1 << 20,
        write_page_index=False,
    ) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
        writer.add_key_value_metadata(dict(footer))


def read_part(
    source: Path | pa.NativeFile,
    columns: Sequence[str],
    *,
    since_ms: int | None = None,
    until_ms: int | None = None,
    prefetch: bool = False,
) -> tuple[list[pa.Table], int]:
    """Read one part file, skipping row groups outside the time range.

    ``since_ms``, ``until_ms``: only samples of ``since_ms <= t < until_ms``, in milliseconds since 1970.
    ``prefetch``: read all bytes of the columns in few large concurrent reads, for remote files; holds them in memory
    until they are decoded.
    Returns: the non-empty tables as passed to :func:`write_part`, filtered, and the number of rows of the file.
    """
    first = _EARLIEST if since_ms is None else since_ms
    last = _LATEST if until_ms is None else until_ms - 1
    with pq.ParquetFile(source, read_dictionary=["node", "gpu"], memory_map=False, pre_buffer=prefetch) as file:
        parts = [part for part in _sorted_tables(file.metadata) if part.begin <= last and part.end >= first]
        if not parts:
            return [], file.metadata.num_rows
        is_cut = any(part.begin < first or part.end > last for part in parts)
        wanted_columns = [*columns, "timestamp"] if is_cut and "timestamp" not in columns else list(columns)
        groups = [group for part in parts for group in part.groups]
        rows = file.read_row_groups(groups, columns=wanted_columns).replace_schema_metadata(None)
        tables, begin = [], 0
        for part in parts:
            table = rows.slice(begin, part.rows)
            begin += part.rows
            if part.begin < first or part.end > last:
                times = instants_ms(table)
                table = table.filter(pa.array((times >= first) & (times <= last)))
            if table.num_rows:
                tables.append(table.select(columns))
        return tables, file.metadata.num_rows


@dataclass(slots=True)
class _SortedTable:
    """Row groups of one sorted table, with number of rows and time range."""

    groups: list[int]
    rows: int
    begin: int
    end: int


def _sorted_tables(metadata: pq.FileMetaData) -> list[_SortedTable]:
    """Return the tables in a file; a row group that overlaps the previous ones in time belongs to the same table."""
    tables: list[_SortedTable] = []
    names = [metadata.schema.column(number).name for number in range(metadata.num_columns)]
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        times = group.column(names.index("timestamp")).statistics if "timestamp" in names else None
        begin, end = _EARLIEST, _LATEST
        if times is not None and times.has_min_max:
            begin, end = times.min_raw, times.max_raw
        if not tables or begin > tables[-1].end:
            tables.append(_SortedTable([number], group.num_rows, begin, end))
            continue
        table = tables[-1]
        table.groups.append(number)
        table.rows += group.num_rows
        table.begin, table.end = min(table.begin, begin), max(table.end, end)
    return tables


def part_rows(source: Path | pa.NativeFile) -> int:
    """Return the number of rows of a part file from its footer."""
    return int(pq.read_metadata(source).num_rows)


def _encodings(table: pa.Table) -> tuple[list[str], dict[str, str]]:
    """Choose dictionary columns, and the encoding of the others, from a sample of rows across the table."""
    dictionary: list[str] = []
    encoding: dict[str, str] = {}
    step = max(1, table.num_rows // _PROBE_ROWS)
    head = table if step == 1 else table.take(pa.array(np.arange(0, table.num_rows, step)))
    for field in table.schema:
        if field.name == "timestamp":
            encoding[field.name] = "DELTA_BINARY_PACKED"
        elif field.type == NAME or pc.count_distinct(head.column(field.name)).as_py() <= _DICTIONARY_DISTINCT:
            dictionary.append(field.name)
        else:
            encoding[field.name] = "BYTE_STREAM_SPLIT"
    return dictionary, encoding


def write_small(path: Path, table: pa.Table) -> None:
    """Write a small table (events, inventory, jobs, quarantine) as one compressed Parquet file."""
    options: dict[str, Any] = {"compression": "zstd", "compression_level": 3}
    pq.write_table(table.replace_schema_metadata(None), path, **options)


def day_digests(table: pa.Table) -> dict[int, str]:
    """Return a digest of each day of a table of samples, to find the first day that changed in a rewritten file.

    ``table``: sorted like a file.
    Returns: by UTC day since 1970-01-01, the first 64 bits in hexadecimal of a SHA-256 over the day's samples in
    order. It does not depend on other days or names in the table.
    """
    days = split_by(table, instants_ms(table) // DAY_MS)
    return {day: _digest(samples) for day, samples in days.items()}


def _digest(samples: pa.Table) -> str:
    total = hashlib.sha256()
    for name in samples.column_names:
        values, known = _bytes_of(samples.column(name))
        total.update(f"{name}\0{values.dtype.str}\0{len(values)}\0{known is not None:d}\0".encode())
        if known is not None:
            total.update(np.packbits(known).data)
        total.update(values.data)
    return total.hexdigest()[:_HEX]


def footer(table: pa.Table) -> dict[str, str]:
    """Return the day digests of a table as key-value metadata of its Parquet file."""
    return {_DAYS_KEY: json.dumps(day_digests(table), separators=(",", ":"))}


def read_day_digests(source: Path | pa.NativeFile) -> dict[int, str] | None:
    """Read the day digests from the footer of a file; None for files of older versions."""
    text = (pq.read_metadata(source).metadata or {}).get(_DAYS_KEY.encode())
    return None if text is None else {int(day): digest for day, digest in json.loads(text).items()}


def _bytes_of(column: pa.ChunkedArray) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]:
    """Return a column as numbers with a constant for nulls, and the mask of valid values (None: all valid)."""
    values = column.combine_chunks()
    known = values.is_valid().to_numpy(zero_copy_only=False) if values.null_count else None
    if values.type == NAME:
        hashes = np.array([node_hash(name) for name in values.dictionary.to_pylist()] or [0], dtype=np.uint64)
        codes = values.indices if known is None else values.indices.fill_null(0)
        return hashes[codes.to_numpy()], known
    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.int64())
    if known is not None:
        values = values.fill_null(False if pa.types.is_boolean(values.type) else 0)
    return np.ascontiguousarray(values.to_numpy(zero_copy_only=False)), known
