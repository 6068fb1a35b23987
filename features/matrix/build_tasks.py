"""Tasks of a matrix build: one per bucket of the dataset, then one per part of the matrix.

A task needs only the small build order; each process derives the rest from the dataset, once. Nothing large is sent to
a cluster, and each worker verifies that it sees the same files and runs the same code.
"""

import hashlib
import json
import os
import socket
import threading
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from features.engine import source_digest
from features.fleet import Fleet
from features.groups.domains import check_scopes
from features.groups.static import StaticPlan
from features.labels.evidence import IncidentEvidence
from features.labels.facts import reported
from features.labels.incidents import known_onsets, out_of_use
from features.matrix.filling import BucketStore, RowPositions, bucket_values, buckets_of, compile_kernels, read_samples
from features.matrix.grid import augmented_rows, decision_rows, decision_times, grid_time
from features.matrix.meta import ROW_COLUMNS, MatrixConfig, MatrixPart, read_meta
from features.matrix.parts import ExistingParts, PartJoiner, PartTimes, write_part
from features.matrix.plan import FeaturePlan
from foundation.errors import InputError
from foundation.place import Place
from foundation.times import instants, milliseconds
from telemetry.dataset.installations import units_of
from telemetry.dataset.schema import EVENTS, INVENTORY, conform
from telemetry.dataset.store import Dataset

_SHARED = "Give every machine of the cluster the same folders under the same paths, and the same version of predrain."


@dataclass(frozen=True, slots=True)
class BuildOrder:
    """Complete and small specification of a build, sent with each task.

    ``dataset``, ``target``: absolute; a pinned version on object storage, and the folder of the finished matrix.
    ``folder``: folder in which the parts are written until then.
    ``config``: without columns and sources.
    ``base``: digest of the matrix at ``target`` that is extended; empty: compute all rows.
    ``since``: rows decided and established before this instant (ms) are reused from it.
    """

    dataset: Place
    target: Path
    folder: Path
    config: MatrixConfig
    digest: str = ""
    base: str = ""
    since: int | None = None


