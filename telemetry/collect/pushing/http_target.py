"""Sends landed files to the HTTP service."""

from __future__ import annotations

import io
import json
import time
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from telemetry.collect.pushing.folder_target import read_landed
from telemetry.collect.pushing.target import Later, Refused
from telemetry.errors import InputError
from telemetry.http import BodyTooLarge, Connection, HttpError, bounded_body, client, http_errors, retry_after_s
from telemetry.landing.tables import Kind

if TYPE_CHECKING:
    import httpx

PATH: Final = "/v1/telemetry"
CONTENT_TYPE: Final = "application/vnd.apache.arrow.stream"
TIMEOUT_S: Final = 30.0
_ANSWER_BYTES: Final = 65536
_LONGEST_WAIT_S: Final = 3600.0
_NOT_THE_FILE: Final = frozenset({401, 403, 404, 405, 407, 408, 421, 425, 429})
"""4xx that speak of the token, the address or the moment: every other file would get the same answer."""


class HttpTarget:
    """The service's push endpoint; implements :class:`telemetry.collect.pushing.target.Target`.

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
        self._client = client(self._connection, timeout_s=timeout_s)
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
                self._client.stream(
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
