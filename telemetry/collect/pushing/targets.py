"""Where landed files are sent: the HTTP service, or another landing folder on a file system that both sides see."""

from __future__ import annotations

import io
import json
import time
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from telemetry.errors import InputError
from telemetry.http import BodyTooLarge, Connection, HttpError, bounded_body, client, http_errors, retry_after_s
from telemetry.landing.tables import Kind

if TYPE_CHECKING:
    import httpx


from collections.abc import Mapping
from typing import Protocol

import pyarrow.parquet as pq

from telemetry.dataset.channel import Channel
from telemetry.landing.folder import Landing


def read_landed(path: Path) -> pa.Table:
    """Read a landed file; :class:`Refused` where it cannot be read."""
    try:
        with pq.ParquetFile(path) as stored:
            return stored.read()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise Refused(f"the file cannot be read: {error}") from error


class FolderTarget:
    """Another landing folder; implements :class:`telemetry.collect.pushing.targets.Target`.

    ``folder``: must exist whenever something is sent: a folder made in place of a file system that is not mounted would
    take everything and show it to nobody.
    ``channels``: channels that samples may have.
    """

    def __init__(self, folder: Path, writer: str, channels: Mapping[str, Channel]) -> None:
        self._folder = folder
        self._landing = Landing(folder, writer=writer, channels=channels)

    def __str__(self) -> str:
        return str(self._folder)

    def send(self, kind: Kind, path: Path, name: str) -> None:
        """Land the file there under its name."""
        table = read_landed(path)
        if not self._folder.is_dir():
            raise Later(f"the folder {self._folder} does not exist: mount its file system, or make it")
        try:
            self._landing.land(kind, table, name=name)
        except ValueError as error:
            raise Refused(str(error)) from error
        except (InputError, OSError) as error:
            raise Later(str(error)) from error


class Later(Exception):
    """The other side cannot take anything now; the file stays in the spool.

    ``why``: for the log; never a secret.
    ``after_s``: when the other side wants to be asked again, if it said so.
    ``poison``: whether the file may be the reason: the other side is there, and stumbled over it.
    """

    def __init__(self, why: str, after_s: float | None = None, *, poison: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.after_s = after_s
        self.poison = poison


class Refused(Exception):
    """The other side will never take this file."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Target(Protocol):
    """Takes landed files, each of them once however often it is sent under its name."""

    def send(self, kind: Kind, path: Path, name: str) -> None:
        """Return once the file is safe on the other side.

        Raises ``FileNotFoundError`` if the file is gone from the spool.
        """


PATH: Final = "/v1/telemetry"
CONTENT_TYPE: Final = "application/vnd.apache.arrow.stream"
TIMEOUT_S: Final = 30.0
_ANSWER_BYTES: Final = 65536
_LONGEST_WAIT_S: Final = 3600.0
_NOT_THE_FILE: Final = frozenset({401, 403, 404, 405, 407, 408, 421, 425, 429})
"""4xx that speak of the token, the address or the moment: every other file would get the same answer."""


class HttpTarget:
    """The service's push endpoint; implements :class:`telemetry.collect.pushing.targets.Target`.

    ``url`` is the service's, with or without the path ``/v1/telemetry``. The token file is read at each request, so
    that it can be replaced. Raises InputError if the address or a file cannot be used.
    """

    def __init__(
        self, url: str, *, token_file: Path | None = None, ca_file: Path | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise InputError(
                f"{url!r} is no address of a service",
                "--push",
                "Give http:// or https://, a host and perhaps a port and a path; a token goes into --token-file.",
            )
        base = url.rstrip("/")
        self._url = base if base.endswith(PATH) else base + PATH
        self._connection = Connection(self._url, ca_file=ca_file)
        self._token_file = token_file
        self._timeout_s = timeout_s
        self._connection.tls()
        self._token()

    def __str__(self) -> str:
        return self._url

    def send(self, kind: Kind, path: Path, name: str) -> None:
        """Post the file as an Arrow stream under its name."""
        body = io.BytesIO()
        table = read_landed(path)
        with pa.ipc.new_stream(body, table.schema) as stream:
            stream.write_table(table)
        headers = {"Content-Type": CONTENT_TYPE}
        try:
            token = self._token()
        except InputError as error:
            raise Later(str(error)) from error
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        deadline_s = time.monotonic() + 2 * self._timeout_s
        try:
            with (
                http_errors(self._url),
                client(self._connection, timeout_s=self._timeout_s) as session,
                session.stream(
                    "POST",
                    self._url,
                    params={"kind": kind, "name": name},
                    content=body.getvalue(),
                    headers=headers,
                ) as answer,
            ):
                self._check(answer, deadline_s)
        except HttpError as error:
            raise Later(f"{self._url}: {error}") from error
        except InputError as error:  # an untrusted certificate: files wait until it is mended
            raise Later(str(error)) from error

    def _check(self, answer: httpx.Response, deadline_s: float) -> None:
        """Raise what an answer other than 2xx means for the file."""
        try:
            content = bounded_body(answer, _ANSWER_BYTES, deadline_s=deadline_s)
        except BodyTooLarge:
            content = b""
        if answer.is_success:
            return
        status, reason = answer.status_code, _reason(content)
        text = f"{self._url} answered {status}{f': {reason}' if reason else ''}"
        if 400 <= status < 500 and status not in _NOT_THE_FILE:
            raise Refused(text)
        if status in (401, 403):
            text += "; check the token in --token-file, nothing is lost meanwhile"
        after_s = retry_after_s(answer.headers.get("Retry-After"), longest_s=_LONGEST_WAIT_S)
        raise Later(text, after_s, poison=status >= 500 and status != 503)

    def _token(self) -> str | None:
        if self._token_file is None:
            return None
        try:
            token = self._token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"the token cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}",
                str(self._token_file),
                "Give --token-file a file that this user may read and that holds the token alone.",
            ) from error
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise InputError(
                "the token is empty or has characters that no token has",
                str(self._token_file),
                "Write the token alone into the file, in one line.",
            )
        return token


def _reason(content: bytes) -> str:
    try:
        problem = json.loads(content)
        return str(problem.get("detail") or problem.get("title") or "")[:500]
    except (ValueError, AttributeError):
        return ""
