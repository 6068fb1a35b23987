"""Building the feature matrix of a dataset, bucket by bucket."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pyarrow.parquet as pq

from features.build_tasks import Build, BuildOrder, BuildTask, digest_of, leave_builds, part_name
from features.config import DecisionSection, FeatureSection, LabelSection
from features.engine import Engine, LocalEngine
from features.errors import InputError
from features.matrix import META_NAME, FeatureMatrix, MatrixConfig, MatrixMeta
from features.sequences import ARRAY_NAME, SequencePlan, write_sequences
from features.spill import Spill
from telemetry.atomic import FolderSwap, building_path, disk_errors, recover_folder, write_bytes
from telemetry.config import format_duration
from telemetry.schema import EVENTS, INVENTORY, conform
from telemetry.store import Dataset

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
    engine : Engine, optional
        Who runs the buckets and parts; default: this machine's cores. The matrix is the same, byte for byte.

    Returns
    -------
    FeatureMatrix

    Raises
    ------
    InputError
        If ``out`` holds something else, a parameter does not fit the dataset, no unit is in service at any decision
        time, the disk is full, or a machine of a cluster does not see the same folders.
    """
    out = Path(out)
    engine = engine or LocalEngine()
    order = BuildOrder(
        dataset=dataset.path.resolve(),
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
    digest = digest_of(order)
    standing = _standing(out, digest)
    if standing is not None:
        return standing
    _check(dataset, decision, features)
    with FolderSwap(out) as swap, disk_errors(out):
        spill = Spill(swap.target, digest)
        try:
            build = Build(replace(order, digest=digest, token=spill.token), dataset, spill)
            _write(build, engine, progress or _silent)
        except Exception:
            spill.remove()  # what was killed goes on; what failed may have failed by it
            raise
        finally:
            engine.everywhere(leave_builds)
        spill.remove()
        swap.commit()
    return FeatureMatrix.open(out)


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
        columns=build.plan.columns,
        dataset_digest=dataset.digest,
        sources=tuple(dataset.meta.sources),
    )
    told = _Steps(progress, sum(each.samples for each in build.work) + len(build.keys))
    engine.each(
        BuildTask(build, "bucket"),
        range(len(build.work)),
        lambda number, _: told.done(build.work[number].samples),
        most=8,
    )
    engine.each(
        BuildTask(build, "part"),
        range(len(build.slabs)),
        lambda number, _: told.done(build.slabs[number].rows),
        most=4,
    )
    if features.sequence.channels:
        windows = SequencePlan.of(features.sequence, dataset.meta.channels, delay=features.delay)
        write_sequences(dataset, build.fleet, windows, order.decision, folder, digest=order.digest)
    pq.write_table(conform(build.events, EVENTS), folder / "events.parquet", compression="zstd")
    pq.write_table(conform(build.inventory, INVENTORY), folder / "inventory.parquet", compression="zstd")
    counts = {
        "rows": len(build.keys),
        "augmented": int(build.augmented.sum()),
        "features": len(build.plan.columns),
    }
    parts = tuple((part_name(number), slab.rows) for number, slab in enumerate(build.slabs))
    write_bytes(folder / META_NAME, MatrixMeta(order.digest, config, counts, parts).encode())


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
