"""Idempotent import of files into a dataset.

Importing the same files again changes nothing. Importing others adds to the dataset: samples of a stored unit and time
are duplicates (or quarantined, if they differ), raw samples of a step that is already rolled up are quarantined, events
are deduplicated together with the stored ones, installations of the same GPU, node and ``installed_at`` are replaced,
and so are jobs.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from foundation.durations import format_duration
from foundation.errors import InputError
from foundation.files import recover_folder
from foundation.running import Progress
from telemetry.dataset.channels import Channel
from telemetry.dataset.files import sha256_of
from telemetry.dataset.meta import META_NAME
from telemetry.dataset.schema import INVENTORY, Unit, ms_of
from telemetry.dataset.store import Dataset
from telemetry.identity.nodes import NodeNames
from telemetry.importing.columns import GPU_PLACE, KEY_ALIASES, resolve_columns, source_names
from telemetry.importing.events import read_events
from telemetry.importing.files.sources import SourceFile, expand_sources, new_sources
from telemetry.importing.files.tables import column_names, read_batches
from telemetry.importing.ingest import ImportResult, Ingest
from telemetry.importing.instants import WRONG_CLOCK
from telemetry.importing.inventory import InstallationIndex, end_overlaps, merge_installations, read_inventory, unit_of
from telemetry.importing.jobs import read_jobs
from telemetry.importing.mapping import ImportMapping, TableMapping, load_mapping
from telemetry.importing.quarantine import Quarantine
from telemetry.importing.suggestion.questions import refuse_open

AHEAD: Final = timedelta(days=1)
"""Tolerance for clock skew and wrong time zones."""

DEFAULT_MAX_LOSS: Final = 0.05
_LOG = logging.getLogger(__name__)
_NAMED = 50
_NO_LIMIT: Final = -float("inf")


def import_dataset(
    out: Path,
    *,
    inventory: Path | None = None,
    step: timedelta,
    channels: Mapping[str, Channel],
    dedupe: timedelta,
    delay: timedelta,
    samples: Sequence[Path] = (),
    events: Sequence[Path] = (),
    jobs: Path | None = None,
    mapping: Path | None = None,
    progress: Progress | None = None,
    max_loss: float = DEFAULT_MAX_LOSS,
    keep_from: datetime | None = None,
    now: datetime | None = None,
) -> ImportResult:
    """Import files into a dataset.

    ``inventory``: installations; if no row names a GPU, nodes are the units. Without it, the dataset's are used, and
    samples that name node and GPU add to them.
    ``channels``: all known channels, see :func:`telemetry.dataset.channels.resolve_channels`.
    ``dedupe``: span within which reports of several sources on one unit, type and code are one event.
    ``delay``: reporting delay of events without a ``known_at``.
    ``samples``, ``events``: files or folders. Events may be kernel logs (``.log``, ``.txt``, ``.jsonl`` of the
    journal).
    ``max_loss``: maximum lost share of a file's rows or a column's values.
    ``now``: rows dated more than :data:`AHEAD` after it are quarantined.
    Raises ``InputError`` if a source is unusable as a whole; the dataset at ``out`` is unchanged then.
    """
    out = Path(out)
    recover_folder(out)
    existing = Dataset.open(out, lease=False) if (out / META_NAME).exists() else None
    rules = load_mapping(mapping)
    files_by_role = {
        "inventory": [inventory] if inventory else [],
        "samples": samples,
        "events": events,
        "jobs": [jobs] if jobs else [],
    }
    sources = _sources(files_by_role, rules, step, channels, dedupe, delay)
    refuse_open(files_by_role, rules, channels)
    if existing is not None:
        check_step(existing, step)
    fresh = new_sources(sources, existing)
    if not fresh and existing is not None:
        return ImportResult(existing, {}, {}, changed=False)
    now = now or datetime.now(UTC)
    files = {role: [source.path for source in fresh if source.role == role] for role in files_by_role}
    source = _Files(files["samples"], rules.samples, rules, files, inventory, fresh, now)
    ingest = Ingest(
        out,
        existing,
        step,
        channels,
        dedupe,
        delay,
        now,
        Quarantine(max_loss),
        live=False,
        not_before_ms=_NO_LIMIT,
        not_after_ms=(now + AHEAD).timestamp() * 1000,
        progress=progress or (lambda *_: None),
        keep_from=keep_from,
    )
    distinct = {(source.role, source.entry["sha256"]) for source in sources}
    ingest.counts["source_files_given_twice"] = len(sources) - len(distinct)
    return ingest.run(source)


def check_step(existing: Dataset, step: timedelta) -> None:
    """Raise ``InputError`` if a dataset's step differs."""
    if existing.meta.step != step:
        old, new = format_duration(existing.meta.step), format_duration(step)
        raise InputError(
            f"the dataset has a step of {old}, but the new data have a step of {new}",
            f"{existing.path}, telemetry.step",
            "Set telemetry.step to the dataset's, or give an empty folder.",
        )


