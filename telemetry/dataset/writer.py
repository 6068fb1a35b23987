"""Atomic writing of a dataset."""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from foundation.errors import InputError
from foundation.files import FolderSwap, disk_errors, fsync_path, recover_folder, refuse_other_content
from telemetry.dataset.channels import Channel, channel_as_dict
from telemetry.dataset.files import sha256_of
from telemetry.dataset.layout import (
    DEFAULT_BUCKETS,
    Runs,
    bucket_name,
    instants_ms,
    node_hash,
    normal_form,
    sort_columns,
    sort_samples,
    split_by,
)
from telemetry.dataset.meta import META_NAME, DatasetMeta, encode_meta, instant_text
from telemetry.dataset.parquet import footer, part_rows, write_part, write_small
from telemetry.dataset.schema import (
    EVENTS,
    INVENTORY,
    JOBS,
    RUNS_SCHEMA_VERSION,
    SCHEMA_VERSION,
    Unit,
    column_as,
    conform,
    samples_schema,
)
from telemetry.dataset.store import Dataset


class DatasetWriter:
    """Builds a dataset next to ``path`` and swaps it in by :meth:`finish`.

    Use it as a context manager: on an error ``path`` is unchanged. Threads may call :meth:`write_samples` concurrently
    for different buckets.

    ``channels``: channels of the sample table in column order, including roll-ups. ``runs``: default: one run per
    bucket.
    Raises ``InputError`` if ``path`` is not a dataset, another process is writing it, or it is not writable.
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
        runs: Runs | None = None,
    ) -> None:
        recover_folder(path)
        refuse_other_content(path, META_NAME, "a dataset")
        self._step = step
        self.buckets = buckets
        self._rows: Counter[int] = Counter()  # by bucket
        self._known: dict[str, str] = {}  # SHA-256 of adopted files
        self._on_disk: set[str] = set()
        self._swap = FolderSwap(path)
        self.declare(channels, unit=unit, sample_count=sample_count, runs=runs)

    @property
    def folder(self) -> Path:
        """The folder under construction; further files may be added before :meth:`finish`."""
        return self._swap.path

    def bucket_of(self, node: str) -> int:
        """Return the bucket of a node's samples."""
        return node_hash(node) % self.buckets

    def declare(
        self, channels: Mapping[str, Channel], *, unit: Unit, sample_count: bool, runs: Runs | None = None
    ) -> None:
        """Set the schema of samples, if it was not known at construction; must precede all samples."""
        if self._rows:
            raise ValueError("samples were already written")
        self._unit = unit
        self._channels = dict(channels)
        self._sample_count = sample_count
        self._schema = samples_schema(self._channels, sample_count=sample_count)
        self._runs = Runs() if runs is None else runs

    def adopt(self, dataset: Dataset, bucket: int, runs: Iterable[int] | None = None) -> None:
        """Adopt a bucket's runs from a dataset with the same layout, without reading or hashing them.

        ``runs``: runs that get no new samples; default: all runs of the bucket.
        """
        same = dataset.meta.buckets == self.buckets and dataset.meta.run_days == self._runs.days
        if dataset.schema != self._schema or not same:
            raise ValueError(f"bucket {bucket} of {dataset.path} does not match this dataset")
        all_runs = dataset.runs_of(bucket)
        chosen = all_runs if runs is None else sorted(runs)
        rows = 0
        with disk_errors(self._swap.target):
            for source in (path for run in chosen for path in dataset.parts_of_run(bucket, run)):
                name = f"telemetry/{source.parent.name}/{source.name}"
                target = self._share(source, name)
                self._known[name] = dataset.sha256_of(name)
                if chosen != all_runs:
                    rows += part_rows(target)
        if chosen == all_runs:
            rows = dataset.meta.counts["samples_by_bucket"].get(str(bucket), 0)
        self._rows[bucket] += rows

    def adopt_folder(self, dataset: Dataset, name: str) -> None:
        """Adopt a folder of further files from a dataset, e.g. the quarantine, without reading them."""
        with disk_errors(self._swap.target):
            for source in sorted(path for path in (dataset.path / name).rglob("*") if path.is_file()):
                self._share(source, source.relative_to(dataset.path).as_posix())

    def write_tables(self, folder: str, tables: Mapping[str, pa.Table]) -> None:
        """Write further tables, which are not part of the digest, to a folder of the dataset."""
        with disk_errors(self._swap.target):
            (self._swap.path / folder).mkdir()
            for name, table in tables.items():
                write_small(self._swap.path / folder / f"{name}.parquet", table)

    def write_samples(self, bucket: int, table: pa.Table) -> None:
        """Write samples of one bucket, in any order; further tables of the bucket must be of other runs.

        ``table``: ``timestamp``, ``node``, ``gpu`` and any channels; missing channels and NaN become null.
        Raises ``InputError`` on an unknown column, a value that does not fit the channel's type, a null key, a
        duplicate (unit, timestamp), or a full disk.
        """
        if table.num_rows == 0:
            return
        table = self._laid_out(table, bucket)
        table, duplicate = sort_samples(table, self._unit)
        if duplicate is not None:
            key = table.column(sort_columns(self._unit)[0])[duplicate].as_py()
            raise InputError(
                f"two samples of one {self._unit} at one time",
                f"{self._unit} {key!r} at {instant_text(table.column('timestamp')[duplicate].as_py())}",
                "Keep one of them; `predrain import` does so and counts the others.",
            )
        with disk_errors(self._swap.target):
            self._write_runs(bucket, table)
        self._rows[bucket] += table.num_rows

    def _write_runs(self, bucket: int, table: pa.Table) -> None:
        """Write sorted samples, one file per run; its bytes depend only on the samples of the run."""
        folder = self._swap.path / bucket_name(bucket)
        folder.mkdir(parents=True, exist_ok=True)
        for run, part in split_by(table, self._runs.of(instants_ms(table))).items():
            path = folder / self._runs.file_name(run)
            if path.exists():  # possibly a hard link: writing to it would change another dataset
                raise ValueError(f"{folder.name}/{path.name} is there already")
            samples = normal_form(part)
            write_part(
                path, list(split_by(samples, self._runs.groups.of(instants_ms(samples))).values()), footer(samples)
            )

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
        """Write the remaining tables and dataset.json, sync all files, and swap the dataset in.

        ``events``, ``inventory``: in the layouts of ``schema``, in any order; missing nullable columns are null.
        ``sources``: sources of the dataset in JSON types, without paths or write times.
        Raises ``InputError`` if the disk is full; the old dataset is unchanged.
        """
        root = self._swap.path
        tables = {"events": _sorted(events, EVENTS, _EVENT_ORDER)}
        tables["inventory"] = _sorted(inventory, INVENTORY, ("node", "gpu", "installed_at"))
        if jobs is not None:
            tables["jobs"] = _sorted(jobs, JOBS, ("started_at", "job"))
        with disk_errors(self._swap.target):
            rows = +self._rows  # without empty buckets
            for name, table in tables.items():
                write_small(root / f"{name}.parquet", table)
            all_counts: dict[str, Any] = {
                "samples": rows.total(),
                **{name: table.num_rows for name, table in tables.items()},
                "jobs": tables["jobs"].num_rows if jobs is not None else 0,
                "nodes": pc.count_distinct(tables["inventory"].column("node")).as_py(),
                "gpus": pc.count_distinct(tables["inventory"].column("gpu"), mode="only_valid").as_py(),
                "samples_by_bucket": {str(bucket): rows[bucket] for bucket in sorted(rows)},
                **(counts or {}),
            }
            meta = DatasetMeta(
                schema_version=SCHEMA_VERSION if self._runs.days is None else RUNS_SCHEMA_VERSION,
                unit=self._unit,
                step=self._step,
                span=(span[0].astimezone(UTC), span[1].astimezone(UTC)),
                channels=self._channels,
                counts=all_counts,
                quarantine=dict(quarantine or {}),
                sources=[dict(source) for source in sources],
                buckets=self.buckets,
                sample_count=self._sample_count,
                run_days=self._runs.days,
                files=self._hashed(root),
            )
            meta = replace(meta, digest=_digest(meta))
            (root / META_NAME).write_bytes(encode_meta(meta))
            for path in sorted(root.rglob("*")):
                if path.relative_to(root).as_posix() not in self._on_disk:
                    fsync_path(path)
            self._swap.commit()
        return Dataset.open(self._swap.target)

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(self, *_error: object) -> None:
        self._swap.discard()

    def _share(self, source: Path, name: str) -> Path:
        """Hard-link or copy a file, which is synced already; files are immutable, so datasets can share them."""
        target = self._swap.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            raise ValueError(f"{name} was written already")
        try:
            target.hardlink_to(source)
        except OSError:
            shutil.copyfile(source, target)
            fsync_path(target)
        self._on_disk.add(name)
        return target

    def _laid_out(self, table: pa.Table, bucket: int) -> pa.Table:
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
        try:
            return column_as(table, field)
        except pa.ArrowInvalid as error:
            raise InputError(
                f"column {field.name!r} does not match its type {field.type}: {error}",
                f"bucket {bucket}",
                "Correct the values, or declare the channel with another kind.",
            ) from error

    def _hashed(self, root: Path) -> dict[str, str]:
        """Return the SHA-256 of each file in the digest; adopted files are not read."""
        files = [*(root / "telemetry").rglob("*.parquet"), *root.glob("*.parquet")]
        names = sorted(path.relative_to(root).as_posix() for path in files)
        return {name: self._known.get(name) or sha256_of(root / name) for name in names}


def _sorted(frame: pd.DataFrame, schema: pa.Schema, order: Sequence[str]) -> pa.Table:
    return conform(frame, schema).sort_by([(name, "ascending") for name in order])


_EVENT_ORDER = ("known_at", "timestamp", "node", "gpu", "code", "type", "source", "detail")


def _digest(meta: DatasetMeta) -> str:
    """Return the digest of a dataset: of its files and the settings needed to interpret them."""
    total = hashlib.sha256()
    settings = {
        "schema_version": meta.schema_version,
        "unit": meta.unit,
        "step": meta.step.total_seconds(),
        "span": [instant_text(instant) for instant in meta.span],
        "buckets": meta.buckets,
        "channels": [channel_as_dict(channel) for channel in meta.channels.values()],
    }
    if meta.run_days is not None:
        settings["run_days"] = meta.run_days
    total.update(json.dumps(settings, sort_keys=True).encode())
    for name, content in sorted(meta.files.items()):
        total.update(f"{name} {content}\n".encode())
    return total.hexdigest()
