"""Building the feature matrix of a dataset, bucket by bucket."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pyarrow.parquet as pq

from features.config import DecisionSection, FeatureSection, LabelSection
from features.engine import Engine, LocalEngine
from features.errors import InputError
from features.matrix.build_inputs import (
    BUILT_FROM_NAME,
    BuildOrder,
    BuiltFrom,
    digest_of,
    first_other_row,
    group_digests,
    rows_digest,
    settings_digest,
)
from features.matrix.build_tasks import (
    Build,
    BuildTask,
    Known,
    leave_builds,
    slab_times,
)
from features.matrix.grid import decision_times
from features.matrix.matrix import FeatureMatrix
from features.matrix.meta import (
    EVENTS_NAME,
    INVENTORY_NAME,
    META_NAME,
    MatrixConfig,
    MatrixMeta,
    MatrixPart,
)
from features.matrix.part_files import read_file, read_part_facts
from features.matrix.spill import Spill
from features.sequences import ARRAY_NAME, SequencePlan, write_sequences
from features.times import instant_ms
from features.vocabulary import FeatureColumn
from telemetry.atomic import FolderSwap, building_path, disk_errors, recover_folder, write_bytes
from telemetry.config import format_duration
from telemetry.dataset.store import Dataset

HELD_ROWS = 65_536
"""A build of so few rows keeps what the buckets gave in memory: 80 MB with every group."""

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
    """Build the feature matrix of a dataset, or return the one that stands at ``out`` if it is the same.

    ``dataset``: with or without telemetry.
    ``out``: the matrix's folder. It is built beside it and swapped in; a killed run leaves what was there.
    ``training``: ``training.augmentation`` and ``training.negative_ratio``.
    ``progress``: called with (samples read and rows written, all of them): before the first bucket, and after each
    bucket and part.
    ``engine``: who runs the buckets and parts; default: this machine's cores. The matrix is the same, byte for byte.
    Raises ``InputError`` if ``out`` holds something else, a parameter does not fit the dataset, no unit is in service
    at any decision time, the disk is full, or a machine of a cluster does not see the same folders.
    """
    out = Path(out)
    engine = engine or LocalEngine()
    order = BuildOrder(
        dataset=dataset.pinned,
        dataset_digest=dataset.digest,
        target=Path(os.path.realpath(out)),
        folder=building_path(Path(os.path.realpath(out))),
        decision=decision,
        labels=labels,
        features=features,
        augmentation=training.augmentation,
        negative_ratio=training.negative_ratio,
        seed=seed,
    )
    order = replace(order, digest=digest_of(order))
    existing = _existing(out)
    if existing is not None and existing.digest == order.digest:
        return existing
    _check(dataset, decision, features)
    with FolderSwap(out) as swap, disk_errors(out):
        known = Known.of(order, dataset)
        if existing is not None:
            order = _extending(order, dataset, existing, known)
            order = order if order.base else _taking(order, existing, known)
        spill = Spill(swap.target, order.spill_key)
        try:
            build = Build(replace(order, token=spill.token), dataset, spill, known)
            if engine.in_process and len(build.keys) <= HELD_ROWS:
                spill.hold()
            _write(build, engine, progress or _silent)
        except OSError:
            spill.remove()  # a full disk may be full of it
            raise
        except Exception:
            if not spill.holds_any():
                spill.remove()
            raise  # a cluster or a storage that was lost: what is finished is kept, as when we are killed
        finally:
            engine.everywhere(leave_builds)
        spill.remove()
        swap.commit()
    return FeatureMatrix.open(out)


def _silent(done: int, total: int) -> None:
    """Report nothing."""


def _existing(out: Path) -> FeatureMatrix | None:
    """Open the matrix that stands, if it is whole."""
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
    names = [part.file for part in matrix.meta.parts]
    if matrix.config.features.sequence.channels:
        names.append(ARRAY_NAME)
    return matrix if all((out / name).exists() for name in names) else None


def _extending(order: BuildOrder, dataset: Dataset, existing: FeatureMatrix, known: Known) -> BuildOrder:
    """Let an order take over what it can of the matrix that stands at its target."""
    before = BuiltFrom.read(existing.path)
    expected = settings_digest(order), slab_times(order, known.inventory).length
    if before is None or (before.settings, before.slab) != expected:
        return order
    config, meta = existing.config, dataset.meta
    if not _mean_the_same(config.columns, known.plan.columns) or (config.channels, config.step) != (
        meta.channels,
        meta.step,
    ):
        return order
    events, inventory = known.tables
    since = first_other_row(
        before,
        dataset,
        delay=order.features.delay,
        events=(read_file(existing.path / EVENTS_NAME), events),
        inventory=(read_file(existing.path / INVENTORY_NAME), inventory),
    )
    begins = decision_times(order.decision, meta.span)
    if not len(begins) or since <= instant_ms(begins[0]):
        return order
    return replace(order, base=existing.digest, since=since)


def _taking(order: BuildOrder, existing: FeatureMatrix, known: Known) -> BuildOrder:
    """Let an order take over groups that nothing has changed for, of a matrix of the same rows."""
    before = BuiltFrom.read(existing.path)
    expected = rows_digest(order), slab_times(order, known.inventory).length
    if before is None or (before.rows, before.slab) != expected:
        return order
    now = group_digests(order, known.plan.panes.reach)
    taken = tuple(group for group in order.features.groups if before.groups.get(group) == now[group])
    return replace(order, base=existing.digest, taken=taken) if taken else order


def _mean_the_same(before: Sequence[FeatureColumn], after: Sequence[FeatureColumn]) -> bool:
    """Tell whether values in columns mean what they meant: new categories have codes behind the old ones."""
    known = [replace(new, categories=new.categories[: len(old.categories)]) for old, new in zip(before, after)]  # noqa: B905
    return len(before) == len(after) and known == list(before)


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
                f"parameter {name}, dataset {dataset.place}",
                "Choose a multiple, or import the dataset with another telemetry.step.",
            )


def _write(build: Build, engine: Engine, progress: Progress) -> None:
    order, dataset, folder = build.order, build.dataset, build.order.folder
    features = order.features
    config = MatrixConfig(
        decision=order.decision,
        labels=order.labels,
        features=features,
        augmentation=order.augmentation,
        negative_ratio=order.negative_ratio,
        seed=order.seed,
        unit=dataset.meta.unit,
        step=dataset.meta.step,
        span=dataset.meta.span,
        channels=dataset.meta.channels,
        columns=build.columns,
        dataset_digest=dataset.digest,
        sources=tuple(dataset.meta.sources),
    )
    samples, rows = [each.samples for each in build.work], [each.rows for each in build.slabs]
    steps = _Steps(progress, sum(samples) + len(build.keys))
    steps.done(0)  # rows and plan are worked out
    engine.run(
        BuildTask(build, "bucket"),
        _largest_first(samples),
        lambda number, _: steps.done(samples[number]),
        max_workers=8,
    )
    engine.run(
        BuildTask(build, "part"), _largest_first(rows), lambda number, _: steps.done(rows[number]), max_workers=4
    )
    if features.sequence.channels:
        windows = SequencePlan.of(features.sequence, dataset.meta.channels, delay=features.delay)
        write_sequences(dataset, build.fleet, windows, order.decision, folder, digest=order.digest)
    for table, name in zip(build.known.tables, (EVENTS_NAME, INVENTORY_NAME), strict=True):
        pq.write_table(table, folder / name, compression="zstd")
    slab = slab_times(order, build.known.inventory).length
    built_from = BuiltFrom.of(
        dataset,
        settings=settings_digest(order),
        rows=rows_digest(order),
        groups=group_digests(order, build.plan.panes.reach),
        slab=slab,
    )
    write_bytes(folder / BUILT_FROM_NAME, built_from.encode())
    parts = _gather_parts(build)
    counts = {
        "rows": sum(part.rows for part in parts),
        "augmented": sum(part.augmented for part in parts),
        "features": len(build.columns),
    }
    write_bytes(folder / META_NAME, MatrixMeta(order.digest, config, counts, parts).encode())


def _largest_first(sizes: Sequence[int]) -> list[int]:
    """Order tasks so that no large one is begun when the others are nearly done, and the other cores then wait."""
    return sorted(range(len(sizes)), key=lambda number: -sizes[number])


def _gather_parts(build: Build) -> tuple[MatrixPart, ...]:
    """Take over the parts that hold as they are; give all of them, in order of time."""
    folder, written = build.order.folder, {slab.file for slab in build.slabs}
    found = [read_part_facts(folder / file) for file in written if (folder / file).exists()]
    if build.existing is not None:
        for file in build.existing.parts.keys() - written:
            build.existing.take_over(file, folder)
            found.append(build.existing.parts[file])
    return tuple(sorted(found, key=lambda part: part.file))


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
