"""How far the matrix that is there holds for a dataset that has grown: rows until then are taken over as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from features.times import NEVER, duration_ms, instant_ms, milliseconds
from telemetry.dataset.runs import DAY_MS
from telemetry.dataset.store import Dataset, SampleFile

BUILT_FROM_NAME = "built-from.json"
"""Name of the file in a matrix's folder."""

_NEWEST_RUNS = 2  # of each bucket: their days are known one by one, for these are the ones that grow


@dataclass(frozen=True, slots=True)
class BuiltFrom:
    """What a matrix was built from, but for events and inventory, which it holds as they are.

    ``settings``: digest of parameters and code.
    ``part_length``: length of the stretches of time that parts cover, milliseconds.
    ``layout``: how the dataset's samples are divided among files.
    ``span``: first and last instant of the dataset.
    ``files``: SHA-256 of each file of samples, by its path in the dataset.
    ``days``: for the newest runs' files the digest of each day, see :func:`telemetry.dataset.layout.day_digests`.
    """

    settings: str
    part_length: int
    layout: dict[str, Any]
    span: tuple[datetime, datetime]
    files: dict[str, str]
    days: dict[str, dict[int, str]]

    @classmethod
    def of(cls, dataset: Dataset, *, settings: str, part_length: int) -> BuiltFrom:
        """Note what a dataset is made of."""
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
    def read(cls, folder: Path) -> BuiltFrom | None:
        """Read the file in a matrix's folder; None where there is none that can be used."""
        try:
            return _BUILT_FROM.validate_json((folder / BUILT_FROM_NAME).read_bytes())
        except (OSError, ValidationError):
            return None

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        return _BUILT_FROM.dump_json(self, indent=1) + b"\n"

    def first_other_sample(self, dataset: Dataset) -> int:
        """Return an instant (ms) before which the samples of a dataset are the same.

        :data:`~features.times.NEVER` where all are, ``-NEVER`` where it is unknown.
        """
        if self.layout != _layout(dataset):
            return -NEVER
        files = {file.path: file for file in dataset.sample_files()}
        other = [
            path for path in {*self.files, *files} if path not in files or self.files.get(path) != files[path].sha256
        ]
        return min((self._first_other_day(path, files.get(path), dataset) for path in other), default=NEVER)

    def _first_other_day(self, path: str, here: SampleFile | None, dataset: Dataset) -> int:
        """Return when the first day begins on which a file is not what it was; where no days are known, its run."""
        before: Mapping[int, str] | None = self.days.get(path) if path in self.files else {}
        after = {} if here is None else dataset.day_digests(here)
        if before is None or after is None:
            runs = dataset.meta.runs
            return -NEVER if runs.days is None else runs.begin_ms(runs.of_file(path.rpartition("/")[2]))
        other = [day for day in {*before, *after} if before.get(day) != after.get(day)]
        return min(other) * DAY_MS if other else NEVER


_BUILT_FROM = TypeAdapter(BuiltFrom)


def first_other_row(
    before: BuiltFrom,
    dataset: Dataset,
    *,
    delay: timedelta,
    events: tuple[pa.Table, pa.Table],
    inventory: tuple[pa.Table, pa.Table],
) -> int:
    """Return an instant before which nothing was known that is different now: rows until then are the same.

    ``delay``: ``features.delay``.
    ``events``, ``inventory``: the existing matrix's and the present ones.
    Returns: milliseconds since 1970: rows decided before, and augmented rows established before, stay as they are.
    ``-NEVER``: none; :data:`~features.times.NEVER`: all.
    """
    if before.span[0] != dataset.meta.span[0]:  # where the grid begins
        return -NEVER
    instants = [_first_other_event(*events), _first_other_stay(*inventory)]
    sample = before.first_other_sample(dataset)
    instants.append(sample + duration_ms(delay) if abs(sample) < NEVER else sample)
    if before.span[1] != dataset.meta.span[1]:
        instants.append(instant_ms(min(before.span[1], dataset.meta.span[1])) + 1)  # where the grid ends
    return min(instants)


def _layout(dataset: Dataset) -> dict[str, Any]:
    meta = dataset.meta
    return {"unit": meta.unit, "buckets": meta.buckets, "run_days": meta.run_days, "columns": dataset.schema.names}


def _first_other_event(before: pa.Table, after: pa.Table) -> int:
    """Return when the first event was known behind the rows in which two tables, ordered by that, begin alike."""
    if before.column_names != after.column_names:
        return -NEVER
    alike = min(before.num_rows, after.num_rows)
    one, two = before.slice(0, alike), after.slice(0, alike)
    if not one.equals(two):
        old, new = (table.to_pandas().astype(object) for table in (one, two))
        same = ((old == new) | (old.isna() & new.isna())).all(axis=1).to_numpy()
        alike = alike if same.all() else int(same.argmin())
    rest = [table.column("known_at").slice(alike).cast(pa.int64()).to_numpy() for table in (before, after)]
    return min((int(known.min()) for known in rest if known.size), default=NEVER)


def _first_other_stay(before: pa.Table, after: pa.Table) -> int:
    """Return when the first stay that is not the same began, or ended, where its end alone is different."""
    if before.column_names != after.column_names:
        return -NEVER
    sides = [table.to_pandas().astype(object).drop_duplicates() for table in (before, after)]
    names = [name for name in before.column_names if name != "removed_at"]
    both = pd.concat([frame.assign(side=side) for side, frame in enumerate(sides)], ignore_index=True)
    other = both.drop_duplicates([*names, "removed_at"], keep=False)
    if other.empty:
        return NEVER
    times = {name: milliseconds(pd.to_datetime(other[name], utc=True)) for name in ("installed_at", "removed_at")}
    began = np.where(times["installed_at"] == NEVER, -NEVER, times["installed_at"])
    of_stay = other.groupby(names, dropna=False)["side"]
    only_ends = (of_stay.transform("size") == 2) & (of_stay.transform("nunique") == 2)
    return int(np.where(only_ends, times["removed_at"], began).min())
