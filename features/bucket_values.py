"""What the samples of one bucket say about its rows: the part of a matrix that needs no other bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from features.blocks import IntArray, SampleBlock, key_columns
from features.filling import Rows, SampleFiller, node_ranges
from features.fleet import Fleet
from features.plan import FeaturePlan
from features.service import instant_ms
from features.spill import BucketValues
from telemetry.store import Dataset


@dataclass(frozen=True, slots=True)
class BucketWork:
    """A bucket with what is to be computed from it.

    Attributes
    ----------
    bucket : int
    nodes : mapping of str to (int, int)
        Range of the pairs of each of its nodes.
    pairs : int64 array
        All of these pairs, ascending.
    rows : int64 array
        Positions of its rows in the matrix, ascending.
    samples : int
        How many are read.
    """

    bucket: int
    nodes: Mapping[str, tuple[int, int]]
    pairs: IntArray
    rows: IntArray
    samples: int


def buckets_of(dataset: Dataset, fleet: Fleet, rows: Rows, *, since: datetime | None = None) -> list[BucketWork]:
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


def read_samples(plan: FeaturePlan, dataset: Dataset, bucket: int, first: datetime | None) -> list[pa.Table]:
    """Read what rows of a bucket look at.

    Parameters
    ----------
    plan : FeaturePlan
    dataset : Dataset
    bucket : int
    first : datetime, optional
        Decision time of the first row, aware; None: everything is read.

    Returns
    -------
    list of pyarrow.Table
        In order of time, a table a run. Runs that only the group ``onset`` looks back into have its columns alone.
    """
    keys = key_columns(plan.unit)
    columns = [*keys, *plan.layout.numbers, *plan.layout.masks]
    if first is None:
        return dataset.read_runs(bucket, columns)
    runs, since = dataset.meta.runs, first - plan.look_back
    near = np.array([instant_ms(first - plan.near_look_back)], dtype=np.int64)
    run = runs.span(int(runs.of(near)[0]))
    if plan.onset is None or run is None or run[0] <= since:
        return dataset.read_runs(bucket, columns, since=since)
    far = dataset.read_runs(bucket, [*keys, *plan.onset.series(plan.layout)], since=since, until=run[0])
    return [*far, *dataset.read_runs(bucket, columns, since=run[0])]


def own_columns(plan: FeaturePlan) -> IntArray:
    """Positions of the columns that a bucket's samples decide, those of ``peers`` still without the fleet."""
    groups = ("telemetry", "peers", "gaps", "workload")
    return np.array([at for at, column in enumerate(plan.columns) if column.group in groups], dtype=np.int64)


def bucket_values(
    plan: FeaturePlan,
    fleet: Fleet,
    rows: Rows,
    service: npt.NDArray[np.bool_],
    work: BucketWork,
    blocks: Iterable[SampleBlock],
) -> BucketValues:
    """Compute what a bucket's samples say.

    Parameters
    ----------
    plan : FeaturePlan
    fleet : Fleet
    rows : Rows
        All rows of the matrix.
    service : bool array, shape (times, pairs of the fleet)
        From :meth:`features.fleet.Fleet.in_service` at ``rows.times``.
    work : BucketWork
    blocks : iterable of SampleBlock
        All samples of the bucket.

    Returns
    -------
    BucketValues
    """
    own = rows.take(work.rows)
    n = work.rows.size
    columns = own_columns(plan)
    values = np.empty((n, columns.size), dtype=np.float32)
    compared = len(plan.peers.names) if plan.peers else 0
    peers = np.empty((compared, int(rows.grid.sum()), work.pairs.size), dtype=np.float32)
    amounts = np.empty((n, len(plan.onset.amounts.columns) if plan.onset else 0), dtype=np.float32)
    filler = SampleFiller(
        plan,
        fleet,
        own,
        values,
        peers if plan.peers else None,
        amounts if plan.onset else None,
        service=service,
        pairs=work.pairs,
        columns=columns,
    )
    filler.fill(blocks, work.nodes)
    return BucketValues(values, amounts, np.moveaxis(peers, 1, 0))


def compile_kernels(plan: FeaturePlan, fleet: Fleet) -> None:
    """Compile every kernel by filling nothing, so that threads need not wait for one another's compilation."""
    none = np.zeros(0, dtype=np.int64)
    service = np.zeros((0, len(fleet.pairs)), dtype=np.bool_)
    work = BucketWork(0, {}, none, none, 0)
    nothing = [SampleBlock.empty(plan.layout)]
    bucket_values(plan, fleet, Rows.none(none), service, work, nothing)
