"""Building the feature matrix of a dataset, bucket by bucket."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from features.blocks import array_of, blocks_of, key_columns
from features.config import DecisionSection, FeatureSection, LabelSection
from features.drains import out_of_use
from features.errors import InputError
from features.filling import Float32Array, Rows, SampleFiller, node_ranges
from features.fleet import Fleet
from features.grid import augmented_rows, decision_rows, decision_times
from features.history import history_columns, history_values
from features.incidents import known_onsets
from features.matrix import META_NAME, ROW_COLUMNS, FeatureMatrix, MatrixConfig, MatrixMeta
from features.onset import Kinds
from features.peers import fleet_medians, model_codes
from features.plan import FeaturePlan
from features.sequences import ARRAY_NAME, SequencePlan, write_sequences
from features.service import milliseconds, reported
from features.static import StaticPlan
from telemetry.atomic import FolderSwap, disk_errors, recover_folder, write_bytes
from telemetry.config import format_duration
from telemetry.schema import EVENTS, INVENTORY, conform
from telemetry.store import Dataset

Progress = Callable[[int, int], None]
"""Called with the steps done and all steps."""

PART_ROWS = 65_536
"""Rows in a part file, at least; a decision time is never split over two."""

IN_MEMORY_BYTES = 1_500_000_000
"""A matrix (or first pass of peers) larger than this is built in a file beside the result instead of in memory."""


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
        Called with (steps done, all steps).

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
        _write(inputs, swap.path, digest, progress or _silent)
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
    both = pd.concat([grid, extra], ignore_index=True) if len(extra) else grid
    return both.sort_values(["decision_time", "augmented", "unit"], kind="stable", ignore_index=True)


def _write(inputs: _Inputs, folder: Path, digest: str, progress: Progress) -> None:
    dataset, features = inputs.dataset, inputs.features
    events, inventory = reported(dataset.events(), features.delay), dataset.inventory()
    keys = _rows(inputs, inventory, events)
    history = history_columns(features, inputs.labels, unit=dataset.meta.unit)
    plan = FeaturePlan.of(
        features,
        dataset.meta.channels,
        unit=dataset.meta.unit,
        step=dataset.meta.step,
        decision=inputs.decision,
        static=StaticPlan.of(inventory, events, features.static),
        history=history,
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
    scratch = _Scratch(folder)
    values = scratch.array("values", (len(keys), len(plan.columns)))
    fleet = Fleet.of(inventory)
    rows = Rows.of(keys, fleet)
    if plan.reads_samples:
        _fill_sampled(plan, dataset, fleet, inventory, events, keys, rows, values, scratch, progress)
    if "history" in features.groups and history:
        at = plan.at["history"]
        values[:, at : at + len(history)] = history_values(
            keys, events, inventory, features, inputs.labels, unit=dataset.meta.unit
        )
    if plan.static is not None:
        at = plan.at["static"]
        values[:, at:] = plan.static.values(fleet, inventory, events, rows.pair, rows.milliseconds)
    if features.sequence.channels:
        windows = SequencePlan.of(features.sequence, dataset.meta.channels, delay=features.delay)
        write_sequences(dataset, fleet, windows, inputs.decision, folder, digest=digest)
    parts = tuple(_write_parts(folder, keys, values, config))
    del values
    scratch.remove()
    pq.write_table(conform(events, EVENTS), folder / "events.parquet", compression="zstd")
    pq.write_table(conform(inventory, INVENTORY), folder / "inventory.parquet", compression="zstd")
    counts = {"rows": len(keys), "augmented": int(keys["augmented"].sum()), "features": len(plan.columns)}
    write_bytes(folder / META_NAME, MatrixMeta(digest, config, counts, parts).encode())


def _fill_sampled(
    plan: FeaturePlan,
    dataset: Dataset,
    fleet: Fleet,
    inventory: pd.DataFrame,
    events: pd.DataFrame,
    keys: pd.DataFrame,
    rows: Rows,
    values: Float32Array,
    scratch: _Scratch,
    progress: Progress,
) -> None:
    first_pass: Float32Array | None = None
    if plan.peers is not None:
        shape = (len(plan.peers.names), rows.times.size, len(fleet.pairs))
        first_pass = scratch.array("peers", shape)
    amounts: Float32Array | None = None
    if plan.onset is not None:
        amounts = scratch.array("amounts", (len(keys), len(plan.onset.amounts.columns)))
    filler = SampleFiller(plan, fleet, rows, values, first_pass, amounts)
    filler.compile()
    by_bucket: dict[int, dict[str, tuple[int, int]]] = {}
    for node, pairs in node_ranges(fleet):
        by_bucket.setdefault(dataset.bucket_of(node), {})[node] = pairs
    wanted = [*key_columns(plan.unit), *plan.layout.numbers, *plan.layout.masks]

    def fill_bucket(bucket: int) -> None:
        table = dataset.read_bucket(bucket, wanted)
        filler.fill(blocks_of(table, plan.layout, unit=plan.unit), by_bucket[bucket])

    steps = len(by_bucket) + 1
    with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, 8)) as pool:
        running = [pool.submit(fill_bucket, bucket) for bucket in sorted(by_bucket)]
        try:
            for done, future in enumerate(as_completed(running), start=1):
                future.result()
                progress(done, steps)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if plan.peers is not None and first_pass is not None:
        models, model = model_codes(fleet, inventory)
        filler.compare_with_fleet(fleet_medians(first_pass, model, len(models)), model)
    if plan.onset is not None and amounts is not None:
        kinds = Kinds.of(fleet, inventory, events, rows.pair, rows.milliseconds)
        grid = np.flatnonzero(~keys["augmented"].to_numpy(dtype=bool))
        reference = plan.onset.reference(amounts[grid], kinds.take(grid), rows.milliseconds[grid])
        plan.onset.finish(amounts, kinds, rows.milliseconds, reference, values, plan.at["onset"])
    progress(steps, steps)


class _Scratch:
    """Arrays of a build: in memory while small, else in files that disappear with the build."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[Path] = []

    def array(self, name: str, shape: tuple[int, ...]) -> Float32Array:
        """Return a float32 array of anything: whoever asks for it writes every cell."""
        if int(np.prod(shape)) * 4 <= IN_MEMORY_BYTES:
            return np.empty(shape, dtype=np.float32)
        path = self._folder / f"{name}.scratch"
        self._files.append(path)
        array: Float32Array = np.memmap(path, dtype=np.float32, mode="w+", shape=shape)
        return array

    def remove(self) -> None:
        """Remove the files; the arrays must not be used any more."""
        for path in self._files:
            path.unlink()


