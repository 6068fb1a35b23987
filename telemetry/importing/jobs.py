"""Job sources: what ran where, and when."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.dataset.schema import JOB_OPTIONS, JOBS
from telemetry.importing.batch import Batch
from telemetry.importing.inventory import InstallationIndex
from telemetry.importing.mapping import TableMapping
from telemetry.values.numbers import ANY_UNIT, read_numbers

_TRES = r"(?:^|[,/ ])gpu(?:[:/][^:=,(]+)?[:=](?P<number>\d+)"
_MOST = {"gpus": 100_000, "min_gpus": 1_000_000}
"""Numbers above are no GPUs."""


def read_jobs(
    batches: Iterable[Batch], mapping: TableMapping, stays: InstallationIndex, not_after: datetime
) -> pd.DataFrame:
    """Read a table of jobs; ``job``, ``node`` and ``started_at`` are required.

    ``not_after``: a job that starts later has a wrong clock; one that ends later still runs.
    Raises ``InputError`` if a required column is missing, a column is unknown, or all starts are naive.
    """
    frames: list[pd.DataFrame] = []
    for batch in batches:
        batch.resolve(mapping, [*JOBS.names, *JOB_OPTIONS], "job", "node", "started_at")
        content: dict[str, object] = {name: batch.texts(name) for name in ("job", "node", "gpu", "outcome")}
        content["started_at"] = batch.times("started_at", not_after, optional=False, is_end=False)
        for name in ("ended_at", "checkpointed_at"):
            content[name] = batch.times(name, not_after, optional=True, is_end=True)
        for name in ("gpus", *(name for name in JOB_OPTIONS if name in batch)):
            numbers = _counts(batch, name)
            wrong = numbers.notna() & ~numbers.between(0, _MOST.get(name, 2**31 - 1))
            batch.refuse(f"impossible number in {name}", wrong.to_numpy())
            content[name] = numbers.mask(wrong).astype("Int32")
        frame = pd.DataFrame(content)
        frame["node"] = frame["node"].map(stays.names.written, na_action="ignore")
        frame["gpu"] = [
            stays.gpu(gpu, node) if isinstance(gpu, str) else None
            for gpu, node in frame[["gpu", "node"]].itertuples(index=False)
        ]
        known_gpu = stays.codes(frame["gpu"].to_numpy(dtype=object)) >= 0
        batch.refuse("missing job or node", (frame["job"].isna() | frame["node"].isna()).to_numpy())
        batch.refuse("job ends before it starts", (frame["ended_at"] < frame["started_at"]).to_numpy())
        batch.refuse("unknown node", ~frame["node"].isin(list(stays.node_since)).to_numpy())
        batch.refuse("unknown gpu", frame["gpu"].notna().to_numpy() & ~known_gpu)
        frames.append(frame[batch.good])
    return pd.concat(frames, ignore_index=True)


def _counts(batch: Batch, name: str) -> pd.Series:
    """Return a column of whole numbers; shares are rounded up, for a failure hits a job with half a GPU as well.

    ``gpu:a100:4`` and ``cpu=8,gres/gpu=4``, as Slurm writes them, are 4.
    """
    column = batch.column(name)
    if column is None:
        return pd.Series(np.nan, index=range(len(batch.rows)), dtype="float64")
    column = column.cast(pa.string())
    of_gpus = pc.struct_field(pc.extract_regex(column, _TRES), "number")
    numbers = read_numbers(pc.coalesce(of_gpus, column), ANY_UNIT, decimal=batch.decimal)
    places = np.flatnonzero(numbers.unreadable & batch.good)
    details = [f"{name} = {value}" for value in column.take(pa.array(places)).to_pylist()]
    batch.set_aside(f"not a number in {name}", places, details, rows=0)
    values = np.where(numbers.values > 0, np.ceil(numbers.values), numbers.values)
    return pd.Series(values, dtype="float64")


def merge_jobs(old: pd.DataFrame | None, new: pd.DataFrame) -> pd.DataFrame:
    """Add newer rows to older ones; a row is known by job, node, gpu and start, and the newer one has its end."""
    both = [frame for frame in (old, new) if frame is not None and len(frame)]
    if not both:
        return new
    key = ["job", "node", "gpu", "started_at"]
    return pd.concat(both, ignore_index=True).drop_duplicates(key, keep="last", ignore_index=True)
