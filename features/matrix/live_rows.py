"""Live rows: what a matrix would hold at one decision time, from the recent samples alone, through the same code."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa

from features.fleet import Fleet
from features.groups.static import StaticPlan
from features.labels.evidence import IncidentEvidence
from features.labels.facts import reported
from features.labels.incidents import out_of_use
from features.matrix.filling import BucketStore, BucketWork, RowPositions, bucket_values, node_ranges
from features.matrix.grid import decision_rows
from features.matrix.meta import ROW_COLUMNS, MatrixConfig
from features.matrix.parts import PartJoiner, PartRows
from features.matrix.plan import FeaturePlan
from features.windows.blocks import blocks_of
from foundation.errors import InputError
from foundation.times import instant_ms, instants

T = TypeVar("T")

_END: Any = object()


def live_plan(config: MatrixConfig) -> FeaturePlan:
    """Make the plan whose columns are those of a matrix.

    Raises ``InputError`` if this version of predrain no longer makes those columns from those settings.
    """
    static = StaticPlan(tuple(column for column in config.columns if column.group == "static"))
    plan = FeaturePlan.of(config, static)
    if plan.columns != config.columns:
        odd = sorted({column.name for column in plan.columns} ^ {column.name for column in config.columns})
        raise InputError(
            f"the feature columns of this version of predrain differ (such as {odd[0] if odd else 'their order'})",
            "the columns of the matrix or model",
            "Train again with this version, or use the version of the training.",
        )
    return plan


def live_rows(
    samples: Iterable[Sequence[pa.Table]],
    events: pd.DataFrame,
    inventory: pd.DataFrame,
    t: datetime,
    config: MatrixConfig,
) -> pd.DataFrame:
    """Compute the rows of one decision time of the grid.

    ``samples``: a dataset's buckets one after the other, each as :meth:`Dataset.read_runs` gives it; three of them are
    in memory at most. At least the samples younger than the plan's ``look_back`` at ``t``; older ones change nothing,
    nor do those that are not usable yet. None twice.
    ``events``, ``inventory``: as a dataset holds them, of the whole fleet and all its past (history features reach back
    without limit).
    Returns: the key columns of a matrix's rows, then its features as float32 (NaN: unknown), sorted by unit: one row
    for each unit in service and not known to be down.
    Raises ``InputError`` if the columns cannot be made by this version.
    """
    plan = live_plan(config)
    events = reported(events, config.features.delay)
    record = IncidentEvidence.of(events, inventory, config.labels)
    keys = decision_rows(instants(np.array([instant_ms(t)], dtype=np.int64)), inventory, out_of_use(record))
    fleet = Fleet.of(inventory)
    rows = RowPositions.of(keys, fleet, config.decision, record)
    work, store = [], BucketStore(None)
    if plan.reads_samples and len(keys):
        work = [BucketWork(0, dict(node_ranges(fleet)), np.arange(len(fleet.pairs)), np.arange(len(keys)))]
        blocks = (block for runs in prefetch(samples) for block in blocks_of(runs, plan.layout, unit=plan.unit))
        # buckets are read, and the next block is cut, while rows are computed
        service = fleet.in_service(rows.times)
        store.keep(0, bucket_values(plan, fleet, rows, service, work[0], prefetch(blocks)))
    joiner = PartJoiner(plan, fleet, rows, keys, events, inventory, record, work, store)
    values = joiner.columns(PartRows("", 0, len(keys))).T
    features = pd.DataFrame(values, columns=[column.name for column in plan.columns])
    return pd.concat([keys[list(ROW_COLUMNS)], features], axis=1)


def prefetch(items: Iterable[T]) -> Iterator[T]:
    """Give the same items, each made by a thread of its own while the one before it is in use.

    What makes them should leave Python's lock alone for the most part, as Arrow and compiled kernels do.
    """
    made = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
        coming = pool.submit(next, made, _END)
        while (item := coming.result()) is not _END:
            coming = pool.submit(next, made, _END)
            yield item
