"""How samples lie on disk: buckets, sort order, and the Parquet settings in one place.

Settings were measured (see the design, section 5): columns with few distinct values as a dictionary, other numbers with
their bytes split into streams, instants as deltas, zstd at level 1; a row of 20 channels takes about 14 bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from telemetry.dataset.schema import NAME, Unit

DEFAULT_BUCKETS = 16
"""Buckets of a dataset unless said otherwise: enough to keep a bucket of a year of 1,000 GPUs under a few GB."""

MAX_ROWS_PER_BUCKET = 8_000_000
"""An import chooses more buckets than the default rather than exceed this; a bucket is held in memory at a time."""

ROW_GROUP_ROWS = 1 << 19
"""Rows of a row group: between the 256 k and 1 M that measured best."""

_EARLIEST, _LATEST = -(1 << 63), (1 << 63) - 1  # of what a timestamp can say

_PROBE_ROWS = 1 << 14
_DICTIONARY_DISTINCT = 1 << 11
# Above about two thousand distinct values a dictionary index costs as much as the split bytes and is slower to build.


@lru_cache(maxsize=1 << 18)
def node_hash(node: str) -> int:
    """Return a 64-bit hash of a node's name that is the same in every process and on every machine.

    The first 8 bytes, little-endian, of the BLAKE2b digest of the UTF-8 name. Part of the layout: it must never change.
    """
    return int.from_bytes(hashlib.blake2b(node.encode(), digest_size=8).digest(), "little")


def bucket_name(bucket: int) -> str:
    """Return the name of the folder of a bucket's parts in a dataset, with slashes."""
    return f"telemetry/bucket={bucket:02d}"


def bucket_folder(root: Path, bucket: int) -> Path:
    """Return the folder of a bucket's parts under a dataset's root."""
    return root / bucket_name(bucket)


def sort_columns(unit: Unit) -> tuple[str, str]:
    """Return the two columns that a bucket is sorted by."""
    return (("gpu" if unit == "gpu" else "node"), "timestamp")


def dictionary_codes(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int32], list[str]]:
    """Return codes in sorted-name order, and the sorted names, of a dictionary column without nulls.

    Returns shape (n_rows,).
    """
    unified = column.unify_dictionaries()
    if unified.num_chunks == 0:
        return np.empty(0, np.int32), []
    names = unified.chunk(0).dictionary.to_pylist()
    order = np.argsort(np.array(names, dtype=object), kind="stable") if names else np.empty(0, np.int64)
    rank = np.empty(len(names), np.int32)
    rank[order] = np.arange(len(names), dtype=np.int32)
    codes = np.concatenate([chunk.indices.to_numpy(zero_copy_only=False) for chunk in unified.chunks])
    return rank[codes], [names[index] for index in order]


def sort_samples(table: pa.Table, unit: Unit) -> tuple[pa.Table, int | None]:
    """Sort samples by (gpu, timestamp), or (node, timestamp); a table already in order is returned as it is.

    ``table``: ``timestamp`` and the unit's column without nulls.
    Returns ``duplicate``: row of the sorted table that has the key of the row before it, if any.
    """
    name, _ = sort_columns(unit)
    codes, _ = dictionary_codes(table.column(name))
    times = table.column("timestamp").cast(pa.int64()).to_numpy()
    if len(codes) > 1:
        same = codes[1:] == codes[:-1]
        later = times[1:] > times[:-1]
        if not np.all((codes[1:] > codes[:-1]) | (same & (times[1:] >= times[:-1]))):
            order = np.lexsort((times, codes))
            table = table.take(pa.array(order))
            codes, times = codes[order], times[order]
            same = codes[1:] == codes[:-1]
            later = times[1:] > times[:-1]
        repeated = np.flatnonzero(same & ~later)
        if len(repeated):
            return table, int(repeated[0]) + 1
    return table, None


def normal_form(table: pa.Table) -> pa.Table:
    """Return samples in the one form that equal samples have: a chunk a column, names in order and none unused.

    Parquet keeps chunks and dictionaries as they come, so without it equal samples could become files that differ.
    """
    table = table.combine_chunks()
    for index, field in enumerate(table.schema):
        if field.type == NAME:
            table = table.set_column(index, field, _in_order(table.column(index)))
    return table


def _in_order(column: pa.ChunkedArray) -> pa.Array:
    if column.null_count:
        texts = column.cast(pa.string()).combine_chunks()
        found = pc.unique(texts.drop_null())
        names = found.take(pc.array_sort_indices(found))
        return pa.DictionaryArray.from_arrays(pc.index_in(texts, value_set=names), names)
    codes, names = dictionary_codes(column)
    used, indices = np.unique(codes, return_inverse=True)
    dictionary = pa.array([names[code] for code in used.tolist()], pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(indices.astype(np.int32)), dictionary)


