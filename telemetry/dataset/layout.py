"""Layout of samples on disk: buckets, runs, sort order and Parquet settings.

A run is a time range of a bucket's samples, so that new samples do not change old files.

The encodings were chosen by measurement: dictionary for columns with few distinct values, BYTE_STREAM_SPLIT for other
numbers, delta encoding for timestamps, zstd level 1. A row of 20 channels takes about 14 bytes.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from telemetry.dataset.schema import NAME, Unit

RUN_ROWS: Final = 1 << 17
"""Target minimum of rows in a bucket's run: below it, opening a file costs as much as reading it."""

MAX_RUN_DAYS: Final = 64
"""Longest run; a dataset so small that it would need longer ones has a single run."""

DAY_MS: Final = 86_400_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Runs:
    """Partition of a dataset's time into runs.

    ``days``: length of a run in UTC days, a power of two; run 0 starts on 1970-01-01. None: a single run, 0.
    Raises ``ValueError`` if ``days`` is not a power of two.
    """

    days: int | None = None

    def __post_init__(self) -> None:
        if self.days is not None and (self.days < 1 or self.days & (self.days - 1)):
            raise ValueError(f"runs of {self.days} days: their length must be a power of two")

    @property
    def groups(self) -> "Runs":
        """Partition of a run's file into row groups: quarters of a run, at least a day; None for a single run."""
        return Runs(None if self.days is None else max(1, self.days // 4))

    def of(self, ms: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the run of each time, given in milliseconds since 1970."""
        return np.zeros(len(ms), np.int64) if self.days is None else ms // (self.days * DAY_MS)

    def begin_ms(self, run: int) -> int:
        """Return the start of a run in milliseconds since 1970; ``days`` must not be None."""
        assert self.days is not None
        return run * self.days * DAY_MS

    def span(self, run: int) -> tuple[datetime, datetime] | None:
        """Return the aware start of a run and of the next one; None for a single run."""
        if self.days is None:
            return None
        begin, end = (_EPOCH + timedelta(milliseconds=self.begin_ms(number)) for number in (run, run + 1))
        return begin, end

    def begin_of(self, instant: datetime) -> datetime | None:
        """Return the aware start of the run of an aware time; None for a single run."""
        span = None if self.days is None else self.span((instant - _EPOCH) // timedelta(days=self.days))
        return None if span is None else span[0]

    def overlaps(self, run: int, since_ms: int | None, until_ms: int | None) -> bool:
        """Whether a run overlaps ``since_ms <= t < until_ms``; None: unbounded."""
        if self.days is None:
            return True
        return (since_ms is None or self.begin_ms(run + 1) > since_ms) and (
            until_ms is None or self.begin_ms(run) < until_ms
        )

    def file_name(self, run: int) -> str:
        """Return the file name of a run, with its first day, or ``part-00000.parquet`` for a single run."""
        span = self.span(run)
        return "part-00000.parquet" if span is None else f"part-{span[0]:%Y%m%d}.parquet"

    def of_file(self, name: str) -> int:
        """Return the run of a file named by :meth:`file_name`."""
        if self.days is None:
            return 0
        first = datetime.strptime(name, "part-%Y%m%d.parquet").replace(tzinfo=UTC)
        run, remainder = divmod((first - _EPOCH).days, self.days)
        if remainder:
            raise ValueError(f"{name} begins no run of {self.days} days")
        return run


def choose_runs(rows_a_day: float, days: float | None = None) -> Runs:
    """Return the shortest runs with at least :data:`RUN_ROWS` rows in a bucket with ``rows_a_day``.

    ``days``: length of the dataset, if it is known not to grow.
    A single run if runs would exceed :data:`MAX_RUN_DAYS`, or a dataset that does not grow would have fewer than two.
    """
    length = 1
    while length <= MAX_RUN_DAYS and length * rows_a_day < RUN_ROWS:
        length *= 2
    if length > MAX_RUN_DAYS or (days is not None and days < 2 * length):
        return Runs(None)
    return Runs(length)


def since_in_ms(instant: datetime | None) -> int | None:
    """Convert an aware time to milliseconds since 1970, rounded up."""
    if instant is None:
        return None
    if instant.tzinfo is None:
        raise ValueError(f"{instant} is naive; give aware UTC")
    return -((_EPOCH - instant) // timedelta(milliseconds=1))


DEFAULT_BUCKETS = 16  # keeps a bucket of a year of 1,000 GPUs below a few GB
MAX_ROWS_PER_BUCKET = 8_000_000
"""An import adds buckets rather than exceed this, because one bucket at a time is held in memory."""

ROW_GROUP_ROWS = 1 << 19
"""Rows of a row group; 256 k to 1 M measured best."""

_EARLIEST, _LATEST = -(1 << 63), (1 << 63) - 1  # range of a timestamp

_PROBE_ROWS = 1 << 14
_DICTIONARY_DISTINCT = 1 << 11
# Above about 2,000 distinct values a dictionary is as large as BYTE_STREAM_SPLIT, and slower to build.


@lru_cache(maxsize=1 << 18)
def node_hash(node: str) -> int:
    """Return the 8-byte BLAKE2b digest of a node's name as an integer. Part of the layout: must never change."""
    return int.from_bytes(hashlib.blake2b(node.encode(), digest_size=8).digest(), "little")


def bucket_name(bucket: int) -> str:
    """Return the folder of a bucket in a dataset, with forward slashes."""
    return f"telemetry/bucket={bucket:02d}"


def sort_columns(unit: Unit) -> tuple[str, str]:
    """Return the two columns that a bucket is sorted by."""
    return (("gpu" if unit == "gpu" else "node"), "timestamp")


def instants_ms(table: pa.Table) -> npt.NDArray[np.int64]:
    """Return the times of samples in milliseconds since 1970."""
    return np.asarray(table.column("timestamp").cast(pa.int64()).to_numpy())


def dictionary_codes(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int32], list[str]]:
    """Return codes and sorted names of a dictionary column without nulls; codes follow the order of names."""
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
    """Sort samples by (gpu, timestamp), or (node, timestamp); a sorted table is returned unchanged.

    Also returns the first row of the sorted table with a duplicate key, if any.
    """
    name, _ = sort_columns(unit)
    codes, _ = dictionary_codes(table.column(name))
    times = instants_ms(table)
    if not np.all((codes[1:] > codes[:-1]) | ((codes[1:] == codes[:-1]) & (times[1:] >= times[:-1]))):
        order = np.lexsort((times, codes))
        table = table.take(pa.array(order))
        codes, times = codes[order], times[order]
    repeated = np.flatnonzero((codes[1:] == codes[:-1]) & (times[1:] <= times[:-1]))
    return table, int(repeated[0]) + 1 if len(repeated) else None


def normal_form(table: pa.Table) -> pa.Table:
    """Return samples in canonical form: one chunk per column, dictionaries sorted and without unused names.

    Parquet preserves chunks and dictionaries, so equal samples could otherwise yield different files.
    """
    table = table.combine_chunks()
    for index, field in enumerate(table.schema):
        if field.type == NAME:
            table = table.set_column(index, field, _in_order(table.column(index)))
    return table


def _in_order(column: pa.ChunkedArray) -> pa.Array:
    array = column.unify_dictionaries().combine_chunks()
    used = pc.unique(array.indices.drop_null())
    used = used.take(pc.array_sort_indices(array.dictionary.take(used)))
    rank = np.zeros(len(array.dictionary), np.int32)
    rank[used.to_numpy()] = np.arange(len(used), dtype=np.int32)
    return pa.DictionaryArray.from_arrays(pa.array(rank).take(array.indices), array.dictionary.take(used))


def merge_runs(tables: Sequence[pa.Table], unit: Unit) -> pa.Table:
    """Merge successive sorted runs, at least one and in order of time, into one sorted table."""
    table = pa.concat_tables(tables).unify_dictionaries()
    if len(tables) == 1:
        return table
    codes, names = dictionary_codes(table.column(sort_columns(unit)[0]))
    if len(names) <= 1 << 16:
        codes = codes.astype(np.uint16)  # NumPy uses radix sort for 16-bit integers
    # The rows of each unit are in order of time already, so a stable sort by unit is a merge.
    return table.combine_chunks().take(pa.array(np.argsort(codes, kind="stable")))


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


_DAYS_KEY: Final = "predrain.days"
_HEX: Final = 16


def split_by(table: pa.Table, number: npt.NDArray[np.int64]) -> dict[int, pa.Table]:
    """Split a table by a number per row; parts keep the order of rows, in one chunk with the shared dictionary."""
    table = table.unify_dictionaries().combine_chunks()
    if not len(number):
        return {}
    first, last = int(number.min()), int(number.max())
    if first == last:
        return {first: table}
    code = (number - first).astype(np.uint16 if last - first < 1 << 16 else np.int64)  # radix sort
    order = np.argsort(code, kind="stable")
    table = table.take(pa.array(order)).combine_chunks()
    codes, begins = np.unique(code[order], return_index=True)
    ends = [*begins[1:].tolist(), len(order)]
    return {
        first + int(code): table.slice(begin, end - begin)
        for code, begin, end in zip(codes.tolist(), begins.tolist(), ends, strict=True)
    }


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
