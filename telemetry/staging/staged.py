"""Staged tables as an import source: reading and checks of staged files, and assignment of their events."""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from foundation.errors import InputError
from foundation.instants import to_ms
from telemetry.dataset.channels import Channel, with_rollups
from telemetry.dataset.schema import EVENTS, INSTANT, conform, ms_of
from telemetry.importing.batch import Batch, unstorable_rows
from telemetry.importing.events import NOT_SEEN_YET, parse_events, place_events
from telemetry.importing.ingest import Ingest
from telemetry.importing.instants import WRONG_CLOCK, times_of
from telemetry.importing.inventory import InstallationIndex, unit_of
from telemetry.importing.jobs import read_jobs
from telemetry.importing.mapping import TableMapping
from telemetry.importing.quarantine import Quarantine, row_text
from telemetry.staging.folder import KINDS, SAMPLE_KEYS, STAGED_EVENTS, Kind, StagingFolder, lay_out
from telemetry.staging.inventory import collapse, from_samples, from_staged, no_runs

_LOG = logging.getLogger(__name__)

SETTLING_STEPS: Final = 2
"""Rows of this many latest steps wait for the next compaction: sources lag, and a step is rolled up only once."""

AHEAD: Final = timedelta(hours=1)
"""Tolerance for times in the future; beyond it the clock is wrong."""

EARLIEST: Final = datetime(2016, 1, 1, tzinfo=UTC)
"""A row before this has an unset clock: DCGM did not exist yet."""

_KEYS: Final = frozenset({*SAMPLE_KEYS.names, "sample_count"})
_INSTANTS: Final = frozenset({"timestamp", "known_at", "seen_at"})
_EVENT_TEXTS: Final = ("node", "gpu", "code", "detail", "source", "pci_bus_id")
_TABLES: Final[Mapping[Kind, str]] = {
    "samples": "samples",
    "events": "events",
    "inventory": "observations",
    "jobs": "jobs",
}


