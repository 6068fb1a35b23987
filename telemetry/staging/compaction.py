"""Atomic compaction of staged files into the dataset.

One swap brings in the new rows, the list of staged files that they came from, and the state for the next compaction in
the dataset's folder ``compaction``: observations, operators' and derived inventories, pending events. If a run is
killed after the swap, the next one finds the compacted files in that list and only removes them. Readers keep reading
the old dataset during the swap (:class:`foundation.files.ReadLease`), and collectors keep writing.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from foundation.errors import InputError
from foundation.files import recover_folder, take_lock
from foundation.instants import to_ms
from foundation.text import quantity
from telemetry.accounting import Accounting
from telemetry.config import TelemetrySection
from telemetry.dataset.channels import Channel
from telemetry.dataset.meta import META_NAME, DatasetMeta, instant_text
from telemetry.dataset.schema import INVENTORY, conform
from telemetry.dataset.store import Dataset
from telemetry.importing.importer import check_step
from telemetry.importing.ingest import STATE_FOLDER, Ingest
from telemetry.importing.inventory import (
    end_overlaps,
    merge_installations,
    read_inventory,
    unit_of,
    with_old_starts,
)
from telemetry.importing.mapping import ImportMapping, TableMapping
from telemetry.importing.sampling import interval_of_staged, step_for
from telemetry.staging.folder import KINDS, STAGED_EVENTS, StagingFolder, staging_of
from telemetry.staging.inventory import (
    RUNS,
    derive_inventory,
    distinguish,
    driver_changes,
    late_nodes,
    merge_observations,
    no_runs,
    under_names,
    unify_spellings,
)
from telemetry.staging.staged import (
    AHEAD,
    EARLIEST,
    STAGED_ROLE,
    Placed,
    Staged,
    Waiting,
    as_pending,
    pending_table,
    place_staged,
)

_LOG = logging.getLogger(__name__)

PENDING: Final = timedelta(days=30)
"""How long an event waits for an unknown GPU or node to be observed.

