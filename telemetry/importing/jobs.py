"""Job sources: what ran where, and when."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pandas as pd

from telemetry.dataset.schema import JOB_OPTIONS, JOBS
from telemetry.importing.columns import as_text
from telemetry.importing.inventory import Installations
from telemetry.importing.mapping import TableMapping
from telemetry.importing.quarantine import Quarantine
from telemetry.importing.reading import read_batches


def read_jobs(
    file: Path, mapping: TableMapping, stays: Installations, quarantine: Quarantine, not_after: datetime
) -> pd.DataFrame:
    """Read a table of jobs; ``job``, ``node`` and ``started_at`` are required.

    ``not_after``: a job that starts later has a wrong clock; one that ends later still runs.
    Raises ``InputError`` if a required column is missing, a column is unknown, or all starts are naive.
    """
    frames: list[pd.DataFrame] = []
    for batch in read_batches(file, "jobs", quarantine):
        batch.resolve(mapping, [*JOBS.names, *JOB_OPTIONS], "job", "node", "started_at")
        content: dict[str, object] = {name: batch.texts(name) for name in ("job", "node", "gpu", "outcome")}
        content["started_at"] = batch.times("started_at", not_after, optional=False, is_end=False)
        for name in ("ended_at", "checkpointed_at"):
            content[name] = batch.times(name, not_after, optional=True, is_end=True)
        for name in ("gpus", *(name for name in JOB_OPTIONS if name in batch)):
            texts = pd.Series(as_text(batch.column(name), len(batch.rows)))
            numbers = pd.to_numeric(texts, errors="coerce").astype("float64").round()
            wrong = numbers.notna() & ~numbers.between(0, 2**31 - 1)
            batch.refuse(f"impossible number in {name}", wrong.to_numpy())
            content[name] = numbers.mask(wrong).astype("Int32")
        frame = pd.DataFrame(content)
        frame["node"] = frame["node"].map(stays.names.written, na_action="ignore")
        known_gpu = stays.codes(frame["gpu"].to_numpy(dtype=object)) >= 0
        batch.refuse("missing job or node", (frame["job"].isna() | frame["node"].isna()).to_numpy())
        batch.refuse("job ends before it starts", (frame["ended_at"] < frame["started_at"]).to_numpy())
        batch.refuse("unknown node", ~frame["node"].isin(list(stays.node_since)).to_numpy())
        batch.refuse("unknown gpu", frame["gpu"].notna().to_numpy() & ~known_gpu)
        frame["gpu"] = [stays.gpu(gpu) if isinstance(gpu, str) else None for gpu in frame["gpu"]]
        frames.append(frame[batch.good])
    return pd.concat(frames, ignore_index=True)


def merge_jobs(old: pd.DataFrame | None, new: pd.DataFrame) -> pd.DataFrame:
    """Add newer rows to older ones; a row is known by job, node, gpu and start, and the newer one has its end."""
    both = [frame for frame in (old, new) if frame is not None and len(frame)]
    if not both:
        return new
    key = ["job", "node", "gpu", "started_at"]
    return pd.concat(both, ignore_index=True).drop_duplicates(key, keep="last", ignore_index=True)
