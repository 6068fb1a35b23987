"""From files to a dataset, in one step that can be repeated.

Importing the same files again changes nothing. Importing others into an existing dataset adds to it: samples of a unit
and time that it holds already are taken for repeats (or set aside, where they differ), raw samples of a step that it
has rolled up are set aside, events go through the same dedupe as if they had come together with what is kept, stays of
the same GPU, node and ``installed_at`` are replaced, and jobs are replaced by their newer rows.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from foundation.durations import format_duration
from foundation.errors import InputError
from foundation.files import recover_folder
from telemetry.accounting import Accounting
from telemetry.dataset.channels import Channel
from telemetry.dataset.files import sha256_of
from telemetry.dataset.layout import DEFAULT_BUCKETS, MAX_ROWS_PER_BUCKET
from telemetry.dataset.meta import META_NAME
from telemetry.dataset.schema import INVENTORY, Unit, conform, ms_of
from telemetry.dataset.store import Dataset
from telemetry.dataset.writer import DatasetWriter
from telemetry.importing.event_runs import (
    concerned,
    dedupe_events,
    drop_known_edges,
    merge_floods,
    stack_events,
    stored_layout,
    total_count,
)
from telemetry.importing.events import empty_events, read_events
from telemetry.importing.instants import WRONG_CLOCK
from telemetry.importing.inventory import (
    Installations,
    end_overlaps,
    merge_stays,
    read_inventory,
    unit_of,
)
from telemetry.importing.jobs import merge_jobs, read_jobs
from telemetry.importing.mapping import ImportMapping, load_mapping, without_later_keys
from telemetry.importing.quarantine import BY_MAPPING, Quarantine
from telemetry.importing.questions import check_tables
from telemetry.importing.reading import (
    Source,
    expand_sources,
    is_packed,
    kind_of,
    new_sources,
)
from telemetry.importing.samples.instruments import read_instruments, write_instruments
from telemetry.importing.samples.intake import SampleIntake, no_usable_rows
from telemetry.importing.samples.merge import SampleMerger
from telemetry.importing.samples.reach import plan_merge, read_newest, write_newest
from telemetry.phrases.classifier import PhraseReview
from telemetry.xids.xid_gauge import SOURCE

Progress = Callable[[int, int], None]
"""Called with how much is done and how much there is: rows of samples, half for reading them, half for writing."""

AHEAD: Final = timedelta(days=1)
"""How far a source's clock, or a time zone that was mistaken, may be ahead."""

DEFAULT_MAX_LOSS: Final = 0.05
_LOG = logging.getLogger(__name__)
_NAMED = 50
_CSV_BYTES_PER_ROW, _PACKED_BYTES_PER_ROW = 100, 10
_FIRST, _LAST = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)


LANDED_ROLE: Final = "landed"
"""Role, in a dataset's sources, of the landed files that its last compaction took."""

STATE_FOLDER: Final = "compaction"
"""Folder of a dataset for what the next compaction must know; an import leaves it as it is."""


@dataclass(frozen=True, slots=True)
class CompactionInput:
    """What differs when an import compacts landed files (see :mod:`telemetry.landing.compaction`) into a dataset.

    The inventory given is then the whole one, files are not remembered by their content but by ``landed``, and sources
    without a usable row, or with a high loss, are no error: no operator is there to correct them.

    ``landed``: names that the dataset keeps in the same step, so that a compaction cut short is never done twice.
    ``state``: tables by name for :data:`STATE_FOLDER`; the inventory is added as ``derived``.
    ``expected_rows``: rows that the dataset is going to hold; a new one gets buckets for them.
    ``not_before``, ``not_after``: instants outside have a wrong clock.
    """

    landed: tuple[str, ...]
    state: Mapping[str, pa.Table] = field(default_factory=dict)
    keep_from: datetime | None = None
    expected_rows: int = 0
    not_before: datetime = _FIRST
    not_after: datetime = _LAST


def expected_rows(files: Iterable[Path]) -> int:
    """Say about how many rows files of samples have, by what Parquet tells and by the size of text."""
    rows = 0
    for path in files:
        if kind_of(path) == "parquet":
            with suppress(pa.ArrowInvalid):  # reading the file will say what is wrong with it
                rows += int(pq.read_metadata(path).num_rows)
        else:
            rows += path.stat().st_size // (_PACKED_BYTES_PER_ROW if is_packed(path) else _CSV_BYTES_PER_ROW)
    return rows


