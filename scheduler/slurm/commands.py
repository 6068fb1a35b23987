"""Slurm by its commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from scheduler.ports.errors import SchedulerError
from scheduler.slurm.job import HELD, CheckpointSignal, SlurmJob, job_of
from scheduler.slurm.node import NodeChange, SlurmNode, node_of
from scheduler.slurm.port import SlurmAnswer, SlurmAnswerKind
from scheduler.slurm.report import NEWEST, OLDEST, Report, ReportReader
from scheduler.slurm.settings import SlurmSettings
from telemetry.collect.slurm.commands import CommandError, ProgramResult, run_program
from telemetry.collect.slurm.slurm_json import SlurmFormatError

_Row = TypeVar("_Row")

_SAID: Final[tuple[tuple[str, SlurmAnswerKind], ...]] = (
    ("invalid node name", "gone"),
    ("invalid job id", "gone"),
    ("already completing or completed", "gone"),
    ("job is pending execution", "already"),
    ("unable to contact slurm controller", "timeout"),
    ("socket timed out", "timeout"),
    ("zero bytes were transmitted", "timeout"),
    ("connection refused", "timeout"),
    ("connection reset", "timeout"),
)
# What Slurm writes for ESLURM_INVALID_NODE_NAME, ESLURM_INVALID_JOB_ID, ESLURM_ALREADY_DONE, ESLURM_JOB_PENDING and
# for a controller that does not answer (slurm_errno.c); all else it refuses.


_NO_SUCH_NODE: Final = ("not found", "invalid node name")
_FOREIGN_FILTERS: Final = ("SQUEUE_", "SINFO_", "SCANCEL_", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")
# With them set a user's own defaults would filter the lists that decisions rest on (squeue(1), ENVIRONMENT VARIABLES).


class SlurmCommands:
    """Slurm through ``scontrol``, ``sinfo``, ``squeue`` and ``scancel``.

    Nodes come from ``scontrol show node --json`` (23.02 and later), else from ``sinfo --json`` (22.05), which has
    another shape in later versions. Each report names the version of the data parser that wrote it. Where that is newer
    than we know, the newest one that we know is asked for (``--json=v0.0.45``, 23.11 and later). Where neither is
    known, Slurm is read as far as possible, and not written to.
    """

    def __init__(self, settings: SlurmSettings) -> None:
        self._settings = settings
        self._environment = {} if settings.slurm_conf is None else {"SLURM_CONF": settings.slurm_conf}
        self._scontrol: bool | None = None  # whether it writes JSON; None: not tried yet
        self._json = "--json"
        self._versions: dict[str, int | None] = {}

    def nodes(self) -> tuple[SlurmNode, ...]:
        """List the nodes."""
        rows = self._nodes(None)
        if not rows:
            raise SchedulerError("Slurm lists no nodes")
        return rows

    def node(self, name: str) -> SlurmNode | None:
        """Read one node; 22.05 can only list all of them, of which the one is kept."""
        return next((each for each in self._nodes(name) if each.name == name), None)

    def jobs(self, node: str | None = None) -> tuple[SlurmJob, ...]:
        """List the jobs that hold nodes."""

        def keep(row: Mapping[str, Any]) -> SlurmJob | None:
            job = job_of(row, self._settings.gres)
            return job if job is not None and (node is None or node in job.nodes) else None

        # of one node all states, for nothing on it may be missed; of the fleet not the queue, which may be long
        only = (f"--states={','.join(sorted(HELD))}",) if node is None else ("--states=all", f"--nodelist={node}")
        return self._report(("squeue", *only), "jobs", keep).rows

    def read_only(self) -> str | None:
        """Say why nothing may be written."""
        for what, version in self._versions.items():
            if version is None:
                return f"Slurm's report of {what} does not tell the version of its data parser: it is only read"
            if not OLDEST <= version <= NEWEST:
                return (
                    f"Slurm's report of {what} is of data parser v0.0.{version}; v0.0.{OLDEST} to v0.0.{NEWEST} are "
                    "known: it is only read"
                )
        return None if self._versions else "Slurm was not read yet"

    def update(self, node: str, change: NodeChange) -> SlurmAnswer:
        """Write to a node by ``scontrol update``."""
        command = [self._program("scontrol"), "update", f"NodeName={node}"]
        if change.state is not None:
            command.append(f"State={change.state}")
        if change.reason is not None:
            # scontrol takes one quotation mark off either end
            command.append(f'Reason="{change.reason}"')
        if change.weight is not None:
            command.append(f"Weight={change.weight}")
        if change.extra is not None:
            command.append(f"Extra={change.extra}")
        return self._write(command)

    def signal(self, job: SlurmJob, signal: CheckpointSignal) -> SlurmAnswer:
        """Send a signal by ``scancel --signal``."""
        batch = ("--batch",) if signal.batch else ()
        return self._write([self._program("scancel"), f"--signal={signal.name}", *batch, str(job.number)])

    def requeue(self, job: SlurmJob) -> SlurmAnswer:
        """Requeue by ``scontrol requeue``."""
        return self._write([self._program("scontrol"), "requeue", str(job.leader)])

    def _nodes(self, name: str | None) -> tuple[SlurmNode, ...]:
        def keep(row: Mapping[str, Any]) -> SlurmNode | None:
            other = name is not None and row.get("name") != name
            return None if other else node_of(row, self._settings.gres)

        if self._scontrol is not False:
            one = () if name is None else (name,)
            try:
                report = self._report(("scontrol", "show", "node", *one), "nodes", keep, missing=name is not None)
            except _NoJsonError:
                self._scontrol = False
            else:
                self._scontrol = True
                return report.rows
        return self._report(("sinfo", "--Node"), "nodes", keep).rows

    def _report(
        self,
        command: tuple[str, ...],
        key: str,
        keep: Callable[[Mapping[str, Any]], _Row | None],
        *,
        missing: bool = False,
    ) -> Report[_Row]:
        report = self._read((*command, self._json), key, keep, missing=missing)
        if report.version is not None and report.version > NEWEST and self._json == "--json":
            try:
                older = f"--json=v0.0.{NEWEST}"
                report = self._read((*command, older), key, keep, missing=missing)
                self._json = older
            except SchedulerError:
                pass  # it cannot write that one: read on, and write nothing
        if not (missing and not report.rows):
            self._versions[key] = report.version
        return report

    def _read(
        self, command: tuple[str, ...], key: str, keep: Callable[[Mapping[str, Any]], _Row | None], *, missing: bool
    ) -> Report[_Row]:
        reader = ReportReader(key, keep)
        try:
            ended = self._run([self._program(command[0]), *command[1:]], reader.feed)
            if ended.status:
                if "unrecognized option" in ended.said or "doesn't allow an argument" in ended.said:
                    raise _NoJsonError(f"`{' '.join(command)}`: {ended.said}")
                why = ended.said or _errors_of(reader) or f"exit status {ended.status}"
                if missing and any(text in why.lower() for text in _NO_SUCH_NODE):
                    return Report((), None)
                raise SchedulerError(f"`{' '.join(command)}`: {why}")
            return reader.finish()
        except CommandError as error:
            raise SchedulerError(str(error)) from None
        except SlurmFormatError as error:
            raise SchedulerError(f"`{' '.join(command)}`: {error}") from None

    def _write(self, command: list[str]) -> SlurmAnswer:
        if any("\0" in each for each in command):
            return SlurmAnswer("refused", "a text with a zero byte cannot be given to a program")
        refused = self.read_only()
        if refused is not None:
            return SlurmAnswer("refused", refused)
        try:
            ended = self._run(command, lambda _: None)
        except CommandError as error:
            return SlurmAnswer("refused" if error.lasting else "timeout", str(error))
        if not ended.status:
            return SlurmAnswer("done", ended.said)
        said = ended.said.lower()
        kind: SlurmAnswerKind = next((kind for text, kind in _SAID if text in said), "refused")
        return SlurmAnswer(kind, ended.said or f"exit status {ended.status}")

    def _run(self, command: list[str], sink: Callable[[bytes], None]) -> ProgramResult:
        settings = self._settings
        kept = {name: text for name, text in os.environ.items() if not name.startswith(_FOREIGN_FILTERS)}
        ended = run_program(
            command, sink, timeout_s=settings.timeout.total_seconds(), most_bytes=settings.max_response_bytes,
            environment={**kept, "LC_ALL": "C", **self._environment},
        )  # fmt: skip
        return replace(ended, said=ended.said[:400])

    def _program(self, name: str) -> str:
        return name if self._settings.bin_dir is None else str(Path(self._settings.bin_dir) / name)


def _errors_of(reader: ReportReader[_Row]) -> str:
    """Give the errors that a report tells; scontrol writes them there and not to stderr."""
    try:
        reader.finish()
    except SlurmFormatError as error:
        return str(error)
    return ""


class _NoJsonError(SchedulerError):
    """The program does not know ``--json``."""
