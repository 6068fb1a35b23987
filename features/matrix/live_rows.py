"""Live rows: what a matrix would hold at one decision time, from the recent samples alone, through the same kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
from features.matrix.grid import decision_rows, grid_time
from features.matrix.meta import ROW_COLUMNS, MatrixConfig
from features.matrix.plan import FeaturePlan
from features.prefetch import prefetch
from features.times import instant_ms, instants
from features.windows.blocks import (
    FloatArray,
    blocks_of,
    key_columns,
    table_of,
)
from features.windows.pieces import epoch_ms, pair_codes


@dataclass(frozen=True, slots=True)
class _FleetReference:
    """What rows off the grid are compared with: the whole fleet at the last decision time of the grid.

    ``medians``: NaN where no unit of a model has a value; shape (values, 1, models).
    """

    medians: FloatArray | None
    onset: Reference | None


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
    samples: pa.Table | pd.DataFrame | Iterable[Sequence[pa.Table]] | None,
    events: pd.DataFrame,
    inventory: pd.DataFrame,
    t: datetime,
    config: MatrixConfig,
) -> pd.DataFrame:
    """Compute the rows of one decision time.

    ``samples``: samples with ``timestamp`` (aware), ``node``, ``gpu`` and channels, in any order; at least those
    younger than :func:`look_back` at ``t``. Older ones change nothing, nor do those that are not usable yet. Of two
    samples of a unit at one time the later in the table counts. None: no telemetry. A dataset's buckets one after the
    other, each as :meth:`Dataset.read_runs` gives it, are taken in one pass with three of them in
    memory at most; ``t`` must then be on the grid of ``config.decision``. No sample may then stand there twice.
    ``events``, ``inventory``: as a dataset holds them, of the whole fleet and all its past (history features reach back
    without limit).
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
    values = np.full((len(keys), len(plan.columns)), np.nan, dtype=np.float32)
    fleet = Fleet.of(inventory)
    rows = Rows.of(keys, fleet, config.decision)
    if plan.reads_samples and len(keys):
        tables = _tables(samples, config)
        filler, first_pass, amounts = _fill(plan, tables, fleet, rows, values)
        off_grid = None
        if (plan.peers is not None or plan.onset is not None) and not rows.grid.all():
            if not isinstance(tables, tuple):
                raise ValueError(f"{t.isoformat()} is off the grid: give the samples as one table")
            off_grid = _fleet_reference(plan, config, tables, events, inventory, fleet, t)
        if plan.peers is not None:
            models, model = model_codes(fleet, inventory)
            medians = off_grid.medians if off_grid else fleet_medians(first_pass, model, len(models))
            assert medians is not None
            filler.compare_with_fleet(medians, model)
        if plan.onset is not None:
            kinds = Kinds.of(fleet, inventory, events, rows.pair, rows.milliseconds)
            last = rows.times[rows.grid][rows.last_grid]
            reference = off_grid.onset if off_grid else plan.onset.reference(amounts, kinds, rows.milliseconds)
            assert reference is not None
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


def _fleet_reference(
    plan: FeaturePlan,
    config: MatrixConfig,
    tables: Iterable[Sequence[pa.Table]],
    events: pd.DataFrame,
    inventory: pd.DataFrame,
    fleet: Fleet,
    t: datetime,
) -> _FleetReference:
    """Take the reference at the last decision time of the grid at or before ``t``, in one pass over the samples."""
    last = grid_time(config.decision, np.array([instant_ms(t)], dtype=np.int64))
    keys = decision_rows(instants(last), inventory, out_of_use(events, inventory, config.labels))
    rows = Rows.of(keys, fleet, config.decision)
    _, first_pass, amounts = _fill(
        plan, tables, fleet, rows, np.full((len(keys), len(plan.columns)), np.nan, np.float32)
    )
    medians, onset = None, None
    if plan.peers is not None:
        models, model = model_codes(fleet, inventory)
        medians = (
            fleet_medians(first_pass, model, len(models))
            if len(keys)
            else np.full((first_pass.shape[0], 1, len(models)), np.nan)
        )
    if plan.onset is not None:
        onset = plan.onset.reference(
            amounts, Kinds.of(fleet, inventory, events, rows.pair, rows.milliseconds), rows.milliseconds
        )
        newest = onset.values[-1:] if onset.times.size else np.full((1, *onset.values.shape[1:]), np.nan)
        onset = Reference(last, onset.kinds, newest)
    return _FleetReference(medians, onset)


def _fill(
    plan: FeaturePlan,
    tables: Iterable[Sequence[pa.Table]],
    fleet: Fleet,
    rows: Rows,
    values: Float32Array,
) -> tuple[SampleFiller, Float32Array, Float32Array]:
    names = plan.peers.names if plan.peers is not None else ()
    first_pass = np.full((len(names), int(rows.grid.sum()), len(fleet.pairs)), np.nan, dtype=np.float32)
    width = len(plan.onset.amounts.columns) if plan.onset is not None else 0
    amounts = np.full((rows.pair.size, width), np.nan, dtype=np.float32)
    filler = SampleFiller(plan, fleet, rows, values, first_pass, amounts)
    blocks = (block for runs in tables for block in blocks_of(runs, plan.layout, unit=plan.unit))
    # buckets are read, and the next block is cut, while rows are computed
    filler.fill(blocks if isinstance(tables, tuple) else prefetch(blocks), dict(node_ranges(fleet)))
    return filler, first_pass, amounts


def _tables(
    samples: pa.Table | pd.DataFrame | Iterable[Sequence[pa.Table]] | None, config: MatrixConfig
) -> tuple[Sequence[pa.Table], ...] | Iterator[Sequence[pa.Table]]:
    """Return what can be iterated again as a tuple, buckets as an iterator."""
    if samples is None:
        return ()
    if isinstance(samples, pa.Table | pd.DataFrame):
        table = table_of(samples) if isinstance(samples, pd.DataFrame) else samples
        return ((_distinct(_usable(table, config), config.unit),),)
    return ([_usable(table, config) for table in runs] for runs in prefetch(samples))


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
