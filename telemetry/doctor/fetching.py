"""One HTTP answer, bounded in time and size: the doctor asks few questions, one after the other."""

from __future__ import annotations

import http.client
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from telemetry.errors import InputError
from telemetry.prometheus.connection import Connection

_PIECE: Final = 1 << 16
_TRIES: Final = 3
_FIRST_WAIT_S: Final = 0.5
_AGAIN: Final = frozenset({429, 500, 502, 503, 504})
_SAID: Final = 300


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said.

    ``elapsed_s``: from the request to the last byte.
    """

    body: bytes
    headers: Mapping[str, str]
    elapsed_s: float


class Refused(Exception):
    """An answer with a status of 400 or more."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"HTTP status {status}: {said}" if said else f"HTTP status {status}")
        self.status = status
        self.said = said


def fetch(
    connection: Connection,
    path: str = "",
    *,
    form: Mapping[str, str] | None = None,
    timeout_s: float = 10.0,
    max_bytes: int = 8 << 20,
    sleep: Callable[[float], None] = time.sleep,
) -> Answer:
    """Ask once, and again where that may help.

    Raises ``Refused`` if the server answers with a status of 400 or more (429 and 5xx: three times).
    Raises ``InputError`` if it cannot be reached, gives no whole answer in time, a larger one than allowed, or sends
    elsewhere.
    """
    where = shown(connection.url)
    for turn in range(1, _TRIES + 1):
        try:
            return _once(connection, path, form, timeout_s, max_bytes)
        except Refused as refused:
            if refused.status not in _AGAIN or turn == _TRIES:
                raise
        except (OSError, http.client.HTTPException) as error:
            if turn == _TRIES:
                reason = getattr(error, "reason", None) or error
                raise InputError(
                    f"no answer: {reason or type(error).__name__}",
                    where,
                    "Check the address, that the server runs, and that this host may reach it.",
                ) from error
        sleep(_FIRST_WAIT_S * 2 ** (turn - 1) * random.uniform(0.5, 1.5))  # noqa: S311 - spreads retries, no secret
    raise AssertionError("unreachable")


def shown(url: str) -> str:
    """Return an address as it may be shown: without user, password and query."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}"


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows a redirect on the same host only: elsewhere is a login page, and no place for our credentials."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            fp.close()
            raise InputError(
                f"the server sends elsewhere: to {shown(newurl)}",
                shown(req.full_url),
                "Give the address behind it, or the credentials it asks for.",
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _once(
    connection: Connection, path: str, form: Mapping[str, str] | None, timeout_s: float, max_bytes: int
) -> Answer:
    request = urllib.request.Request(  # noqa: S310 - Connection and parse_target allow http and https only
        connection.url + path,
        data=None if form is None else urlencode(form).encode(),
        headers={"User-Agent": "predrain-doctor", "Accept": "*/*", **connection.request_headers()},
    )
    handlers: list[urllib.request.BaseHandler] = [_SameHost()]
    tls = connection.tls()
    if tls is not None:
        handlers.append(urllib.request.HTTPSHandler(context=tls))
    began = time.monotonic()
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as response:
            body = _body(response, began + timeout_s, max_bytes, shown(connection.url))
            headers = {name.lower(): value for name, value in response.headers.items()}
    except urllib.error.HTTPError as error:
        with error:
            said = " ".join(error.read(_SAID).decode("utf-8", "replace").split())
        raise Refused(error.code, said) from None
    return Answer(body, headers, time.monotonic() - began)


def _body(response: Any, deadline: float, max_bytes: int, where: str) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while piece := response.read1(_PIECE):
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            raise InputError(
                f"the answer is larger than {max_bytes:,} bytes", where, "Check that it is the right page."
            )
        if time.monotonic() > deadline:
            raise TimeoutError("the answer did not end in time")
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(pieces)
