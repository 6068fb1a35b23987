"""Slurm through its commands, e.g. ``scontrol`` and ``squeue``; ``rest`` is the other transport."""

import contextlib
import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from foundation.programs import CommandError, run_program
from foundation.slurm import LOCAL, SlurmFormatError, expand_hostlist, instant, number
from scheduler.ports.errors import SchedulerError
from scheduler.ports.readings import WriteResult
from scheduler.slurm.job import HELD_STATES, CheckpointSignal, SlurmJob
from scheduler.slurm.node import NodeChange
from scheduler.slurm.port import NEWEST, OLDEST, Partition, SlurmPort, errors_in, kind_of, read_report
from scheduler.slurm.settings import SlurmSettings

_RESERVED_NODES: Final = re.compile(r"(?:^|\s)Nodes=(\S+)")
_FIELD: Final = re.compile(r"(\w+)=(\S+)")
_TIME: Final = re.compile(rb"^sdiag output at .*\((\d+)\)", re.MULTILINE)
_NO_SUCH_NODE: Final = ("not found", "invalid node name")
_NO_JSON: Final = ("unrecognized option", "doesn't allow an argument")
_FOREIGN_FILTERS: Final = (
    "SQUEUE_", "SINFO_", "SCANCEL_", "SBATCH_", "SCONTROL_", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT"
)  # fmt: skip
# These variables set defaults, e.g. filters of the lists that decisions use (squeue(1), ENVIRONMENT VARIABLES).


