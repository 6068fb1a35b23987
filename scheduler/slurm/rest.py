"""Slurm by slurmrestd, over TCP with a JWT or over a unix socket."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

import httpx

from scheduler.ports.errors import SchedulerError
from scheduler.slurm.job import CheckpointSignal, SlurmJob, job_of
from scheduler.slurm.node import NodeChange, SlurmNode, node_of
from scheduler.slurm.port import SlurmAnswer
from scheduler.slurm.report import NEWEST, OLDEST, Report, ReportReader
from scheduler.slurm.settings import SlurmSettings
from telemetry.collect.slurm.slurm_json import SlurmFormatError
from telemetry.errors import InputError
from telemetry.http import Connection, HttpError, client, deadline_extensions, http_errors

_Row = TypeVar("_Row")

FIRST_WITH_NODE_WRITES: Final = 39
"""slurmrestd updates nodes from v0.0.39 (Slurm 23.02) on."""

_FIRST_WITH_NUMBER_OBJECTS: Final = 40
_CHUNK: Final = 1 << 18
_MOST_ANSWER: Final = 1 << 20
_OK: Final = 200
_NOT_FOUND: Final = 404
_DENIED: Final = frozenset({401, 403, 511})  # 511: slurmrestd's answer to a token that it does not take


class _NoAnswerError(Exception):
    """Nobody knows what became of a request."""


class SlurmRest:
    """Slurm through slurmrestd.

    Raises ``InputError`` if the file of the token cannot be read.

    The newest version of the interface is taken that both sides know; it is asked for from the newest on. Redirects are
    not followed. Where the version has no writing of nodes (22.05) Slurm is only read. slurmrestd has no requeue: jobs
    are waited for.
    """

    def __init__(self, settings: SlurmSettings) -> None:
        assert settings.rest_url is not None
        self._settings, self._where = settings, settings.rest_url
        self._version: int | None = None
        self._headers()

    def nodes(self) -> tuple[SlurmNode, ...]:
        """List the nodes."""
        rows = self._report("nodes/", "nodes", lambda row: node_of(row, self._settings.gres)).rows
        if not rows:
            raise SchedulerError("Slurm lists no nodes")
        return rows

    def node(self, name: str) -> SlurmNode | None:
        """Read one node."""

        def keep(row: Mapping[str, Any]) -> SlurmNode | None:
            node = node_of(row, self._settings.gres)
            return node if node.name == name else None

        rows = self._report(f"node/{quote(name, safe='')}", "nodes", keep, missing=True).rows
        return rows[0] if rows else None

    def jobs(self, node: str | None = None) -> tuple[SlurmJob, ...]:
        """List the jobs that hold nodes."""

        def keep(row: Mapping[str, Any]) -> SlurmJob | None:
            job = job_of(row, self._settings.gres)
            return job if job is not None and (node is None or node in job.nodes) else None

        return self._report("jobs/", "jobs", keep).rows

    def read_only(self) -> str | None:
        """Say why nothing may be written."""
        if self._version is None:
            return "Slurm was not read yet"
        if self._version < FIRST_WITH_NODE_WRITES:
            return f"slurmrestd's v0.0.{self._version} cannot write nodes: Slurm is only read"
        return None

    def update(self, node: str, change: NodeChange) -> SlurmAnswer:
        """Write to a node."""
        body: dict[str, Any] = {}
        if change.state is not None:
            body["state"] = [change.state]
        if change.reason is not None:
            body["reason"] = change.reason
        if change.extra is not None:
            body["extra"] = change.extra
        if change.weight is not None:
            objects = (self._version or 0) >= _FIRST_WITH_NUMBER_OBJECTS
            body["weight"] = {"set": True, "infinite": False, "number": change.weight} if objects else change.weight
        return self._write("POST", f"node/{quote(node, safe='')}", body)

    def signal(self, job: SlurmJob, signal: CheckpointSignal) -> SlurmAnswer:
        """Send a job a signal."""
        asked = {"signal": signal.name, **({"flags": "BATCH_JOB"} if signal.batch else {})}
        return self._write("DELETE", f"job/{job.number}?{urlencode(asked)}", None)

    def requeue(self, job: SlurmJob) -> SlurmAnswer:  # noqa: ARG002 - as the port says
        """Refuse: slurmrestd has no requeue."""
        return SlurmAnswer("refused", "slurmrestd cannot requeue a job")

    def _write(self, method: str, path: str, body: dict[str, Any] | None) -> SlurmAnswer:
        refused = self.read_only()
        if refused is not None:
            return SlurmAnswer("refused", refused)
        answer = bytearray()

        def take(piece: bytes) -> None:
            answer.extend(piece)
            if len(answer) > _MOST_ANSWER:
                raise SlurmFormatError("an answer of over 1 MiB")

        try:
            status = self._ask(method, self._path(self._version or 0, path), take, body)
        except (_NoAnswerError, SlurmFormatError) as error:
            return SlurmAnswer("timeout", str(error))
        said = _errors(bytes(answer))
        if said is None:  # a proxy, or cut off: slurmrestd answers every request with JSON
            return SlurmAnswer("timeout", f"HTTP {status}: no whole answer of slurmrestd")
        if status == _OK and not said:
            return SlurmAnswer("done")
        if status == _NOT_FOUND or "invalid node name" in said.lower() or "invalid job id" in said.lower():
            return SlurmAnswer("gone", said or f"HTTP {status}")
        return SlurmAnswer("refused", f"HTTP {status}: {said}"[:400])

    def _report(
        self, path: str, key: str, keep: Callable[[Mapping[str, Any]], _Row | None], *, missing: bool = False
    ) -> Report[_Row]:
        known = [self._version] if self._version is not None else list(range(NEWEST, OLDEST - 1, -1))
        said = ""
        for version in known:
            reader = ReportReader(key, keep)
            try:
                status = self._ask("GET", self._path(version, path), reader.feed, None)
                if status == _NOT_FOUND and self._version is None:
                    continue
                if status in _DENIED:
                    raise SchedulerError(f"{self._where}: HTTP {status}: slurmrestd does not take our token")
                if status != _OK:
                    try:
                        reader.finish()
                    except SlurmFormatError as error:
                        said = str(error)
                    if missing and (status == _NOT_FOUND or "invalid node name" in said.lower()):
                        return Report((), version)
                    raise SchedulerError(f"{self._where}: HTTP {status}: {said[:300]}")
                report = reader.finish()
            except _NoAnswerError as error:
                raise SchedulerError(str(error)) from None
            except SlurmFormatError as error:
                if missing and "invalid node name" in str(error).lower():
                    return Report((), version)
                raise SchedulerError(f"{self._where}: {error}") from None
            self._version = version
            return report
        raise SchedulerError(f"{self._where}: it knows none of v0.0.{OLDEST} to v0.0.{NEWEST}")

    def _path(self, version: int, path: str) -> str:
        return f"/slurm/v0.0.{version}/{path}"

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        if self._settings.rest_user is not None:
            headers["X-SLURM-USER-NAME"] = self._settings.rest_user
        if self._settings.rest_token_file is not None:
            file = Path(self._settings.rest_token_file)
            try:
                headers["X-SLURM-USER-TOKEN"] = file.read_text(encoding="ascii").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(
                    f"slurmrestd's token cannot be read: {error}", str(file), "Write the JWT into it, for us alone."
                ) from None
        return headers

    def _ask(self, method: str, path: str, sink: Callable[[bytes], None], body: dict[str, Any] | None) -> int:
        """Send one request, and give its answer to ``sink``; gives its status."""
        timeout = self._settings.timeout.total_seconds()
        deadline = time.monotonic() + timeout
        try:
            headers = self._headers()
        except InputError as error:
            raise SchedulerError(str(error)) from None
        size = 0
        try:
            with (
                http_errors(self._where),
                self._client(timeout) as session,
                deadline_extensions(deadline) as extensions,
                session.stream(method, path, json=body, headers=headers, extensions=extensions) as answer,
            ):
                for piece in answer.iter_bytes(_CHUNK):
                    size += len(piece)
                    if size > self._settings.max_response_bytes:
                        raise SlurmFormatError(f"an answer of over {self._settings.max_response_bytes:,} bytes")
                    if time.monotonic() > deadline:
                        raise _NoAnswerError(f"{self._where}: no whole answer within {timeout:g} s")
                    sink(piece)
                return answer.status_code
        except (HttpError, InputError) as error:
            late = time.monotonic() >= deadline
            why = f"no whole answer within {timeout:g} s" if late else str(error)
            raise _NoAnswerError(f"{self._where}: {why}") from None

    def _client(self, timeout_s: float) -> httpx.Client:
        if self._where.startswith("unix:"):
            socket = httpx.HTTPTransport(uds=self._where.removeprefix("unix:"))
            return httpx.Client(transport=socket, base_url="http://localhost", timeout=timeout_s, trust_env=False)
        session = client(Connection(self._where.rstrip("/")), timeout_s=timeout_s, use_proxies=False)
        session.base_url = httpx.URL(self._where)
        return session


def _errors(content: bytes) -> str | None:
    """Give the errors that an answer tells; None where it is no answer of slurmrestd."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    errors = found.get("errors") or []
    told = [
        str(each.get("error") or each.get("description") or each) if isinstance(each, dict) else str(each)
        for each in (errors if isinstance(errors, list) else [errors])
    ]
    return " ".join(told)[:300]
