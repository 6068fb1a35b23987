"""The tasks of a matrix's build: one for each bucket of the dataset, then one for each part of the matrix.

Whoever runs a task needs the order alone, which is small: it works out the rest from the dataset, once a process. So
nothing large is sent to the machines of a cluster, and each of them finds out by itself whether it sees the same files
and runs the same code.
"""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from features.errors import InputError
from features.fleet import Fleet
from features.groups.history import History, history_columns
from features.groups.static import StaticPlan
from features.installations import reported, units_of
from features.labels.evidence import Record
from features.matrix.bucket_values import (
    bucket_values,
    buckets_of,
    compile_kernels,
    read_samples,
)
from features.matrix.build_inputs import BuildOrder, digest_of
from features.matrix.filling import Rows
from features.matrix.grid import rows_of
from features.matrix.meta import ROW_COLUMNS, read_meta
from features.matrix.part_files import ExistingParts, read_file, write_part
from features.matrix.plan import FeaturePlan
from features.matrix.slabs import SlabJoiner, SlabTimes, cut_slabs
from features.matrix.spill import Spill
from features.times import instants
from features.windows.blocks import array_of
from telemetry.dataset.schema import EVENTS, INVENTORY, conform
from telemetry.dataset.store import Dataset

_SHARED = "Give every machine of the cluster the same folders under the same paths, and the same version of predrain."


@dataclass(frozen=True)
class Known:
    """What is read of a dataset before any sample.

    ``events``: from :func:`features.installations.reported`.
    """

    events: pd.DataFrame
    inventory: pd.DataFrame
    plan: FeaturePlan

    @classmethod
    def of(cls, order: BuildOrder, dataset: Dataset) -> Known:
        """Read events and inventory, and plan the columns of the matrix of a dataset."""
        events, inventory = reported(dataset.events(), order.features.delay), dataset.inventory()
        plan = FeaturePlan.of(
            order.features,
            dataset.meta.channels,
            unit=dataset.meta.unit,
            step=dataset.meta.step,
            decision=order.decision,
            static=StaticPlan.of(inventory, events, order.features.static),
            history=history_columns(order.features, order.labels, unit=dataset.meta.unit),
        )
        return cls(events, inventory, plan)

    @cached_property
    def tables(self) -> tuple[pa.Table, pa.Table]:
        """Events and inventory as a matrix keeps them."""
        return conform(self.events, EVENTS), conform(self.inventory, INVENTORY)


def slab_times(order: BuildOrder, inventory: pd.DataFrame) -> SlabTimes:
    """Choose how the matrix of a fleet is cut into parts."""
    return SlabTimes.of(order.decision, len(pd.unique(units_of(inventory))))


