"""Building the feature matrix of a dataset, bucket by bucket."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from features.blocks import array_of, blocks_of, key_columns
from features.bucket_values import BucketWork, bucket_values, buckets_of, compile_kernels
from features.config import DecisionSection, FeatureSection, LabelSection
from features.drains import out_of_use
from features.errors import InputError
from features.filling import Rows
from features.fleet import Fleet
from features.grid import augmented_rows, decision_rows, decision_times
from features.history import History, history_columns
from features.incidents import known_onsets
from features.matrix import META_NAME, ROW_COLUMNS, FeatureMatrix, MatrixConfig, MatrixMeta
from features.plan import FeaturePlan
from features.sequences import ARRAY_NAME, SequencePlan, write_sequences
from features.service import reported
from features.slabs import Slab, SlabJoiner, cut_slabs
from features.spill import Spill
from features.static import StaticPlan
from telemetry.atomic import FolderSwap, disk_errors, recover_folder, write_bytes
from telemetry.config import format_duration
from telemetry.schema import EVENTS, INVENTORY, conform
from telemetry.store import Dataset

Progress = Callable[[int, int], None]
"""Called with the samples read and rows written so far, and with those of the whole build."""

PART_ROWS = 32_768
"""Rows in a part file, at least; a part begins with a decision time of the grid, whole."""


class Augmentation(Protocol):
    """The two training parameters that decide which rows are added off the decision grid."""

    @property
    def augmentation(self) -> int:
        """Extra times for each incident."""

    @property
    def negative_ratio(self) -> int:
        """Negatives a training set keeps for each positive."""


def build_matrix(
    dataset: Dataset,
    out: Path,
    *,
    decision: DecisionSection,
    labels: LabelSection,
    features: FeatureSection,
    training: Augmentation,
    seed: int,
    progress: Progress | None = None,
) -> FeatureMatrix:
    """Build the feature matrix of a dataset, or return the one that stands at ``out`` if it is the same.

    Parameters
    ----------
    dataset : Dataset
        With or without telemetry.
    out : Path
        The matrix's folder. It is built beside it and swapped in; a killed run leaves what was there.
    decision, labels, features : sections of the parameters
    training : Augmentation
        ``training.augmentation`` and ``training.negative_ratio``.
    seed : int
        Seed of the augmented rows' companions.
    progress : callable, optional
        Called with (samples read and rows written, all of them), once a bucket and once a part.

    Returns
    -------
    FeatureMatrix

    Raises
    ------
    InputError
        If ``out`` holds something else, a parameter does not fit the dataset, no unit is in service at any decision
        time, or the disk is full.
    """
    out = Path(out)
    settings = {
        "dataset": dataset.digest,
        "decision": decision.model_dump(mode="json"),
        "labels": labels.model_dump(mode="json"),
        "features": features.model_dump(mode="json"),
        "training": [training.augmentation, training.negative_ratio],
        "seed": seed,
        "code": code_digest(),
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    standing = _standing(out, digest)
    if standing is not None:
        return standing
    _check(dataset, decision, features)
    inputs = _Inputs(dataset, decision, labels, features, training, seed)
    with FolderSwap(out) as swap, disk_errors(out):
        _write(inputs, swap, digest, progress or _silent)
        swap.commit()
    return FeatureMatrix.open(out)


@functools.cache
def code_digest() -> str:
    """Return the SHA-256 of this room's source files: a matrix made by other code is not the same matrix."""
    total = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


@dataclass(frozen=True, slots=True)
class _Inputs:
    dataset: Dataset
    decision: DecisionSection
    labels: LabelSection
    features: FeatureSection
    training: Augmentation
    seed: int


def _silent(done: int, total: int) -> None:
    """Report nothing."""


def _standing(out: Path, digest: str) -> FeatureMatrix | None:
    recover_folder(out)
    if not (out / META_NAME).exists():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(
                "there is something here that is not a feature matrix, and it would be replaced",
                str(out),
                "Choose another folder, or remove this one yourself.",
            )
        return None
    try:
        matrix = FeatureMatrix.open(out)
    except InputError:
        return None  # of another version, or damaged: it is built anew
    names = [name for name, _ in matrix.meta.parts]
    if matrix.config.features.sequence.channels:
        names.append(ARRAY_NAME)
    whole = all((out / name).exists() for name in names)
    return matrix if whole and matrix.digest == digest else None


