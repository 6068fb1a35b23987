"""Job sources: what ran where, and when."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import numpy as np
import pandas as pd

from telemetry.dataset.schema import JOBS
from telemetry.importing.columns import (
    KEY_ALIASES,
    as_text,
    map_values,
    require,
    resolve_columns,
)
from telemetry.importing.instants import (
    OK,
    PROBLEMS,
    WRONG_CLOCK,
    parse_instants,
)
from telemetry.importing.inventory import naive_error
from telemetry.importing.mapping import TableMapping
from telemetry.importing.quarantine import Quarantine
from telemetry.importing.reading import expand_sources, read_batches
from telemetry.importing.stays import Stays

_TIMES = ("started_at", "ended_at", "checkpointed_at")
_TEXTS = ("job", "node", "gpu", "outcome")


def read_jobs(
    path: Path, mapping: TableMapping, stays: Stays, quarantine: Quarantine, not_after: datetime
) -> pd.DataFrame:
    """Read a table of jobs; ``job``, ``node`` and ``started_at`` are required.

    ``quarantine``: takes rows without a required value, with an unusable instant, that end before they start, or on an
    unknown node or GPU.
    ``not_after``: a job that starts later has a wrong clock; one that ends later still runs.
    Returns: in the layout of :data:`telemetry.dataset.schema.JOBS`.
    Raises ``InputError`` if a required column is missing, a column is unknown, or all starts are naive.
    """
    frames: list[pd.DataFrame] = []
    for file in expand_sources((path,), "jobs"):
        for batch in read_batches(file, "jobs", quarantine):
            length = batch.table.num_rows
            names = batch.table.column_names
            columns = resolve_columns(names, mapping, JOBS.names, KEY_ALIASES, str(file))
            require(columns, ["job", "node", "started_at"], names, str(file))
            good = np.ones(length, dtype=bool)
            content: dict[str, object] = {}
            for name in _TEXTS:
                text = as_text(columns.get(batch.table, name), length)
                if name in mapping.values:
                    text, dropped = map_values(text, mapping.values[name])
                    good &= ~dropped
                content[name] = text
            for name in _TIMES:
                column = columns.get(batch.table, name)
                content[name] = pd.Series(pd.NaT, index=range(length), dtype="datetime64[ms, UTC]")
                if column is None:
                    continue
                instants = parse_instants(column, mapping.time, f"{file}, column {name!r}")
                if length and np.all(np.isin(instants.status, (1, 3))) and np.any(instants.status == 3):
                    raise naive_error(f"{file}, column {name!r}", "jobs", column)
                for problem, reason in PROBLEMS.items():
                    chosen = good & (instants.status == problem)
                    if problem != 1 or name == "started_at":
                        quarantine.add_rows(f"{reason} in {name}", "jobs", file, chosen, batch.rows, batch.table)
                        good &= ~chosen
                values = pd.Series(pd.to_datetime(instants.ms, unit="ms", utc=True)).dt.as_unit("ms")
                ahead = (instants.status == OK) & (instants.ms > not_after.timestamp() * 1000)
                if name == "started_at":
                    quarantine.add_rows(WRONG_CLOCK, "jobs", file, good & ahead, batch.rows, batch.table)
                    good &= ~ahead
                content[name] = values.where((instants.status == OK) & ~ahead)
            gpus = as_text(columns.get(batch.table, "gpus"), length)
            content["gpus"] = pd.to_numeric(pd.Series(gpus), errors="coerce").round().astype("Int32")
            frame = pd.DataFrame(content)
            known_gpu = stays.codes(frame["gpu"].to_numpy(dtype=object)) >= 0
            for reason, rejected in (
                ("missing job or node", (frame["job"].isna() | frame["node"].isna()).to_numpy()),
                ("job ends before it starts", (frame["ended_at"] < frame["started_at"]).to_numpy()),
                ("unknown node", ~frame["node"].isin(list(stays.node_since)).to_numpy()),
                ("unknown gpu", frame["gpu"].notna().to_numpy() & ~known_gpu),
            ):
                chosen = rejected & good
                quarantine.add_rows(reason, "jobs", file, chosen, batch.rows, batch.table)
                good &= ~chosen
            frame["gpu"] = [stays.parents.get(gpu, gpu) for gpu in frame["gpu"]]
            frames.append(frame[good][JOBS.names])
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
