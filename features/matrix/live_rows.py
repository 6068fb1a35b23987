"""Live rows: what a matrix would hold at one decision time, from the recent samples alone, through the same kernels."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from features.errors import InputError
from features.fleet import Fleet
from features.groups.history import history_columns, history_values
from features.groups.onset import Kinds, Reference
from features.groups.peers import fleet_medians, model_codes
from features.groups.static import StaticPlan
from features.installations import reported
from features.labels.evidence import Record
from features.labels.outages import out_of_use
from features.matrix.filling import (
    Float32Array,
    Rows,
    SampleFiller,
    node_ranges,
)
from features.matrix.fleet_reference import FleetReference, take_reference
from features.matrix.grid import decision_rows
from features.matrix.meta import ROW_COLUMNS, MatrixConfig
from features.matrix.plan import FeaturePlan
from features.prefetch import ahead
from features.times import instant_ms, instants
from features.windows.blocks import (
    FloatArray,
    IntArray,
    SampleBlock,
    blocks_of,
    key_columns,
    table_of,
)
from features.windows.pieces import epoch_ms, pair_codes


@dataclass(frozen=True, slots=True)
class Blocks:
    """Samples that stand in blocks already, for :func:`live_rows` and :func:`fleet_reference`.

    ``again``: gives the blocks from the first on, each time it is called: all samples of a node in one block, ascending
    in time within each pair and none twice.
    """

    again: Callable[[], Iterator[SampleBlock]]


def look_back(config: MatrixConfig) -> timedelta:
    """How old a sample can be at a decision time and still matter to a row of it, the fleet's reference included."""
    plan = live_plan(config)
    compared = plan.onset is not None or plan.peers is not None
    return plan.look_back + (config.decision.every if compared else timedelta(0))


def live_plan(config: MatrixConfig) -> FeaturePlan:
    """Make the plan whose columns are those of a matrix.

    Raises ``InputError`` if this version of predrain no longer makes those columns from those settings.
    """
    static = StaticPlan(tuple(column for column in config.columns if column.group == "static"))
    plan = FeaturePlan.of(
        config.features,
        config.channels,
        unit=config.unit,
        step=config.step,
        decision=config.decision,
        static=static,
        history=history_columns(config.features, config.labels, unit=config.unit),
    )
    if plan.columns != config.columns:
        odd = sorted({column.name for column in plan.columns} ^ {column.name for column in config.columns})
        raise InputError(
            f"this version of predrain makes other feature columns (such as {odd[0] if odd else 'their order'})",
            "the columns of the matrix or model",
            "Train again with this version, or use the version it was trained with.",
        )
    return plan


