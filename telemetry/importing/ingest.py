"""The only write path of a dataset: rows are read from a source, spilled, assigned to units, merged, and swapped in.

An import of files and a compaction of staged files differ only in their :class:`Source`. Everything after reading is
shared: correction of the inventory by samples, clock checks, deduplication of events across sources, loss budgets,
accounting of every row, and the atomic swap.
"""

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from foundation.errors import InputError
from foundation.instants import to_ms
from foundation.running import Progress
from foundation.times import NEVER
from telemetry.accounting import Accounting
from telemetry.dataset.channels import Channel
from telemetry.dataset.layout import DEFAULT_BUCKETS, MAX_ROWS_PER_BUCKET
from telemetry.dataset.meta import META_NAME
from telemetry.dataset.schema import INVENTORY, conform
from telemetry.dataset.store import Dataset
from telemetry.dataset.writer import DatasetWriter
from telemetry.importing.event_runs import (
    affected_events,
    dedupe_events,
    drop_known_edges,
    merge_floods,
    stack_events,
    stored_layout,
    total_count,
)
from telemetry.importing.events import empty_events
from telemetry.importing.evidence import unseen_nodes
from telemetry.importing.files.sources import expected_rows
from telemetry.importing.inventory import InstallationIndex
from telemetry.importing.jobs import merge_jobs
from telemetry.importing.mapping import TableMapping
from telemetry.importing.quarantine import Quarantine
from telemetry.importing.samples.block import Spill
from telemetry.importing.samples.derived_events import SOURCE
from telemetry.importing.samples.installation_correction import InstallationCorrection
from telemetry.importing.samples.instruments import read_instruments, write_instruments
from telemetry.importing.samples.intake import SampleIntake, no_usable_rows
from telemetry.importing.samples.merge import SampleMerger
from telemetry.importing.samples.merge_scope import plan_merge, read_newest, write_newest
from telemetry.phrases import PhraseReview

STATE_FOLDER: Final = "compaction"
"""Folder of a dataset with the state for the next compaction; an import does not change it."""

_LOG = logging.getLogger(__name__)
_NAMED: Final = 50


@dataclass(frozen=True, slots=True)
class ImportResult:
    """Result of an import.

    ``counts``: rows read and how they were processed; empty if nothing was new.
    ``changed``: false if every source was known and nothing was written.
    ``contradictions``: contradictions between samples and inventory, a line each.
    """

    dataset: Dataset
    counts: dict[str, int]
    quarantined: dict[str, int]
    changed: bool = True
    accounting: Accounting = field(default_factory=Accounting)
    contradictions: tuple[str, ...] = ()
    phrases: list[dict[str, Any]] = field(default_factory=list)