Then it is quarantined, or assigned to its node if it names only a PCI address and the node is known.
"""

_DECLARED: Final = pa.schema([field.with_nullable(True) for field in INVENTORY])
"""All columns are nullable: an unknown installation time is derived from observations."""


_EXPECTED_DAYS: Final = 120
# A new dataset gets buckets for this many days of telemetry of the GPUs known at its creation.


@dataclass(frozen=True, slots=True)
class CompactSettings:
    """Settings of a compaction.

    ``channels``: all channels that may occur.
    ``dedupe``: events of one unit and code from several sources within this time are one event.
    ``delay``: reporting delay of events without ``known_at``.
    """

    telemetry: TelemetrySection
    channels: Mapping[str, Channel]
    dedupe: timedelta
    delay: timedelta


@dataclass(frozen=True, slots=True)
class CompactResult:
    """Result of a compaction.

    ``compacted``: number of compacted staged files, by kind; empty if there was nothing to compact.
    ``refused``: number of unreadable staged files, which were moved to ``refused/``.
    ``meta``: metadata of the current dataset; None if there is none yet.
    ``waits_for``: what remaining staged files wait for, or an empty string.
    """

    compacted: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    quarantined: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    meta: DatasetMeta | None = None
    waits_for: str = ""
    accounting: Accounting = field(default_factory=Accounting)


def compact(
    dataset: Path,
    *,
    settings: CompactSettings,
    inventory: Path | None = None,
    now: datetime,
    progress: Callable[[int, int], None] | None = None,
) -> CompactResult:
    """Compact a dataset's staged files into the dataset, which is created if it does not exist.

    ``dataset``: may be read concurrently by any number of processes.
    ``inventory``: installations from the operator (Parquet or CSV), which override observations and are stored.
    Raises ``InputError`` if another process is compacting or importing into the dataset, the step differs from the
    dataset's, or the disk is full. Nothing is lost then: the files stay for the next run.
    """
    staging = StagingFolder(staging_of(dataset), writer="compact", channels=settings.channels)
    problem, advice = "another process is compacting this dataset", "Wait until it has ended."
    with take_lock(staging.state("compact.lock"), problem, str(dataset), advice):
        recover_folder(dataset)
        staging.sweep()
        existing = Dataset.open(dataset, lease=False) if (dataset / META_NAME).exists() else None
        step = settings.telemetry.step
        if step is None:
            staged = staging.waiting("samples")
            step = step_for(interval_of_staged(staged)) if existing is None else existing.meta.step
        if existing is not None:
            check_step(existing, step)
            # files of the last compaction, if it was killed before it retired them
            compacted_names = {entry["name"] for entry in existing.meta.sources if entry.get("role") == STAGED_ROLE}
            _retire(staging, [path for path in staging.waiting() if _key(path) in compacted_names], settings, now)
        waiting = Waiting(staging, settings.channels, step, now, settings.delay)
        result = _Compaction(dataset, existing, staging, settings, now, waiting).run(inventory, progress)
        _expire(staging, settings, now)
        return result


def _key(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _retire(staging: StagingFolder, paths: list[Path], settings: CompactSettings, now: datetime) -> None:
    """Move compacted files to ``compacted/`` if raw samples are retained, otherwise delete them."""
    if not paths:
        return
    staging.remember_compacted(paths, now.timestamp())
    keep = settings.telemetry.retention.raw > timedelta(0)
    for path in paths:
        if keep:
            staging.put_aside(path, "compacted")
        else:
            path.unlink(missing_ok=True)


def _expire(staging: StagingFolder, settings: CompactSettings, now: datetime) -> None:
    oldest = now.timestamp() - settings.telemetry.retention.raw.total_seconds()
    for path in (staging.root / "compacted").glob("*/*.parquet"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < oldest:
                path.unlink()


@dataclass(slots=True)
class _Compaction:
    dataset: Path
    existing: Dataset | None
    staging: StagingFolder
    settings: CompactSettings
    now: datetime
    waiting: Waiting

    def run(self, inventory: Path | None, progress: Callable[[int, int], None] | None) -> CompactResult:
        waiting, files = self.waiting, self.waiting.files
        waiting.read_files()
        runs = merge_observations(self._state("sightings"), waiting.observations)
        previous = self._state("derived")
        declared = self._without_overlaps(self._declared(inventory, previous, runs))
        known = INVENTORY.empty_table().to_pandas() if declared is None else declared
        stored = INVENTORY.empty_table().to_pandas() if self.existing is None else self.existing.inventory()
        nodes, gpus = [*known["node"], *stored["node"]], [*stored["gpu"].dropna(), *known["gpu"].dropna()]
        runs = unify_spellings(runs, nodes, gpus)
        sightings, twins = distinguish(runs, waiting.step, stored["gpu"].dropna().tolist())
        has_strays = len(set(sightings["gpu"])) < len(set(runs["gpu"]))
        runs = under_names(sightings, twins)
        if not any(files.values()) and (inventory is None or self.existing is None):
            return self._result()
        installations = derive_inventory(runs, declared, previous)
        # A new dataset needs samples, or events of GPUs: observed nodes alone do not determine its unit.
        begins = files["samples"] or (files["events"] and installations["gpu"].notna().any())
        if (installations.empty and not has_strays) or (self.existing is None and not begins):
            self._wait_for_all()
            return self._result(waits_for="a first sample: no GPU was seen yet")
        placed = self._events(runs, installations, twins)
        installations["installed_at"] = self._starts(installations, runs, placed.events, previous)
        if (
            not any(files.values())
            and self.existing is not None
            and set(_rows(installations)) == set(_rows(self.existing.inventory()))
        ):
            return self._result()
        paths = [path for kind in KINDS for path in files[kind]]
        state = {
            "sightings": pa.Table.from_pandas(sightings, schema=RUNS, preserve_index=False),
            "pending": conform(placed.waiting, STAGED_EVENTS),
        }
        if declared is not None:
            state["given"] = conform(declared, _DECLARED)
        now = self.now
        ingest = Ingest(
            self.dataset,
            self.existing,
            waiting.step,
            self.settings.channels,
            self.settings.dedupe,
            self.settings.delay,
            now,
            waiting.quarantine,
            live=True,
            not_before_ms=to_ms(EARLIEST),
            not_after_ms=to_ms(now + AHEAD),
            progress=progress or (lambda *_: None),
            keep_from=self._keep_from(),
            expected_rows=self._expected_rows(installations),
        )
        ingest.counts.update(waiting.counts)
        ingest.counts["xids_without_a_gpu"] += placed.without_gpu
        result = ingest.run(
            Staged(
                files["samples"],
                TableMapping(),
                waiting.unsettled,
                conform(installations, INVENTORY).to_pandas(),
                placed.events,
                waiting.jobs,
                state,
                tuple(_key(path) for path in paths),
                now,
                twins,
            )
        )
        _retire(self.staging, paths, self.settings, self.now)
        compacted: dict[str, int] = {kind: len(paths) for kind, paths in files.items() if paths}
        _LOG.info(
            "compacted %s into %s", ", ".join(f"{n} files of {kind}" for kind, n in compacted.items()), self.dataset
        )
        return replace(
            self._result(),
            compacted=compacted,
            counts=result.counts,
            quarantined=result.quarantined,
            meta=result.dataset.meta,
        )

    def _wait_for_all(self) -> None:
        for name, account in self.waiting.quarantine.tables.items():
            account.used = 0
            self.waiting.quarantine.waiting(name, "a first sample", account.unaccounted)

    def _result(self, waits_for: str = "") -> CompactResult:
        waiting = self.waiting
        reasons = [waits_for] if waits_for and not waiting.held_back else []
        if waiting.held_back:
            until = instant_text(waiting.settled_until)
            reasons.append(f"their steps to be over: {quantity(waiting.held_back, 'row')} later than {until}")
        if waiting.undeclared:
            names = ", ".join(sorted(waiting.undeclared))
            reasons.append(f"a declaration of {names} under `channels:` in the parameters")
        meta = None if self.existing is None else self.existing.meta
        return CompactResult(
            refused=waiting.refused, meta=meta, waits_for="; ".join(reasons), accounting=waiting.quarantine
        )

    def _declared(self, inventory: Path | None, derived: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame | None:
        """Return the operators' installations: from ``inventory``, earlier ones, and imports since the last compaction.

        A file is complete for the units that it names, and replaces their earlier installations.
        """
        saved = self._state("given")
        declared = saved if len(saved) else None
        if self.existing is not None:
            imported_before = self.existing.inventory()
            observed = imported_before["gpu"].isin(set(runs["gpu"].dropna())) | imported_before["gpu"].isna()
            # A GPU in the dataset without observations has rows that must keep their installation.
            imported = imported_before[~(_rows(imported_before).isin(set(_rows(derived))) & observed)]
            if len(imported):
                declared = merge_installations(declared, imported.reset_index(drop=True))
        if inventory is None:
            return declared
        read, _ = read_inventory(inventory, ImportMapping().inventory, self.waiting.quarantine)
        account = self.waiting.quarantine.tables["inventory"]
        account.used = account.read - account.left_out.total()
        if declared is None:
            return read
        unit = "gpu" if read["gpu"].notna().any() else "node"
        named = declared[unit].isin(set(read[unit].dropna()))
        read = with_old_starts(declared[named], read) if named.any() else read
        return pd.concat([frame for frame in (declared[~named], read) if len(frame)], ignore_index=True)

    def _without_overlaps(self, declared: pd.DataFrame | None) -> pd.DataFrame | None:
        if declared is None:
            return None
        unit = unit_of(declared)
        installed, dropped, ended = end_overlaps(declared[declared[unit].notna()], unit)
        reason, quarantine = "in two places from the same time", self.waiting.quarantine
        quarantine.set_aside_frame(reason, "inventory", Path("inventory"), dropped, rows=0)
        self.waiting.counts["overlapping_installations_ended"] += len(ended)
        return installed

    def _events(self, runs: pd.DataFrame, installations: pd.DataFrame, twins: Mapping[tuple[str, str], str]) -> Placed:
        """Assign staged and pending events, and driver changes, to nodes and GPUs."""
        waiting, quarantine = self.waiting, self.waiting.quarantine
        pending = waiting.read_events(Path("pending"), pending_table(self._state("pending")))
        changes = driver_changes(runs)
        if self.existing is not None:
            changes = changes[~_rows(changes).isin(set(_rows(self.existing.events())))]
        quarantine.read("events", len(changes))
        frames = [pending, *waiting.events, changes]
        events = as_pending(frames)
        # Exact duplicates count as used.
        quarantine.used("events", sum(len(frame) for frame in frames) - len(events))
        events["since_ms"] = events["since_ms"].fillna(to_ms(self.now))
        return place_staged(events, installations, twins, to_ms(self.now - PENDING), quarantine)

    def _starts(
        self, installations: pd.DataFrame, runs: pd.DataFrame, events: pd.DataFrame, previous: pd.DataFrame
    ) -> pd.Series:
        """Return the start of each installation; for a GPU that was always there, the first known time.

        On a node that joined the fleet later, this is the first known time of the node.
        """
        instants = [pd.Timestamp(int(runs["first_ms"].min()), unit="ms", tz="UTC")] if len(runs) else []
        instants += [events["timestamp"].min()] if len(events) else []
        instants += [] if self.existing is None else [pd.Timestamp(self.existing.meta.span[0])]
        first = min(instants, default=pd.Timestamp(self.now)).as_unit("ms")
        joined_later = late_nodes(runs, events, unit_of(installations))
        # Earlier derived starts are kept, because retention moves the first known time.
        earlier = previous.fillna({"gpu": ""}).groupby(["gpu", "node"])["installed_at"].min().to_dict()
        starts = []
        for gpu, node in zip(installations["gpu"], installations["node"], strict=True):
            since = joined_later.get(node, first)
            starts.append(min(since, earlier.get((gpu or "", node), since)))
        return installations["installed_at"].fillna(
            pd.Series(starts, index=installations.index, dtype="datetime64[ms, UTC]")
        )

    def _keep_from(self) -> datetime | None:
        """Return the midnight before which samples expire, once the dataset exceeds the retention by a day."""
        keep = self.settings.telemetry.retention.samples
        if keep is None:
            return None
        limit = (self.now - keep).astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        if self.existing is None or self.existing.meta.span[0] < limit - timedelta(days=1):
            return limit
        return None

    def _expected_rows(self, installations: pd.DataFrame) -> int:
        days = timedelta(days=_EXPECTED_DAYS)
        keep = self.settings.telemetry.retention.samples
        span = days if keep is None else min(days, keep)
        return int(len(installations) * (span / self.waiting.step))

    def _state(self, name: str) -> pd.DataFrame:
        path = self.dataset / STATE_FOLDER / f"{name}.parquet"
        try:
            return pq.read_table(path).to_pandas()
        except FileNotFoundError:
            if name == "sightings":
                return no_runs()
            return (STAGED_EVENTS if name == "pending" else INVENTORY).empty_table().to_pandas()
        except (pa.ArrowException, OSError) as error:
            raise InputError(
                f"a state file is damaged: {error}",
                str(path),
                "Remove it: observations of GPUs then restart.",
            ) from error


_IDENTITY = ("gpu", "node", "installed_at", "removed_at", "serial", "timestamp", "type", "code")


def _rows(frame: pd.DataFrame) -> pd.Series:
    """Return each row as one string, to compare rows between frames."""
    if frame.empty:
        return pd.Series([], dtype=str)
    # String columns keep nulls through astype(str), and one null would make the whole row null.
    columns = [frame[name].astype(object) for name in _IDENTITY if name in frame]
    texts = [column.where(column.notna(), "").map(str) for column in columns]
    return texts[0].str.cat(texts[1:], sep="\0")
