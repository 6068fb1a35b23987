"""Layout of samples: buckets, runs, sort order and canonical form.

A run is a time range of a bucket's samples, so that new samples do not change old files.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

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
