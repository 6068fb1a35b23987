"""Writing a dataset in a single step."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.atomic import FolderSwap, disk_errors, fsync_path, recover_folder
from telemetry.channel import Channel, channel_as_dict
from telemetry.dataset import Dataset
from telemetry.errors import InputError
from telemetry.layout import (
    DEFAULT_BUCKETS,
    bucket_folder,
    node_hash,
    part_paths,
    read_part,
    sort_columns,
    sort_samples,
    write_part,
    write_small,
)
from telemetry.meta import META_NAME, DatasetMeta, encode_meta, instant_text
from telemetry.schema import EVENTS, INVENTORY, JOBS, SCHEMA_VERSION, Unit, conform, samples_schema


@dataclass(slots=True)
class _Part:
    """A part file and the keys of its first and last row."""

    path: Path
    rows: int
    first: tuple[str, int]
    last: tuple[str, int]


class DatasetWriter:
    """Builds a dataset beside its place and swaps it in by :meth:`finish`.

    Use it as a context manager: on an error nothing remains but what stood at ``path`` before. Several threads may call
    :meth:`write_samples` at once.

    Parameters
    ----------
    path : pathlib.Path
        Where the dataset shall stand. A dataset there is replaced; any other non-empty folder is refused.
    step : datetime.timedelta
        Nominal sample interval.
    channels : mapping of str to Channel
        Channels of the sample table in column order, roll-ups included.
    unit : {"gpu", "node"}
        What a row is about.
    buckets : int
        Number of buckets; a node's samples go to bucket :meth:`bucket_of`.
    sample_count : bool
        Whether samples carry ``sample_count``.

    Raises
    ------
    InputError
        If ``path`` holds something else than a dataset, is being written by another run, or may not be written to.
    """

    def __init__(
        self,
        path: Path,
        *,
        step: timedelta,
        channels: Mapping[str, Channel],
        unit: Unit = "gpu",
        buckets: int = DEFAULT_BUCKETS,
        sample_count: bool = False,
    ) -> None:
        path = Path(path)
        recover_folder(path)
        if path.exists() and not (path / META_NAME).exists() and (not path.is_dir() or any(path.iterdir())):
            raise InputError(
                "there is something here that is not a dataset, and it would be replaced",
                str(path),
                "Choose another folder, or remove this one yourself.",
            )
        self._unit = unit
        self._step = step
        self._channels = dict(channels)
        self._buckets = buckets
        self._sample_count = sample_count
        self._schema = samples_schema(self._channels, sample_count=sample_count)
        self._parts: dict[int, list[_Part]] = {}
        self._adopted: dict[int, int] = {}
        self._guard = threading.Lock()
        self._swap = FolderSwap(path)

    @property
    def folder(self) -> Path:
        """The folder that is being built; further files of the dataset may be put there before :meth:`finish`."""
        return self._swap.path

    def bucket_of(self, node: str) -> int:
        """Return the bucket that a node's samples belong to."""
        return node_hash(node) % self._buckets

    @property
    def buckets(self) -> int:
        """Number of buckets."""
        return self._buckets

    def set_unit(self, unit: Unit) -> None:
        """Set the unit, before any sample is written."""
        if self._parts or self._adopted:
            raise ValueError("samples were written already")
        self._unit = unit

    def declare(self, channels: Mapping[str, Channel], *, sample_count: bool) -> None:
        """Set the channels anew, before any sample is written; for a writer made before the channels were known."""
        if self._parts:
            raise ValueError("samples were written already")
        self._channels = dict(channels)
        self._sample_count = sample_count
        self._schema = samples_schema(self._channels, sample_count=sample_count)

    def adopt(self, dataset: Dataset, bucket: int) -> None:
        """Take a bucket's parts over from a dataset of the same columns, without reading them again.

        Parameters
        ----------
        dataset : Dataset
            May be the one that is going to be replaced.
        bucket : int
            A bucket that nothing was written to.
        """
        if dataset.schema != self._schema or dataset.meta.buckets != self._buckets or bucket in self._parts:
            raise ValueError(f"bucket {bucket} of {dataset.path} does not fit this dataset")
        folder = bucket_folder(self._swap.path, bucket)
        with disk_errors(self._swap.target):
            folder.mkdir(parents=True, exist_ok=True)
            for source in part_paths(dataset.path, bucket):
                # Parts are never changed in place, so that two datasets may share one file.
                try:
                    (folder / source.name).hardlink_to(source)
                except OSError:
                    shutil.copyfile(source, folder / source.name)
        rows = dataset.meta.counts["samples_by_bucket"].get(str(bucket), 0)
        self._adopted[bucket] = rows

    def write_samples(self, bucket: int, table: pa.Table) -> None:
        """Write samples of one bucket; any number of calls for each bucket, in any order.

        Parameters
        ----------
        bucket : int
            The bucket of every node in ``table``.
        table : pyarrow.Table
            ``timestamp``, ``node``, ``gpu`` and any of the channels; an absent channel is null. A table in the order
            (gpu, timestamp), or (node, timestamp), is written without a copy; another is sorted. NaN becomes null.

        Raises
        ------
        InputError
            On an unknown column, a value that does not fit the channel's type, a null key, two samples of one unit at
            one time, or a full disk.
        """
        if not 0 <= bucket < self._buckets:
            raise ValueError(f"bucket {bucket} is outside 0 .. {self._buckets - 1}")
        if table.num_rows == 0:
            return
        table = self._laid_out(table, bucket)
        table, duplicate = sort_samples(table, self._unit)
        if duplicate is not None:
            raise self._duplicate(table, duplicate)
        with self._guard:
            parts = self._parts.setdefault(bucket, [])
            path = bucket_folder(self._swap.path, bucket) / f"part-{len(parts):05d}.parquet"
            part = _Part(path, table.num_rows, self._key(table, 0), self._key(table, table.num_rows - 1))
            parts.append(part)
        with disk_errors(self._swap.target):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_part(path, table)

    def finish(
        self,
        *,
        events: pd.DataFrame,
        inventory: pd.DataFrame,
        span: tuple[datetime, datetime],
        jobs: pd.DataFrame | None = None,
        sources: Sequence[Mapping[str, Any]] = (),
        quarantine: Mapping[str, int] | None = None,
        counts: Mapping[str, Any] | None = None,
    ) -> Dataset:
        """Write the remaining tables and dataset.json, force all to the disk, and swap the dataset in.

        Parameters
        ----------
        events, inventory : pandas.DataFrame
            In the layouts of :mod:`telemetry.schema`, in any order; absent nullable columns are null.
        span : tuple of two datetime
            First and last instant of anything observed, aware.
        jobs : pandas.DataFrame, optional
        sources : sequence of mapping
            What the dataset was made from, JSON types only, without paths or times of writing.
        quarantine : mapping of str to int, optional
            Rows set aside, by reason.
        counts : mapping, optional
            Further counts for dataset.json.

        Returns
        -------
        Dataset
            The finished dataset.

        Raises
        ------
        InputError
            If the disk is full (the old dataset is unchanged), or parts of a bucket hold the same key twice.
        """
        for instant in span:
            if instant.tzinfo is None:
                raise ValueError(f"span {instant} is naive; give aware UTC")
        root = self._swap.path
        event_table = conform(events, EVENTS)
        event_table = event_table.sort_by([(name, "ascending") for name in _EVENT_ORDER])
        inventory_table = conform(inventory, INVENTORY)
        inventory_table = inventory_table.sort_by([(name, "ascending") for name in ("node", "gpu", "installed_at")])
        job_table = (
            None if jobs is None else conform(jobs, JOBS).sort_by([("started_at", "ascending"), ("job", "ascending")])
        )
        with disk_errors(self._swap.target):
            self._merge_parts()
            write_small(root / "events.parquet", event_table)
            write_small(root / "inventory.parquet", inventory_table)
            if job_table is not None:
                write_small(root / "jobs.parquet", job_table)
            rows = {bucket: sum(part.rows for part in parts) for bucket, parts in self._parts.items()} | self._adopted
            by_bucket = {str(bucket): rows[bucket] for bucket in sorted(rows)}
            all_counts: dict[str, Any] = {
                "samples": sum(by_bucket.values()),
                "events": event_table.num_rows,
                "inventory": inventory_table.num_rows,
                "jobs": 0 if job_table is None else job_table.num_rows,
                "nodes": pc.count_distinct(inventory_table.column("node")).as_py(),
                "gpus": pc.count_distinct(inventory_table.column("gpu"), mode="only_valid").as_py(),
                "samples_by_bucket": by_bucket,
                **(counts or {}),
            }
            meta = DatasetMeta(
                schema_version=SCHEMA_VERSION,
                unit=self._unit,
                step=self._step,
                span=(span[0].astimezone(UTC), span[1].astimezone(UTC)),
                channels=self._channels,
                counts=all_counts,
                quarantine=dict(quarantine or {}),
                sources=[dict(source) for source in sources],
                buckets=self._buckets,
                sample_count=self._sample_count,
            )
            meta = replace(meta, digest=_digest(root, meta))
            (root / META_NAME).write_bytes(encode_meta(meta))
            for path in sorted(root.rglob("*")):
                fsync_path(path)
            self._swap.commit()
        return Dataset.open(self._swap.target)

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._swap.discard()

    def _laid_out(self, table: pa.Table, bucket: int) -> pa.Table:
        if table.schema.equals(self._schema):
            columns = list(table.columns)
        else:
            unknown = [name for name in table.column_names if name not in self._schema.names]
            if unknown:
                raise InputError(
                    f"the sample table has unknown columns {unknown}",
                    f"bucket {bucket}",
                    "Give their channels to the writer, or leave the columns out.",
                )
            columns = [self._column(table, field, bucket) for field in self._schema]
        for index, field in enumerate(self._schema):
            if pa.types.is_floating(field.type) and pc.any(pc.is_nan(columns[index])).as_py():
                nan = pc.is_nan(columns[index])
                columns[index] = pc.if_else(nan, pa.scalar(None, field.type), columns[index])
        laid = pa.Table.from_arrays(columns, schema=self._schema)
        for name in ("timestamp", "node", *sort_columns(self._unit)[:1]):
            if laid.column(name).null_count:
                raise InputError(f"samples without {name!r}", f"bucket {bucket}", f"Every sample needs a {name}.")
        return laid

    def _column(self, table: pa.Table, field: pa.Field, bucket: int) -> pa.ChunkedArray:
        if field.name not in table.column_names:
            return pa.chunked_array([pa.nulls(table.num_rows, field.type)])
        column = table.column(field.name)
        if column.type == field.type:
            return column
        try:
            if pa.types.is_dictionary(field.type) and not pa.types.is_dictionary(column.type):
                return column.cast(pa.string()).dictionary_encode().cast(field.type)
            return column.cast(field.type)
        except pa.ArrowInvalid as error:
            raise InputError(
                f"column {field.name!r} does not fit its type {field.type}: {error}",
                f"bucket {bucket}",
                "Correct the values, or declare the channel with another kind.",
            ) from error

    def _key(self, table: pa.Table, row: int) -> tuple[str, int]:
        name, time = sort_columns(self._unit)
        return table.column(name)[row].as_py(), table.column(time)[row].cast(pa.int64()).as_py()

    def _duplicate(self, table: pa.Table, row: int) -> InputError:
        name, _ = sort_columns(self._unit)
        unit, instant = table.column(name)[row].as_py(), table.column("timestamp")[row].as_py()
        return InputError(
            f"two samples of one {name} at one time",
            f"{name} {unit!r} at {instant_text(instant)}",
            "Keep one of them; `predrain import` does so and counts the others.",
        )

    def _merge_parts(self) -> None:
        """Make the order of each bucket's parts the order of its rows; rewrite as one part where they interleave."""
        for bucket, parts in sorted(self._parts.items()):
            ordered = sorted(parts, key=lambda part: part.first)
            if any(before.last >= after.first for before, after in pairwise(ordered)):
                whole = pa.concat_tables([read_part(part.path) for part in parts]).unify_dictionaries()
                whole, duplicate = sort_samples(whole.cast(self._schema), self._unit)
                if duplicate is not None:
                    raise self._duplicate(whole, duplicate)
                for part in parts:
                    part.path.unlink()
                path = bucket_folder(self._swap.path, bucket) / "part-00000.parquet"
                write_part(path, whole)
                self._parts[bucket] = [_Part(path, whole.num_rows, self._key(whole, 0), self._key(whole, -1))]
            elif ordered != parts:
                for index, part in enumerate(ordered):
                    part.path.rename(part.path.with_name(f"sorted-{index:05d}"))
                for index in range(len(ordered)):
                    folder = bucket_folder(self._swap.path, bucket)
                    (folder / f"sorted-{index:05d}").rename(folder / f"part-{index:05d}.parquet")


_EVENT_ORDER = ("known_at", "timestamp", "node", "gpu", "code", "type", "source", "detail")


def _digest(root: Path, meta: DatasetMeta) -> str:
    """Hash what a reader could see of the dataset: its files' bytes and the settings that give them a meaning."""
    total = hashlib.sha256()
    settings = {
        "schema_version": meta.schema_version,
        "unit": meta.unit,
        "step": meta.step.total_seconds(),
        "span": [instant_text(instant) for instant in meta.span],
        "buckets": meta.buckets,
        "channels": [channel_as_dict(channel) for channel in meta.channels.values()],
    }
    total.update(json.dumps(settings, sort_keys=True).encode())
    files = [*(root / "telemetry").rglob("*.parquet"), *root.glob("*.parquet")]
    for path in sorted(files, key=lambda each: each.relative_to(root).as_posix()):
        with path.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        total.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return total.hexdigest()
