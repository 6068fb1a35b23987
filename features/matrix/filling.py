"""Computing rows from samples: the code path shared by training matrices and live rows."""

import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from numba import njit

from features.config import DecisionSection
from features.fleet import Fleet
from features.groups.gaps import fresh_share
from features.groups.peers import compare_with_node
from features.labels.evidence import IncidentEvidence
from features.labels.maintenance import Maintenance
from features.matrix.grid import grid_time
from features.matrix.plan import FeaturePlan
from features.windows.blocks import IntArray, RowSpans, SampleBlock, blocks_of, key_columns
from features.windows.layout import ChannelLayout
from features.windows.pane_index import Panes
from features.windows.window_plan import WindowPlan
from foundation.times import duration_ms, instant_ms, milliseconds
from telemetry.dataset.store import Dataset

BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RowPositions:
    """Rows to compute, as positions.

    ``pair``: number of each row's pair in the fleet; shape (rows,).
    ``time``: position of its decision time in ``times``; shape (rows,).
    ``times``: distinct decision times and the last grid time at or before each, ascending, in milliseconds.
    ``grid``: which of ``times`` are on the grid.
    ``planned``: maintenance, and the unit code of each pair; None: no maintenance.
    """

    pair: IntArray
    time: IntArray
    times: IntArray
    grid: BoolArray
    planned: tuple[Maintenance, IntArray] | None = None

    @classmethod
    def of(
        cls, frame: pd.DataFrame, fleet: Fleet, decision: DecisionSection, evidence: IncidentEvidence
    ) -> "RowPositions":
        """Build from row keys (``decision_time``, ``node``, ``unit``)."""
        decided = milliseconds(frame["decision_time"], "decision_time")
        distinct = np.unique(decided)
        newest = grid_time(decision, distinct)
        times = np.union1d(distinct, newest)
        node_code, nodes = pd.factorize(frame["node"])
        unit_code, units = pd.factorize(frame["unit"])
        units_count = max(len(units), 1)
        pair_codes, pair_of_row = np.unique(node_code.astype(np.int64) * units_count + unit_code, return_inverse=True)
        node_names, unit_names = nodes.tolist(), units.tolist()
        pair = fleet.numbers(
            [str(node_names[code // units_count]) for code in pair_codes.tolist()],
            [str(unit_names[code % units_count]) for code in pair_codes.tolist()],
        )
        pairs = pair[pair_of_row] if len(pair_codes) else pair_of_row.astype(np.int64)
        planned = None
        if len(evidence.maintenance.start):
            planned = evidence.maintenance, evidence.installations.codes([unit for _, unit in fleet.pairs])
        return cls(pairs, np.searchsorted(times, decided), times, np.isin(times, newest), planned)

    @property
    def milliseconds(self) -> IntArray:
        """Decision time of each row."""
        return self.times[self.time]

    @property
    def last_grid_position(self) -> IntArray:
        """For each row, the position among the grid times of the last one at or before its time."""
        return (np.cumsum(self.grid, dtype=np.int64) - 1)[self.time]

    def take(self, chosen: IntArray) -> "RowPositions":
        """Return a selection of rows."""
        return RowPositions(self.pair[chosen], self.time[chosen], self.times, self.grid, self.planned)

    def since_maintenance(self, span: int) -> tuple[IntArray, IntArray]:
        """Return the rows up to ``span`` (ms) after the end of a known maintenance, and those ends (ms)."""
        none = np.zeros(0, dtype=np.int64)
        if self.planned is None:
            return none, none
        maintenance, unit = self.planned
        ends = maintenance.last_end(unit[self.pair], self.milliseconds)
        chosen = np.flatnonzero(self.milliseconds - span < ends)
        return chosen, ends[chosen]


@dataclass(frozen=True, slots=True)
class BucketWork:
    """A bucket of samples and the rows to compute from it.

    ``nodes``: pair range of each of its nodes.
    ``pairs``: all of these pairs, ascending.
    """

    bucket: int
    nodes: Mapping[str, tuple[int, int]]
    pairs: IntArray
    rows: IntArray
    samples: int = 0


@dataclass(frozen=True, slots=True)
class BucketValues:
    """Values computed from the samples of one bucket.

    ``values``: columns that need no other bucket (:func:`bucket_columns`).
    ``amounts``: of the group ``onset``, not yet compared with the fleet.
    ``peers``: first pass of the group ``peers``; shape (grid times, values, pairs of the bucket).
    """

    values: Float32Array
    amounts: Float32Array
    peers: Float32Array


def bucket_columns(plan: FeaturePlan) -> IntArray:
    """Return the columns computed within a bucket; those of ``peers`` still lack the fleet comparison."""
    groups = ("telemetry", "peers", "gaps", "workload")
    return np.array([i for i, column in enumerate(plan.columns) if column.group in groups], dtype=np.int64)


def bucket_values(
    plan: FeaturePlan,
    fleet: Fleet,
    rows: RowPositions,
    service: BoolArray,
    work: BucketWork,
    blocks: Iterable[SampleBlock],
) -> BucketValues:
    """Compute the values of a bucket. Nodes without samples have rows, too.

    ``service``: from :meth:`features.fleet.Fleet.in_service` at ``rows.times``; shape (times, pairs of the fleet).
    """
    positions, columns = rows.take(work.rows), bucket_columns(plan)
    order = np.argsort(positions.pair, kind="stable")
    starts = np.searchsorted(positions.pair[order], np.arange(len(fleet.pairs) + 1))
    peer_values = len(plan.peers.names) if plan.peers else 0
    bucket = BucketValues(
        values=np.empty((order.size, columns.size), dtype=np.float32),
        amounts=np.empty((order.size, len(plan.onset.amounts.columns) if plan.onset else 0), dtype=np.float32),
        peers=np.empty((int(rows.grid.sum()), peer_values, work.pairs.size), dtype=np.float32),
    )
    for block, spans in _block_by_block(blocks, work.nodes, plan.layout):
        pairs = np.concatenate([np.arange(first, last, dtype=np.int64) for first, last in spans])
        chosen = np.concatenate([order[starts[first] : starts[last]] for first, last in spans])
        panes, chosen_rows = Panes(block, plan.panes), positions.take(chosen)
        filled = np.full((chosen.size, len(plan.columns)), np.nan, dtype=np.float32)
        first_pass = _fill_block(plan, panes, fleet, pairs, chosen_rows, service, filled)
        _copy_columns(filled, columns, chosen, bucket.values)
        if first_pass is not None:
            bucket.peers[:, :, np.searchsorted(work.pairs, pairs)] = first_pass
        if plan.onset is not None:
            bucket.amounts[chosen] = _onset_amounts(plan, plan.onset.amounts, panes, fleet, chosen_rows)
    return bucket


def compile_kernels(plan: FeaturePlan, fleet: Fleet) -> None:
    """Compile all kernels by running them on empty inputs, so that threads do not wait for compilation."""
    none = np.zeros(0, dtype=np.int64)
    rows = RowPositions(none, none, none, np.zeros(0, dtype=np.bool_))
    service = np.zeros((0, len(fleet.pairs)), dtype=np.bool_)
    work = BucketWork(0, {"": (0, 0)}, none, none)  # a node without units still calls the kernels
    bucket_values(plan, fleet, rows, service, work, ())


@njit(cache=True, nogil=True)
def _copy_columns(filled: Float32Array, columns: IntArray, rows: IntArray, out: Float32Array) -> None:
    for i in range(rows.size):
        for j in range(columns.size):
            out[rows[i], j] = filled[i, columns[j]]


def _block_by_block(
    blocks: Iterable[SampleBlock], nodes: Mapping[str, tuple[int, int]], layout: ChannelLayout
) -> Iterator[tuple[SampleBlock, list[tuple[int, int]]]]:
    """Yield each block with the pair ranges of its nodes; nodes without samples come last, in an empty block."""
    remaining = dict(nodes)
    for block in blocks:
        block_nodes = sorted({node for node, _ in block.spans} & remaining.keys())
        if block_nodes:
            yield block, [remaining.pop(node) for node in block_nodes]
    if remaining:
        yield SampleBlock.empty(layout), sorted(remaining.values())


def _onset_amounts(
    plan: FeaturePlan, amounts: WindowPlan, panes: Panes, fleet: Fleet, rows: RowPositions
) -> Float32Array:
    """Return the amounts of the group ``onset``, shape (rows, amounts)."""
    pairs = np.unique(rows.pair)
    begins, ends = panes.block.ranges([fleet.pairs[pair] for pair in pairs.tolist()])
    pair_position = np.searchsorted(pairs, rows.pair)
    spans = RowSpans(begins[pair_position], ends[pair_position], rows.milliseconds - duration_ms(plan.features.delay))
    values = np.full((rows.pair.size, len(amounts.columns)), np.nan, dtype=np.float32)
    amounts.fill(panes, spans, values)
    chosen, maintenance_end = rows.since_maintenance(int(amounts.edges[-1]) + duration_ms(plan.features.delay))
    if chosen.size:  # increases during maintenance come from the work itself
        recomputed = np.full((chosen.size, values.shape[1]), np.nan, dtype=np.float32)
        amounts.fill(panes, _spans_from(panes.block, spans, chosen, maintenance_end), recomputed)
        values[chosen] = recomputed
    return values


def _fill_block(
    plan: FeaturePlan,
    panes: Panes,
    fleet: Fleet,
    pairs: IntArray,
    rows: RowPositions,
    service: BoolArray,
    out: Float32Array,
) -> Float32Array | None:
    """Fill all sampled groups of a block's rows, except comparisons with the fleet; return the first pass of ``peers``.

    ``pairs``: all pairs of the block's nodes, ascending.
    """
    block, delay = panes.block, duration_ms(plan.features.delay)
    borders = rows.milliseconds - delay
    begins, ends = block.ranges([fleet.pairs[pair] for pair in pairs.tolist()])
    pair_position = np.searchsorted(pairs, rows.pair)
    spans = RowSpans(begins[pair_position], ends[pair_position], borders)
    first = np.searchsorted(pairs, fleet.first_of_node[rows.pair])
    last = np.searchsorted(pairs, fleet.last_of_node[rows.pair])
    if plan.telemetry is not None:
        plan.telemetry.fill(panes, spans, out, plan.offsets["telemetry"])
    if plan.workload is not None:
        plan.workload.fill(panes, spans, out, plan.offsets["workload"])
    present = np.ascontiguousarray(service[:, pairs])
    if plan.gaps is not None:
        since = np.append(fleet.installed, 0)[fleet.installation_at(rows.pair, rows.milliseconds)]
        columns = slice(plan.offsets["gaps"], plan.offsets["gaps"] + len(plan.gaps.columns))
        plan.gaps.fill(panes, spans, since, out, columns.start)
        chosen, end = rows.since_maintenance(plan.gaps.look_back + delay)
        if chosen.size:  # silence during maintenance is planned: treat its end as start of service
            gap_values, cut_spans = out[chosen, columns], _spans_from(block, spans, chosen, end)
            plan.gaps.fill(panes, cut_spans, np.maximum(since[chosen], end), gap_values)
            age = plan.gaps.windows.size + 1
            gap_values[:, age] = np.minimum(gap_values[:, age], (rows.milliseconds[chosen] - end) / 3_600_000)
            out[chosen, columns] = gap_values
        if plan.gaps.with_node:
            column, window = columns.stop - 1, int(plan.gaps.windows[0])
            expected = present if rows.planned is None else present & ~_recently_maintained(rows, pairs, window + delay)
            fresh_share(block.times, begins, ends, expected, rows.time, first, last, borders, window, column, out)
    if plan.peers is None:
        return None
    compared = present & _compared(rows, first, last, present.shape)
    values = plan.peers.first_pass(panes, begins, ends, rows.times - delay, compared)
    tables = (plan.peers.deviation, plan.peers.rank)
    compare_with_node(values, rows.time, pair_position, first, last, *tables, plan.offsets["peers"], out)
    on_grid = values[rows.grid]
    plan.peers.fill_own(on_grid, rows.last_grid_position, pair_position, out, plan.offsets["peers"])
    return np.moveaxis(on_grid, 2, 1)


def _spans_from(block: SampleBlock, spans: RowSpans, chosen: IntArray, start: IntArray) -> RowSpans:
    """Restrict some rows to samples from an instant of each on (ms)."""
    begins = spans.begins[chosen].copy()
    for i, end in enumerate(spans.ends[chosen].tolist()):
        begins[i] += np.searchsorted(block.times[begins[i] : end], start[i], side="left")
    return RowSpans(begins, spans.ends[chosen], spans.borders[chosen], cut=True)


def _recently_maintained(rows: RowPositions, pairs: IntArray, span: int) -> BoolArray:
    """Return which pairs were known to be in maintenance, or out of it for less than ``span`` (ms), at each time."""
    assert rows.planned is not None
    maintenance, unit = rows.planned
    units = np.tile(unit[pairs], rows.times.size)
    return maintenance.recently(units, np.repeat(rows.times, pairs.size), span).reshape(rows.times.size, pairs.size)


def _compared(rows: RowPositions, first: IntArray, last: IntArray, shape: tuple[int, ...]) -> BoolArray:
    """Return which pairs are compared at which times: all on the grid; off it, those of nodes with rows then."""
    steps = np.zeros((shape[0], shape[1] + 1), dtype=np.int32)
    off_grid = ~rows.grid[rows.time]
    np.add.at(steps, (rows.time[off_grid], first[off_grid]), 1)
    np.add.at(steps, (rows.time[off_grid], last[off_grid]), -1)
    compared: BoolArray = np.cumsum(steps[:, :-1], axis=1) > 0
    compared[rows.grid] = True
    return compared


class BucketStore:
    """Stores the values of buckets until all are complete: in files during a build, in memory for live rows.

    Files are written atomically, and repeating a task writes the same bytes.

    ``folder``: inside the build folder of the matrix, and removed with it; None: in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._in_memory: dict[int, BucketValues] = {}

    def put(self, bucket: int, values: BucketValues) -> None:
        """Store the values of a bucket; safe for concurrent processes, even for the same bucket."""
        if self._folder is None:
            self._in_memory[bucket] = values
            return
        self._folder.mkdir(exist_ok=True)
        for field in fields(values):
            path = self._folder / f"{secrets.token_hex(8)}.partial"
            np.ascontiguousarray(getattr(values, field.name)).tofile(path)
            path.replace(self._folder / f"bucket-{bucket:05d}.{field.name}")

    def read(self, bucket: int, name: str, begin: int, end: int, shape: tuple[int, ...]) -> Float32Array:
        """Read entries ``begin`` to ``end`` of one of a bucket's arrays; shape (end - begin, *shape)."""
        if self._folder is None:
            array: Float32Array = getattr(self._in_memory[bucket], name)
            return array[begin:end]
        size = int(np.prod(shape))
        path, count = self._folder / f"bucket-{bucket:05d}.{name}", (end - begin) * size
        entries = np.fromfile(path, dtype=np.float32, count=count, offset=begin * size * 4)
        return entries.reshape(end - begin, *shape)


def node_ranges(fleet: Fleet) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each node of a fleet with its pair range."""
    first = 0
    while first < len(fleet.pairs):
        last = int(fleet.last_of_node[first])
        yield fleet.pairs[first][0], (first, last)
        first = last


def buckets_of(
    dataset: Dataset, fleet: Fleet, rows: RowPositions, *, since: datetime | None = None
) -> list[BucketWork]:
    """Split the rows of a matrix by bucket of its dataset, in order of bucket number.

    ``since``: aware; samples in files that end before it are not counted.
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
    """Read the samples that a bucket's rows need; ``first``: decision time of the first row, None: all."""
    columns = [*key_columns(plan.unit), *plan.layout.numbers, *plan.layout.masks]
    if first is None:
        return blocks_of(dataset.read_runs(bucket, columns), plan.layout, unit=plan.unit)
    since = first - plan.look_back
    # whole row groups are read; blocks_of skips their older samples without a copy
    runs = dataset.read_runs(bucket, columns, since=dataset.meta.runs.groups.begin_of(since))
    return blocks_of(runs, plan.layout, unit=plan.unit, since=instant_ms(since))
