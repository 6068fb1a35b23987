"""Sends landed files to the HTTP service."""

from __future__ import annotations

import email.utils
import http.client
import io
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from email.message import Message
from pathlib import Path
from typing import IO, Final

import pyarrow as pa

from telemetry.errors import InputError
from telemetry.landing.tables import Kind
from telemetry.pushing.folder_target import read_landed
from telemetry.pushing.target import Later, Refused

PATH: Final = "/v1/telemetry"
CONTENT_TYPE: Final = "application/vnd.apache.arrow.stream"
TIMEOUT_S: Final = 30.0
_ANSWER_BYTES: Final = 65536
_LONGEST_WAIT_S: Final = 3600.0
_NOT_THE_FILE: Final = frozenset({401, 403, 404, 405, 407, 408, 421, 425, 429})
"""4xx that speak of the token, the address or the moment: every other file would get the same answer."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token elsewhere."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        """Follow none."""


class HttpTarget:
    """The service's push endpoint; implements :class:`telemetry.pushing.target.Target`.

    ``url``: of the service, with or without the path ``/v1/telemetry``.
    ``token_file``: holds the bearer token; read at each request, so that it can be replaced.
    ``ca_file``: certificates (PEM) to trust instead of the system's.
    ``timeout_s``: longest silence of the server, and longest time for its answer as a whole.
    ``clock``: Now, aware UTC; for dates in ``Retry-After``.
    Raises ``InputError`` if the address or a file cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        token_file: Path | None = None,
        ca_file: Path | None = None,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
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
        self._token_file = token_file
        self._timeout_s = timeout_s
        self._clock = clock
        handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
        if parts.scheme == "https":
            handlers.append(urllib.request.HTTPSHandler(context=_trust(ca_file)))
        self._opener = urllib.request.build_opener(*handlers)
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
        query = urllib.parse.urlencode({"kind": kind, "name": name})
        request = urllib.request.Request(  # noqa: S310  the scheme was checked
            f"{self._url}?{query}", data=body.getvalue(), headers=headers, method="POST"
        )
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                if not 200 <= answer.status < 300:
                    raise Later(f"{self._url} answered {answer.status}")
                self._drain(answer)
        except urllib.error.HTTPError as error:
            with error:
                self._judge(error)
        except urllib.error.URLError as error:
            raise Later(f"{self._url} cannot be reached: {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            raise Later(f"{self._url} broke off: {type(error).__name__} {error}") from error

    def _judge(self, error: urllib.error.HTTPError) -> None:
        """Raise what an answer other than 2xx means for the file."""
        reason = self._reason(error)
        text = f"{self._url} answered {error.code}{f': {reason}' if reason else ''}"
        if 400 <= error.code < 500 and error.code not in _NOT_THE_FILE:
            raise Refused(text)
        if error.code in (401, 403):
            text += "; check the token in --token-file, nothing is lost meanwhile"
        after_s = self._retry_after_s(error.headers.get("Retry-After"))
        raise Later(text, after_s, poison=error.code >= 500 and error.code != 503)

    def _reason(self, error: urllib.error.HTTPError) -> str:
        try:
            content = json.loads(self._drain(error))
            return str(content.get("detail") or content.get("title") or "")[:500]
        except (OSError, http.client.HTTPException, ValueError, AttributeError, Later):
            return ""

    def _drain(self, answer: IO[bytes] | http.client.HTTPResponse) -> bytes:
        """Read the answer's body up to a size, and within the time-out as a whole: a server may drip."""
        deadline = time.monotonic() + self._timeout_s
        content = b""
        while len(content) < _ANSWER_BYTES:
            got: bytes = answer.read1(_ANSWER_BYTES)  # type: ignore[union-attr]  # both kinds of answer have it
            if not got:
                break
            content += got
            if time.monotonic() > deadline:
                raise Later(f"{self._url} answers too slowly")
        return content

    def _retry_after_s(self, value: str | None) -> float | None:
        if value is None:
            return None
        if value.strip().isdigit():
            return min(float(value), _LONGEST_WAIT_S)
        try:
            when = email.utils.parsedate_to_datetime(value)
        except ValueError:
            return None
        when = when if when.tzinfo else when.replace(tzinfo=UTC)
        return min(max(0.0, (when - self._clock()).total_seconds()), _LONGEST_WAIT_S)

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


def _trust(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise InputError(
            f"the certificates cannot be read: {error}", str(ca_file), "Give --ca-file a file of certificates in PEM."
        ) from error