@dataclass(slots=True)
class Waiting:
    """The staged files of one compaction.

    ``quarantine``: receives unusable rows.
    ``files``: files to compact, by kind.
    ``undeclared``: undeclared channels; files with them keep waiting.
    ``held_back``: number of rows that are too new.
    ``refused``: number of invalid files, which were moved away.
    ``observations``: observations in all rows to compact, see :func:`telemetry.staging.inventory.merge_observations`.
    ``events``: events, with the columns of :data:`STAGED_EVENTS`. ``jobs``: batches of jobs.
    """

    staging: StagingFolder
    channels: Mapping[str, Channel]
    step: timedelta
    now: datetime
    delay: timedelta
    quarantine: Quarantine = field(default_factory=Quarantine)
    files: dict[Kind, list[Path]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    undeclared: set[str] = field(default_factory=set)
    held_back: int = 0
    refused: int = 0
    observations: pd.DataFrame = field(default_factory=no_runs)
    events: list[pd.DataFrame] = field(default_factory=list)
    jobs: list[Batch] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def settled_until(self) -> datetime:
        """End of the last step whose rows are assumed to be complete."""
        since_epoch = (self.now - SETTLING_STEPS * self.step) - datetime(1970, 1, 1, tzinfo=UTC)
        return datetime(1970, 1, 1, tzinfo=UTC) + (since_epoch // self.step) * self.step

    def unsettled(self, ms: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return the mask of times in unsettled steps, without times of a wrong clock, which would never settle."""
        return (ms > to_ms(self.settled_until)) & (ms <= to_ms(self.now + AHEAD))

    def wrong_clock(self, ms: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return the mask of times that only a wrong clock can produce."""
        return (ms < to_ms(EARLIEST)) | (ms > to_ms(self.now + AHEAD))

    def read_files(self) -> None:
        """Read all staged files; move invalid files away, and re-stage rows that are too new."""
        sampled: list[pd.DataFrame] = []
        frames: list[pd.DataFrame] = []
        for kind in KINDS:
            for path in self.staging.waiting(kind):
                try:
                    table = pq.read_table(path)
                    self._check(kind, table)
                except FileNotFoundError:
                    continue
                except (pa.ArrowException, OSError, ValueError, KeyError, OverflowError) as error:
                    self._refuse(path, error)
                    continue
                self.quarantine.read("staged files")
                if kind == "samples":
                    settled = self._settled(path, table)
                    if settled is None:
                        self.quarantine.waiting("staged files", "their rows", 1, path.name)
                        continue
                    sampled.append(from_samples(settled))
                elif kind == "inventory":
                    frames.append(from_staged(self._usable(kind, path, table, "seen_at")))
                elif kind == "events":
                    self.events.append(self.read_events(path, table))
                else:
                    batch = self._batch(kind, path, table)
                    batch.keep_good()
                    self.jobs.append(batch)
                self.quarantine.used("staged files")
                self.files[kind].append(path)
        full = [frame for frame in (*frames, collapse(sampled)) if len(frame)]
        self.observations = pd.concat(full, ignore_index=True) if full else no_runs()

    def read_events(self, path: Path, table: pa.Table) -> pd.DataFrame:
        """Return the valid events of a staged table, parsed like any other table of events."""
        batch = self._batch("events", path, table)
        known = [*STAGED_EVENTS.names, "since_ms"]
        batch, rows = parse_events(batch, TableMapping(), known, self.delay, self.counts, _EVENT_TEXTS)
        has_wrong_clock = self.wrong_clock(rows["timestamp"]) | (
            rows["known_at"] > to_ms(self.now + AHEAD + self.delay)
        )
        batch.refuse(WRONG_CLOCK, has_wrong_clock)
        frame = pd.DataFrame({name: rows[name] for name in STAGED_EVENTS.names})
        for name in ("timestamp", "known_at"):
            frame[name] = times_of(rows[name])
        since = batch.table.column("since_ms").to_numpy() if "since_ms" in batch.table.column_names else np.nan
        return frame.assign(since_ms=since)[batch.valid]

    def _usable(self, kind: Kind, path: Path, table: pa.Table, instant: str) -> pa.Table:
        batch = self._batch(kind, path, table)
        batch.columns = {name: name for name in table.column_names}
        instants = batch.instants(instant)
        assert instants is not None
        batch.refuse(WRONG_CLOCK, instants.ok & self.wrong_clock(instants.ms))
        self.quarantine.used(batch.kind, int(batch.valid.sum()))
        return table.filter(pa.array(batch.valid))

    def _batch(self, kind: Kind, path: Path, table: pa.Table) -> Batch:
        """Return a staged table as a batch, like any other file."""
        self.quarantine.read_rows(_TABLES[kind], path, table.num_rows)
        batch = Batch(path, _TABLES[kind], np.arange(1, table.num_rows + 1), table, self.quarantine)
        batch.refuse_unstorable()
        return batch

    def _check(self, kind: Kind, table: pa.Table) -> None:
        columns = table.slice(0, 0)  # rows are checked individually later
        for name, type_ in zip(columns.schema.names, columns.schema.types, strict=True):
            if name in _INSTANTS and type_ != INSTANT:
                raise ValueError(f"column {name!r} is of type {type_}, not {INSTANT}")
        if kind != "samples":
            lay_out(kind, columns, self.channels)
            return
        channels = [name for name in table.column_names if name not in _KEYS]
        lay_out(kind, columns.drop_columns(channels), self.channels)
        if not channels:
            raise ValueError("it has no known channel")
        for name in channels:
            kind = table.schema.field(name).type
            if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
                raise ValueError(f"column {name!r} holds no numbers")

    def _settled(self, path: Path, table: pa.Table) -> pa.Table | None:
        """Return the rows to compact that count as observations; None if the whole file keeps waiting.

        Rows that are too new are staged again. The rows are accounted for when the file is read again for ingestion.
        """
        unknown = set(table.column_names) - _KEYS - set(with_rollups(self.channels))
        self.undeclared |= unknown
        if unknown:
            self._wait(f"a declaration of {min(unknown)} under `channels:`", table.num_rows, path)
            return None
        ms = table.column("timestamp").cast(pa.int64()).fill_null(0).to_numpy()
        is_unsettled = self.unsettled(ms)
        self.held_back += int(is_unsettled.sum())
        if is_unsettled.all():
            self._wait("the end of their step", table.num_rows, path)
            return None
        storable = ~unstorable_rows(table)
        if is_unsettled.any():
            digest = hashlib.sha256(f"{path.parent.name}/{path.name}".encode()).hexdigest()[:24]
            name = f"rest-{digest}-{to_ms(self.settled_until) // 1000}"
            self.staging.stage("samples", table.filter(pa.array(is_unsettled & storable)), name=name)
        return table.filter(pa.array(~is_unsettled & storable & ~self.wrong_clock(ms)))

    def _wait(self, reason: str, number: int, path: Path) -> None:
        self.quarantine.read("samples", number)
        self.quarantine.waiting("samples", reason, number, path.name)

    def _refuse(self, path: Path, error: Exception) -> None:
        self.quarantine.read("staged files")
        self.quarantine.left_out("staged files", "cannot be read", 1, f"{path.name}: {error}")
        try:
            target = self.staging.put_aside(path, "refused")
        except (OSError, InputError) as problem:
            _LOG.error("%s is invalid and cannot be moved: %s", path, problem)
        else:
            _LOG.error("%s is invalid, moved to %s: %s", path, target, error)
        self.refused += 1


STAGED_ROLE: Final = "staged"
PENDING_COLUMNS: Final = (*STAGED_EVENTS.names, "since_ms")
"""Columns of pending events: the staged columns, and since when they wait."""

_NO_GPU: Final = "no gpu at its PCI address"


@dataclass(slots=True)
class Staged:
    """Staged tables as a source; see :class:`telemetry.importing.ingest.Source`.

    ``staged``: file names stored in the dataset atomically, so that an interrupted compaction is never repeated.
    ``twins``: maps an identity shared by GPUs of several nodes, and a node, to the GPU on that node.
    """

    samples: Sequence[Path]
    rules: TableMapping
    unsettled: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]] | None
    inventory: pd.DataFrame
    placed: pd.DataFrame
    batches: Sequence[Batch]
    tables: Mapping[str, pa.Table]
    staged: tuple[str, ...]
    now: datetime
    twins: Mapping[tuple[str, str], str]

    def installations(self, ingest: Ingest) -> InstallationIndex:
        """Return the complete inventory."""
        unit = "gpu" if self.inventory.empty else unit_of(self.inventory)
        return InstallationIndex(self.inventory, unit, shared=self.twins)

    def events(self, ingest: Ingest, installations: InstallationIndex) -> list[pd.DataFrame]:
        """Return the assigned events."""
        ingest.quarantine.used("events", len(self.placed))
        return [self.placed]

    def jobs(self, ingest: Ingest, installations: InstallationIndex) -> list[pd.DataFrame]:
        """Return the staged jobs on known nodes."""
        if not self.batches:
            return []
        jobs = read_jobs(self.batches, TableMapping(), installations, self.now + AHEAD)
        ingest.quarantine.used("jobs", len(jobs))
        return [jobs]

    def state(self) -> Mapping[str, pa.Table] | None:
        """Return the state for the next compaction."""
        return self.tables

    def entries(self, old: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the sources with these staged files instead of those of the last compaction."""
        entries = [entry for entry in old if entry.get("role") != STAGED_ROLE]
        return entries + [{"role": STAGED_ROLE, "name": name} for name in self.staged]

    def observed(self) -> Sequence[datetime]:
        """Return no times in addition to the rows."""
        return ()


@dataclass(frozen=True, slots=True)
class Placed:
    """Events to compact, pending events (with ``since_ms``), and the number of XIDs compacted without a GPU."""

    events: pd.DataFrame
    waiting: pd.DataFrame
    without_gpu: int


def place_staged(
    events: pd.DataFrame,
    installations: pd.DataFrame,
    twins: Mapping[tuple[str, str], str],
    waited_ms: float,
    quarantine: Quarantine,
) -> Placed:
    """Assign events to nodes and GPUs; events without a match stay pending for a while.

    ``installations``: a missing ``installed_at`` means "always there". ``twins``: see :class:`Staged`.
    ``waited_ms``: events that have waited since before this time are no longer pending.
    """
    known = installations.assign(installed_at=installations["installed_at"].fillna(pd.Timestamp(0, tz="UTC")))
    index = InstallationIndex(known, unit_of(known), shared=twins)
    columns = ("node", "gpu", "type", "pci_bus_id")
    text = {name: events[name].astype(object).where(events[name].notna(), None).to_numpy(copy=True) for name in columns}
    by_address = pd.isna(text["gpu"]) & ~pd.isna(text["pci_bus_id"])
    reasons = place_events(text, ms_of(events["timestamp"]), index)
    placed = events.assign(node=text["node"], gpu=text["gpu"])
    unlocated = by_address & pd.isna(text["gpu"])
    # If no GPU has an address, waiting is useless: assign the event to its node immediately.
    may_come = index.unit == "gpu" and bool(known["pci_bus_id"].notna().any())
    unseen = np.isin(reasons.astype(str), NOT_SEEN_YET) | (unlocated & may_come)
    waits = unseen & (events["since_ms"] > waited_ms).to_numpy()
    for reason in sorted(set(reasons[waits])):
        chosen = waits & (reasons == reason)
        example = row_text(events[chosen].iloc[0].dropna().drop("since_ms").to_dict())
        quarantine.waiting("events", reason or _NO_GPU, int(chosen.sum()), example)
    for reason in sorted(set(reasons[~waits]) - {""}):
        rows = events.loc[~waits & (reasons == reason), list(STAGED_EVENTS.names)]
        quarantine.set_aside_frame(reason, "events", Path("staged"), rows)
    used = ~waits & (reasons == "")
    return Placed(
        events=placed.loc[used, EVENTS.names].reset_index(drop=True),
        waiting=events.loc[waits, list(PENDING_COLUMNS)].reset_index(drop=True),
        without_gpu=int((unlocated & used & (events["type"] == "xid").to_numpy()).sum()),
    )


def pending_table(frame: pd.DataFrame) -> pa.Table:
    """Return pending events as a table of staged events with ``since_ms``."""
    since = frame["since_ms"] if "since_ms" in frame else pd.Series(np.nan, index=frame.index)
    table = conform(frame.reindex(columns=STAGED_EVENTS.names), STAGED_EVENTS)
    return table.append_column("since_ms", pa.array(since.to_numpy(np.float64)))


def as_pending(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate events with the columns of pending events, without duplicates."""
    stamps = dict.fromkeys(("timestamp", "known_at"), "datetime64[ms, UTC]")
    full = [frame.reindex(columns=PENDING_COLUMNS).astype({**stamps, "since_ms": float}) for frame in frames]
    return pd.concat(full, ignore_index=True).drop_duplicates(STAGED_EVENTS.names, ignore_index=True)