def _check(dataset: Dataset, decision: DecisionSection, features: FeatureSection) -> None:
    if features.sequence.channels:
        SequencePlan.of(features.sequence, dataset.meta.channels, delay=features.delay)
    if not dataset.meta.channels:
        return
    step = dataset.meta.step
    named = [("decision.every", decision.every), ("features.peer_window", features.peer_window)]
    named += [("features.windows", window) for window in features.windows]
    if features.sequence.channels:
        named.append(("features.sequence.step", features.sequence.step))
    for name, value in named:
        if value % step:
            raise InputError(
                f"{format_duration(value)} is not a multiple of the dataset's step of {format_duration(step)}",
                f"parameter {name}, dataset {dataset.path}",
                "Choose a multiple, or import the dataset with another telemetry.step.",
            )


def _rows(inputs: _Inputs, inventory: pd.DataFrame, events: pd.DataFrame) -> pd.DataFrame:
    span = inputs.dataset.meta.span
    down = out_of_use(events, inventory, inputs.labels)
    times = decision_times(inputs.decision, span)
    grid = decision_rows(times, inventory, down)
    extra = grid.head(0)
    if inputs.training.augmentation:  # finding the onsets is a tenth of a small build
        extra = augmented_rows(
            known_onsets(events, inventory, inputs.labels),
            inventory,
            down,
            decision=inputs.decision,
            labels=inputs.labels,
            step=inputs.dataset.meta.step,
            span=span,
            augmentation=inputs.training.augmentation,
            negative_ratio=inputs.training.negative_ratio,
            seed=inputs.seed,
        )
    if not len(grid):
        raise InputError(
            f"no unit is in service at any decision time from {span[0].isoformat()} to {span[1].isoformat()}",
            f"dataset {inputs.dataset.path}",
            "Check the inventory's installed_at and removed_at, and decision.every against the dataset's length.",
        )
    if not len(extra):
        return grid  # sorted as it is
    both = pd.concat([grid, extra], ignore_index=True)
    return both.sort_values(["decision_time", "augmented", "unit"], kind="stable", ignore_index=True)


def _write(inputs: _Inputs, swap: FolderSwap, digest: str, progress: Progress) -> None:
    dataset, features, folder = inputs.dataset, inputs.features, swap.path
    events, inventory = reported(dataset.events(), features.delay), dataset.inventory()
    keys = _rows(inputs, inventory, events)
    plan = FeaturePlan.of(
        features,
        dataset.meta.channels,
        unit=dataset.meta.unit,
        step=dataset.meta.step,
        decision=inputs.decision,
        static=StaticPlan.of(inventory, events, features.static),
        history=history_columns(features, inputs.labels, unit=dataset.meta.unit),
    )
    config = MatrixConfig(
        decision=inputs.decision,
        labels=inputs.labels,
        features=features,
        augmentation=inputs.training.augmentation,
        negative_ratio=inputs.training.negative_ratio,
        seed=inputs.seed,
        unit=dataset.meta.unit,
        step=dataset.meta.step,
        span=dataset.meta.span,
        channels=dataset.meta.channels,
        columns=plan.columns,
        dataset_digest=dataset.digest,
        sources=tuple(dataset.meta.sources),
    )
    fleet = Fleet.of(inventory)
    rows = Rows.of(keys, fleet)
    augmented = keys["augmented"].to_numpy(dtype=bool)
    slabs = cut_slabs(rows, augmented, PART_ROWS)
    work = buckets_of(dataset, fleet, rows) if plan.reads_samples else []
    told = _Steps(progress, sum(each.samples for each in work) + len(keys))
    spill = Spill(swap.target, digest)
    try:
        if work:
            _spill(plan, dataset, fleet, rows, work, spill, told)
        history = None
        if "history" in features.groups:
            history = History.of(events, inventory, features, inputs.labels, unit=dataset.meta.unit)
        joiner = SlabJoiner(plan, fleet, rows, keys, augmented, events, inventory, history, work, spill)
        parts = _write_parts(folder, keys, joiner, slabs, config, told)
        if features.sequence.channels:
            windows = SequencePlan.of(features.sequence, dataset.meta.channels, delay=features.delay)
            write_sequences(dataset, fleet, windows, inputs.decision, folder, digest=digest)
    except Exception:
        spill.remove()  # what was killed goes on; what failed may have failed by it
        raise
    pq.write_table(conform(events, EVENTS), folder / "events.parquet", compression="zstd")
    pq.write_table(conform(inventory, INVENTORY), folder / "inventory.parquet", compression="zstd")
    counts = {"rows": len(keys), "augmented": int(augmented.sum()), "features": len(plan.columns)}
    write_bytes(folder / META_NAME, MatrixMeta(digest, config, counts, parts).encode())
    spill.remove()