@dataclass(frozen=True, slots=True)
class ImportResult:
    """What an import did.

    ``counts``: what was read and made of it, by this import; empty if nothing was new.
    ``changed``: false if every source was known already, so that nothing was written.
    ``phrases``: words of tickets that were classified: ``phrase``, ``count``, ``type``.
    """

    dataset: Dataset
    counts: dict[str, int]
    quarantined: dict[str, int]
    changed: bool = True
    accounting: Accounting = field(default_factory=Accounting)
    phrases: list[dict[str, Any]] = field(default_factory=list)


def import_dataset(
    out: Path,
    *,
    inventory: Path,
    step: timedelta,
    channels: Mapping[str, Channel],
    dedupe: timedelta,
    delay: timedelta,
    samples: Sequence[Path] = (),
    events: Sequence[Path] = (),
    jobs: Path | None = None,
    mapping: Path | None = None,
    progress: Progress | None = None,
    compaction: CompactionInput | None = None,
    max_loss: float = DEFAULT_MAX_LOSS,
    now: datetime | None = None,
) -> ImportResult:
    """Import files into a dataset.

    ``inventory``: who was where, when; if no row names a GPU, the nodes are the units.
    ``channels``: every channel that may occur, see :func:`telemetry.dataset.channels.resolve_channels`.
    ``dedupe``: events of one unit and code within this span are one.
    ``delay``: reporting delay of events that do not say when they were known.
    ``samples``, ``events``: Files, or folders of files. Events may be kernel logs (``.log``, ``.txt``, ``.jsonl`` of
    the journal).
    ``mapping``: see :mod:`telemetry.importing.mapping`.
    ``compaction``: set when the sources are landed files.
    ``max_loss``: share of a file's rows, or of a channel's values, that may be lost before the import is refused;
    landed files are never refused for it.
    ``now``: aware; what is dated more than :data:`AHEAD` after it is quarantined.
    Raises ``InputError`` if a source cannot be used as a whole. The dataset at ``out`` is then as it was.
    """
    out = Path(out)
    recover_folder(out)
    existing = Dataset.open(out, lease=False) if (out / META_NAME).exists() else None
    rules = load_mapping(mapping)
    given = {"inventory": [inventory], "samples": samples, "events": events, "jobs": [jobs] if jobs else []}
    sources = _sources(given, rules, step, channels, dedupe, delay)
    if compaction is None:
        check_tables(given, rules, channels)
    if existing is not None:
        check_step(existing, step)
    fresh = new_sources(sources, existing) if compaction is None else sources
    if not fresh and existing is not None:
        return ImportResult(existing, {}, {}, changed=False)
    now = now or datetime.now(UTC)
    work = _Import(
        out,
        existing,
        rules,
        {role: [source.path for source in fresh if source.role == role] for role in given},
        step,
        channels,
        dedupe,
        delay,
        progress or (lambda *_: None),
        compaction or CompactionInput(landed=(), not_after=now + AHEAD),
        None if compaction else max_loss,
        now,
    )
    distinct = {(source.role, source.entry["sha256"]) for source in sources}
    work.counts["source_files_given_twice"] = len(sources) - len(distinct)
    return work.run(inventory, [source.entry for source in fresh] if compaction is None else None)


def check_step(existing: Dataset, step: timedelta) -> None:
    """Raise ``InputError`` if a dataset has another step."""
    if existing.meta.step != step:
        old, new = format_duration(existing.meta.step), format_duration(step)
        raise InputError(
            f"the dataset has a step of {old}, what is brought in one of {new}",
            f"{existing.path}, telemetry.step",
            "Set telemetry.step to the dataset's, or give an empty folder.",
        )


def _sources(
    given: Mapping[str, Sequence[Path]],
    rules: ImportMapping,
    step: timedelta,
    channels: Mapping[str, Channel],
    dedupe: timedelta,
    delay: timedelta,
) -> list[Source]:
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
        dumps = [section.model_dump(mode="json") for section in sections]
        read["mapping"] = digest([without_later_keys(dump) for dump in dumps])
    sources = []
    for role, paths in given.items():
        for file in expand_sources(tuple(paths), role):
            entry = {"role": role, "name": file.name, "bytes": file.stat().st_size, "sha256": sha256_of(file)}
            sources.append(Source(role, file, entry | {"settings": settings[role]}))
    return sources


