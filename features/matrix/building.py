"""Building the feature matrix of a dataset, bucket by bucket."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import pyarrow.parquet as pq

from features.config import DecisionSection, FeatureSection, LabelSection
from features.engine import Engine, LocalEngine
from features.matrix.build_tasks import (
    Build,
    BuildInputs,
    BuildOrder,
    build_here,
    digest_of,
    leave_builds,
    run_bucket,
    run_part,
    settings_digest,
)
from features.matrix.extension import BUILT_FROM_NAME, BuiltFrom, first_other_row
from features.matrix.grid import decision_times
from features.matrix.matrix import FeatureMatrix
from features.matrix.meta import EVENTS_NAME, INVENTORY_NAME, META_NAME, MatrixConfig, MatrixMeta, MatrixPart
from features.matrix.parts import read_file
from features.matrix.sequences import ARRAY_NAME, SequencePlan, write_sequences
from features.times import instant_ms
from features.vocabulary import FeatureColumn
from foundation.durations import format_duration
from foundation.errors import InputError
from foundation.files import FolderSwap, building_path, disk_errors, recover_folder, write_bytes
from telemetry.dataset.store import Dataset

Progress = Callable[[int, int], None]
"""Called with the samples read and rows written so far, and with those of the whole build."""


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
    engine: Engine | None = None,
) -> FeatureMatrix:
    """Build the feature matrix of a dataset, or extend or return the one that is at ``out``.

    ``dataset``: with or without telemetry.
    ``out``: the matrix's folder. It is built in a sibling folder and swapped in; a killed run leaves what was there.
    ``progress``: called before the first bucket, and after each bucket and part.
    ``engine``: who runs the buckets and parts; default: this machine's cores. The matrix is the same, byte for byte.
    Raises ``InputError`` if ``out`` holds something else, a parameter does not fit the dataset, no unit is in service
    at any decision time, the disk is full, or a machine of a cluster does not see the same folders.
    """
    out = Path(out)
    engine = engine or LocalEngine()
    meta, target = dataset.meta, Path(os.path.realpath(out))
    config = MatrixConfig(
        decision=decision,
        labels=labels,
        features=features,
        augmentation=training.augmentation,
        negative_ratio=training.negative_ratio,
        seed=seed,
        unit=meta.unit,
        step=meta.step,
        span=meta.span,
        channels=meta.channels,
        columns=(),
        dataset_digest=dataset.digest,
    )
    order = BuildOrder(dataset.pinned, target, building_path(target), config, digest_of(config))
    existing = _existing(out)
    if existing is not None and existing.digest == order.digest:
        return existing
    _check(dataset, config)
    with FolderSwap(out) as swap, disk_errors(out):
        known = BuildInputs.of(order, dataset)
        if existing is not None:
            order = _extending(order, dataset, existing, known)
        try:
            _write(build_here(order, dataset, known), engine, progress)
        finally:
            engine.everywhere(leave_builds)
        swap.commit()
    return FeatureMatrix.open(out)


def _existing(out: Path) -> FeatureMatrix | None:
    """Open the matrix at ``out``, if it is whole."""
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
        return None  # of another version, or damaged: it is built from scratch
    names = [part.file for part in matrix.meta.parts]
    if matrix.config.features.sequence.channels:
        names.append(ARRAY_NAME)
    return matrix if all((out / name).exists() for name in names) else None


def _extending(order: BuildOrder, dataset: Dataset, existing: FeatureMatrix, known: BuildInputs) -> BuildOrder:
    """Let an order take over what it can of the matrix at its target."""
    before, old, new = BuiltFrom.read(existing.path), existing.config, order.config
    if before is None or (before.settings, before.part_length) != (settings_digest(new), known.times.length):
        return order
    if not _mean_the_same(old.columns, known.plan.columns) or (old.channels, old.step) != (new.channels, new.step):
        return order
    events, inventory = known.tables
    since = first_other_row(
        before,
        dataset,
        delay=new.features.delay,
        events=(read_file(existing.path / EVENTS_NAME), events),
        inventory=(read_file(existing.path / INVENTORY_NAME), inventory),
    )
    begins = decision_times(new.decision, new.span)
    if not len(begins) or since <= instant_ms(begins[0]):
        return order
    return replace(order, base=existing.digest, since=since)


def _mean_the_same(before: Sequence[FeatureColumn], after: Sequence[FeatureColumn]) -> bool:
    """Tell whether values in columns mean what they meant: new categories have codes behind the old ones."""
    known = [replace(new, categories=new.categories[: len(old.categories)]) for old, new in zip(before, after)]  # noqa: B905
    return len(before) == len(after) and known == list(before)


def _check(dataset: Dataset, config: MatrixConfig) -> None:
    features, step = config.features, config.step
    if features.sequence.channels:
        SequencePlan.of(config)
    if not config.channels:
        return
    named = [("decision.every", config.decision.every), ("features.peer_window", features.peer_window)]
    named += [("features.windows", window) for window in features.windows]
    if features.sequence.channels:
        named.append(("features.sequence.step", features.sequence.step))
    for name, value in named:
        if value % step:
            raise InputError(
                f"{format_duration(value)} is not a multiple of the dataset's step of {format_duration(step)}",
                f"parameter {name}, dataset {dataset.place}",
                "Choose a multiple, or import the dataset with another telemetry.step.",
            )


def _write(build: Build, engine: Engine, progress: Progress | None) -> None:
    order, config, folder = build.order, build.order.config, build.order.folder
    samples, rows = [work.samples for work in build.work], [part.rows for part in build.parts]
    done, total = 0, sum(samples) + len(build.keys)
    written: list[MatrixPart] = []

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    def wrote(number: int, part: MatrixPart | None) -> None:
        written.extend([] if part is None else [part])
        advance(rows[number])

    advance(0)  # rows and plan are worked out
    engine.run(
        partial(run_bucket, order), _largest_first(samples), lambda number, _: advance(samples[number]), max_workers=8
    )
    engine.run(partial(run_part, order), _largest_first(rows), wrote, max_workers=4)
    shutil.rmtree(folder / "buckets", ignore_errors=True)
    if config.features.sequence.channels:
        write_sequences(build.dataset, build.fleet, config, folder)
    for table, name in zip(build.known.tables, (EVENTS_NAME, INVENTORY_NAME), strict=True):
        pq.write_table(table, folder / name, compression="zstd")
    built_from = BuiltFrom.of(build.dataset, settings=settings_digest(config), part_length=build.known.times.length)
    write_bytes(folder / BUILT_FROM_NAME, built_from.encode())
    parts = _all_parts(build, written)
    config = replace(config, columns=build.plan.columns, sources=tuple(build.dataset.meta.sources))
    counts = {
        "rows": sum(part.rows for part in parts),
        "augmented": sum(part.augmented for part in parts),
        "features": len(build.plan.columns),
    }
    write_bytes(folder / META_NAME, MatrixMeta(order.digest, config, counts, parts).encode())


def _largest_first(sizes: Sequence[int]) -> list[int]:
    """Order tasks so that no large one is begun when the others are nearly done, and the other cores then wait."""
    return sorted(range(len(sizes)), key=lambda number: -sizes[number])


def _all_parts(build: Build, written: list[MatrixPart]) -> tuple[MatrixPart, ...]:
    """Take over the parts that hold as they are; give all of them, in order of time."""
    folder, parts = build.order.folder, list(written)
    for part in written:
        if not (folder / part.file).exists():
            raise InputError(
                f"a worker wrote {part.file} where this process does not see it",
                str(folder.parent),
                "Give every machine of the cluster the same folders under the same paths.",
            )
    if build.existing is not None:
        for file in build.existing.parts.keys() - {part.file for part in build.parts}:
            build.existing.take_over(file, folder)
            parts.append(build.existing.parts[file])
    return tuple(sorted(parts, key=lambda part: part.file))