def _write_parts(
    folder: Path, keys: pd.DataFrame, values: Float32Array, config: MatrixConfig
) -> Iterator[tuple[str, int]]:
    times = milliseconds(keys["decision_time"], "decision_time")
    new_time = np.flatnonzero(np.concatenate(([True], times[1:] != times[:-1])))
    names = [column.name for column in config.columns]
    table = pa.table({name: _key_array(keys[name]) for name in ROW_COLUMNS})
    begin = 0
    while begin < len(keys):
        at = np.searchsorted(new_time, begin + PART_ROWS)
        end = int(new_time[at]) if at < new_time.size else len(keys)
        columns = np.ascontiguousarray(values[begin:end].T)
        arrays: dict[str, Any] = {name: table.column(name).slice(begin, end - begin) for name in ROW_COLUMNS}
        arrays.update({name: pa.array(columns[j]) for j, name in enumerate(names)})
        file = f"part-{len(list(folder.glob('part-*.parquet'))):05d}.parquet"
        pq.write_table(
            pa.table(arrays),
            folder / file,
            compression="zstd",
            compression_level=1,
            use_dictionary=["node", "gpu", "unit"],
            column_encoding=_encodings(names),
            write_statistics=False,
        )
        yield file, end - begin
        begin = end


def _encodings(names: list[str]) -> Mapping[str, str]:
    # Floats compress by a quarter better when their bytes are split into streams, at no cost in time.
    return {**dict.fromkeys(names, "BYTE_STREAM_SPLIT"), "decision_time": "DELTA_BINARY_PACKED"}


def _key_array(column: pd.Series) -> pa.Array:
    array = array_of(column)
    return array.cast(pa.string()).dictionary_encode() if column.name in ("node", "gpu", "unit") else array