def settings_digest(config: MatrixConfig) -> str:
    """Return a digest of what a matrix depends on besides the dataset: settings and this package's code."""
    content = {
        **{name: getattr(config, name).model_dump(mode="json") for name in ("decision", "labels", "features")},
        "training": [config.augmentation, config.negative_ratio],
        "seed": config.seed,
        "code": source_digest("features"),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def digest_of(config: MatrixConfig) -> str:
    """Return a digest of everything a matrix depends on, including the dataset's content."""
    return hashlib.sha256(f"{config.dataset_digest} {settings_digest(config)}".encode()).hexdigest()


@dataclass(frozen=True)
class BuildInputs:
    """Inputs read from a dataset before any sample; ``events`` with the reporting delay applied."""

    events: pd.DataFrame
    inventory: pd.DataFrame
    plan: FeaturePlan
    times: PartTimes

    @classmethod
    def of(cls, order: BuildOrder, dataset: Dataset) -> Self:
        """Read events and inventory, and plan the columns and parts of the matrix."""
        config = order.config
        events, inventory = reported(dataset.events(), config.features.delay), dataset.inventory()
        if "history" in config.features.groups:
            check_scopes(config.features.domains, inventory)
        plan = FeaturePlan.of(config, StaticPlan.of(inventory, events, config.features.static))
        return cls(events, inventory, plan, PartTimes.of(config.decision, len(pd.unique(units_of(inventory)))))

    @cached_property
    def tables(self) -> tuple[pa.Table, pa.Table]:
        """Events and inventory as stored in a matrix."""
        return conform(self.events, EVENTS), conform(self.inventory, INVENTORY)


def rows_of(order: BuildOrder, dataset: Dataset, inventory: pd.DataFrame, record: IncidentEvidence) -> pd.DataFrame:
    """Return the rows to compute, on and off the grid, sorted by (decision_time, augmented, unit).

    With ``order.since``, only rows decided or established since then; for older off-grid times among them, also the
    fleet's rows at the last grid time before, which they are compared with.
    Raises ``InputError`` if all rows are requested and no unit is in service at any decision time.
    """
    config, since = order.config, order.since
    span = config.span
    down = out_of_use(record)
    times = decision_times(config.decision, span)
    extra = None
    if config.augmentation:  # finding onsets takes a tenth of a small build
        onsets = known_onsets(record)
        if since is not None:
            onsets = onsets[milliseconds(onsets["known_at"], "known_at") >= since]
        if len(onsets):
            extra = augmented_rows(onsets, inventory, down, config)
    if since is not None:
        times_ms = milliseconds(times, "decision time")
        is_new = times_ms >= since
        if extra is not None:
            is_new |= np.isin(
                times_ms, grid_time(config.decision, milliseconds(extra["decision_time"], "decision_time"))
            )
        times = instants(times_ms[is_new])
    grid = decision_rows(times, inventory, down)
    if not len(grid) and since is None:
        raise InputError(
            f"no unit is in service at any decision time from {span[0].isoformat()} to {span[1].isoformat()}",
            f"dataset {dataset.place}",
            "Check the inventory's installed_at and removed_at, and decision.every against the dataset's length.",
        )
    if extra is None or not len(extra):
        return grid  # already sorted
    rows = pd.concat([grid, extra], ignore_index=True)
    return rows.sort_values(["decision_time", "augmented", "unit"], kind="stable", ignore_index=True)


class Build:
    """A build in progress in one process, shared by its threads.

    Raises ``InputError`` if no unit is in service at any decision time, or a parameter does not fit the dataset.
    """

    def __init__(self, order: BuildOrder, dataset: Dataset, known: BuildInputs) -> None:
        self.order, self.dataset, self.known, self.plan = order, dataset, known, known.plan
        self.store = BucketStore(order.folder / "buckets")
        self._record = IncidentEvidence.of(known.events, known.inventory, order.config.labels)
        self.keys = rows_of(order, dataset, known.inventory, self._record)
        self.fleet = Fleet.of(known.inventory)
        self.rows = RowPositions.of(self.keys, self.fleet, order.config.decision, self._record)
        self.parts = known.times.cut(self.rows)
        self.existing: ExistingParts | None = None
        self._first: datetime | None = None
        if order.since is not None:
            meta = read_meta(order.target)
            if meta.digest != order.base:
                raise InputError(
                    "the matrix was replaced while it was extended",
                    str(order.target),
                    "Run the command again.",
                )
            self.existing = ExistingParts(order.target, {part.file: part for part in meta.parts}, order.since)
            self.parts = self.existing.with_stale(self.parts)
            if len(self.keys):
                self._first = instants(self.rows.times[:1])[0].to_pydatetime()
        self.work = []
        if self.plan.reads_samples and len(self.keys):
            since = None if self._first is None else self._first - self.plan.look_back
            self.work = buckets_of(dataset, self.fleet, self.rows, since=since)
        self._guard = threading.Lock()

    @classmethod
    def join(cls, order: BuildOrder) -> Self:
        """Join a build that another machine started.

        Raises ``InputError`` if this machine does not see the dataset or the matrix folder, or runs other code.
        """
        host_process = f"machine {socket.gethostname()}, process {os.getpid()}"
        if digest_of(order.config) != order.digest:
            raise InputError("a worker runs another version of predrain", host_process, _SHARED)
        try:
            dataset = Dataset.open(order.dataset)
        except InputError as error:
            raise InputError(
                f"a worker cannot read the dataset: {error.problem}", f"{host_process}: {error.location}", _SHARED
            ) from None
        if dataset.digest != order.config.dataset_digest:
            raise InputError(
                "a worker sees a different dataset",
                f"{host_process}: {order.dataset}",
                "Do not replace a dataset while it is read. " + _SHARED,
            )
        if not order.folder.is_dir():
            raise InputError(
                "a worker cannot see the output directory of the matrix",
                f"{host_process}: {order.target.parent}",
                _SHARED,
            )
        return cls(order, dataset, BuildInputs.of(order, dataset))

    def bucket(self, number: int) -> None:
        """Compute and store the values of a bucket."""
        work = self.work[number]
        with self._guard:
            service = self._service
        samples = read_samples(self.plan, self.dataset, work.bucket, self._first)
        self.store.put(work.bucket, bucket_values(self.plan, self.fleet, self.rows, service, work, samples))

    def part(self, number: int) -> MatrixPart | None:
        """Write a part of the matrix and return its metadata; None if it has no rows."""
        part = self.parts[number]
        with self._guard:
            joiner, keys = self._joiner, self._key_table
        columns = joiner.columns(part)
        arrays: dict[str, Any] = {name: keys.column(name).slice(part.begin, part.rows) for name in ROW_COLUMNS}
        arrays.update({column.name: pa.array(columns[j]) for j, column in enumerate(self.plan.columns)})
        table = pa.table(arrays)
        if self.existing is not None:
            table = self.existing.join(part.file, table)
        return write_part(self.order.folder / part.file, table) if table.num_rows else None

    @cached_property
    def _service(self) -> npt.NDArray[np.bool_]:
        """Pairs in service at the decision times; first access also compiles the kernels."""
        compile_kernels(self.plan, self.fleet)
        return self.fleet.in_service(self.rows.times)

    @cached_property
    def _joiner(self) -> PartJoiner:
        events, inventory = self.known.events, self.known.inventory
        return PartJoiner(
            self.plan, self.fleet, self.rows, self.keys, events, inventory, self._record, self.work, self.store
        )

    @cached_property
    def _key_table(self) -> pa.Table:
        return pa.table({name: array_of(self.keys[name]) for name in ROW_COLUMNS})


_BUILDS: dict[tuple[Path, str, str, int | None], Build] = {}
_JOINING = threading.Lock()


def build_here(order: BuildOrder, dataset: Dataset, known: BuildInputs) -> Build:
    """Start a build in this process, and register it for the tasks of this process."""
    build = Build(order, dataset, known)
    with _JOINING:
        _BUILDS[_key(order)] = build
    return build


def run_bucket(order: BuildOrder, number: int) -> None:
    """Run the task of a bucket, see :meth:`Build.bucket`."""
    _build_of(order).bucket(number)


def run_part(order: BuildOrder, number: int) -> MatrixPart | None:
    """Run the task of a part, see :meth:`Build.part`."""
    return _build_of(order).part(number)


def leave_builds() -> None:
    """Release the builds that this process holds."""
    with _JOINING:
        _BUILDS.clear()


def _build_of(order: BuildOrder) -> Build:
    """Return this process's build of an order, joining it if necessary."""
    with _JOINING:
        if _key(order) not in _BUILDS:
            _BUILDS.clear()  # keep only the latest build
            _BUILDS[_key(order)] = Build.join(order)
        return _BUILDS[_key(order)]


def _key(order: BuildOrder) -> tuple[Path, str, str, int | None]:
    return (order.target, order.digest, order.base, order.since)


def array_of(column: pd.Series) -> pa.Array:
    """Convert a column to Arrow: timestamps as UTC milliseconds, names dictionary-encoded."""
    if isinstance(column.dtype, pd.DatetimeTZDtype):  # Arrow's conversion drops the zone with a pandas 3 warning
        instants = column.dt.tz_convert("UTC").dt.tz_localize(None).to_numpy()
        return pa.array(instants).cast(pa.timestamp("ms"), safe=False).cast(pa.timestamp("ms", tz="UTC"))
    array = pa.array(column, from_pandas=True)
    return array.cast(pa.string()).dictionary_encode() if column.name in ("node", "gpu", "unit") else array