class Source(Protocol):
    """Input of an ingest; each method quarantines unusable rows.

    ``samples``, ``rules``: sample files, and the mapping of their columns.
    ``unsettled``: returns the mask of sample times (Unix ms) that are deferred to a later run; None: no deferral.
    """

    samples: Sequence[Path]
    rules: TableMapping
    unsettled: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]] | None

    def installations(self, ingest: "Ingest") -> InstallationIndex:
        """Return the installations of the whole dataset."""

    def events(self, ingest: "Ingest", installations: InstallationIndex) -> list[pd.DataFrame]:
        """Return events with their nodes and GPUs resolved."""

    def jobs(self, ingest: "Ingest", installations: InstallationIndex) -> list[pd.DataFrame]:
        """Return tables of jobs, newest last."""

    def state(self) -> Mapping[str, pa.Table] | None:
        """Return the tables of :data:`STATE_FOLDER`, without the inventory; None keeps the existing ones."""

    def entries(self, old: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the dataset's records of sources, including earlier runs."""

    def observed(self) -> Sequence[datetime]:
        """Return times that extend the observed period beyond the rows."""


@dataclass(slots=True)
class Ingest:
    """One run; ``live`` sources cannot be corrected by hand, so their losses are accepted.

    ``not_before_ms``, ``not_after_ms``: bounds of plausible times (Unix ms).
    ``keep_from``: start of the retention of samples.
    ``expected_rows``: expected size, which determines the number of buckets of a new dataset.
    """

    out: Path
    existing: Dataset | None
    step: timedelta
    channels: Mapping[str, Channel]
    dedupe: timedelta
    delay: timedelta
    now: datetime
    quarantine: Quarantine
    live: bool
    not_before_ms: float
    not_after_ms: float
    progress: Progress = lambda *_: None
    keep_from: datetime | None = None
    expected_rows: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    contradictions: list[str] = field(default_factory=list)
    review: PhraseReview = field(default_factory=PhraseReview)
    _times_seen: list[datetime] = field(default_factory=list)

    def run(self, source: Source) -> ImportResult:
        """Ingest a source; raises ``InputError`` if it is unusable as a whole, and leaves the dataset unchanged."""
        existing = self.existing
        buckets = self._bucket_number(source.samples) if existing is None else existing.meta.buckets
        with DatasetWriter(self.out, step=self.step, channels={}, buckets=buckets) as writer:
            self._check_unchanged()
            state = source.state()
            if existing is not None:
                writer.adopt_folder(existing, "quarantine")
                if state is None:
                    writer.adopt_folder(existing, STATE_FOLDER)
            with self.quarantine.stored_in(writer.folder / "quarantine"):
                installations = source.installations(self)
                self.quarantine.check_loss("inventory")
                staged = self._stage(source, writer, installations) if source.samples else None
                if staged is not None:
                    installations = staged[0].installations
                source_events = stack_events(source.events(self, installations))
                self._report_names(installations)
                self.quarantine.check_loss("events")
                detected = self._merge(writer, installations, source, staged)
                events = self._all_events(source_events, detected)
                jobs = None if existing is None else existing.jobs()
                for new in source.jobs(self, installations):
                    jobs = merge_jobs(jobs, new)
                self.quarantine.check_loss("jobs")
            span = self._span(events, source)
            shutil.rmtree(writer.folder / ".spill", ignore_errors=True)
            frame = installations.given
            self.counts["installed_before_anything_observed"] += int(frame["installed_at"].isna().sum())
            frame["installed_at"] = frame["installed_at"].fillna(pd.Timestamp(span[0]).as_unit("ms"))
            if state is not None:
                writer.write_tables(STATE_FOLDER, {**state, "derived": conform(frame, INVENTORY)})
            quarantined = self.quarantine.counts
            imported = {} if existing is None else existing.meta.counts.get("imported", {})
            old = [] if existing is None else existing.meta.sources
            dataset = writer.finish(
                events=events,
                inventory=frame,
                jobs=jobs,
                span=span,
                sources=sorted(
                    source.entries(old), key=lambda entry: [entry.get(key, "") for key in ("role", "name", "sha256")]
                ),
                quarantine=dict(quarantined + Counter({} if existing is None else existing.meta.quarantine)),
                counts={"imported": _plain(self.counts + Counter(imported))},
            )
        return ImportResult(
            dataset,
            _plain(self.counts),
            _plain(quarantined),
            accounting=self.quarantine,
            contradictions=tuple(self.contradictions),
            phrases=self.review.rows(),
        )

    def wrong_clock(self, ms: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return the mask of implausible times (Unix ms)."""
        return (ms < self.not_before_ms) | (ms > self.not_after_ms)

    def _check_unchanged(self) -> None:
        """Check, under the write lock, that no other run changed the dataset since it was opened."""
        now = Dataset.open(self.out, lease=False).digest if (self.out / META_NAME).exists() else None
        if now != (None if self.existing is None else self.existing.digest):
            raise InputError("another run changed the dataset", str(self.out), "Run the import again.")

    def _bucket_number(self, files: Sequence[Path]) -> int:
        rows = max(expected_rows(files), self.expected_rows)
        buckets = DEFAULT_BUCKETS
        while rows > buckets * MAX_ROWS_PER_BUCKET:
            buckets *= 2
        return buckets

    def _stage(
        self, source: Source, writer: DatasetWriter, installations: InstallationIndex
    ) -> tuple[SampleIntake, Spill]:
        """Read, validate and spill the samples, and correct the installations by them."""
        files, named = source.samples, list(dict.fromkeys(installations.nodes))
        intake = SampleIntake(
            files,
            source.rules,
            self.channels,
            installations,
            self.quarantine,
            self.wrong_clock,
            not self.live,
            unsettled=source.unsettled,
        )
        self._check_kinds(intake.channels)
        expected = expected_rows(files)
        self.progress(0, 2 * expected)
        spill = intake.run(
            writer.folder / ".spill", writer.buckets, expected, lambda rows, total: self.progress(rows, 2 * total)
        )
        self.quarantine.check_loss("samples")
        self.counts.update(intake.counts)
        self.counts["gpus_named_by_their_place"] += intake.place_names
        stored = () if self.existing is None else self.existing.inventory()["gpu"]
        since_ms = NEVER if self.existing is None else to_ms(self.existing.meta.span[0])
        correct = InstallationCorrection(intake, spill, self.step, set(stored), since_ms, self.live, self.counts)
        self.contradictions += correct()
        if named:
            self._report_nodes(*unseen_nodes(installations, named, intake.seen_nodes))
        return intake, spill

    def _report_names(self, installations: InstallationIndex) -> None:
        domains = installations.names.in_several_domains()
        self.counts["nodes_named_in_several_domains"] += len(domains)
        for node, forms in domains.items():
            listed = " and ".join(forms[:_NAMED])
            self.contradictions.append(
                f"node {node}: also named {listed}; if these are several nodes, give `nodes.aliases`"
            )
            _LOG.warning("%s", self.contradictions[-1])

    def _report_nodes(self, added: list[str], silent: list[str]) -> None:
        for problem, names in (("not in the inventory", added), ("without a sample", silent)):
            self.contradictions += [f"node {name}: {problem}" for name in names]

    def _merge(
        self,
        writer: DatasetWriter,
        installations: InstallationIndex,
        source: Source,
        staged: tuple[SampleIntake, Spill] | None,
    ) -> pd.DataFrame:
        """Write the merged samples; return the events derived from them."""
        if staged is None:
            self._keep_samples(writer, installations)
            return empty_events()
        intake, spill = staged
        rows = intake.rows_read
        plan = plan_merge(spill, self.existing, intake, self.step, self.keep_from)
        writer.declare(plan.channels, unit=installations.unit, sample_count=plan.rolled, runs=plan.runs)
        merger = SampleMerger(plan, self.existing, self.delay, list(source.samples), self.quarantine)
        for bucket, table, row_count in merger.run(spill):
            if row_count:
                assert self.existing is not None
                writer.adopt(self.existing, bucket, row_count)
            if table is not None:
                writer.write_samples(bucket, table)
            self.progress(rows + rows * bucket // writer.buckets, 2 * rows)
        self.progress(2 * rows, 2 * rows)
        self.counts.update(merger.counts)
        self.quarantine.check_loss("samples")
        write_newest(writer.folder, merger.newest)
        write_instruments(writer.folder, merger.instruments.table())
        self._times_seen += [datetime.fromtimestamp(ms / 1000, UTC) for ms in merger.span_ms]
        return stack_events([*merger.events, intake.losses.events(installations, self.delay, spill.renamed)])

    def _keep_samples(self, writer: DatasetWriter, installations: InstallationIndex) -> None:
        if self.existing is None:
            writer.declare({}, unit=installations.unit, sample_count=False)
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
                    f"channel {name!r} is a {old.kind} in the dataset, but now declared a {channel.kind}",
                    f"{self.out}, params channels.{name}.kind",
                    "Import all sources again into an empty folder.",
                )

    def _all_events(self, new_events: pd.DataFrame, detected: pd.DataFrame) -> pd.DataFrame:
        old = empty_events() if self.existing is None else self.existing.events()
        new = stack_events([new_events, detected])
        self.counts["xids_from_gauge"] += int((detected["type"] == "xid").sum())
        self.counts["gpus_lost_in_samples"] += int((detected["type"] == "failure").sum())
        if new.empty:
            return old
        may_change = affected_events(old, new)
        candidates = stack_events([old[may_change], new])
        merged = merge_floods(candidates)
        # Stored edges too, so that the order of importing samples and kernel logs does not matter.
        better = drop_known_edges(merged, max(self.step, self.dedupe), SOURCE)
        events = dedupe_events(better, self.dedupe)
        self.counts["xids_from_gauge_told_elsewhere"] += len(merged) - len(better)
        self.counts["events_deduplicated"] += (
            total_count(candidates) - total_count(events) - (len(merged) - len(better))
        )
        self.counts["events_in_runs"] += total_count(events) - len(events)
        return stored_layout(stack_events([old[~may_change], events]))

    def _span(self, events: pd.DataFrame, source: Source) -> tuple[datetime, datetime]:
        stored = () if self.existing is None else self.existing.meta.span
        times = [*self._times_seen, *stored, *source.observed()]
        if len(events):
            times += [events["timestamp"].min().to_pydatetime(), events["timestamp"].max().to_pydatetime()]
        if not times:
            if self.quarantine.counts:
                raise no_usable_rows("sample" if source.samples else "event", self.quarantine, str(self.out))
            raise InputError(
                "no observations: there are no samples and no events",
                str(self.out),
                "Give --samples or --events with rows, or `span:` in the mapping if a quiet period was observed.",
            )
        # An event dated today is at the end of the day, which is not observed yet.
        known = [self.now, *self._times_seen, *stored]
        first, last = min(times).astimezone(UTC), min(max(times), max(known)).astimezone(UTC)
        return min(max(first, self.keep_from or first), last), last


def _plain(counts: Counter[str]) -> dict[str, int]:
    return {name: int(number) for name, number in sorted(counts.items()) if number}
