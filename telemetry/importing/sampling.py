"""Sampling interval of a source, and the step of the dataset imported from it."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from foundation.errors import InputError
from telemetry.dataset.channels import Channel, by_source_name
from telemetry.dataset.meta import META_NAME
from telemetry.dataset.store import Dataset
from telemetry.importing.columns import KEY_ALIASES, as_text, resolve_columns
from telemetry.importing.files.sources import expand_sources
from telemetry.importing.files.tables import read_batches
from telemetry.importing.mapping import TableMapping
from telemetry.importing.quarantine import Quarantine
from telemetry.importing.samples.rollup import median_gaps

STEPS: Final = tuple(timedelta(minutes=minutes) for minutes in (10, 15, 20, 30, 60, 120, 180, 240, 360, 720, 1440))
"""Possible steps of a new dataset, ascending; each divides a day. Finer samples are rolled up to the first."""

_JITTER: Final = 0.95
"""Tolerance for scrape jitter: a step need only be this share of the interval."""

_ROWS: Final = 200_000
_FILES: Final = 5
"""Number of files read, evenly spaced among those given."""


def step_for(interval: timedelta | None) -> timedelta:
    """Return the shortest step not shorter than an interval; the first of :data:`STEPS` if it is unknown."""
    if interval is None:
        return STEPS[0]
    return next((step for step in STEPS if interval * _JITTER <= step), STEPS[-1])


def sampling_interval(units: Sequence[str] | npt.NDArray[Any], ms: npt.NDArray[np.int64]) -> timedelta | None:
    """Return the median over units of each unit's median interval; None if no unit has two samples.

    ``units``, ``ms``: unit and time (milliseconds) of each sample.
    """
    codes, _ = pd.factorize(np.asarray(units))
    medians = median_gaps(codes, ms)
    return timedelta(milliseconds=float(medians.median())) if len(medians) else None


def interval_of_files(
    samples: Sequence[Path], mapping: TableMapping, channels: Mapping[str, Channel]
) -> timedelta | None:
    """Estimate the sampling interval from the first rows of a few files; None if they do not suffice."""
    files = expand_sources(tuple(samples), "samples")
    places = sorted({*np.linspace(0, len(files) - 1, min(_FILES, len(files))).astype(int)})
    intervals = [_interval_of_file(files[place], mapping, channels) for place in places]
    seconds = [interval.total_seconds() for interval in intervals if interval is not None]
    return timedelta(seconds=float(np.median(seconds))) if seconds else None


def interval_of_staged(files: Sequence[Path]) -> timedelta | None:
    """Estimate the sampling interval of staged samples; None if they do not suffice."""
    # A staged file may contain a single scrape, so consecutive files are read together.
    tables: list[pa.Table] = []
    for path in reversed(files):
        with suppress(pa.ArrowException, OSError):  # compaction sets damaged files aside
            tables.append(pq.read_table(path, columns=["timestamp", "node", "gpu"]).slice(0, _ROWS))
        if sum(table.num_rows for table in tables) >= _ROWS:
            break
    if not tables:
        return None
    staged = pa.concat_tables(tables, promote_options="permissive")
    ms = staged.column("timestamp").cast(pa.int64()).to_numpy()
    return sampling_interval(_units([staged.column("node"), staged.column("gpu")], len(ms)), ms)


def _units(columns: Iterable[pa.ChunkedArray | None], length: int) -> npt.NDArray[np.int64]:
    """Return a code per row, equal for rows with equal names."""
    units = np.zeros(length, np.int64)
    for column in columns:
        codes, names = pd.factorize(as_text(column, length))
        units = units * (len(names) + 1) + codes
    return units


def _interval_of_file(file: Path, mapping: TableMapping, channels: Mapping[str, Channel]) -> timedelta | None:
    aliases = by_source_name(channels) | dict(KEY_ALIASES)
    batch = next(iter(read_batches(file, "samples", Quarantine())), None)
    if batch is None:
        return None
    keys = ("timestamp", "node", "gpu")
    try:
        batch.columns = resolve_columns(
            batch.table.column_names, mapping, keys, str(file), ["timestamp"], aliases=aliases, extras=True
        )
        batch.mapping = mapping
        instants = batch.instants("timestamp")
    except InputError:
        return None  # the import reports the error
    assert instants is not None
    units = _units([batch.column("node"), batch.column("gpu")], len(batch.rows))
    valid = instants.ok
    return sampling_interval(units[valid], instants.ms[valid])


def step_of(out: Path, samples: Sequence[Path], mapping: TableMapping, channels: Mapping[str, Channel]) -> timedelta:
    """Return the step of the dataset at ``out``, or if there is none, the step of a new one with these samples."""
    if (out / META_NAME).exists():
        return Dataset.open(out, lease=False).meta.step
    return step_for(interval_of_files(samples, mapping, channels) if samples else None)
