"""Job sources: what ran where, and when."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pandas as pd

from telemetry.dataset.schema import JOBS
from telemetry.importing.columns import KEY_ALIASES, as_text, mapped_text, require, resolve_columns
from telemetry.importing.instants import WRONG_CLOCK
from telemetry.importing.inventory import Installations
from telemetry.importing.mapping import TableMapping
from telemetry.importing.quarantine import Quarantine
from telemetry.importing.reading import expand_sources, read_batches

_TIMES = ("started_at", "ended_at", "checkpointed_at")
_TEXTS = ("job", "node", "gpu", "outcome")


def read_jobs(
    path: Path, mapping: TableMapping, stays: Installations, quarantine: Quarantine, not_after: datetime
) -> pd.DataFrame:
    """Read a table of jobs; ``job``, ``node`` and ``started_at`` are required.

    ``not_after``: a job that starts later has a wrong clock; one that ends later still runs.
    Raises ``InputError`` if a required column is missing, a column is unknown, or all starts are naive.
    """
    frames: list[pd.DataFrame] = []
    for file in expand_sources((path,), "jobs"):
        for batch in read_batches(file, "jobs", quarantine):
            length = batch.table.num_rows
            names = batch.table.column_names
            columns = resolve_columns(names, mapping, JOBS.names, KEY_ALIASES, str(file))
            require(columns, ["job", "node", "started_at"], names, str(file))
            content: dict[str, object] = {}
            for name in _TEXTS:
                content[name], dropped = mapped_text(columns, batch.table, name, mapping)
                batch.good &= ~dropped
            for name in _TIMES:
                instants = batch.instants(columns, name, mapping.time, optional=name != "started_at")
                if instants is None:
                    content[name] = pd.Series(pd.NaT, index=range(length), dtype="datetime64[ms, UTC]")
                    continue
                ahead = instants.after(not_after)
                if name == "started_at":
                    batch.refuse(WRONG_CLOCK, ahead)
                content[name] = instants.series(instants.ok & ~ahead)
            gpus = as_text(columns.get(batch.table, "gpus"), length)
            content["gpus"] = pd.to_numeric(pd.Series(gpus), errors="coerce").round().astype("Int32")
            frame = pd.DataFrame(content)
            known_gpu = stays.codes(frame["gpu"].to_numpy(dtype=object)) >= 0
            batch.refuse("missing job or node", (frame["job"].isna() | frame["node"].isna()).to_numpy())
            batch.refuse("job ends before it starts", (frame["ended_at"] < frame["started_at"]).to_numpy())
            batch.refuse("unknown node", ~frame["node"].isin(list(stays.node_since)).to_numpy())
            batch.refuse("unknown gpu", frame["gpu"].notna().to_numpy() & ~known_gpu)
            frame["gpu"] = [stays.parents.get(gpu, gpu) for gpu in frame["gpu"]]
            frames.append(frame[batch.good][JOBS.names])
    return pd.concat(frames, ignore_index=True) if frames else JOBS.empty_table().to_pandas()


def merge_jobs(old: pd.DataFrame | None, new: pd.DataFrame) -> pd.DataFrame:
    """Add newer rows to older ones; a row is known by job, node, gpu and start, and the newer one says how it ended."""
    both = [frame for frame in (old, new) if frame is not None and len(frame)]
    if not both:
        return new
    merged = pd.concat(both, ignore_index=True)
    key = {name: merged[name].astype("str").fillna("") for name in ("job", "node", "gpu")}
    repeated = pd.DataFrame({**key, "t": merged["started_at"]}).duplicated(keep="last").to_numpy()
    return merged[~repeated].reset_index(drop=True)