def _sources(
    files: Mapping[str, Sequence[Path]],
    rules: ImportMapping,
    step: timedelta,
    channels: Mapping[str, Channel],
    dedupe: timedelta,
    delay: timedelta,
) -> list[SourceFile]:
    def digest(content: object) -> str:
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]

    ranges = digest([[channel.name, channel.kind, channel.low, channel.high] for channel in channels.values()])
    times = {"step": format_duration(step), "dedupe": format_duration(dedupe), "delay": format_duration(delay)}
    settings: dict[str, dict[str, Any]] = {
        "samples": {"step": times["step"], "delay": times["delay"], "channels": ranges},
        "events": {"dedupe": times["dedupe"], "delay": times["delay"]},
        "inventory": {},
        "jobs": {},
    }
    for role, read in settings.items():
        sections = [getattr(rules, role), *([rules.kernel_log] if role == "events" else [])]
        read["mapping"] = digest([*(section.model_dump(mode="json") for section in sections), rules.nodes.aliases])
    sources = []
    for role, paths in files.items():
        for file in expand_sources(tuple(paths), role):
            entry = {"role": role, "name": file.name, "bytes": file.stat().st_size, "sha256": sha256_of(file)}
            sources.append(SourceFile(role, file, entry | {"settings": settings[role]}))
    return sources


