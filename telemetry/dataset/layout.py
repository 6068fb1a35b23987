"""Layout of samples on disk: buckets, runs, sort order and Parquet settings.

A run is a stretch of time of a bucket's samples, so that new samples leave old files alone.

Settings were measured (see the design, section 5): columns with few distinct values as a dictionary, other numbers with
their bytes split into streams, instants as deltas, zstd at level 1; a row of 20 channels takes about 14 bytes.
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
"""Rows that a run of a bucket should hold at least: below, opening a file costs as much as reading it."""

MOST_RUN_DAYS: Final = 64
"""A dataset whose runs would have to be longer is small: it stays one run."""

DAY_MS: Final = 86_400_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Runs:
    """How a dataset's time is cut.

    ``days``: length of a run in days of UTC, a power of two; run 0 begins on 1970-01-01. None: all time is run 0.
    Raises ``ValueError`` if ``days`` is no power of two.
    """

    days: int | None = None

    def __post_init__(self) -> None:
        if self.days is not None and (self.days < 1 or self.days & (self.days - 1)):
            raise ValueError(f"runs of {self.days} days: their length must be a power of two")

    @property
    def groups(self) -> "Runs":
        """How a run's file is cut into row groups: quarters of a run, of a day at least; not where time is one run."""
        return Runs(None if self.days is None else max(1, self.days // 4))

    def of(self, ms: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the number of the run of each instant, given in milliseconds since 1970."""
        return np.zeros(len(ms), np.int64) if self.days is None else ms // (self.days * DAY_MS)

    def begin_ms(self, run: int) -> int:
        """Return where a run begins, in milliseconds since 1970; only where time is cut."""
        assert self.days is not None
        return run * self.days * DAY_MS

    def span(self, run: int) -> tuple[datetime, datetime] | None:
        """Return where a run begins and where the next one does, aware; None where all time is one run."""
        if self.days is None:
            return None
        begin, end = (_EPOCH + timedelta(milliseconds=self.begin_ms(number)) for number in (run, run + 1))
        return begin, end

    def begin_of(self, instant: datetime) -> datetime | None:
        """Return where the run of an instant begins, both aware; None where all time is one run."""
        span = None if self.days is None else self.span((instant - _EPOCH) // timedelta(days=self.days))
        return None if span is None else span[0]

    def overlaps(self, run: int, since_ms: int | None, until_ms: int | None) -> bool:
        """Whether a run may hold an instant of ``since_ms <= t < until_ms``; None leaves a side open."""
        if self.days is None:
            return True
        return (since_ms is None or self.begin_ms(run + 1) > since_ms) and (
            until_ms is None or self.begin_ms(run) < until_ms
        )

    def file_name(self, run: int) -> str:
        """Name the file of a run: by its first day, or ``part-00000.parquet`` where all time is one run."""
        span = self.span(run)
        return "part-00000.parquet" if span is None else f"part-{span[0]:%Y%m%d}.parquet"

    def of_file(self, name: str) -> int:
        """Return the run of a file that :meth:`file_name` named."""
        if self.days is None:
            return 0
        first = datetime.strptime(name, "part-%Y%m%d.parquet").replace(tzinfo=UTC)
        run, rest = divmod((first - _EPOCH).days, self.days)
        if rest:
            raise ValueError(f"{name} begins no run of {self.days} days")
        return run


def choose_runs(rows_a_day: float, days: float | None = None) -> Runs:
    """Return the shortest runs with :data:`RUN_ROWS` rows in a bucket that gets so many a day.

    ``days``: how long the dataset is, where it is known never to grow.
    One run where they would exceed :data:`MOST_RUN_DAYS`, or a dataset that does not grow would have fewer than two.
    """
    length = 1
    while length <= MOST_RUN_DAYS and length * rows_a_day < RUN_ROWS:
        length *= 2
    if length > MOST_RUN_DAYS or (days is not None and days < 2 * length):
        return Runs(None)
    return Runs(length)


def since_in_ms(instant: datetime | None) -> int | None:
    """Return the first millisecond that is not before an aware instant."""
    if instant is None:
        return None
    if instant.tzinfo is None:
        raise ValueError(f"{instant} is naive; give aware UTC")
    return -((_EPOCH - instant) // timedelta(milliseconds=1))


DEFAULT_BUCKETS = 16
"""Default number of buckets of a dataset: enough to keep a bucket of a year of 1,000 GPUs under a few GB."""

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
    """Return the first 8 bytes of the BLAKE2b digest of a node's name. Part of the layout: it must never change."""
    return int.from_bytes(hashlib.blake2b(node.encode(), digest_size=8).digest(), "little")


def bucket_name(bucket: int) -> str:
    """Return the name of the folder of a bucket's parts in a dataset, with slashes."""
    return f"telemetry/bucket={bucket:02d}"


def sort_columns(unit: Unit) -> tuple[str, str]:
    """Return the two columns that a bucket is sorted by."""
    return (("gpu" if unit == "gpu" else "node"), "timestamp")


def instants_ms(table: pa.Table) -> npt.NDArray[np.int64]:
    """Return the instants of samples, in milliseconds since 1970."""
    return np.asarray(table.column("timestamp").cast(pa.int64()).to_numpy())


def dictionary_codes(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int32], list[str]]:
    """Return codes in the order of the names, and the sorted names, of a dictionary column without nulls."""
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

    Returns also the row of the sorted table that has the key of the row before it, if any.
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
    """Return samples in the one form that equal samples have: a chunk a column, names in order and none unused.

    Parquet keeps chunks and dictionaries as they come, so without it equal samples could become files that differ.
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
    """Make one sorted table of successive runs that are each sorted; one at least, in order of time."""
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

    ``tables``: each sorted. They follow each other in time and have row groups of their own, so that a reader passes
    over those that it does not want.
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


def read_part(
    source: Path | pa.NativeFile,
    columns: Sequence[str],
    *,
    since_ms: int | None = None,
    until_ms: int | None = None,
    ahead: bool = False,
) -> tuple[list[pa.Table], int]:
    """Read one part file; of its row groups those alone that may hold what is asked for.

    ``since_ms``, ``until_ms``: only samples of ``since_ms <= t < until_ms``, in milliseconds since 1970.
    ``ahead``: whether to ask for all bytes of the columns at the same time, in few large and simultaneous reads: for
    files that are far away. It holds them all in memory until they are decoded.
    Returns: what :func:`write_part` was given, as far as it was asked for, none empty; and the rows of the file.
    """
    first = _EARLIEST if since_ms is None else since_ms
    last = _LATEST if until_ms is None else until_ms - 1
    with pq.ParquetFile(source, read_dictionary=["node", "gpu"], memory_map=False, pre_buffer=ahead) as file:
        parts = [part for part in _sorted_tables(file.metadata) if part.begin <= last and part.end >= first]
        if not parts:
            return [], file.metadata.num_rows
        is_cut = any(part.begin < first or part.end > last for part in parts)
        asked = [*columns, "timestamp"] if is_cut and "timestamp" not in columns else list(columns)
        groups = [group for part in parts for group in part.groups]
        whole = file.read_row_groups(groups, columns=asked).replace_schema_metadata(None)
        tables, begin = [], 0
        for part in parts:
            table = whole.slice(begin, part.rows)
            begin += part.rows
            if part.begin < first or part.end > last:
                times = instants_ms(table)
                table = table.filter(pa.array((times >= first) & (times <= last)))
            if table.num_rows:
                tables.append(table.select(columns))
        return tables, file.metadata.num_rows


@dataclass(slots=True)
class _SortedTable:
    """Row groups that hold one sorted table: how many rows, from when to when."""

    groups: list[int]
    rows: int
    begin: int
    end: int


def _sorted_tables(metadata: pq.FileMetaData) -> list[_SortedTable]:
    """Return the tables in a file: a row group that does not follow the one before in time continues with its table."""
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


_DAYS_KEY: Final = "predrain.days"
_HEX: Final = 16


def split_by(table: pa.Table, number: npt.NDArray[np.int64]) -> dict[int, pa.Table]:
    """Cut a table by the number of each row; each part keeps the rows' order, in one chunk with the whole's names."""
    table = table.unify_dictionaries().combine_chunks()
    if not len(number):
        return {}
    first, last = int(number.min()), int(number.max())
    if first == last:
        return {first: table}
    code = (number - first).astype(np.uint16 if last - first < 1 << 16 else np.int64)  # two bytes sort in one pass
    order = np.argsort(code, kind="stable")
    table = table.take(pa.array(order)).combine_chunks()
    codes, begins = np.unique(code[order], return_index=True)
    ends = [*begins[1:].tolist(), len(order)]
    return {
        first + int(code): table.slice(begin, end - begin)
        for code, begin, end in zip(codes.tolist(), begins.tolist(), ends, strict=True)
    }


def day_digests(table: pa.Table) -> dict[int, str]:
    """Digest each day of a table of samples.

    When a file is not the one it was (each compaction writes the newest again), they show the first day that changed.

    ``table``: sorted as a file is.
    Returns: by day of UTC since 1970-01-01: the first 64 bits, hexadecimal, of a SHA-256 over the day's samples in
    their order. It does not depend on what other days or units' names the table holds.
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
    """Return what the Parquet file of a table says about its days, as metadata of the file."""
    return {_DAYS_KEY: json.dumps(day_digests(table), separators=(",", ":"))}


def read_day_digests(source: Path | pa.NativeFile) -> dict[int, str] | None:
    """Read the digests of a file of samples from its footer alone; None in a file that an older version wrote."""
    text = (pq.read_metadata(source).metadata or {}).get(_DAYS_KEY.encode())
    return None if text is None else {int(day): digest for day, digest in json.loads(text).items()}


def _bytes_of(column: pa.ChunkedArray) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_] | None]:
    """Return a column as numbers, the same for what is null, and which are known; None: all."""
    whole = column.combine_chunks()
    known = whole.is_valid().to_numpy(zero_copy_only=False) if whole.null_count else None
    if whole.type == NAME:
        hashes = np.array([node_hash(name) for name in whole.dictionary.to_pylist()] or [0], dtype=np.uint64)
        codes = whole.indices if known is None else whole.indices.fill_null(0)
        return hashes[codes.to_numpy()], known
    if pa.types.is_timestamp(whole.type):
        whole = whole.cast(pa.int64())
    if known is not None:
        whole = whole.fill_null(False if pa.types.is_boolean(whole.type) else 0)
    return np.ascontiguousarray(whole.to_numpy(zero_copy_only=False)), known
