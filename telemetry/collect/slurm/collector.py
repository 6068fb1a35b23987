"""Poll loop over Slurm's nodes and jobs; new events and job rows are staged."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pydantic import TypeAdapter

from foundation.errors import InputError
from foundation.instants import from_ms, to_ms
from foundation.programs import CommandError, Run
from foundation.running import Failing, Wait, every
from foundation.slurm import LOCAL, SlurmFormatError
from telemetry.collect.outbox import Outbox
from telemetry.collect.slurm.jobs import SACCT_COLUMNS, Job, jobs_table, read_sacct, read_squeue
from telemetry.collect.slurm.nodes import SOURCE, ObservedSlurmNode, changes, read_nodes
from telemetry.dataset.event import Event
from telemetry.phrases import PhraseReview, PhraseRules
from telemetry.staging.folder import StagingFolder

_log = logging.getLogger(__name__)
NODE_COMMANDS: Final = (("scontrol", "--json", "show", "nodes"), ("sinfo", "--Node", "--json"))
"""Commands that list nodes, in order of preference: ``scontrol`` since Slurm 23.02, ``sinfo`` before."""

ENVIRONMENT: Final = {**LOCAL, "SLURM_TIME_FORMAT": "%s", "TZ": "UTC"}
"""Environment of every command: times are printed as Unix seconds and parsed as UTC."""

WINDOW: Final = timedelta(days=1)
OVERLAP: Final = timedelta(hours=1)
"""Each query starts this long before the end of the last one, because slurmdbd records jobs late."""

FIRST_SINCE: Final = timedelta(days=1)
_NODES: Final = TypeAdapter(dict[str, ObservedSlurmNode])


class SlurmCollector:
    """Collects events and jobs; ``since``: start of the first accounting query, by default a day ago."""

    def __init__(
        self,
        outbox: Outbox,
        staging: StagingFolder,
        *,
        run: Run,
        rules: PhraseRules,
        clock: Callable[[], datetime],
        since: datetime | None = None,
    ) -> None:
        self._outbox, self._staging, self._run = outbox, staging, run
        self._rules, self._clock, self._since = rules, clock, since
        self._node_commands = list(NODE_COMMANDS)
        self._accounting = True
        self._gpus_accounted: bool | None = None
        self._failing = Failing(_log)
        self.counts: Counter[str] = Counter()
        self.accounting = outbox.accounting
        self.review = PhraseReview()

    def once(self) -> None:
        """Poll once; raises ``InputError`` if Slurm does not respond or the result cannot be written."""
        errors = self._round()
        if errors:
            raise InputError(
                f"Slurm does not respond: {'; '.join(map(str, errors))}",
                "predrain collect slurm",
                "Run this on a host where `sinfo` works (SLURM_CONF, munge), while the controller is up.",
            )

    def follow(self, interval_s: float, stop: Wait) -> None:
        """Poll every ``interval_s`` seconds until ``stop`` is true; failures are retried in the next round.

        Raises ``InputError`` if the first round cannot be written.
        """
        for turn in every(interval_s, stop):
            try:
                self._round()
            except InputError as error:
                if turn == 0:
                    raise
                self._failing.failed("writing", error, level=logging.ERROR)
            else:
                self._failing.recovered("writing")

    def _round(self) -> list[Exception]:
        """Poll once and return the errors; nodes and jobs fail independently."""
        self.counts["rounds"] += 1
        position = dict(self._outbox.position)
        errors: list[Exception] = []
        events: list[Event] = []
        for kind, poll in (("nodes", self._poll_nodes), ("jobs", self._poll_jobs)):
            try:
                events += poll(position)
            except (CommandError, SlurmFormatError) as error:
                errors.append(error)
                self._failing.failed(f"reading Slurm's {kind}", error)
            else:
                self._failing.recovered(f"reading Slurm's {kind}")
        if position != self._outbox.position or events:
            self._outbox.commit(position, events=events)
            self._outbox.flush()
        self.counts["events"] += len(events)
        self.counts["failed"] += bool(errors)
        return errors

    def _poll_nodes(self, position: dict[str, Any]) -> list[Event]:
        views = read_nodes(self._nodes_report(), self.accounting)
        now = self._clock()
        polled_at = from_ms(position["looked_at"]) if "looked_at" in position else None
        known = _NODES.validate_python(position.get("nodes", {}))
        events: list[Event] = []
        for name, view in sorted(views.items()):
            # A node may be missing for a moment, as when slurmctld restarts: its drain stays open.
            changed, known[name] = changes(known.get(name), view, self._rules, now=now, last_poll=polled_at)
            events += changed
            drained = any(event.type == "drain" and event.source == SOURCE for event in changed)
            if drained and view.reason is not None:
                self.review.add(view.reason, self._rules.classify(view.reason, "reason").type)
        position["nodes"] = _NODES.dump_python(known, mode="json", exclude_defaults=True)
        position["looked_at"] = to_ms(now)
        return events

    def _nodes_report(self) -> str:
        try:
            return self._run(self._node_commands[0])
        except CommandError as error:
            if not error.lasting or len(self._node_commands) == 1:
                raise
            del self._node_commands[0]
            return self._nodes_report()

    def _poll_jobs(self, position: dict[str, Any]) -> list[Event]:
        now = self._clock()
        jobs = position.get("jobs", {})
        known: dict[str, str] = dict(jobs.get("known", {}))
        start = from_ms(jobs["until"]) - OVERLAP if "until" in jobs else (self._since or now - FIRST_SINCE)
        while self._accounting and start < now:
            end = min(start + WINDOW, now + timedelta(minutes=1))
            try:
                report = self._run(_sacct(start, end))
            except CommandError as error:
                if "accounting storage is" not in error.reason.lower():
                    raise
                self._use_memory("Slurm has no accounting")
                break
            if not self._accounts_gpus():
                self._use_memory(
                    "AccountingStorageTRES of Slurm has no gres/gpu, so that sacct reports no GPUs of jobs"
                )
                break
            self._stage(read_sacct(report, self.accounting), known, floor=end - WINDOW - OVERLAP)
            start = min(end, now)
            # The position is committed after each query, so a kill during a long backfill repeats one query.
            position["jobs"] = {"until": to_ms(start), "known": known}
            if start < now:
                self._outbox.commit(self._outbox.position | {"jobs": position["jobs"]})
        if not self._accounting:
            report = self._run(("squeue", "--states=all", "--json"))
            self._stage(read_squeue(report, self.accounting), known, floor=now - WINDOW)
            position["jobs"] = {"until": to_ms(now), "known": known}
        return []

    def _use_memory(self, reason: str) -> None:
        self._accounting = False
        _log.warning("%s: jobs are read from the controller's memory, starting now", reason)

    def _accounts_gpus(self) -> bool:
        if self._gpus_accounted is None:
            try:
                known = self._run(("sacctmgr", "--noheader", "--parsable2", "show", "tres", "format=type,name"))
            except CommandError:
                return True  # not cached: asked again in the next round
            self._gpus_accounted = not known.strip() or "gres|gpu" in known
        return self._gpus_accounted

    def _stage(self, jobs: Sequence[Job], known: dict[str, str], *, floor: datetime) -> None:
        """Stage new and changed jobs; drop jobs from ``known`` that ended before ``floor``."""
        news = {job.key: job for job in jobs if known.get(job.key) != job.digest}
        if news:
            table = jobs_table(news.values())
            self._staging.stage("jobs", table)
            self.counts["job_rows"] += table.num_rows
        self.counts["jobs"] += len(news)
        known |= {key: job.digest for key, job in news.items()}
        for key, digest in list(known.items()):
            ended_at = digest.split(" ", 1)[0]
            if ended_at != "None" and int(ended_at) < to_ms(floor):
                del known[key]


def _sacct(start: datetime, end: datetime) -> tuple[str, ...]:
    return (
        *("sacct", "--allusers", "--allocations", "--duplicates", "--parsable2", "--noheader"),
        f"--starttime={start.astimezone(UTC):%Y-%m-%dT%H:%M:%S}",
        f"--endtime={end.astimezone(UTC):%Y-%m-%dT%H:%M:%S}",
        f"--format={','.join(SACCT_COLUMNS)}",
    )
