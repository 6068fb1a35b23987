"""Interface to Slurm for both transports, and parsing of Slurm's JSON reports."""

import os
import pwd
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from foundation.slurm import SlurmFormatError
from scheduler.ports.codec import read_json
from scheduler.ports.errors import SchedulerError
from scheduler.ports.readings import ResultKind, WriteResult
from scheduler.slurm.job import PROBE_PREFIX, CheckpointSignal, SlurmJob, job_of
from scheduler.slurm.node import NodeChange, SlurmNode, node_of
from scheduler.slurm.settings import SlurmSettings

OLDEST: Final = 38
NEWEST: Final = 45
"""Supported versions of Slurm's data parser (``v0.0.38``: Slurm 22.05); with others Slurm is only read."""

_ERRORS: Final[tuple[tuple[str, ResultKind], ...]] = (
    ("invalid node name", "gone"), ("invalid job id", "gone"), ("already completing or completed", "gone"),
    ("job is pending execution", "already"), ("unable to contact slurm controller", "timeout"),
    ("socket timed out", "timeout"), ("zero bytes were transmitted", "timeout"), ("connection refused", "timeout"),
    ("connection reset", "timeout"),
)  # fmt: skip
# Messages of ESLURM_INVALID_NODE_NAME, ESLURM_INVALID_JOB_ID, ESLURM_ALREADY_DONE, ESLURM_JOB_PENDING, and of a
# slurmctld that does not respond (slurm_errno.c).

Partition = Mapping[str, str]
"""Fields of a partition as ``scontrol`` names them, e.g. ``State`` and ``MaxTime``."""

_VERSION = re.compile(r"v0\.0\.(\d{1,4})\Z")


class SlurmPort(ABC):
    """A connection to Slurm. Reads raise ``SchedulerError``, also instead of an incomplete list."""

    cannot_requeue: str | None = None
    """Why this transport cannot requeue jobs; None if it can."""

    def __init__(self, settings: SlurmSettings) -> None:
        self._settings = settings
        self._user = pwd.getpwuid(os.geteuid()).pw_name

    def nodes(self) -> tuple[SlurmNode, ...]:
        """List the nodes."""
        nodes = self._nodes()
        if not nodes:
            raise SchedulerError("Slurm lists no nodes")
        return nodes

    def node(self, name: str) -> SlurmNode | None:
        """Read one node; None if it does not exist."""
        return next((node for node in self._nodes(name) if node.name == name), None)

    def jobs(self, node: str | None = None) -> tuple[SlurmJob, ...]:
        """List the jobs that hold one node or any node, without predrain's own probes."""
        try:
            rows = [row for row in self._job_rows(node) if not self._is_probe(row)]
            jobs = [job_of(row, self._settings.gres) for row in rows]
        except (ValueError, TypeError, OverflowError) as error:
            raise SchedulerError(f"a row of jobs cannot be read: {error}") from None
        return tuple(job for job in jobs if job is not None and (node is None or node in job.nodes))

    def _is_probe(self, row: Mapping[str, Any]) -> bool:
        """Whether a job is one of our probes, by name and user: the name alone could hide another user's job."""
        is_own = str(row.get("name") or "").startswith(PROBE_PREFIX) and row.get("user_name") == self._user
        return self._settings.probe is not None and is_own

    def reserved_nodes(self, reservation: str) -> frozenset[str]:
        """Return the nodes of a reservation; needed only if jobs can be requeued."""
        raise SchedulerError(f"reservation {reservation} is not read: {self.cannot_requeue}")

    def partitions(self) -> Mapping[str, Partition]:
        """Return each partition; needed only if jobs can be requeued."""
        raise SchedulerError(f"partitions are not read: {self.cannot_requeue}")

    def _nodes(self, name: str | None = None) -> tuple[SlurmNode, ...]:
        try:
            # sinfo may list a node once per partition, with identical content
            return tuple(dict.fromkeys(node_of(row, self._settings.gres) for row in self._node_rows(name)))
        except (ValueError, TypeError, OverflowError) as error:
            raise SchedulerError(f"a row of nodes cannot be read: {error}") from None

    @abstractmethod
    def server_time(self) -> datetime | None:
        """Return slurmctld's time; None: unknown."""

    @abstractmethod
    def _node_rows(self, name: str | None) -> list[dict[str, Any]]:
        """Read the row of one node (empty if it does not exist), or of all."""

    @abstractmethod
    def _job_rows(self, node: str | None) -> list[dict[str, Any]]:
        """Read the rows of jobs, at least of those that hold the node, or any node."""

    @abstractmethod
    def read_only(self) -> str | None:
        """Return why Slurm must not be written to, based on the reports read so far, or None."""

    @abstractmethod
    def update(self, node: str, change: NodeChange) -> WriteResult:
        """Write a change to a node in one request."""

    @abstractmethod
    def signal(self, job: SlurmJob, signal: CheckpointSignal) -> WriteResult:
        """Send a signal to exactly this job, task or component, at least once."""

    @abstractmethod
    def requeue(self, job: SlurmJob) -> WriteResult:
        """Requeue exactly this batch job or task, with Slurm's KillWait between SIGTERM and SIGKILL."""


def read_report(content: bytes, key: str) -> tuple[list[dict[str, Any]], int | None]:
    """Return the rows of a report under ``key`` (``nodes``, ``jobs``), and its data parser's version, if stated.

    Raises ``SlurmFormatError`` if the report is truncated, not JSON, has no such list, or reports errors, as its list
    may be incomplete.
    """
    text = content.decode("utf-8", errors="replace")
    try:
        report = read_json(text[max(text.find("{"), 0) :])  # plugins may print debug lines first
    except ValueError as error:
        raise SlurmFormatError(f"the output is truncated or not JSON: {error}") from None
    if not isinstance(report, dict):
        raise SlurmFormatError("the output is not a JSON object")
    if report.get("errors"):
        raise SlurmFormatError(f"Slurm reports {str(report['errors'])[:300]}")
    rows = report.get(key)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise SlurmFormatError(
            f"the output has no list {key}, only {', '.join(sorted(report))[:200] or 'an empty object'}"
        )
    return rows, parser_version(report.get("meta"))


def errors_in(content: bytes) -> str | None:
    """Return the errors in a response, on one line; None if it is not a JSON object."""
    try:
        answer = read_json(content)
    except ValueError:
        return None
    if not isinstance(answer, dict):
        return None
    errors = answer.get("errors") or []
    messages = [
        str(error.get("error") or error.get("description") or error) if isinstance(error, dict) else str(error)
        for error in (errors if isinstance(errors, list) else [errors])
    ]
    return " ".join(messages)[:300]


def kind_of(errors: str) -> ResultKind:
    """Return the kind of result for Slurm's error message; ``refused`` if unknown."""
    return next((kind for text, kind in _ERRORS if text in errors.lower()), "refused")


def parser_version(meta: object) -> int | None:
    """Return the data parser's version from a report's ``meta``; None if it is not stated.

    22.05 and 23.02 state it as ``plugin.type`` (``openapi/v0.0.38``), later ones as ``plugin.data_parser``
    (``data_parser/v0.0.42``).
    """
    plugin = meta.get("plugin") if isinstance(meta, Mapping) else None
    if not isinstance(plugin, Mapping):
        return None
    versions = (_VERSION.search(str(plugin.get(key) or "")) for key in ("data_parser", "type"))
    return next((int(version[1]) for version in versions if version), None)
