"""Building and extending the feature matrix of a dataset, bucket by bucket."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter, ValidationError

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
from features.matrix.grid import decision_times
from features.matrix.matrix import FeatureMatrix
from features.matrix.meta import EVENTS_NAME, INVENTORY_NAME, META_NAME, MatrixConfig, MatrixMeta, MatrixPart
from features.matrix.parts import read_file
from features.matrix.sequences import ARRAY_NAME, SequencePlan, write_sequences
from features.vocabulary import FeatureColumn
from foundation.durations import format_duration
from foundation.errors import InputError
from foundation.files import (
    FolderSwap,
    building_path,
    disk_errors,
    link_or_copy,
    recover_folder,
    refuse_other_content,
    write_bytes,
)
from foundation.running import Progress
from foundation.times import NEVER, duration_ms, instant_ms, milliseconds
from telemetry.dataset.layout import DAY_MS
from telemetry.dataset.store import Dataset, SampleFile

BUILT_FROM_NAME = "built-from.json"
"""File in the matrix folder that records its inputs."""

_NEWEST_RUNS = 2  # of each bucket; digested day by day, because they still grow


@dataclass(frozen=True, slots=True)
class BuiltFrom:
    """Fingerprint of the inputs of a matrix, except events and inventory, which it stores in full.

    ``part_length``: milliseconds.
    ``layout``: how the dataset's samples are divided among files.
    ``files``: SHA-256 of each sample file, by its path in the dataset.
    ``days``: for files of the newest runs, the digest of each day, see :func:`telemetry.dataset.parquet.day_digests`.
    """

    settings: str
    part_length: int
    layout: dict[str, Any]
    span: tuple[datetime, datetime]
    files: dict[str, str]
    days: dict[str, dict[int, str]]

    @classmethod
    def of(cls, dataset: Dataset, *, settings: str, part_length: int) -> "BuiltFrom":
        """Take the fingerprint of a dataset."""
        files = sorted(dataset.sample_files(), key=lambda file: file.path)
        newest: dict[int, set[int]] = {}
        for file in files:
            newest.setdefault(file.bucket, set()).add(file.run)
        recent = {(bucket, run) for bucket, runs in newest.items() for run in sorted(runs)[-_NEWEST_RUNS:]}
        days = {file.path: dataset.day_digests(file) for file in files if (file.bucket, file.run) in recent}
        return cls(
            settings=settings,
            part_length=part_length,
            layout=_layout(dataset),
            span=dataset.meta.span,
            files={file.path: file.sha256 for file in files},
            days={path: digests for path, digests in days.items() if digests is not None},
        )

    @classmethod
    def read(cls, folder: Path) -> "BuiltFrom | None":
        """Read the file in a matrix folder; None if it is missing or unusable."""
        try:
            return _BUILT_FROM.validate_json((folder / BUILT_FROM_NAME).read_bytes())
        except (OSError, ValidationError):
            return None

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        return _BUILT_FROM.dump_json(self, indent=1) + b"\n"

    def first_other_sample(self, dataset: Dataset) -> int:
        """Return the instant (ms) before which the samples of a dataset are unchanged.

        :data:`~foundation.times.NEVER`: all are unchanged; ``-NEVER``: unknown.
        """
        if self.layout != _layout(dataset):
            return -NEVER
        files = {file.path: file for file in dataset.sample_files()}
        changed = [
            path for path in {*self.files, *files} if path not in files or self.files.get(path) != files[path].sha256
        ]
        return min((self._first_other_day(path, files.get(path), dataset) for path in changed), default=NEVER)

    def _first_other_day(self, path: str, current: SampleFile | None, dataset: Dataset) -> int:
        """Return the start of the first changed day of a file, or of its run if its days are unknown."""
        old_days: Mapping[int, str] | None = self.days.get(path) if path in self.files else {}
        new_days = {} if current is None else dataset.day_digests(current)
        if old_days is None or new_days is None:
            runs = dataset.meta.runs
            return -NEVER if runs.days is None else runs.begin_ms(runs.of_file(path.rpartition("/")[2]))
        changed_days = [day for day in {*old_days, *new_days} if old_days.get(day) != new_days.get(day)]
        return min(changed_days) * DAY_MS if changed_days else NEVER


_BUILT_FROM = TypeAdapter(BuiltFrom)


def first_other_row(
    built_from: BuiltFrom,
    dataset: Dataset,
    *,
    delay: timedelta,
    events: tuple[pa.Table, pa.Table],
    inventory: tuple[pa.Table, pa.Table],
) -> int:
    """Return the instant (ms) before which all known facts are unchanged, and so rows are reusable.

    ``events``, ``inventory``: of the existing matrix and the current ones.
    Returns: ``-NEVER``: no row is reusable; :data:`~foundation.times.NEVER`: all are.
    """
    if built_from.span[0] != dataset.meta.span[0]:  # start of the grid
        return -NEVER
    instants = [_first_other_event(*events), _first_other_installation(*inventory)]
    sample = built_from.first_other_sample(dataset)
    instants.append(sample + duration_ms(delay) if abs(sample) < NEVER else sample)
    if built_from.span[1] != dataset.meta.span[1]:
        instants.append(instant_ms(min(built_from.span[1], dataset.meta.span[1])) + 1)  # end of the grid
    return min(instants)


def _layout(dataset: Dataset) -> dict[str, Any]:
    meta = dataset.meta
    return {"unit": meta.unit, "buckets": meta.buckets, "run_days": meta.run_days, "columns": dataset.schema.names}


def _first_other_event(old_events: pa.Table, new_events: pa.Table) -> int:
    """Return the first known-at time after the common prefix of two tables sorted by known-at time."""
    if old_events.column_names != new_events.column_names:
        return -NEVER
    common_rows = min(old_events.num_rows, new_events.num_rows)
    old_prefix, new_prefix = old_events.slice(0, common_rows), new_events.slice(0, common_rows)
    if not old_prefix.equals(new_prefix):
        old, new = (table.to_pandas().astype(object) for table in (old_prefix, new_prefix))
        is_unchanged = ((old == new) | (old.isna() & new.isna())).all(axis=1).to_numpy()
        common_rows = common_rows if is_unchanged.all() else int(is_unchanged.argmin())
    remaining = [
        table.column("known_at").slice(common_rows).cast(pa.int64()).to_numpy() for table in (old_events, new_events)
    ]
    return min((int(known.min()) for known in remaining if known.size), default=NEVER)


def _first_other_installation(old_inventory: pa.Table, new_inventory: pa.Table) -> int:
    """Return the start of the first changed installation, or its end if only that changed."""
    if old_inventory.column_names != new_inventory.column_names:
        return -NEVER
    sides = [table.to_pandas().astype(object).drop_duplicates() for table in (old_inventory, new_inventory)]
    names = [name for name in old_inventory.column_names if name != "removed_at"]
    installations = pd.concat([frame.assign(side=side) for side, frame in enumerate(sides)], ignore_index=True)
    changed = installations.drop_duplicates([*names, "removed_at"], keep=False)
    if changed.empty:
        return NEVER
    times = {name: milliseconds(pd.to_datetime(changed[name], utc=True)) for name in ("installed_at", "removed_at")}
    starts = np.where(times["installed_at"] == NEVER, -NEVER, times["installed_at"])
    of_installation = changed.groupby(names, dropna=False)["side"]
    only_ends = (of_installation.transform("size") == 2) & (of_installation.transform("nunique") == 2)
    return int(np.where(only_ends, times["removed_at"], starts).min())


class Augmentation(Protocol):
    """The two training parameters that determine the augmented rows."""

    @property
    def augmentation(self) -> int:
        """Extra times per incident."""

    @property
    def negative_ratio(self) -> int:
        """Negatives per positive in a training set."""


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
    """Build the feature matrix of a dataset, or extend or return the existing one at ``out``.

    ``out``: folder of the matrix. It is built in a sibling folder and swapped in; a killed run leaves the old one
    intact.
    ``progress``: called before the first bucket, and after each bucket and part.
    ``engine``: runs the buckets and parts; default: this machine's cores. The result is byte-identical.
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
    """Open the matrix at ``out`` if it is complete."""
    recover_folder(out)
    if not (out / META_NAME).exists():
        refuse_other_content(out, META_NAME, "a feature matrix")
        return None
    try:
        matrix = FeatureMatrix.open(out)
    except InputError:
        return None  # other version or damaged: rebuild from scratch
    names = [part.file for part in matrix.meta.parts]
    if matrix.config.features.sequence.channels:
        names.append(ARRAY_NAME)
    return matrix if all((out / name).exists() for name in names) else None


