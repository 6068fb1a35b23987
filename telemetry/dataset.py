"""Reading a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from telemetry.atomic import ReadLease, recover_folder
from telemetry.errors import InputError
from telemetry.layout import bucket_folder, node_hash, part_paths, read_part
from telemetry.meta import DatasetMeta, read_meta
from telemetry.schema import samples_schema


class Dataset:
    """A dataset on disk, opened for reading; make it with :meth:`open`.

    Parameters
    ----------
    path : pathlib.Path
        The dataset's folder.
    meta : DatasetMeta
        What its dataset.json says.
    lease : ReadLease, optional
        Keeps the files in place while another run replaces the dataset: this object goes on reading the old one.
    """

    def __init__(self, path: Path, meta: DatasetMeta, lease: ReadLease | None = None) -> None:
        self.path = path
        self.meta = meta
        self._lease = lease
        self._root = path if lease is None else lease.path

    @classmethod
    def open(cls, path: Path, *, lease: bool = True) -> Dataset:
        """Open the dataset at ``path``; a swap that a killed writer left half done is undone first.

        Parameters
        ----------
        path : pathlib.Path
        lease : bool
            Whether the files shall stay while this object lives, even if another run replaces the dataset.

        Raises
        ------
        InputError
            If there is no dataset at ``path``, or it cannot be read by this version.
        """
        path = Path(path)
        recover_folder(path)
        if not lease or not path.is_dir():
            return cls(path, read_meta(path))
        held = ReadLease(path)
        return cls(path, read_meta(held.path, path), held)

    @property
    def digest(self) -> str:
        """SHA-256 over the dataset's content, as hexadecimal text."""
        return self.meta.digest

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of the sample table."""
        return samples_schema(self.meta.channels, sample_count=self.meta.sample_count)

    def buckets(self) -> list[int]:
        """Return the numbers of the buckets that hold samples, ascending; empty without telemetry."""
        return sorted(int(bucket) for bucket in self.meta.counts["samples_by_bucket"])

    def bucket_of(self, node: str) -> int:
        """Return the bucket that a node's samples are in."""
        return node_hash(node) % self.meta.buckets

    def read_bucket(self, bucket: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read one bucket.

        Parameters
        ----------
        bucket : int
            0 .. ``meta.buckets`` - 1; one without samples gives an empty table.
        columns : sequence of str, optional
            Columns to read, in that order; default all.

        Returns
        -------
        pyarrow.Table
            Sorted by (gpu, timestamp); by (node, timestamp) where the unit is the node. ``node`` and ``gpu`` are
            dictionary-encoded, with one dictionary for the whole table.

        Raises
        ------
        InputError
            If a column is not in the dataset, or files are missing (damaged, or replaced while being read).
        """
        schema = self.schema
        if columns is not None:
            for name in columns:
                if name not in schema.names:
                    raise InputError(
                        f"the dataset has no column {name!r}", str(self.path), f"Its columns are {schema.names}."
                    )
            schema = pa.schema([schema.field(name) for name in columns])
        try:
            tables = [read_part(path, columns) for path in part_paths(self._root, bucket)]
        except FileNotFoundError:
            tables = []
        rows = sum(table.num_rows for table in tables)
        expected = self.meta.counts["samples_by_bucket"].get(str(bucket), 0)
        if rows != expected:
            raise InputError(
                f"bucket {bucket} holds {rows} samples, dataset.json says {expected}",
                str(bucket_folder(self.path, bucket)),
                "The dataset is damaged or was replaced while it was read: run again, or import it again.",
            )
        if not tables:
            return schema.empty_table()
        return pa.concat_tables([table.select(schema.names).cast(schema) for table in tables]).unify_dictionaries()

    def events(self) -> pd.DataFrame:
        """Return the events, sorted by (known_at, timestamp, node, gpu, code); see :data:`telemetry.schema.EVENTS`."""
        return self._small("events.parquet")

    def inventory(self) -> pd.DataFrame:
        """Return the stays, sorted by (node, gpu, installed_at); see :data:`telemetry.schema.INVENTORY`."""
        return self._small("inventory.parquet")

    def jobs(self) -> pd.DataFrame | None:
        """Return the jobs, or None where the dataset has none; see :data:`telemetry.schema.JOBS`."""
        return self._small("jobs.parquet") if (self._root / "jobs.parquet").exists() else None

    def _small(self, name: str) -> pd.DataFrame:
        try:
            return pq.read_table(self._root / name).to_pandas()
        except FileNotFoundError:
            raise InputError(
                f"the dataset has no {name}", str(self.path), "It is damaged: import its sources again."
            ) from None
