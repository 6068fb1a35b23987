"""Slurm through slurmrestd, over TCP with a JWT or over a Unix socket."""

from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

from foundation.errors import InputError
from foundation.files import read_small
from foundation.http import BodyTooLarge, Connection, HttpError, NoAnswerInTime, ask
from foundation.slurm import SlurmFormatError, instant
from scheduler.ports.codec import read_json
from scheduler.ports.errors import SchedulerError
from scheduler.ports.readings import WriteResult
from scheduler.slurm.job import CheckpointSignal, SlurmJob
from scheduler.slurm.node import NodeChange
from scheduler.slurm.port import NEWEST, OLDEST, SlurmPort, errors_in, kind_of, read_report
from scheduler.slurm.settings import SlurmSettings

FIRST_WITH_NODE_WRITES: Final = 39
"""First version of slurmrestd that can update nodes (v0.0.39: Slurm 23.02)."""

_FIRST_WITH_NUMBER_OBJECTS: Final = 40
_OK: Final = 200
_NOT_FOUND: Final = 404
_DENIED: Final = frozenset({401, 403, 511})  # 511: slurmrestd's response to a rejected token


class _NoAnswerError(Exception):
    """The outcome of a request is unknown."""


class SlurmRest(SlurmPort):
    """Slurm through slurmrestd.

    Raises ``InputError`` if the token file cannot be read.

    Uses the newest API version that both sides support, trying the newest first. Redirects are not followed. If the
    version cannot update nodes (22.05), Slurm is only read. slurmrestd cannot requeue, so jobs run to completion.
    """

    cannot_requeue = "slurmrestd cannot requeue a job"

    def __init__(self, settings: SlurmSettings) -> None:
        super().__init__(settings)
        assert settings.rest_url is not None
        self._url = settings.rest_url
        self._version: int | None = None
        self._headers()

    def read_only(self) -> str | None:
        """Return why nothing may be written."""
        if self._version is None:
            return "Slurm has not been read yet"
        if self._version < FIRST_WITH_NODE_WRITES:
            return f"slurmrestd's v0.0.{self._version} cannot write nodes: Slurm is read-only"
        return None

    def update(self, node: str, change: NodeChange) -> WriteResult:
        """Write to a node."""
        state = None if change.state is None else [change.state]
        weight: Any = change.weight
        if weight is not None and (self._version or 0) >= _FIRST_WITH_NUMBER_OBJECTS:
            weight = {"set": True, "infinite": False, "number": weight}
        body = {"state": state, "reason": change.reason, "extra": change.extra, "weight": weight}
        fields = {name: value for name, value in body.items() if value is not None}
        return self._write("POST", f"node/{quote(node, safe='')}", fields)

    def signal(self, job: SlurmJob, signal: CheckpointSignal) -> WriteResult:
        """Send a job a signal."""
        query = {"signal": signal.name, **({"flags": "BATCH_JOB"} if signal.batch else {})}
        return self._write("DELETE", f"job/{quote(job.name, safe='')}?{urlencode(query)}", None)

    def requeue(self, job: SlurmJob) -> WriteResult:
        """Refuse, because slurmrestd cannot requeue."""
        return WriteResult("refused", self.cannot_requeue)

    def server_time(self) -> datetime | None:
        """Return the time at which slurmctld answered a request for its statistics."""
        try:
            _, content = self._ask("GET", f"/slurm/v0.0.{self._version}/diag/", None)
            return instant(read_json(content)["statistics"]["req_time"])
        except (_NoAnswerError, ValueError, TypeError, KeyError) as error:
            raise SchedulerError(f"the time of slurmctld cannot be read: {error!r}") from None

    def _node_rows(self, name: str | None) -> list[dict[str, Any]]:
        return self._rows("nodes", "nodes/" if name is None else f"node/{quote(name, safe='')}", one=name is not None)

    def _job_rows(self, node: str | None) -> list[dict[str, Any]]:
        return self._rows("jobs", "jobs/")

    def _rows(self, key: str, path: str, *, one: bool = False) -> list[dict[str, Any]]:
        """Read a report's rows; with ``one``, empty if the node does not exist."""
        for version in [self._version] if self._version is not None else range(NEWEST, OLDEST - 1, -1):
            try:
                status, content = self._ask("GET", f"/slurm/v0.0.{version}/{path}", None)
            except _NoAnswerError as error:
                raise SchedulerError(str(error)) from None
            if status == _NOT_FOUND and self._version is None:
                continue
            if status in _DENIED:
                raise SchedulerError(f"{self._url}: HTTP {status}: slurmrestd rejects the token")
            try:
                if status != _OK:
                    raise SlurmFormatError(f"HTTP {status}: {errors_in(content) or 'no message'}")
                rows, _ = read_report(content, key)
            except SlurmFormatError as error:
                if one and (status == _NOT_FOUND or _is_unknown_node(content)):
                    return []
                # 22.05's only message if slurmctld rejects the token
                doubt = self._settings.rest_token_file is not None and "Unspecified error" in str(error)
                hint = "; the token may be invalid or expired" if doubt else ""
                raise SchedulerError(f"{self._url}: {error}{hint}") from None
            self._version = version
            return rows
        raise SchedulerError(f"{self._url}: it supports no version from v0.0.{OLDEST} to v0.0.{NEWEST}")

    def _write(self, method: str, path: str, body: dict[str, Any] | None) -> WriteResult:
        refused = self.read_only()
        if refused is not None:
            return WriteResult("refused", refused)
        try:
            status, content = self._ask(method, f"/slurm/v0.0.{self._version}/{path}", body)
        except _NoAnswerError as error:
            return WriteResult("timeout", str(error))
        errors = errors_in(content)
        if errors is None:  # from a proxy, or truncated: slurmrestd always responds with JSON
            return WriteResult("timeout", f"HTTP {status}: incomplete response of slurmrestd")
        if status == _OK and not errors:
            return WriteResult("done")
        return WriteResult("gone" if status == _NOT_FOUND else kind_of(errors), f"HTTP {status}: {errors}"[:400])

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        if self._settings.rest_user is not None:
            headers["X-SLURM-USER-NAME"] = self._settings.rest_user
        if self._settings.rest_token_file is not None:
            file = Path(self._settings.rest_token_file)
            try:
                headers["X-SLURM-USER-TOKEN"] = read_small(file).decode("ascii").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(
                    f"slurmrestd's token cannot be read: {error}", str(file), "Write the JWT to it."
                ) from None
        return headers

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        """Send one request; return status and body of the response."""
        timeout_s = self._settings.timeout.total_seconds()
        try:
            headers = self._headers()
        except InputError as error:
            raise SchedulerError(str(error)) from None
        is_unix = self._url.startswith("unix:")
        try:
            answer = ask(
                Connection("http://localhost" if is_unix else self._url.rstrip("/")), method, path,
                timeout_s=timeout_s, max_bytes=self._settings.max_response_bytes, use_proxies=False,
                unix_socket=self._url.removeprefix("unix:") if is_unix else None, headers=headers, json=body,
            )  # fmt: skip
        except NoAnswerInTime:
            raise _NoAnswerError(f"{self._url}: no complete response within {timeout_s:g} s") from None
        except InputError as error:  # its hint names options of other commands
            raise _NoAnswerError(f"{self._url}: {error.problem}") from None
        except (HttpError, BodyTooLarge) as error:
            raise _NoAnswerError(f"{self._url}: {error}") from None
        return answer.status, answer.body


def _is_unknown_node(content: bytes) -> bool:
    """Whether a response says that the node does not exist."""
    if "invalid node name" in (errors_in(content) or "").lower():
        return True
    # 24.11 uses this message for any failed query of a node; the node is unknown only if the error number is 0.
    try:
        errors = read_json(content)["errors"]
        return bool(errors) and all(
            error["error_number"] == 0 and error["description"].lower().startswith("failure to query node ")
            for error in errors
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return False