def _extending(order: BuildOrder, dataset: Dataset, existing: FeatureMatrix, known: BuildInputs) -> BuildOrder:
    """Return an order that reuses as much as possible of the matrix at its target."""
    built_from, old, new = BuiltFrom.read(existing.path), existing.config, order.config
    if built_from is None or (built_from.settings, built_from.part_length) != (
        settings_digest(new),
        known.times.length,
    ):
        return order
    if not _mean_the_same(old.columns, known.plan.columns) or (old.channels, old.step) != (new.channels, new.step):
        return order
    events, inventory = known.tables
    since = first_other_row(
        built_from,
        dataset,
        delay=new.features.delay,
        events=(read_file(existing.path / EVENTS_NAME), events),
        inventory=(read_file(existing.path / INVENTORY_NAME), inventory),
    )
    begins = decision_times(new.decision, new.span)
    if not len(begins) or since <= instant_ms(begins[0]):
        return order
    return replace(order, base=existing.digest, since=since)


def _mean_the_same(old_columns: Sequence[FeatureColumn], new_columns: Sequence[FeatureColumn]) -> bool:
    """Return whether column values keep their meaning: new categories only append codes."""
    if len(old_columns) != len(new_columns):
        return False
    pairs = zip(old_columns, new_columns, strict=True)
    return [replace(new, categories=new.categories[: len(old.categories)]) for old, new in pairs] == list(old_columns)


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
    n_done, total = 0, sum(samples) + len(build.keys)
    written: list[MatrixPart] = []

    def advance(count: int) -> None:
        nonlocal n_done
        n_done += count
        if progress is not None:
            progress(n_done, total)

    def wrote(number: int, part: MatrixPart | None) -> None:
        written.extend([] if part is None else [part])
        advance(rows[number])

    advance(0)  # rows and plan are ready
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
    """Order tasks by size, so that no large one starts last and leaves cores idle."""
    return sorted(range(len(sizes)), key=lambda number: -sizes[number])


def _all_parts(build: Build, written: list[MatrixPart]) -> tuple[MatrixPart, ...]:
    """Link the reusable parts unchanged, and return all parts in order of time."""
    folder, parts = build.order.folder, list(written)
    for part in written:
        if not (folder / part.file).exists():
            raise InputError(
                f"a worker wrote {part.file}, which this process cannot see",
                str(folder.parent),
                "Give every machine of the cluster the same folders under the same paths.",
            )
    if build.existing is not None:
        for file in build.existing.parts.keys() - {part.file for part in build.parts}:
            link_or_copy(build.existing.folder / file, folder / file)
            parts.append(build.existing.parts[file])
    return tuple(sorted(parts, key=lambda part: part.file))
