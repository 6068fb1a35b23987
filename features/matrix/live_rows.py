"""Live rows: the matrix rows of one decision time, computed from recent samples by the same code."""

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
    """Plan the columns of an existing matrix.

    Raises ``InputError`` if this version of predrain derives other columns from its settings.
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
    """Compute the rows of one decision time on the grid.

    ``samples``: one bucket at a time, each from :meth:`Dataset.read_runs`; at most three are in memory. Must include
    all samples younger than the plan's ``look_back`` at ``t``; older ones and those not usable yet are ignored. No
    duplicates.
    ``events``, ``inventory``: of the whole fleet and its entire past, as in a dataset (the look-back of history
    features is unlimited).
    Returns: the key columns of a matrix, then its features as float32 (NaN: unknown), sorted by unit: one row for each
    unit in service and not known to be down.
    Raises ``InputError`` if this version cannot compute the columns.
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
        # overlap reading buckets and cutting blocks with computing rows
        service = fleet.in_service(rows.times)
        store.put(0, bucket_values(plan, fleet, rows, service, work[0], prefetch(blocks)))
    joiner = PartJoiner(plan, fleet, rows, keys, events, inventory, record, work, store)
    values = joiner.columns(PartRows("", 0, len(keys))).T
    features = pd.DataFrame(values, columns=[column.name for column in plan.columns])
    return pd.concat([keys[list(ROW_COLUMNS)], features], axis=1)


def prefetch(items: Iterable[T]) -> Iterator[T]:
    """Yield the same items, computing each in a background thread while its predecessor is in use.

    The producer should mostly release the GIL, as Arrow and compiled kernels do.
    """
    iterator = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
        coming = pool.submit(next, iterator, _END)
        while (item := coming.result()) is not _END:
            coming = pool.submit(next, iterator, _END)
            yield item
