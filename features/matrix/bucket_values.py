"""What the samples of one bucket say about its rows: the part of a matrix that needs no other bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import numpy.typing as npt

from features.fleet import Fleet
from features.matrix.filling import Rows, SampleFiller, node_ranges
from features.matrix.plan import FeaturePlan
from features.matrix.spill import BucketValues
from features.times import instant_ms
from features.windows.blocks import (
    IntArray,
    SampleBlock,
    blocks_of,
    cut_blocks,
    key_columns,
)
from features.windows.pieces import pieces_of
from telemetry.dataset.store import Dataset


@dataclass(frozen=True, slots=True)
class BucketWork:
    """A bucket with what is to be computed from it.

    ``nodes``: range of the pairs of each of its nodes.
    ``pairs``: all of these pairs, ascending.
    ``rows``: positions of its rows in the matrix, ascending.
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


@dataclass(frozen=True, slots=True)
class BucketBlocks:
    """The samples that rows of a bucket look at.

    ``plan``: of the columns that ``blocks`` fill: all, or those that are not the group ``onset``'s.
    ``onset``: where ``onset`` looks back further than the other groups: what it looks at, its own channels alone.
    """

    plan: FeaturePlan
    blocks: Iterable[SampleBlock]
    onset: Iterable[SampleBlock] | None = None


def read_samples(plan: FeaturePlan, dataset: Dataset, bucket: int, first: datetime | None) -> BucketBlocks:
    """Read what rows of a bucket look at.

    ``first``: decision time of the first row, aware; None: everything is read.
    """
    keys = key_columns(plan.unit)
    columns = [*keys, *plan.layout.numbers, *plan.layout.masks]
    if first is None:
        return BucketBlocks(plan, blocks_of(dataset.read_runs(bucket, columns), plan.layout, unit=plan.unit))
    near, far = first - plan.near.look_back, first - plan.look_back
    # whole row groups are read: samples of one that are too old are passed over when blocks are cut, without a copy
    begin = dataset.meta.runs.groups.begin_of(near)
    runs = dataset.read_runs(bucket, columns, since=begin)
    if plan.onset is None or far >= near:
        pieces = pieces_of(runs, plan.layout, plan.unit)
        return BucketBlocks(plan, cut_blocks(pieces, plan.layout, since=instant_ms(near)))
    alone = plan.onset.alone.layout
    if begin is not None and far < begin:
        columns = [*keys, *alone.numbers, *alone.masks]
        runs = [*dataset.read_runs(bucket, columns, since=dataset.meta.runs.groups.begin_of(far), until=begin), *runs]
    pieces = pieces_of(runs, plan.layout, plan.unit)
    return BucketBlocks(
        plan.near,
        cut_blocks(pieces, plan.layout, since=instant_ms(near)),
        cut_blocks(pieces, alone, since=instant_ms(far)),
    )


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
    samples: BucketBlocks,
) -> BucketValues:
    """Compute what a bucket's samples say.

    ``service``: from :meth:`features.fleet.Fleet.in_service` at ``rows.times``; shape (times, pairs of the fleet).
    """
    own = rows.take(work.rows)
    n = work.rows.size
    columns = own_columns(plan)
    values = np.empty((n, columns.size), dtype=np.float32)
    compared = len(plan.peers.names) if plan.peers else 0
    peers = np.empty((compared, int(rows.grid.sum()), work.pairs.size), dtype=np.float32)
    amounts = np.empty((n, len(plan.onset.amounts.columns) if plan.onset else 0), dtype=np.float32)
    filler = SampleFiller(
        samples.plan,
        fleet,
        own,
        values,
        peers if plan.peers else None,
        amounts if plan.onset else None,
        service=service,
        pairs=work.pairs,
        columns=columns,
    )
    filler.fill(samples.blocks, work.nodes)
    if samples.onset is not None:
        filler.take_amounts(plan, samples.onset, work.nodes)
    return BucketValues(values, amounts, np.moveaxis(peers, 1, 0))


def compile_kernels(plan: FeaturePlan, fleet: Fleet) -> None:
    """Compile every kernel by filling nothing, so that threads need not wait for one another's compilation."""
    none = np.zeros(0, dtype=np.int64)
    service = np.zeros((0, len(fleet.pairs)), dtype=np.bool_)
    work = BucketWork(0, {"": (0, 0)}, none, none, 0)  # a node without units: the kernels are called, with nothing
    bucket_values(plan, fleet, Rows.none(none), service, work, BucketBlocks(plan, ()))
