"""Reading of a dataset, the input of the other rooms; ``writer`` writes one."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from foundation.errors import InputError
from foundation.files import ReadLease, recover_folder
from foundation.place import Place, S3Place, refuse_storage
from telemetry.dataset.files import FolderFiles, StoredFiles
from telemetry.dataset.layout import bucket_name, merge_runs, node_hash, since_in_ms, sort_columns
from telemetry.dataset.meta import DatasetMeta, read_meta
from telemetry.dataset.parquet import part_rows, read_day_digests, read_part
from telemetry.dataset.schema import samples_schema

# Threads read and free buckets concurrently: releasing pages costs Arrow's default allocators a sixth of a build's
# CPU time, and the system allocator less.
if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
    pa.set_memory_pool(pa.system_memory_pool())


@dataclass(frozen=True, slots=True)
class SampleFile:
    """A file of samples; files with the same ``sha256`` have the same samples.

    ``span``: start of its run and of the next one; the dataset's span if a bucket is one run.
    """

    bucket: int
    run: int
    path: str
    sha256: str
    span: tuple[datetime, datetime]


class Dataset:
    """A dataset opened for reading from a folder or S3-compatible storage; create it with :meth:`open`.

    In a folder it keeps reading the same files while another process replaces the dataset.
    """

    def __init__(self, place: Place, meta: DatasetMeta, files: FolderFiles) -> None:
        self.place = place
        self.meta = meta
        self._files = files

    @classmethod
    def open(cls, place: Place, *, lease: bool = True) -> "Dataset":
        """Open the dataset at ``place``; in a folder, an interrupted swap is undone first.

        ``lease``: keep the files in a folder for the lifetime of this object, even if the dataset is replaced.
        Raises ``InputError`` if there is no dataset at ``place``, or it cannot be read.
        """
        if isinstance(place, S3Place):
            stored = StoredFiles.open(place)
            return cls(stored.place, stored.meta, stored)
        refuse_storage(place)
        recover_folder(place)
        read_lease = ReadLease(place) if lease and place.is_dir() else None
        files = FolderFiles(place, read_lease)
        return cls(place, read_meta(files.root, place), files)

    @property
    def path(self) -> Path:
        """The dataset's folder; raises ``ValueError`` on storage."""
        if not isinstance(self.place, Path):
            raise ValueError(f"{self.place} is not in a folder")
        return self.place

    @property
    def root(self) -> Path:
        """Path of the files that this object reads, even after a swap; raises ``ValueError`` on storage."""
        if isinstance(self._files, StoredFiles):
            raise ValueError(f"{self.place} is not in a folder")
        return self._files.root

    @property
    def pinned(self) -> Place:
        """Location of this dataset for another process: its absolute folder, or its prefix and digest on storage."""
        return self.place if isinstance(self.place, S3Place) else self.place.resolve()

    @property
    def digest(self) -> str:
        """SHA-256 of the dataset's content in hexadecimal."""
        return self.meta.digest

    @cached_property
    def schema(self) -> pa.Schema:
        """Arrow schema of the sample table."""
        return samples_schema(self.meta.channels, sample_count=self.meta.sample_count)

    def buckets(self) -> list[int]:
        """Return the buckets with samples, ascending; empty without telemetry."""
        return sorted(int(bucket) for bucket in self.meta.counts["samples_by_bucket"])

    def bucket_of(self, node: str) -> int:
        """Return the bucket of a node's samples."""
        return node_hash(node) % self.meta.buckets

    def runs_of(self, bucket: int) -> list[int]:
        """Return the runs in which a bucket has samples, ascending; see :class:`Runs`."""
        return sorted(self._names.get(bucket, {}))

    def parts_of_run(self, bucket: int, run: int) -> list[Path]:
        """Return the files of one run of a bucket; several only in datasets of older versions with a single run."""
        return [self.root / name for name in self._names_of(bucket, run)]

    def rows_in(self, bucket: int, *, since: datetime | None = None) -> int:
        """Return the number of samples in the files that may have samples at or after ``since``, or in all files."""
        if since is None:
            return int(self.meta.counts["samples_by_bucket"].get(str(bucket), 0))
        rows = 0
        runs = [run for run in self.runs_of(bucket) if self.meta.runs.overlaps(run, since_in_ms(since), None)]
        for name in (name for run in runs for name in self._names_of(bucket, run)):
            with self._files.opened(name) as stream:
                rows += part_rows(stream)
        return rows

    def sample_files(self) -> list[SampleFile]:
        """Return all files of samples by bucket and run."""
        return [
            SampleFile(bucket, run, name, self.sha256_of(name), self.meta.runs.span(run) or self.meta.span)
            for bucket in self.buckets()
            for run in self.runs_of(bucket)
            for name in self._names_of(bucket, run)
        ]

    def day_digests(self, file: SampleFile) -> dict[int, str] | None:
        """Return the day digests of a file; see :func:`telemetry.dataset.parquet.read_day_digests`."""
        with self._files.opened(file.path) as stream:
            return read_day_digests(stream)

    def sha256_of(self, name: str) -> str:
        """Return the SHA-256 of a file from dataset.json, or, in datasets of older versions, of its bytes."""
        return self.meta.files.get(name) or self._files.sha256_of(name)

    def read_bucket(
        self,
        bucket: int,
        columns: Sequence[str] | None = None,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> pa.Table:
        """Read the samples of one bucket with ``since <= t < until`` (aware); runs outside are not opened.

        Returns: sorted by (gpu, timestamp), or (node, timestamp) if the unit is the node. ``node`` and ``gpu`` are
        dictionary-encoded, with one dictionary for the whole table.
        Raises ``InputError`` if a column is unknown, or files are missing, corrupt or replaced.
        """
        names = self._columns(columns)
        return self._joined(self.read_runs(bucket, self._with_key(names), since=since, until=until), names)

    def read_runs(
        self,
        bucket: int,
        columns: Sequence[str] | None = None,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> list[pa.Table]:
        """Read one bucket as stored: one non-empty table per run or row group, in order of time.

        Each is sorted and encoded like the result of :meth:`read_bucket`.
        """
        names = self._columns(columns)
        first, last = since_in_ms(since), since_in_ms(until)
        runs = [run for run in self.runs_of(bucket) if self.meta.runs.overlaps(run, first, last)]
        parts = [self._read(bucket, run, names, first, last) for run in runs]
        total_rows = sum(rows for _, rows in parts)
        expected = self.meta.counts["samples_by_bucket"].get(str(bucket), 0)
        if runs == self.runs_of(bucket) and total_rows != expected:
            raise self._damaged(f"bucket {bucket} holds {total_rows} samples, dataset.json says {expected}", bucket)
        return [table for tables, _ in parts for table in tables]

    def read_run(self, bucket: int, run: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read one run of a bucket, sorted and encoded like :meth:`read_bucket`; empty without samples."""
        names = self._columns(columns)
        return self._joined(self._read(bucket, run, self._with_key(names), None, None)[0], names)

    def _with_key(self, names: list[str]) -> list[str]:
        """Add the sort key for merging, if there may be several tables."""
        key, _ = sort_columns(self.meta.unit)
        return names if key in names or self.meta.run_days is None else [*names, key]

    def _joined(self, tables: list[pa.Table], names: list[str]) -> pa.Table:
        if not tables:
            return pa.schema([self.schema.field(name) for name in names]).empty_table()
        return (tables[0] if len(tables) == 1 else merge_runs(tables, self.meta.unit)).select(names)

    def _read(
        self, bucket: int, run: int, names: list[str], since_ms: int | None, until_ms: int | None
    ) -> tuple[list[pa.Table], int]:
        """Read the tables of a run, and the number of rows of its files."""
        schema = pa.schema([self.schema.field(name) for name in names])
        tables: list[pa.Table] = []
        rows = 0
        for name in self._names_of(bucket, run):
            try:
                with self._files.opened(name) as stream:
                    part, row_count = read_part(
                        stream, names, since_ms=since_ms, until_ms=until_ms, prefetch=self._files.is_remote
                    )
            except FileNotFoundError:
                raise self._damaged(f"bucket {bucket} has lost {name.rpartition('/')[2]}", bucket) from None
            tables += [table if table.schema == schema else table.cast(schema) for table in part]
            rows += row_count
        if self.meta.run_days is None and len(tables) > 1:  # successive files form one sorted table
            tables = [pa.concat_tables(tables)]
        return [table.unify_dictionaries() for table in tables], rows

    def _columns(self, columns: Sequence[str] | None) -> list[str]:
        names = list(self.schema.names)
        for name in columns or ():
            if name not in names:
                raise InputError(f"the dataset has no column {name!r}", str(self.place), f"Its columns are {names}.")
        return names if columns is None else list(columns)

    def _damaged(self, problem: str, bucket: int) -> InputError:
        return InputError(
            problem,
            f"{self.place}/{bucket_name(bucket)}",
            "The dataset is damaged or was replaced while it was read: run again, or import it again.",
        )

    def _names_of(self, bucket: int, run: int) -> list[str]:
        return self._names.get(bucket, {}).get(run, [])

    @cached_property
    def _names(self) -> dict[int, dict[int, list[str]]]:
        if self.meta.run_days is None:  # older versions may have several files per bucket
            parts = {bucket: self._files.parts_in(bucket_name(bucket)) for bucket in self.buckets()}
            return {bucket: {0: names} if names else {} for bucket, names in parts.items()}
        names_of: dict[int, dict[int, list[str]]] = {}
        for path in sorted(self.meta.files):
            folder, _, name = path.rpartition("/")
            if folder.startswith("telemetry/bucket="):
                bucket = int(folder.removeprefix("telemetry/bucket="))
                names_of.setdefault(bucket, {})[self.meta.runs.of_file(name)] = [path]
        return names_of

    def events(self) -> pd.DataFrame:
        """Return the events, sorted by (known_at, timestamp, node, gpu, code); see :data:`EVENTS`."""
        return self._small("events.parquet")

    def inventory(self) -> pd.DataFrame:
        """Return the installations by (node, gpu, installed_at); see :data:`telemetry.dataset.schema.INVENTORY`."""
        return self._small("inventory.parquet")

    def jobs(self) -> pd.DataFrame | None:
        """Return the jobs, or None if the dataset has none; see :data:`telemetry.dataset.schema.JOBS`."""
        return self._small("jobs.parquet") if self._files.has("jobs.parquet") else None

    def _small(self, name: str) -> pd.DataFrame:
        try:
            with self._files.opened(name) as stream:
                return pq.read_table(stream).to_pandas()
        except FileNotFoundError:
            raise InputError(
                f"the dataset has no {name}", str(self.place), "It is damaged: import its sources again."
            ) from None