@dataclass(slots=True)
class _Files:
    """Files as a :class:`Source`; ``fresh`` are those not imported yet."""

    samples: Sequence[Path]
    rules: TableMapping
    mapping: ImportMapping
    files: Mapping[str, Sequence[Path]]
    inventory: Path | None
    fresh: Sequence[SourceFile]
    now: datetime
    unsettled: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]] | None = None

    def installations(self, ingest: Ingest) -> InstallationIndex:
        """Return the dataset's installations, updated by those of the file."""
        existing = None if ingest.existing is None else ingest.existing.inventory()
        if self.inventory is None:
            if existing is None:
                unit = self._unit_of_samples(ingest.channels)
                no_rows = INVENTORY.empty_table().to_pandas()
                return InstallationIndex(no_rows, unit, aliases=self.mapping.nodes.aliases, is_observed=True)
            return InstallationIndex(existing, unit_of(existing), aliases=self.mapping.nodes.aliases)
        # A known inventory is read again for its MIG names; its bad rows were counted by its first import.
        is_new = bool(self.files["inventory"])
        quarantine = ingest.quarantine if is_new else Quarantine()
        names = NodeNames((), self.mapping.nodes.aliases)
        frame, parents = read_inventory(self.inventory, self.mapping.inventory, quarantine, self.now + AHEAD, names)
        if self.mapping.span is not None:  # a removal at the end of the span was not observed
            end = pd.Timestamp(self.mapping.span[1])  # a date means the day's last millisecond
            frame.loc[frame["removed_at"].isin([end, end - pd.Timedelta(milliseconds=1)]), "removed_at"] = pd.NaT
        frame = merge_installations(existing, frame) if is_new or existing is None else existing
        unit = unit_of(frame)
        if ingest.existing is not None and ingest.existing.meta.unit != unit:
            raise InputError(
                f"the dataset's unit is the {ingest.existing.meta.unit}, but the inventory's is the {unit}",
                str(self.inventory),
                "Import into an empty folder.",
            )
        unnamed = frame[unit].isna()
        quarantine.set_aside_frame("missing gpu", "inventory", self.inventory, frame[unnamed])
        installed, dropped, ended = end_overlaps(frame[~unnamed], unit)
        quarantine.set_aside_frame("in two places from the same time", "inventory", self.inventory, dropped)
        if ended:
            ingest.counts["overlapping_installations_ended"] += len(ended)
            _LOG.warning("%s: %d installations overlap: %s", self.inventory, len(ended), "; ".join(ended[:_NAMED]))
        if is_new:
            account = quarantine.tables["inventory"]
            account.used = account.read - account.left_out.total()
        return InstallationIndex(installed, unit, parents, self.mapping.nodes.aliases)

    def _unit_of_samples(self, channels: Mapping[str, Channel]) -> Unit:
        """Return the samples' unit if there is no inventory; raises ``InputError`` if they do not name the node."""
        if not self.samples:
            raise InputError(
                "nodes and GPUs are named neither by an inventory nor by samples",
                "--inventory",
                "Give --inventory, or --samples with columns for node and GPU.",
            )
        unit: Unit = "node"
        aliases = {**source_names(channels), **KEY_ALIASES, "index": "slot"}
        for file in self.samples:
            columns = resolve_columns(
                column_names(file, long=self.rules.long),
                self.rules,
                ["gpu", "node", *GPU_PLACE],
                str(file),
                aliases=aliases,
                extras=True,
            )
            names = {*columns, *self.rules.constants}
            unit = "node" if unit == "node" and names.isdisjoint(("gpu", *GPU_PLACE)) else "gpu"
            if "node" not in names:
                raise InputError(
                    "the samples do not name the node of each row, and no inventory does",
                    str(file),
                    "Map the column that names the node (`columns: {COLUMN: node}`), or give --inventory.",
                )
        return unit

    def events(self, ingest: Ingest, installations: InstallationIndex) -> list[pd.DataFrame]:
        """Read event tables and kernel logs."""
        frames = []
        quarantine = ingest.quarantine
        for file in self.files["events"]:
            events = read_events(
                file, self.mapping, installations, quarantine, ingest.delay, ingest.counts, ingest.review
            )
            is_ahead = ingest.wrong_clock(ms_of(events["timestamp"]))
            is_ahead |= (events["known_at"] > self.now + AHEAD + ingest.delay).to_numpy()
            to_come = is_ahead & (events["type"] == "maintenance").to_numpy()  # from a calendar, not a fact yet
            quarantine.set_aside_frame(WRONG_CLOCK, "events", file, events[is_ahead & ~to_come])
            quarantine.leave_out("events", file, "a future maintenance", int(to_come.sum()))
            quarantine.used("events", int((~is_ahead).sum()))
            frames.append(events[~is_ahead])
        return frames

    def jobs(self, ingest: Ingest, installations: InstallationIndex) -> list[pd.DataFrame]:
        """Read job tables."""
        frames = []
        for file in self.files["jobs"]:
            batches = read_batches(file, "jobs", ingest.quarantine)
            frames.append(read_jobs(batches, self.mapping.jobs, installations, self.now + AHEAD))
            ingest.quarantine.used("jobs", len(frames[-1]))
        return frames

    def state(self) -> Mapping[str, pa.Table] | None:
        """Keep the state of the next compaction."""
        return None

    def entries(self, old: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Record each new file by its digest."""
        return old + [source.entry for source in self.fresh]

    def observed(self) -> Sequence[datetime]:
        """Return the observed period that the mapping states."""
        span = self.mapping.span
        if span is not None and max(span) > self.now + AHEAD:
            raise InputError("`span:` ends in the future", "mapping, span", "Give the period that was observed.")
        return span or ()