def live_rows(
    samples: pa.Table | pd.DataFrame | Iterable[Sequence[pa.Table]] | Blocks | None,
    events: pd.DataFrame,
    inventory: pd.DataFrame,
    t: datetime,
    config: MatrixConfig,
    fleet_reference: FleetReference | None = None,
    *,
    nodes: Collection[str] | None = None,
) -> pd.DataFrame:
    """Compute the rows of one decision time.

    ``samples``: samples with ``timestamp`` (aware), ``node``, ``gpu`` and channels, in any order; at least those
    younger than :func:`look_back` at ``t``. Older ones change nothing, nor do those that are not usable yet. Of two
    samples of a unit at one time the later in the table counts. None: no telemetry. A dataset's buckets one after the
    other, each as :meth:`telemetry.dataset.Dataset.read_runs` gives it, are taken in one pass with three of them in
    memory at most; ``t`` must then be on the grid of ``config.decision``. No sample may then stand there twice.
    ``events``, ``inventory``: as a dataset holds them, of the whole fleet and all its past (history features reach back
    without limit).
    ``fleet_reference``: from :func:`fleet_reference`, where ``samples`` are not those of the whole fleet. By default
    the samples are taken to be the fleet's.
    ``nodes``: nodes to compute rows for, whose samples must be there in full; default: every node.
    Returns: the key columns of a matrix's rows, then its features as float32 (NaN: unknown), sorted by unit: one row
    for each unit in service and not known to be down.
    Raises ``InputError`` if a key column is missing, times have no time zone, or the columns cannot be made by this
    version.
    Raises ``ValueError`` if buckets are given one after the other for a time off the grid.
    """
    plan = live_plan(config)
    events = reported(events, config.features.delay)
    record = Record.of(events, inventory, config.labels)
    down = out_of_use(events, inventory, config.labels, record=record)
    keys = decision_rows(instants(np.array([instant_ms(t)], dtype=np.int64)), inventory, down)
    if nodes is not None:
        keys = keys[keys["node"].isin(set(nodes))].reset_index(drop=True)
    values = np.full((len(keys), len(plan.columns)), np.nan, dtype=np.float32)
    fleet = Fleet.of(inventory)
    rows = Rows.of(keys, fleet, config.decision)
    if plan.reads_samples and len(keys):
        tables = _tables(samples, config)
        filler, held, amounts = _fill(plan, tables, fleet, rows, values, nodes)
        usual, compared = fleet_reference, plan.peers is not None or plan.onset is not None
        if compared and usual is None and (nodes is not None or not rows.grid.all()):
            if not isinstance(tables, tuple | Blocks):
                raise ValueError(f"{t.isoformat()} is off the grid: give the samples as one table")
            usual = take_reference(plan, config, _blocks(tables, plan), events, inventory, fleet, t)
        if plan.peers is not None:
            filler.compare_with_fleet(*_medians(plan, fleet, inventory, held, usual))
        if plan.onset is not None:
            kinds = Kinds.of(fleet, inventory, events, rows.pair, rows.milliseconds)
            last = rows.times[rows.grid][rows.last_grid]
            if usual is None:
                reference = plan.onset.reference(amounts, kinds, rows.milliseconds)  # the rows are the fleet's own
            else:
                reference = Reference.from_frame(usual.onset, int(last[0]))
            plan.onset.finish(amounts, kinds, last, reference, values, plan.at["onset"])
    history = [column for column in plan.columns if column.group == "history"]
    if history:
        at = plan.at["history"]
        values[:, at : at + len(history)] = history_values(
            keys, events, inventory, config.features, config.labels, unit=config.unit, record=record
        )
    if plan.static is not None:
        at = plan.at["static"]
        values[:, at:] = plan.static.values(fleet, inventory, events, rows.pair, rows.milliseconds)
    features = pd.DataFrame(values, columns=[column.name for column in plan.columns])
    return pd.concat([keys[list(ROW_COLUMNS)], features], axis=1)


def fleet_reference(
    samples: pa.Table | pd.DataFrame | Blocks,
    events: pd.DataFrame,
    inventory: pd.DataFrame,
    t: datetime,
    config: MatrixConfig,
) -> FleetReference:
    """Take what the comparisons with the fleet need, from the whole fleet's samples, at the last time of the grid.

    ``samples``, ``events``, ``inventory``, ``t``, ``config``: as for :func:`live_rows`.
    """
    plan, fleet = live_plan(config), Fleet.of(inventory)
    told = reported(events, config.features.delay)
    return take_reference(plan, config, _blocks(_tables(samples, config), plan), told, inventory, fleet, t)


