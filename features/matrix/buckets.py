"""The buckets of a dataset: which rows each has, what is read of it, and where its values are kept for the parts."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import fields
from datetime import datetime
from pathlib import Path

import numpy as np

from features.fleet import Fleet
from features.matrix.filling import BucketValues, BucketWork, Float32Array, RowPositions
from features.matrix.plan import FeaturePlan
from features.times import instant_ms
from features.windows.blocks import SampleBlock, blocks_of, key_columns
from telemetry.dataset.store import Dataset


class BucketStore:
    """Keeps what each bucket gave until all have: in files while a matrix is built, for live rows in memory.

    Files get their names when they are whole, and a task that is run twice writes the same bytes twice.

    ``folder``: removed with the matrix's building folder that it lies in; None: in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._held: dict[int, BucketValues] = {}

    def keep(self, bucket: int, found: BucketValues) -> None:
        """Keep a bucket's values; several processes may keep buckets, even the same one, at the same time."""
        if self._folder is None:
            self._held[bucket] = found
            return
        self._folder.mkdir(exist_ok=True)
        for field in fields(found):
            path = self._folder / f"{secrets.token_hex(8)}.partial"
            np.ascontiguousarray(getattr(found, field.name)).tofile(path)
            path.replace(self._folder / f"bucket-{bucket:05d}.{field.name}")

    def read(self, bucket: int, name: str, begin: int, end: int, shape: tuple[int, ...]) -> Float32Array:
        """Read some entries along the first axis of one of a bucket's arrays; shape (end - begin, *shape)."""
        if self._folder is None:
            array: Float32Array = getattr(self._held[bucket], name)
            return array[begin:end]
        size = int(np.prod(shape))
        path, count = self._folder / f"bucket-{bucket:05d}.{name}", (end - begin) * size
        entries = np.fromfile(path, dtype=np.float32, count=count, offset=begin * size * 4)
        return entries.reshape(end - begin, *shape)


def node_ranges(fleet: Fleet) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each node of a fleet with the range of its pairs."""
    first = 0
    while first < len(fleet.pairs):
        last = int(fleet.last_of_node[first])
        yield fleet.pairs[first][0], (first, last)
        first = last


def buckets_of(
    dataset: Dataset, fleet: Fleet, rows: RowPositions, *, since: datetime | None = None
) -> list[BucketWork]:
    """Divide a matrix's rows among the buckets of its dataset, in order of their numbers.

    Samples before ``since`` (aware) are not going to be read.
    """
    by_bucket: dict[int, dict[str, tuple[int, int]]] = {}
    bucket_of_pair = np.zeros(len(fleet.pairs), dtype=np.int64)
    for node, (first, last) in node_ranges(fleet):
        bucket = dataset.bucket_of(node)
        by_bucket.setdefault(bucket, {})[node] = (first, last)
        bucket_of_pair[first:last] = bucket
    bucket_of_row = bucket_of_pair[rows.pair]
    order = np.argsort(bucket_of_row, kind="stable")
    bounds = np.searchsorted(bucket_of_row[order], np.arange(dataset.meta.buckets + 1))
    return [
        BucketWork(
            bucket,
            nodes,
            np.flatnonzero(bucket_of_pair == bucket),
            order[bounds[bucket] : bounds[bucket + 1]],
            dataset.rows_in(bucket, since=since),
        )
        for bucket, nodes in sorted(by_bucket.items())
    ]


def read_samples(plan: FeaturePlan, dataset: Dataset, bucket: int, first: datetime | None) -> Iterator[SampleBlock]:
    """Read what rows of a bucket look at; ``first`` is the decision time of the first row, None: everything is read."""
    columns = [*key_columns(plan.unit), *plan.layout.numbers, *plan.layout.masks]
    if first is None:
        return blocks_of(dataset.read_runs(bucket, columns), plan.layout, unit=plan.unit)
    since = first - plan.look_back
    # whole row groups are read: samples of one that are too old are passed over when blocks are cut, without a copy
    runs = dataset.read_runs(bucket, columns, since=dataset.meta.runs.groups.begin_of(since))
    return blocks_of(runs, plan.layout, unit=plan.unit, since=instant_ms(since))