@dataclass(slots=True)
class _Import:
    """One import; ``max_loss`` is None where it compacts landed files."""

    out: Path
    existing: Dataset | None
    rules: ImportMapping
    files: dict[str, list[Path]]
    step: timedelta
    channels: Mapping[str, Channel]
    dedupe: timedelta
    delay: timedelta
    progress: Progress
    compaction: CompactionInput
    max_loss: float | None
    now: datetime
    counts: Counter[str] = field(default_factory=Counter)
    review: PhraseReview = field(default_factory=PhraseReview)
    observed: list[datetime] = field(default_factory=list)
    quarantine: Quarantine = field(default_factory=lambda: Quarantine(None))

    def run(self, inventory: Path, entries: list[dict[str, Any]] | None) -> ImportResult:
        """Import; ``entries``: what to remember of the sources, None for those of a compaction."""
        existing = self.existing
        buckets = self._bucket_number() if existing is None else existing.meta.buckets
        with DatasetWriter(self.out, step=self.step, channels={}, buckets=buckets) as writer:
            self._check_unchanged()
            folder = writer.folder / "quarantine"
            if existing is not None:
                writer.adopt_folder(existing, "quarantine")
                if self.max_loss is not None:
                    writer.adopt_folder(existing, STATE_FOLDER)
            with Quarantine(folder, self.max_loss) as self.quarantine:
                stays = self._inventory(inventory)
                given = self._events(stays)
                detected = self._samples(writer, stays)
                events = self._all_events(given, detected)
                jobs = self._jobs(stays)
            span = self._span(events)
            accounts = self.quarantine.accounting.tables.values()
            self.counts["rows_left_out_by_mapping"] += sum(account.left_out[BY_MAPPING] for account in accounts)
            shutil.rmtree(writer.folder / ".spill", ignore_errors=True)
            frame = stays.given
            self.counts["installed_before_anything_observed"] += int(frame["installed_at"].isna().sum())
            frame["installed_at"] = frame["installed_at"].fillna(pd.Timestamp(span[0]).as_unit("ms"))
            if self.max_loss is None:
                writer.write_tables(STATE_FOLDER, {**self.compaction.state, "derived": conform(frame, INVENTORY)})
            quarantined = self.quarantine.counts
            before = {} if existing is None else existing.meta.counts.get("imported", {})
            dataset = writer.finish(
                events=events,
                inventory=frame,
                jobs=jobs,
                span=span,
                sources=self._sources(entries),
                quarantine=dict(quarantined + Counter({} if existing is None else existing.meta.quarantine)),
                counts={"imported": _plain(self.counts + Counter(before))},
            )
        accounting, phrases = self.quarantine.accounting, self.review.rows()
        return ImportResult(dataset, _plain(self.counts), _plain(quarantined), accounting=accounting, phrases=phrases)

    def _check_unchanged(self) -> None:
        """Make sure, now that no other run can write, that the dataset is still the one that was looked at."""
        now = Dataset.open(self.out, lease=False).digest if (self.out / META_NAME).exists() else None
        if now != (None if self.existing is None else self.existing.digest):
            raise InputError("another run changed the dataset just now", str(self.out), "Run the import again.")

    def _bucket_number(self) -> int:
        rows = max(expected_rows(self.files["samples"]), self.compaction.expected_rows)
        buckets = DEFAULT_BUCKETS
        while rows > buckets * MAX_ROWS_PER_BUCKET:
            buckets *= 2
        return buckets

    def _inventory(self, path: Path) -> Installations:
        # A known inventory is read again for its MIG names; what it sets aside was counted by the import it was new in.
        is_new = bool(self.files["inventory"])
        quarantine = self.quarantine if is_new else Quarantine(None)
        frame, parents = read_inventory(path, self.rules.inventory, quarantine, self.now + AHEAD)
        if self.rules.span is not None:  # whatever was there until the end has not been seen to leave
            end = pd.Timestamp(self.rules.span[1])  # of a date, the day's last millisecond
            frame.loc[frame["removed_at"].isin([end, end - pd.Timedelta(milliseconds=1)]), "removed_at"] = pd.NaT
        old = self.existing.inventory() if self.existing is not None and self.max_loss is not None else None
        frame = merge_stays(old, frame) if is_new or old is None else old
        unit = unit_of(frame)
        if self.existing is not None and self.existing.meta.unit != unit:
            raise InputError(
                f"the dataset's unit is the {self.existing.meta.unit}, the inventory's is the {unit}",
                str(path),
                "Import into an empty folder.",
            )
        unnamed = frame[unit].isna()
        self.quarantine.add_frame("missing gpu", "inventory", path, frame[unnamed])
        kept, dropped, ended = end_overlaps(frame[~unnamed], unit)
        self.quarantine.add_frame("in two places from the same time", "inventory", path, dropped)
        if ended:
            self.counts["overlapping_stays_ended"] += len(ended)
            _LOG.warning("%s: %d stays overlap: %s", path, len(ended), "; ".join(ended[:_NAMED]))
        if is_new:
            account = self.quarantine.accounting.tables["inventory"]
            account.used = account.read - account.left_out.total()
        self.quarantine.check_loss("inventory")
        return Installations(kept, unit, parents)

    def _wrong_clock(self, ms: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        first, last = (limit.timestamp() * 1000 for limit in (self.compaction.not_before, self.compaction.not_after))
        return (ms < first) | (ms > last)

    def _events(self, stays: Installations) -> pd.DataFrame:
        frames = []
        for file in self.files["events"]:
            events = read_events(file, self.rules, stays, self.quarantine, self.delay, self.counts, self.review)
            ahead = self._wrong_clock(ms_of(events["timestamp"]))
            ahead |= (events["known_at"] > self.now + AHEAD + self.delay).to_numpy()
            to_come = ahead & (events["type"] == "maintenance").to_numpy()  # of a calendar: not yet a fact
            self.counts["maintenance_to_come"] += int(to_come.sum())
            self.quarantine.add_frame(WRONG_CLOCK, "events", file, events[ahead & ~to_come])
            self.quarantine.leave_out("events", file, "a maintenance that has not begun", int(to_come.sum()))
            self.quarantine.accounting.used("events", int((~ahead).sum()))
            frames.append(events[~ahead])
        self.quarantine.check_loss("events")
        return stack_events(frames)

    def _samples(self, writer: DatasetWriter, stays: Installations) -> pd.DataFrame:
        files, existing = self.files["samples"], self.existing
        if not files:
            self._keep_samples(writer, stays.unit)
            return empty_events()
        intake = SampleIntake(
            files,
            self.rules.samples,
            self.channels,
            stays,
            self.quarantine,
            self._wrong_clock,
            self.max_loss is not None,
        )
        self._check_kinds(intake.channels)
        expected = expected_rows(self.files["samples"])
        self.progress(0, 2 * expected)
        spill = intake.run(
            writer.folder / ".spill", writer.buckets, lambda rows: self.progress(rows, 2 * max(rows, expected))
        )
        self.quarantine.check_loss("samples")
        self.counts.update(intake.counts)
        rows = intake.counts["samples_read"]
        plan = plan_merge(spill, existing, intake, self.step, self.compaction.keep_from)
        writer.declare(plan.channels, unit=stays.unit, sample_count=plan.rolled, runs=plan.runs)
        merger = SampleMerger(plan, existing, self.delay, files, self.quarantine)
        for bucket, table, kept in merger.run(spill):
            if kept:
                assert existing is not None
                writer.adopt(existing, bucket, kept)
            if table is not None:
                writer.write_samples(bucket, table)
            self.progress(rows + rows * bucket // writer.buckets, 2 * rows)
        self.progress(2 * rows, 2 * rows)
        self.counts.update(merger.counts)
        self.quarantine.check_loss("samples")
        write_newest(writer.folder, merger.newest)
        write_instruments(writer.folder, merger.instruments.table())
        self.observed += [datetime.fromtimestamp(ms / 1000, UTC) for ms in merger.span_ms]
        return stack_events([*merger.events, intake.losses.events(stays, self.delay)])

    def _keep_samples(self, writer: DatasetWriter, unit: Unit) -> None:
        if self.existing is None:
            writer.declare({}, unit=unit, sample_count=False)
            return
        meta = self.existing.meta
        writer.declare(meta.channels, unit=meta.unit, sample_count=meta.sample_count, runs=meta.runs)
        write_newest(writer.folder, read_newest(self.existing.path))
        write_instruments(writer.folder, read_instruments(self.existing.path))
        for bucket in self.existing.buckets():
            writer.adopt(self.existing, bucket)

    def _check_kinds(self, channels: Mapping[str, Channel]) -> None:
        if self.existing is None:
            return
        for name, channel in channels.items():
            old = self.existing.meta.channels.get(name)
            if old is not None and old.kind != channel.kind:
                raise InputError(
                    f"channel {name!r} is a {old.kind} in the dataset, and a {channel.kind} now",
                    f"{self.out}, params channels.{name}.kind",
                    "Import all sources again into an empty folder.",
                )

    def _all_events(self, given: pd.DataFrame, detected: pd.DataFrame) -> pd.DataFrame:
        old = empty_events() if self.existing is None else self.existing.events()
        new = stack_events([given, detected])
        self.counts["xids_from_gauge"] += int((detected["type"] == "xid").sum())
        self.counts["gpus_lost_in_samples"] += int((detected["type"] == "failure").sum())
        if new.empty:
            return old
        may_change = concerned(old, new)
        together = stack_events([old[may_change], new])
        merged = merge_floods(together)
        # The stored edges too: a kernel log that comes after the samples makes the same dataset as one before them.
        better = drop_known_edges(merged, max(self.step, self.dedupe), SOURCE)
        kept = dedupe_events(better, self.dedupe)
        self.counts["xids_from_gauge_told_elsewhere"] += len(merged) - len(better)
        self.counts["events_deduplicated"] += total_count(together) - total_count(kept) - (len(merged) - len(better))
        self.counts["events_in_runs"] += total_count(kept) - len(kept)
        return stored_layout(stack_events([old[~may_change], kept]))

    def _jobs(self, stays: Installations) -> pd.DataFrame | None:
        jobs = None if self.existing is None else self.existing.jobs()
        for file in self.files["jobs"]:
            new = read_jobs(file, self.rules.jobs, stays, self.quarantine, self.now + AHEAD)
            self.counts["jobs_read"] += len(new)
            self.quarantine.accounting.used("jobs", len(new))
            jobs = merge_jobs(jobs, new)
        self.quarantine.check_loss("jobs")
        return jobs

    def _span(self, events: pd.DataFrame) -> tuple[datetime, datetime]:
        seen = [*self.observed, *(() if self.existing is None else self.existing.meta.span)]
        if len(events):
            seen += [events["timestamp"].min().to_pydatetime(), events["timestamp"].max().to_pydatetime()]
        if self.rules.span is not None:
            if max(self.rules.span) > self.now + AHEAD:
                raise InputError("`span:` ends in the future", "mapping, span", "Give the period that was observed.")
            seen += self.rules.span
        if not seen:
            where = ", ".join(str(file) for file in self.files["events"]) or str(self.out)
            if self.quarantine.counts:
                raise no_usable_rows("event" if self.files["events"] else "sample", self.quarantine, where)
            raise InputError(
                "nothing was observed: there are no samples and no events",
                where,
                "Give --samples or --events with rows, or `span:` in the mapping if a quiet period was observed.",
            )
        # an event dated today lies at the day's end, which is not observed yet
        known = [self.now, *self.observed, *(() if self.existing is None else self.existing.meta.span)]
        first, last = min(seen).astimezone(UTC), min(max(seen), max(known)).astimezone(UTC)
        return min(max(first, self.compaction.keep_from or first), last), last

    def _sources(self, entries: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        old = [] if self.existing is None else self.existing.meta.sources
        if entries is None:
            old = [entry for entry in old if entry.get("role") != LANDED_ROLE]
            entries = [{"role": LANDED_ROLE, "name": name} for name in self.compaction.landed]
        return sorted(old + entries, key=lambda entry: [entry.get(key, "") for key in ("role", "name", "sha256")])


def _plain(counts: Counter[str]) -> dict[str, int]:
    return {name: int(number) for name, number in sorted(counts.items()) if number}