class Build:
    """A build under way, as one process sees it; its threads may share it.

    ``dataset``: the order's.
    ``plan``: of those that are computed.
    Raises ``InputError`` if no unit is in service at any decision time, or a parameter does not fit the dataset.
    """

    def __init__(self, order: BuildOrder, dataset: Dataset, spill: Spill, known: Known) -> None:
        self.order, self.dataset, self.spill = order, dataset, spill
        self.known, self.columns = known, known.plan.columns
        self.plan = known.plan.of_groups([group for group in order.features.groups if group not in order.taken])
        self._record = Record.of(self.known.events, self.known.inventory, order.labels)
        self.keys = rows_of(
            dataset,
            self.known.events,
            self.known.inventory,
            decision=order.decision,
            labels=order.labels,
            augmentation=order.augmentation,
            negative_ratio=order.negative_ratio,
            seed=order.seed,
            since=order.since,
            record=self._record,
        )
        self.fleet = Fleet.of(self.known.inventory)
        self.rows = Rows.of(self.keys, self.fleet, order.decision)
        self.augmented: npt.NDArray[np.bool_] = self.keys["augmented"].to_numpy(dtype=bool)
        self.slabs = cut_slabs(self.rows, slab_times(order, self.known.inventory))
        self.existing: ExistingParts | None = None
        if order.base:
            meta = read_meta(order.target)
            if meta.digest != order.base:
                raise InputError(
                    "the matrix that was to be extended is another one now",
                    str(order.target),
                    "Do not replace a matrix while it is extended; run again.",
                )
        if order.since is not None:
            self.existing = ExistingParts(order.target, {part.file: part for part in meta.parts}, order.since)
            self.slabs = self.existing.slabs(self.slabs)
        self._first: datetime | None = None
        if self.existing is not None and len(self.keys):
            self._first = instants(self.rows.times[:1])[0].to_pydatetime()
        self.work = []
        if self.plan.reads_samples and len(self.keys):
            since = None if self._first is None else self._first - self.plan.look_back
            self.work = buckets_of(dataset, self.fleet, self.rows, since=since)
        self._guard = threading.Lock()

    @classmethod
    def join(cls, order: BuildOrder) -> Build:
        """Join a build that another machine has begun.

        Raises ``InputError`` if this machine does not see the dataset or the folder of the matrix, or runs other code.
        """
        here = f"machine {socket.gethostname()}, process {os.getpid()}"
        if digest_of(order) != order.digest:
            raise InputError("a worker runs another version of predrain", here, _SHARED)
        try:
            dataset = Dataset.open(order.dataset)
        except InputError as error:
            raise InputError(
                f"a worker cannot read the dataset: {error.what}", f"{here}: {error.where}", _SHARED
            ) from None
        if dataset.digest != order.dataset_digest:
            raise InputError(
                "a worker sees another dataset than the one that the build began with",
                f"{here}: {order.dataset}",
                "Do not replace a dataset while it is read. " + _SHARED,
            )
        spill = Spill.join(order.target, order.spill_key, order.token)
        if spill is None or not order.folder.is_dir():
            raise InputError(
                "a worker does not see the folder that the matrix is built in",
                f"{here}: {order.target.parent}",
                _SHARED,
            )
        return cls(order, dataset, spill, Known.of(order, dataset))

    def bucket(self, number: int) -> None:
        """Compute what a bucket's samples say, unless it is there already."""
        work = self.work[number]
        if self.spill.has(work.bucket):
            return
        service = self._service()
        samples = read_samples(self.plan, self.dataset, work.bucket, self._first)
        self.spill.keep(work.bucket, bucket_values(self.plan, self.fleet, self.rows, service, work, samples))

    def part(self, number: int) -> None:
        """Write a part of the matrix: the whole file appears, or, where it has no rows, none."""
        slab = self.slabs[number]
        with self._guard:
            joiner, keys = self._joiner, self._key_table
        columns = joiner.columns(slab)
        arrays: dict[str, Any] = {name: keys.column(name).slice(slab.begin, slab.rows) for name in ROW_COLUMNS}
        found = {column.name: pa.array(columns[j]) for j, column in enumerate(self.plan.columns)}
        taken = [column.name for column in self.columns if column.name not in found]
        if taken:
            existing = read_file(self.order.target / slab.file, columns=taken)
            found |= {name: existing.column(name) for name in taken}
        arrays.update({column.name: found[column.name] for column in self.columns})
        table = pa.table(arrays)
        if self.existing is not None:
            table = self.existing.join(slab.file, table)
        if not table.num_rows:
            return
        temporary = self.spill.temporary()
        write_part(temporary, table)
        temporary.replace(self.order.folder / slab.file)

    def _service(self) -> npt.NDArray[np.bool_]:
        with self._guard:
            return self._ready

    @cached_property
    def _ready(self) -> npt.NDArray[np.bool_]:
        """Pairs in service at the decision times; whoever has it has the kernels compiled as well."""
        compile_kernels(self.plan, self.fleet)
        return self.fleet.in_service(self.rows.times)

    @cached_property
    def _joiner(self) -> SlabJoiner:
        features, history = self.order.features, None
        if "history" in {column.group for column in self.plan.columns}:
            unit = self.dataset.meta.unit
            labels, record = self.order.labels, self._record
            history = History.of(self.known.events, self.known.inventory, features, labels, unit=unit, record=record)
        return SlabJoiner(
            self.plan,
            self.fleet,
            self.rows,
            self.keys,
            self.augmented,
            self.known.events,
            self.known.inventory,
            history,
            self.work,
            self.spill,
        )

    @cached_property
    def _key_table(self) -> pa.Table:
        return pa.table({name: _key_array(self.keys[name]) for name in ROW_COLUMNS})


class BuildTask:
    """One of the two kinds of tasks, as a function of a number; can be sent to another machine.

    ``build``: the build, in the process that began it. It is not sent along: elsewhere the task joins by the order.
    """

    def __init__(self, build: Build, what: Literal["bucket", "part"]) -> None:
        self._order, self._what = build.order, what
        self.name = what
        self._build: Build | None = build

    def __call__(self, number: int) -> None:
        """Do one: the number of a bucket's work, or of a slab."""
        build = self._build or _joined(self._order)
        (build.bucket if self._what == "bucket" else build.part)(number)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the build here."""
        return {"_order": self._order, "_what": self._what, "name": self.name, "_build": None}


_JOINED: dict[tuple[Path, str], Build] = {}
_JOINING = threading.Lock()


def _joined(order: BuildOrder) -> Build:
    """Give this process's build of an order; it holds the last one only."""
    key = (order.target, order.spill_key)
    with _JOINING:
        if key not in _JOINED or not _JOINED[key].spill.is_there():
            _JOINED.clear()
            _JOINED[key] = Build.join(order)
        return _JOINED[key]


def leave_builds() -> None:
    """Let go of what this process holds of builds of others."""
    with _JOINING:
        _JOINED.clear()


def _key_array(column: pd.Series) -> pa.Array:
    array = array_of(column)
    return array.cast(pa.string()).dictionary_encode() if column.name in ("node", "gpu", "unit") else array
