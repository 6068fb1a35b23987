"""Filling rows from samples: the one path that training matrices and live rows share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from numba import njit

from features.config import DecisionSection
from features.fleet import Fleet
from features.groups.gaps import fresh_share
from features.matrix.grid import grid_time
from features.matrix.plan import FeaturePlan
from features.times import duration_ms, milliseconds
from features.windows.blocks import (
    FloatArray,
    IntArray,
    RowSpans,
    SampleBlock,
)
from features.windows.layout import ChannelLayout
from features.windows.panes import Panes
from features.windows.statistics import WindowPlan

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows to compute, as positions.

    ``pair``: number of each row's pair in the fleet; shape (rows,).
    ``time``: position of its decision time in ``times``; shape (rows,).
    ``times``: distinct decision times, ascending, in milliseconds; with each also the last one of the grid before it.
    """

    pair: IntArray
    time: IntArray
    times: IntArray
    grid: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, frame: pd.DataFrame, fleet: Fleet, decision: DecisionSection) -> Rows:
        """Read the rows' keys (``decision_time``, ``node``, ``unit``)."""
        decided = milliseconds(frame["decision_time"], "decision_time")
        distinct = np.unique(decided)
        before = grid_time(decision, distinct)
        times = np.union1d(distinct, before)
        node_code, nodes = pd.factorize(frame["node"])
        unit_code, units = pd.factorize(frame["unit"])
        both, where = np.unique(node_code.astype(np.int64) * max(len(units), 1) + unit_code, return_inverse=True)
        node_names, unit_names = nodes.tolist(), units.tolist()
        pair = fleet.numbers(
            [str(node_names[code // max(len(units), 1)]) for code in both.tolist()],
            [str(unit_names[code % max(len(units), 1)]) for code in both.tolist()],
        )
        pairs = pair[where] if len(both) else where.astype(np.int64)
        return cls(pairs, np.searchsorted(times, decided), times, np.isin(times, before))

    @classmethod
    def none(cls, times: IntArray) -> Rows:
        """Give no rows at some times of the grid, for what is looked at without them."""
        empty = np.zeros(0, dtype=np.int64)
        return cls(empty, empty, times, np.ones(times.size, dtype=np.bool_))

    @property
    def milliseconds(self) -> IntArray:
        """Decision time of each row."""
        return self.times[self.time]

    @property
    def last_grid(self) -> IntArray:
        """For each row, the position of the last grid time that is not later among the grid times."""
        return (np.cumsum(self.grid, dtype=np.int64) - 1)[self.time]

    def take(self, chosen: IntArray) -> Rows:
        """Return some of the rows."""
        return Rows(self.pair[chosen], self.time[chosen], self.times, self.grid)


class SampleFiller:
    """Fills the sampled groups of all rows, one set of nodes after the other.

    Several threads may call :meth:`fill` at once with different nodes.

    ``values``: filled in place; shape (rows, plan's columns).
    ``first_pass``: where the first pass of ``peers`` is kept; None where that group is off; shape (values, grid times,
    pairs).
    ``amounts``: where the amounts of ``onset`` are kept; None where that group is off; shape (rows, amounts).
    ``service``: from :meth:`features.fleet.Fleet.in_service` at the rows' times, where it is known already; shape
    (times, pairs of the fleet).
    ``pairs``: the pairs that ``first_pass`` has, ascending; default: the fleet's.
    ``columns``: which of the plan's columns ``values`` has; default: all.
    """

    def __init__(
        self,
        plan: FeaturePlan,
        fleet: Fleet,
        rows: Rows,
        values: Float32Array,
        first_pass: Float32Array | None,
        amounts: Float32Array | None,
        *,
        service: npt.NDArray[np.bool_] | None = None,
        pairs: IntArray | None = None,
        columns: IntArray | None = None,
    ) -> None:
        self._plan = plan
        self._fleet = fleet
        self._rows = rows
        self._values = values
        self._first_pass = first_pass
        self._amounts = amounts
        self._order = np.argsort(rows.pair, kind="stable").astype(np.int64)
        self._starts = np.searchsorted(rows.pair[self._order], np.arange(len(fleet.pairs) + 1))
        self._service = fleet.in_service(rows.times) if service is None else service
        self._pairs = pairs
        self._columns = np.arange(len(plan.columns)) if columns is None else columns

    def fill(self, blocks: Iterable[SampleBlock], nodes: Mapping[str, tuple[int, int]]) -> None:
        """Fill the rows of some nodes, and take their amounts, where the plan has them.

        ``nodes``: range of each node's pairs. A node without a sample has rows like any other: everything about it is
        missing, and ``gaps`` says so.
        """
        for block, spans in _block_by_block(blocks, nodes, self._plan.layout):
            chosen, panes = self._chosen(spans), Panes(block, self._plan.panes)
            self._fill(panes, spans, chosen)
            if self._plan.onset is not None and self._amounts is not None:
                self._take(panes, chosen, self._plan.onset.amounts)

    def take_amounts(
        self, plan: FeaturePlan, blocks: Iterable[SampleBlock], nodes: Mapping[str, tuple[int, int]]
    ) -> None:
        """Take the amounts of the rows of some nodes, which :meth:`fill` leaves out where its plan has no ``onset``.

        ``blocks``: of the layout that ``onset`` reads alone, with all samples of those nodes that it looks back into.
        ``nodes``: range of each node's pairs.
        """
        assert plan.onset is not None
        alone = plan.onset.alone
        for block, spans in _block_by_block(blocks, nodes, alone.layout):
            self._take(Panes(block, plan.panes), self._chosen(spans), alone)

    def compare_with_fleet(self, medians: FloatArray, model: IntArray) -> None:
        """Fill the comparison with the fleet, after every node's :meth:`fill`.

        ``medians``: from :func:`features.groups.peers.fleet_medians` at the last grid time before the rows; shape
        (values, 1, models).
        ``model``: model of each pair; -1 where it has no median; shape (pairs of the fleet,).
        """
        peers, pair = self._plan.peers, self._rows.pair
        assert peers is not None
        peers.fill_fleet(medians, np.zeros_like(pair), model[pair], self._values, self._plan.at["peers"])

    def _chosen(self, spans: list[tuple[int, int]]) -> IntArray:
        return np.concatenate([self._order[self._starts[first] : self._starts[last]] for first, last in spans])

    def _take(self, panes: Panes, chosen: IntArray, amounts: WindowPlan) -> None:
        assert self._amounts is not None
        delay = duration_ms(self._plan.features.delay)
        self._amounts[chosen] = onset_amounts(amounts, delay, panes, self._fleet, self._rows.take(chosen))

    def _fill(self, panes: Panes, spans: list[tuple[int, int]], chosen: IntArray) -> None:
        pairs = np.concatenate([np.arange(first, last, dtype=np.int64) for first, last in spans])
        filled = np.full((chosen.size, len(self._plan.columns)), np.nan, dtype=np.float32)
        rows = self._rows.take(chosen)
        taken = fill_block(self._plan, panes, self._fleet, pairs, rows, self._service, filled)
        _place(filled, self._columns, chosen, self._values)
        if self._first_pass is not None and taken is not None:
            self._first_pass[:, :, pairs if self._pairs is None else np.searchsorted(self._pairs, pairs)] = taken


@njit(cache=True, nogil=True)
def _place(filled: Float32Array, columns: IntArray, rows: IntArray, out: Float32Array) -> None:
    for i in range(rows.size):
        for j in range(columns.size):
            out[rows[i], j] = filled[i, columns[j]]


def node_ranges(fleet: Fleet) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each node of a fleet with the range of its pairs."""
    at = 0
    while at < len(fleet.pairs):
        last = int(fleet.last_of_node[at])
        yield fleet.pairs[at][0], (at, last)
        at = last


def _block_by_block(
    blocks: Iterable[SampleBlock], nodes: Mapping[str, tuple[int, int]], layout: ChannelLayout
) -> Iterator[tuple[SampleBlock, list[tuple[int, int]]]]:
    """Yield each block with the pairs of the nodes in it; those of nodes in no block come last, with an empty one."""
    remaining = dict(nodes)
    for block in blocks:
        found = sorted({node for node, _ in block.spans} & remaining.keys())
        if found:
            yield block, [remaining.pop(node) for node in found]
    if remaining:
        yield SampleBlock.empty(layout), sorted(remaining.values())


def onset_amounts(amounts: WindowPlan, delay: int, panes: Panes, fleet: Fleet, rows: Rows) -> Float32Array:
    """Take the amounts of the group ``onset`` for rows whose nodes stand in a block, shape (rows, amounts).

    ``amounts`` is the plan for the block's layout, ``delay`` is ``features.delay`` in milliseconds.
    """
    wanted = np.unique(rows.pair)
    begins, ends = panes.block.ranges([fleet.pairs[pair] for pair in wanted.tolist()])
    local = np.searchsorted(wanted, rows.pair)
    spans = RowSpans(begins[local], ends[local], rows.milliseconds - delay)
    taken = np.full((rows.pair.size, len(amounts.columns)), np.nan, dtype=np.float32)
    amounts.fill(panes, spans, taken)
    return taken


def fill_block(
    plan: FeaturePlan,
    panes: Panes,
    fleet: Fleet,
    pairs: IntArray,
    rows: Rows,
    service: npt.NDArray[np.bool_],
    out: Float32Array,
) -> Float32Array | None:
    """Compute everything that a block's samples decide: all sampled groups but the comparison with the fleet.

    ``pairs``: every pair of those nodes, ascending.
    ``service``: from :meth:`features.fleet.Fleet.in_service` at ``rows.times``; shape (times, pairs of the fleet).
    ``out``: filled in place at the groups' columns; shape (rows, plan's columns).
    Returns: the first pass of ``peers``, where that group is on; shape (values, grid times, pairs).
    """
    block, delay = panes.block, duration_ms(plan.features.delay)
    borders = rows.milliseconds - delay
    begins, ends = block.ranges([fleet.pairs[pair] for pair in pairs.tolist()])
    local = np.searchsorted(pairs, rows.pair)
    spans = RowSpans(begins[local], ends[local], borders)
    first = np.searchsorted(pairs, fleet.first_of_node[rows.pair])
    last = np.searchsorted(pairs, fleet.last_of_node[rows.pair])
    if plan.telemetry is not None:
        plan.telemetry.fill(panes, spans, out, plan.at["telemetry"])
    if plan.workload is not None:
        plan.workload.fill(panes, spans, out, plan.at["workload"])
    present = np.ascontiguousarray(service[:, pairs])
    if plan.gaps is not None:
        stay = fleet.stay_at(rows.pair, rows.milliseconds)
        plan.gaps.fill(panes, spans, np.append(fleet.installed, 0)[stay], out, plan.at["gaps"])
        if plan.gaps.with_node:
            fresh_share(
                block.times,
                begins,
                ends,
                present,
                rows.time,
                first,
                last,
                borders,
                int(plan.gaps.windows[0]),
                plan.at["gaps"] + len(plan.gaps.columns) - 1,
                out,
            )
    if plan.peers is None:
        return None
    compared = present & _compared(rows, first, last, present.shape)
    values = plan.peers.first_pass(panes, begins, ends, rows.times - delay, compared)
    plan.peers.fill_node(values, rows.time, local, first, last, out, plan.at["peers"])
    on_grid = values[rows.grid]
    plan.peers.fill_own(on_grid, rows.last_grid, local, out, plan.at["peers"])
    return np.moveaxis(on_grid, 2, 0)


def _compared(rows: Rows, first: IntArray, last: IntArray, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Which pairs are compared with at which times: all on the grid, off it those of the nodes that have rows then."""
    wanted = np.zeros((shape[0], shape[1] + 1), dtype=np.int32)
    off = ~rows.grid[rows.time]
    np.add.at(wanted, (rows.time[off], first[off]), 1)
    np.add.at(wanted, (rows.time[off], last[off]), -1)
    found: npt.NDArray[np.bool_] = np.cumsum(wanted[:, :-1], axis=1) > 0
    found[rows.grid] = True
    return found