class SlurmCommands(SlurmPort):
    """Slurm through ``scontrol``, ``sinfo``, ``squeue`` and ``scancel``.

    Nodes come from ``scontrol show node --json`` (23.02 and later), else from ``sinfo --json`` (22.05), whose layout
    differs in later versions. Each report states the version of its data parser. If that is newer than the newest known
    version, the latter is requested (``--json=v0.0.45``, 23.11 and later). If no known version is available, Slurm is
    read as far as possible, and not written to.
    """

    def __init__(self, settings: SlurmSettings) -> None:
        super().__init__(settings)
        self._scontrol_writes_json = True  # until it rejects --json
        self._json = "--json"
        self._versions: dict[str, int | None] = {}

    def read_only(self) -> str | None:
        """Return why nothing may be written."""
        for entity, version in self._versions.items():
            if version is None:
                return f"Slurm's report of {entity} does not state the version of its data parser: Slurm is read-only"
            if not OLDEST <= version <= NEWEST:
                return (
                    f"Slurm's report of {entity} is of data parser v0.0.{version}; v0.0.{OLDEST} to v0.0.{NEWEST} are "
                    "known: Slurm is read-only"
                )
        return None if self._versions else "Slurm has not been read yet"

    def update(self, node: str, change: NodeChange) -> WriteResult:
        """Write to a node by ``scontrol update``."""
        fields = {
            "State": change.state,
            # scontrol strips one quotation mark from either end
            "Reason": None if change.reason is None else f'"{change.reason}"',
            "Weight": change.weight,
            "Extra": change.extra,
        }
        assignments = [f"{name}={value}" for name, value in fields.items() if value is not None]
        return self._write("scontrol", "update", f"NodeName={node}", *assignments)

    def signal(self, job: SlurmJob, signal: CheckpointSignal) -> WriteResult:
        """Send a signal by ``scancel --signal``."""
        batch = ("--batch",) if signal.batch else ()
        return self._write("scancel", f"--signal={signal.name}", *batch, job.name)

    def requeue(self, job: SlurmJob) -> WriteResult:
        """Requeue by ``scontrol requeue``."""
        return self._write("scontrol", "requeue", job.requeue_name)

    def submit(self, *arguments: str) -> WriteResult:
        """Submit a batch job; the message of the result is its id."""
        return self._write("sbatch", *arguments)

    def cancel(self, job: int) -> WriteResult:
        """Cancel a batch job."""
        return self._write("scancel", str(job))

    def job_row(self, job: int) -> dict[str, Any] | None:
        """Read the row of a job in any state; None if Slurm has purged it."""
        try:
            rows = self._report("jobs", "squeue", f"--jobs={job}", "--states=all")
        except SchedulerError as error:
            if "invalid job id" in str(error).lower():
                return None
            raise
        return next((row for row in rows if number(row.get("job_id")) == job), None)

    def job_named(self, name: str) -> int | None:
        """Return the newest job with this name that Slurm has not purged."""
        rows = self._report("jobs", "squeue", f"--name={name}", "--states=all")
        return max(
            (job for row in rows if row.get("name") == name and (job := number(row.get("job_id")))), default=None
        )

    def reserved_nodes(self, reservation: str) -> frozenset[str]:
        """Return the nodes of a reservation from ``scontrol show reservation``."""
        output = self._show("reservation", reservation)
        listed = (
            None if " State=INACTIVE" in output else _RESERVED_NODES.search(output)
        )  # Slurm holds the jobs of an ended reservation
        try:
            return frozenset(expand_hostlist("" if listed is None or listed[1] == "(null)" else listed[1]))
        except ValueError as error:
            raise SchedulerError(f"the nodes of reservation {reservation} cannot be read: {error}") from None

    def partitions(self) -> Mapping[str, Partition]:
        """Return the fields of each partition from ``scontrol show partition``."""
        listed = [dict(_FIELD.findall(line)) for line in self._show("partition", "--all").splitlines()]
        return {fields["PartitionName"]: fields for fields in listed if "State" in fields}

    def server_time(self) -> datetime | None:
        """Return the time in the output of ``sdiag``, which has no JSON in 22.05."""
        match = _TIME.search(self._run("sdiag")[2])
        return None if match is None else instant(int(match[1]))

    def _show(self, *target: str) -> str:
        """Return the text output of ``scontrol show``: 22.05 has no JSON output for these."""
        try:
            status, errors, output = self._run("scontrol", "show", *target, "--oneliner")
        except CommandError as error:
            raise SchedulerError(str(error)) from None
        if status != 0:
            raise SchedulerError(f"`scontrol show {' '.join(target)}`: {errors or f'exit status {status}'}")
        return output.decode("utf-8", errors="replace")

    def _job_rows(self, node: str | None) -> list[dict[str, Any]]:
        # one node: all states, so that no job is missed; the fleet: without the queue, which may be long
        filters = (
            (f"--states={','.join(sorted(HELD_STATES))}",) if node is None else ("--states=all", f"--nodelist={node}")
        )
        return self._report("jobs", "squeue", *filters)

    def _node_rows(self, name: str | None) -> list[dict[str, Any]]:
        if self._scontrol_writes_json:
            arguments = () if name is None else (name,)
            try:
                return self._report("nodes", "scontrol", "show", "node", *arguments)
            except _NoJsonError:
                self._scontrol_writes_json = False
            except _NoSuchNodeError:
                if name is None:
                    raise
                return []
        rows = self._report("nodes", "sinfo", "--Node")  # 22.05 can only list all nodes
        return [row for row in rows if name is None or row.get("name") == name]

    def _report(self, key: str, *command: str) -> list[dict[str, Any]]:
        rows, version = self._read(key, *command, self._json)
        if version is not None and version > NEWEST and self._json == "--json":
            older = f"--json=v0.0.{NEWEST}"
            with contextlib.suppress(SchedulerError):  # not supported: continue read-only
                rows, version = self._read(key, *command, older)
                self._json = older
        self._versions[key] = version
        return rows

    def _read(self, key: str, *command: str) -> tuple[list[dict[str, Any]], int | None]:
        line = f"`{' '.join(command)}`"
        try:
            status, errors, output = self._run(*command)
            if status == 0:
                return read_report(output, key)
        except CommandError as error:
            raise SchedulerError(str(error)) from None
        except SlurmFormatError as error:
            raise SchedulerError(f"{line}: {error}") from None
        # scontrol writes its errors to the report, not to stderr
        message = f"{line}: {errors or errors_in(output) or f'exit status {status}'}"
        if any(text in errors for text in _NO_JSON):
            raise _NoJsonError(message)
        if any(text in message.lower() for text in _NO_SUCH_NODE):
            raise _NoSuchNodeError(message)
        raise SchedulerError(message)

    def _write(self, *command: str) -> WriteResult:
        """Run a command that writes; the message of the result is its output, e.g. a job id."""
        barred = self.read_only()
        if barred is not None:
            return WriteResult("refused", barred)
        try:
            status, errors, output = self._run(*command)
        except CommandError as error:
            return WriteResult("refused" if error.lasting else "timeout", str(error))
        if status != 0:
            return WriteResult(kind_of(errors), errors or f"exit status {status}")
        return WriteResult("done", output.decode("utf-8", errors="replace").strip() or errors)

    def _run(self, program: str, *arguments: str) -> tuple[int, str, bytes]:
        """Run a program; return its exit status, the start of stderr, and stdout."""
        settings = self._settings
        environment = {name: text for name, text in os.environ.items() if not name.startswith(_FOREIGN_FILTERS)}
        conf = {} if settings.slurm_conf is None else {"SLURM_CONF": settings.slurm_conf}
        path = program if settings.bin_dir is None else str(Path(settings.bin_dir) / program)
        ended = run_program(
            [path, *arguments], timeout_s=settings.timeout.total_seconds(),
            max_bytes=settings.max_response_bytes, environment={**environment, **LOCAL, "LC_ALL": "C", **conf},
        )  # fmt: skip
        return ended.status, ended.errors[:400], ended.output


class _NoJsonError(SchedulerError):
    """The program does not support ``--json``."""


class _NoSuchNodeError(SchedulerError):
    """The node does not exist."""