def _fill(
    plan: FeaturePlan,
    tables: Iterable[Sequence[pa.Table]] | Blocks,
    fleet: Fleet,
    rows: Rows,
    values: Float32Array,
    nodes: Collection[str] | None,
) -> tuple[SampleFiller, Float32Array, Float32Array]:
    names = plan.peers.names if plan.peers is not None else ()
    first_pass = np.full((len(names), int(rows.grid.sum()), len(fleet.pairs)), np.nan, dtype=np.float32)
    width = len(plan.onset.amounts.columns) if plan.onset is not None else 0
    amounts = np.full((rows.pair.size, width), np.nan, dtype=np.float32)
    filler = SampleFiller(plan, fleet, rows, values, first_pass, amounts)
    ranges = {node: pairs for node, pairs in node_ranges(fleet) if nodes is None or node in nodes}
    blocks = _blocks(tables, plan)
    # tables that come one after the other are a fleet's: one is read and the next block cut while rows are computed
    filler.fill(blocks if isinstance(tables, tuple | Blocks) else ahead(blocks), ranges)
    return filler, first_pass, amounts


def _blocks(tables: Iterable[Sequence[pa.Table]] | Blocks, plan: FeaturePlan) -> Iterator[SampleBlock]:
    if isinstance(tables, Blocks):
        yield from tables.again()
        return
    for runs in tables:
        yield from blocks_of(runs, plan.layout, unit=plan.unit)


def _tables(
    samples: pa.Table | pd.DataFrame | Iterable[Sequence[pa.Table]] | Blocks | None, config: MatrixConfig
) -> tuple[Sequence[pa.Table], ...] | Iterator[Sequence[pa.Table]] | Blocks:
    """Give what can be gone through again as a tuple or blocks, what cannot as an iterator."""
    if isinstance(samples, Blocks):
        return samples
    if samples is None:
        return ()
    if isinstance(samples, pa.Table | pd.DataFrame):
        table = table_of(samples) if isinstance(samples, pd.DataFrame) else samples
        return ((_distinct(_usable(table, config), config.unit),),)
    return ([_usable(table, config) for table in runs] for runs in ahead(samples))


def _usable(table: pa.Table, config: MatrixConfig) -> pa.Table:
    """Leave out what no row needs: other columns, and samples without a key."""
    for name in key_columns(config.unit):
        if name not in table.column_names:
            raise InputError(f"the samples have no column {name!r}", "live samples", "Add it.")
    kind = table.schema.field("timestamp").type
    if not pa.types.is_timestamp(kind) or kind.tz is None:
        raise InputError(
            f"timestamps of type {kind} have no time zone", "live samples", "Give aware timestamps, such as UTC."
        )
    wanted = {*key_columns(config.unit), *config.channels}
    table = table.select([name for name in table.column_names if name in wanted])
    for name in key_columns(config.unit):
        if table.column(name).null_count:
            table = table.filter(pc.is_valid(table.column(name)))
    return table


def _distinct(table: pa.Table, unit: str) -> pa.Table:
    """Keep the last of several samples of a unit at one time; gives the table sorted by unit and time."""
    if table.num_rows == 0:
        return table
    codes, _, _ = pair_codes(table, unit)
    times = epoch_ms(table.column("timestamp"))
    if bool(((codes[1:] > codes[:-1]) | ((codes[1:] == codes[:-1]) & (times[1:] > times[:-1]))).all()):
        return table  # a dataset's own samples: sorted, and none twice
    order = np.lexsort((times, codes))
    same = (codes[order][1:] == codes[order][:-1]) & (times[order][1:] == times[order][:-1])
    return table.take(order[np.append(~same, True)])


def _medians(
    plan: FeaturePlan,
    fleet: Fleet,
    inventory: pd.DataFrame,
    first_pass: Float32Array,
    given: FleetReference | None,
) -> tuple[FloatArray, IntArray]:
    assert plan.peers is not None
    models, model = model_codes(fleet, inventory)
    if given is None:
        return fleet_medians(first_pass, model, len(models)), model
    known = {str(name): position for position, name in enumerate(given.medians.index)}
    chosen = given.medians.reindex(columns=list(plan.peers.names)).to_numpy(np.float64)
    code = np.array([known.get(name, -1) for name in models], dtype=np.int64)
    return np.ascontiguousarray(chosen.T[:, np.newaxis, :]), code[model]
