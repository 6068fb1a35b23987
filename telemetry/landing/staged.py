"""Staged tables as a source of rows: their events on nodes and GPUs, and the installations that they show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from telemetry.dataset.schema import EVENTS, conform, ms_of
from telemetry.importing.batch import Batch
from telemetry.importing.ingest import Ingest
from telemetry.importing.inventory import Installations, unit_of
from telemetry.importing.jobs import read_jobs
from telemetry.importing.mapping import TableMapping
from telemetry.importing.placing.events import NOT_SEEN_YET, place_events
from telemetry.importing.quarantine import Quarantine, row_text
from telemetry.landing.tables import LANDED_EVENTS
from telemetry.landing.waiting import AHEAD

LANDED_ROLE: Final = "landed"
"""Role, in a dataset's sources, of the staged files that its last compaction took."""

PENDING_COLUMNS: Final = (*LANDED_EVENTS.names, "since_ms")
"""Columns of events that wait: as they were staged, and since when they wait."""

_NO_GPU: Final = "no gpu at its PCI address"


@dataclass(slots=True)
class Staged:
    """Staged tables as a source; see :class:`telemetry.importing.ingest.Source`.

    ``landed``: names that the dataset keeps in the same step, so that a compaction cut short is never done twice.
    """

    samples: Sequence[Path]
    rules: TableMapping
    unsettled: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]] | None
    inventory: pd.DataFrame
    placed: pd.DataFrame
    batches: Sequence[Batch]
    tables: Mapping[str, pa.Table]
    landed: tuple[str, ...]
    now: datetime

    def stays(self, ingest: Ingest) -> Installations:  # noqa: ARG002
        """Return the inventory, which is the whole one."""
        return Installations(self.inventory, unit_of(self.inventory))

    def events(self, ingest: Ingest, stays: Installations) -> list[pd.DataFrame]:  # noqa: ARG002
        """Return the events that were placed."""
        ingest.quarantine.accounting.used("events", len(self.placed))
        return [self.placed]

    def jobs(self, ingest: Ingest, stays: Installations) -> list[pd.DataFrame]:
        """Return the staged jobs on known nodes."""
        if not self.batches:
            return []
        jobs = read_jobs(self.batches, TableMapping(), stays, self.now + AHEAD)
        ingest.counts["jobs_read"] += len(jobs)
        ingest.quarantine.accounting.used("jobs", len(jobs))
        return [jobs]

    def state(self) -> Mapping[str, pa.Table] | None:
        """Return what the next compaction must know."""
        return self.tables

    def entries(self, old: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Remember the staged files instead of those of the last compaction."""
        kept = [entry for entry in old if entry.get("role") != LANDED_ROLE]
        return kept + [{"role": LANDED_ROLE, "name": name} for name in self.landed]

    def observed(self) -> Sequence[datetime]:
        """Return nothing beyond the rows."""
        return ()


@dataclass(frozen=True, slots=True)
class Placed:
    """Events to compact, events that wait (with ``since_ms``), and XIDs to compact without the GPU of their address."""

    events: pd.DataFrame
    waiting: pd.DataFrame
    without_gpu: int


def place_staged(events: pd.DataFrame, stays: pd.DataFrame, waited_ms: float, quarantine: Quarantine) -> Placed:
    """Find the node and GPU of each event, and separate those that may still find it.

    ``stays``: a missing ``installed_at`` is "always there".
    ``waited_ms``: an event that waits since before has waited long enough.
    """
    known = stays.assign(installed_at=stays["installed_at"].fillna(pd.Timestamp(0, tz="UTC")))
    where = Installations(known, unit_of(known))
    columns = ("node", "gpu", "type", "pci_bus_id")
    text = {name: events[name].astype(object).where(events[name].notna(), None).to_numpy(copy=True) for name in columns}
    by_address = pd.isna(text["gpu"]) & ~pd.isna(text["pci_bus_id"])
    reasons = place_events(text, ms_of(events["timestamp"]), where)
    placed = events.assign(node=text["node"], gpu=text["gpu"])
    without = by_address & pd.isna(text["gpu"])
    # Where no GPU has an address, none will come by itself, and its node should know of the event at once.
    may_come = where.unit == "gpu" and bool(known["pci_bus_id"].notna().any())
    unseen = np.isin(reasons.astype(str), NOT_SEEN_YET) | (without & may_come)
    waits = unseen & (events["since_ms"] > waited_ms).to_numpy()
    for reason in sorted(set(reasons[waits])):
        chosen = waits & (reasons == reason)
        example = row_text(events[chosen].iloc[0].dropna().drop("since_ms").to_dict())
        quarantine.accounting.waiting("events", reason or _NO_GPU, int(chosen.sum()), example)
    for reason in sorted(set(reasons[~waits]) - {""}):
        rows = events.loc[~waits & (reasons == reason), list(LANDED_EVENTS.names)]
        quarantine.add_frame(reason, "events", Path("staged"), rows)
    used = ~waits & (reasons == "")
    return Placed(
        events=placed.loc[used, EVENTS.names].reset_index(drop=True),
        waiting=events.loc[waits, list(PENDING_COLUMNS)].reset_index(drop=True),
        without_gpu=int((without & used & (events["type"] == "xid").to_numpy()).sum()),
    )


def pending_table(frame: pd.DataFrame) -> pa.Table:
    """Return events that waited as a table of staged events, with ``since_ms``."""
    since = frame["since_ms"] if "since_ms" in frame else pd.Series(np.nan, index=frame.index)
    table = conform(frame.reindex(columns=LANDED_EVENTS.names), LANDED_EVENTS)
    return table.append_column("since_ms", pa.array(since.to_numpy(np.float64)))


def as_pending(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Return events with the columns of those that wait, equal ones once."""
    stamps = dict.fromkeys(("timestamp", "known_at"), "datetime64[ms, UTC]")
    full = [frame.reindex(columns=PENDING_COLUMNS).astype({**stamps, "since_ms": float}) for frame in frames]
    return pd.concat(full, ignore_index=True).drop_duplicates(LANDED_EVENTS.names, ignore_index=True)
