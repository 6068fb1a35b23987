"""The tasks of a matrix's build: one for each bucket of the dataset, then one for each part of the matrix.

Whoever runs a task needs the order alone, which is small: it works out the rest from the dataset, once a process. So
nothing large is sent to the machines of a cluster, and each of them finds out by itself whether it sees the same files
and runs the same code.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from features.blocks import array_of, blocks_of, key_columns
from features.bucket_values import bucket_values, buckets_of, compile_kernels
from features.config import DecisionSection, FeatureSection, LabelSection
from features.drains import out_of_use
from features.errors import InputError
from features.filling import Rows
from features.fleet import Fleet
from features.grid import augmented_rows, decision_rows, decision_times
from features.history import History, history_columns
from features.incidents import known_onsets
from features.matrix import ROW_COLUMNS
from features.plan import FeaturePlan
from features.service import reported
from features.slabs import SlabJoiner, cut_slabs
from features.spill import Spill
from features.static import StaticPlan
from telemetry.store import Dataset

PART_ROWS = 32_768
"""Rows in a part file, at least; a part begins with a decision time of the grid, whole."""

_SHARED = "Give every machine of the cluster the same folders under the same paths, and the same version of predrain."


@dataclass(frozen=True, slots=True)
class BuildOrder:
    """Everything that a build is a function of, small enough to be sent along with each task.

    Attributes
    ----------
    dataset : Path
        Absolute.
    dataset_digest : str
    target : Path
        Where the matrix will stand; absolute.
    folder : Path
        Where its parts are written until then.
    decision, labels, features : sections of the parameters
    augmentation, negative_ratio : int
    seed : int
    digest : str
        Of the matrix: :func:`digest_of` where the build began.
    token : str
        Of the spill, by which a machine knows that it sees the same folder and not one of its own by that name.
    """

    dataset: Path
    dataset_digest: str
    target: Path
    folder: Path
    decision: DecisionSection
    labels: LabelSection
    features: FeatureSection
    augmentation: int
    negative_ratio: int
    seed: int
    digest: str = ""
    token: str = ""


@functools.cache
def code_digest() -> str:
    """Return the SHA-256 of this room's source files: a matrix made by other code is not the same matrix."""
    total = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def digest_of(order: BuildOrder) -> str:
    """Digest what a matrix is a function of: the dataset's content, the settings, and this room's code as it runs here.

    Returns
    -------
    str
        SHA-256, hexadecimal.
    """
    settings = {
        "dataset": order.dataset_digest,
        "decision": order.decision.model_dump(mode="json"),
        "labels": order.labels.model_dump(mode="json"),
        "features": order.features.model_dump(mode="json"),
        "training": [order.augmentation, order.negative_ratio],
        "seed": order.seed,
        "code": code_digest(),
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


class Build:
    """A build under way, as one process sees it; its threads may share it.

    Parameters
    ----------
    order : BuildOrder
    dataset : Dataset
        The order's.
    spill : Spill
        Where what the buckets gave is kept.

    Raises
    ------
    InputError
        If no unit is in service at any decision time, or a parameter does not fit the dataset.
    """

    def __init__(self, order: BuildOrder, dataset: Dataset, spill: Spill) -> None:
        self.order, self.dataset, self.spill = order, dataset, spill
        self.events, self.inventory = reported(dataset.events(), order.features.delay), dataset.inventory()
        self.keys = _rows(order, dataset, self.inventory, self.events)
        self.plan = FeaturePlan.of(
            order.features,
            dataset.meta.channels,
            unit=dataset.meta.unit,
            step=dataset.meta.step,
            decision=order.decision,
            static=StaticPlan.of(self.inventory, self.events, order.features.static),
            history=history_columns(order.features, order.labels, unit=dataset.meta.unit),
        )
        self.fleet = Fleet.of(self.inventory)
        self.rows = Rows.of(self.keys, self.fleet, order.decision)
        self.augmented: npt.NDArray[np.bool_] = self.keys["augmented"].to_numpy(dtype=bool)
        self.slabs = cut_slabs(self.rows, self.augmented, PART_ROWS)
        self.work = buckets_of(dataset, self.fleet, self.rows) if self.plan.reads_samples else []
        self._guard = threading.Lock()

    @classmethod
    def join(cls, order: BuildOrder) -> Build:
        """Join a build that another machine has begun.

        Raises
        ------
        InputError
            If this machine does not see the dataset or the folder of the matrix, or runs other code.
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
        spill = Spill.join(order.target, order.digest, order.token)
        if spill is None or not order.folder.is_dir():
            raise InputError(
                "a worker does not see the folder that the matrix is built in",
                f"{here}: {order.target.parent}",
                _SHARED,
            )
        return cls(order, dataset, spill)

    def bucket(self, number: int) -> None:
        """Compute what a bucket's samples say, unless it is there already."""
        work = self.work[number]
        if self.spill.has(work.bucket):
            return
        service = self._service()
        runs = self.dataset.read_runs(work.bucket, self._wanted)
        blocks = blocks_of(runs, self.plan.layout, unit=self.plan.unit)
        self.spill.keep(work.bucket, bucket_values(self.plan, self.fleet, self.rows, service, work, blocks))

    def part(self, number: int) -> None:
        """Write a part of the matrix: the whole file appears, or nothing."""
        slab = self.slabs[number]
        names = [column.name for column in self.plan.columns]
        with self._guard:
            joiner, table = self._joiner, self._key_table
        columns = joiner.columns(slab)
        arrays: dict[str, Any] = {name: table.column(name).slice(slab.begin, slab.rows) for name in ROW_COLUMNS}
        arrays.update({name: pa.array(columns[j]) for j, name in enumerate(names)})
        temporary = self.spill.temporary()
        pq.write_table(
            pa.table(arrays),
            temporary,
            compression="zstd",
            compression_level=1,
            use_dictionary=["node", "gpu", "unit"],
            column_encoding=_encodings(names),
            write_statistics=False,
        )
        temporary.replace(self.order.folder / part_name(number))

    def _service(self) -> npt.NDArray[np.bool_]:
        with self._guard:
            return self._ready

    @cached_property
    def _ready(self) -> npt.NDArray[np.bool_]:
        """Pairs in service at the decision times; whoever has it has the kernels compiled as well."""
        compile_kernels(self.plan, self.fleet)
        return self.fleet.in_service(self.rows.times)

    @property
    def _wanted(self) -> list[str]:
        return [*key_columns(self.plan.unit), *self.plan.layout.numbers, *self.plan.layout.masks]

    @cached_property
    def _joiner(self) -> SlabJoiner:
        features, history = self.order.features, None
        if "history" in features.groups:
            unit = self.dataset.meta.unit
            history = History.of(self.events, self.inventory, features, self.order.labels, unit=unit)
        return SlabJoiner(
            self.plan,
            self.fleet,
            self.rows,
            self.keys,
            self.augmented,
            self.events,
            self.inventory,
            history,
            self.work,
            self.spill,
        )

    @cached_property
    def _key_table(self) -> pa.Table:
        return pa.table({name: _key_array(self.keys[name]) for name in ROW_COLUMNS})


class BuildTask:
    """One of the two kinds of tasks, as a function of a number; can be sent to another machine.

    Parameters
    ----------
    build : Build
        The build, in the process that began it. It is not sent along: elsewhere the task joins by the order.
    what : {"bucket", "part"}
        A bucket's values, or a part of the matrix.
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


def part_name(number: int) -> str:
    """Name a part file."""
    return f"part-{number:05d}.parquet"


_JOINED: dict[tuple[Path, str], Build] = {}
_JOINING = threading.Lock()


def _joined(order: BuildOrder) -> Build:
    """Give this process's build of an order; it holds the last one only."""
    key = (order.target, order.digest)
    with _JOINING:
        if key not in _JOINED or not _JOINED[key].spill.is_there():
            _JOINED.clear()
            _JOINED[key] = Build.join(order)
        return _JOINED[key]


def leave_builds() -> None:
    """Let go of what this process holds of builds of others."""
    with _JOINING:
        _JOINED.clear()


def _rows(order: BuildOrder, dataset: Dataset, inventory: pd.DataFrame, events: pd.DataFrame) -> pd.DataFrame:
    span = dataset.meta.span
    down = out_of_use(events, inventory, order.labels)
    times = decision_times(order.decision, span)
    grid = decision_rows(times, inventory, down)
    extra = grid.head(0)
    if order.augmentation:  # finding the onsets is a tenth of a small build
        extra = augmented_rows(
            known_onsets(events, inventory, order.labels),
            inventory,
            down,
            decision=order.decision,
            labels=order.labels,
            step=dataset.meta.step,
            span=span,
            augmentation=order.augmentation,
            negative_ratio=order.negative_ratio,
            seed=order.seed,
        )
    if not len(grid):
        raise InputError(
            f"no unit is in service at any decision time from {span[0].isoformat()} to {span[1].isoformat()}",
            f"dataset {dataset.path}",
            "Check the inventory's installed_at and removed_at, and decision.every against the dataset's length.",
        )
    if not len(extra):
        return grid  # sorted as it is
    both = pd.concat([grid, extra], ignore_index=True)
    return both.sort_values(["decision_time", "augmented", "unit"], kind="stable", ignore_index=True)


def _encodings(names: list[str]) -> Mapping[str, str]:
    # Floats compress by a quarter better when their bytes are split into streams, at no cost in time.
    return {**dict.fromkeys(names, "BYTE_STREAM_SPLIT"), "decision_time": "DELTA_BINARY_PACKED"}


def _key_array(column: pd.Series) -> pa.Array:
    array = array_of(column)
    return array.cast(pa.string()).dictionary_encode() if column.name in ("node", "gpu", "unit") else array