def merge_runs(tables: Sequence[pa.Table], unit: Unit) -> pa.Table:
    """Make one table, sorted by (gpu, timestamp), of successive runs that are each sorted so.

    ``tables``: one at least, of the same columns, the unit's among them; in order of time.
    """
    whole = pa.concat_tables(tables).unify_dictionaries()
    if len(tables) == 1:
        return whole
    codes, names = dictionary_codes(whole.column(sort_columns(unit)[0]))
    if len(names) <= 1 << 16:
        codes = codes.astype(np.uint16)  # NumPy sorts numbers of two bytes by counting: one pass, not a merge
    # Rows of one unit come in order of time already, so a stable sort by unit alone is the merge.
    return whole.combine_chunks().take(pa.array(np.argsort(codes, kind="stable")))


def write_part(path: Path, tables: Sequence[pa.Table], footer: Mapping[str, str]) -> None:
    """Write one Parquet file of samples with the settings of this module.

    ``tables``: one at least, each of sorted samples in the layout of :func:`samples_schema`. They
    follow each other in time and have row groups of their own, so that a reader passes over those that it does not
    want.
    ``footer``: metadata of the file, which the table that is read from it does not have.
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


@dataclass(frozen=True, slots=True)
class PartSamples:
    """What was read of a part file.

    ``tables``: in order of time, none empty, each sorted: what :func:`write_part` was given, as far as it was asked
    for.
    """

    tables: list[pa.Table]
    rows: int


def read_part(
    source: Path | pa.NativeFile,
    columns: Sequence[str],
    *,
    since_ms: int | None = None,
    until_ms: int | None = None,
    ahead: bool = False,
) -> PartSamples:
    """Read one part file; of its row groups those alone that may hold what is asked for.

    ``since_ms``, ``until_ms``: only samples of ``since_ms <= t < until_ms``, in milliseconds since 1970.
    ``ahead``: whether to ask for all bytes of the columns at once, in few large and simultaneous reads: for files that
    are far away. It holds them all in memory until they are decoded.
    """
    first = _EARLIEST if since_ms is None else since_ms
    last = _LATEST if until_ms is None else until_ms - 1
    with pq.ParquetFile(source, read_dictionary=["node", "gpu"], memory_map=False, pre_buffer=ahead) as file:
        found = [each for each in _sorted_tables(file.metadata) if each.begin <= last and each.end >= first]
        if not found:
            return PartSamples([], file.metadata.num_rows)
        cut = any(each.begin < first or each.end > last for each in found)
        asked = [*columns, "timestamp"] if cut and "timestamp" not in columns else list(columns)
        groups = [group for each in found for group in each.groups]
        whole = file.read_row_groups(groups, columns=asked).replace_schema_metadata(None)
        tables, at = [], 0
        for each in found:
            table = whole if len(found) == 1 else whole.slice(at, each.rows)
            at += each.rows
            if each.begin < first or each.end > last:
                times = table.column("timestamp").cast(pa.int64()).to_numpy()
                table = table.filter(pa.array((times >= first) & (times <= last)))
            if table.num_rows:
                tables.append(table.select(columns))
        return PartSamples(tables, file.metadata.num_rows)


@dataclass(slots=True)
class _SortedTable:
    """Row groups that hold one sorted table: how many rows, from when to when."""

    groups: list[int]
    rows: int
    begin: int
    end: int


def _sorted_tables(metadata: pq.FileMetaData) -> list[_SortedTable]:
    """Return the tables in a file: a row group that does not follow the one before in time goes on with its table."""
    found: list[_SortedTable] = []
    column = next((at for at in range(metadata.num_columns) if metadata.schema.column(at).name == "timestamp"), None)
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        told = None if column is None else group.column(column).statistics
        begin, end = _EARLIEST, _LATEST
        if told is not None and told.has_min_max:
            begin, end = told.min_raw, told.max_raw
        if found and begin <= found[-1].end:
            before = found[-1]
            before.groups.append(number)
            before.rows += group.num_rows
            before.begin, before.end = min(before.begin, begin), max(before.end, end)
        else:
            found.append(_SortedTable([number], group.num_rows, begin, end))
    return found


def part_rows(source: Path | pa.NativeFile) -> int:
    """Return the rows of a part file, from its last bytes alone."""
    return int(pq.read_metadata(source).num_rows)


def _encodings(table: pa.Table) -> tuple[list[str], dict[str, str]]:
    """Choose dictionary columns and the encoding of the others from rows spread over the table."""
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