class _Steps:
    """Counts samples read and rows written for whoever wants to know."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._guard = threading.Lock()

    def done(self, count: int) -> None:
        """Tell of so many more."""
        with self._guard:
            self._done += count
            self._progress(self._done, self._total)


def _in_threads(run: Callable[[Any], None], tasks: Sequence[Any], most: int) -> None:
    """Run all tasks in as many threads as there are cores, at most ``most``; the first error ends it."""
    with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, most)) as pool:
        running = [pool.submit(run, task) for task in tasks]
        try:
            for future in as_completed(running):
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _spill(
    plan: FeaturePlan,
    dataset: Dataset,
    fleet: Fleet,
    rows: Rows,
    work: Sequence[BucketWork],
    spill: Spill,
    told: _Steps,
) -> None:
    """Compute what each bucket's samples say, but for the buckets that are there already."""
    service = fleet.in_service(rows.times)
    wanted = [*key_columns(plan.unit), *plan.layout.numbers, *plan.layout.masks]
    compile_kernels(plan, fleet)

    def run(each: BucketWork) -> None:
        if not spill.has(each.bucket):
            table = dataset.read_bucket(each.bucket, wanted)
            blocks = blocks_of(table, plan.layout, unit=plan.unit)
            spill.keep(each.bucket, bucket_values(plan, fleet, rows, service, each, blocks))
        told.done(each.samples)

    _in_threads(run, work, 8)


def _write_parts(
    folder: Path, keys: pd.DataFrame, joiner: SlabJoiner, slabs: Sequence[Slab], config: MatrixConfig, told: _Steps
) -> tuple[tuple[str, int], ...]:
    names = [column.name for column in config.columns]
    table = pa.table({name: _key_array(keys[name]) for name in ROW_COLUMNS})

    def run(each: tuple[str, Slab]) -> None:
        file, slab = each
        columns = joiner.columns(slab)
        arrays: dict[str, Any] = {name: table.column(name).slice(slab.begin, slab.rows) for name in ROW_COLUMNS}
        arrays.update({name: pa.array(columns[j]) for j, name in enumerate(names)})
        pq.write_table(
            pa.table(arrays),
            folder / file,
            compression="zstd",
            compression_level=1,
            use_dictionary=["node", "gpu", "unit"],
            column_encoding=_encodings(names),
            write_statistics=False,
        )
        told.done(slab.rows)

    named = [(f"part-{number:05d}.parquet", slab) for number, slab in enumerate(slabs)]
    _in_threads(run, named, 4)
    return tuple((file, slab.rows) for file, slab in named)


def _encodings(names: list[str]) -> Mapping[str, str]:
    # Floats compress by a quarter better when their bytes are split into streams, at no cost in time.
    return {**dict.fromkeys(names, "BYTE_STREAM_SPLIT"), "decision_time": "DELTA_BINARY_PACKED"}


def _key_array(column: pd.Series) -> pa.Array:
    array = array_of(column)
    return array.cast(pa.string()).dictionary_encode() if column.name in ("node", "gpu", "unit") else array
