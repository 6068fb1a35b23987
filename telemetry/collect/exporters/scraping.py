"""One scrape over HTTP: a whole page within the bounds, or a :class:`ScrapeError` that says what went wrong."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final, Literal, get_args

from telemetry.errors import InputError
from telemetry.http import Connection, async_client

if TYPE_CHECKING:
    import httpx

FailureKind = Literal[
    "refused",
    "unreachable",
    "timeout",
    "tls",
    "status",
    "redirect",
    "truncated",
    "too_large",
    "protocol",
    "parse",
    "empty",
]
"""Kinds of failed scrapes.

``unreachable``: no route, no such name, connection lost. ``truncated``: the body ended early. ``too_large``: over a
bound of bytes or rows. ``protocol``: no HTTP. ``parse``: no page of an exporter. ``empty``: no series of any device.
"""

FAILURE_KINDS: Final[tuple[FailureKind, ...]] = get_args(FailureKind)
PAGE_BYTES: Final = 8 << 20
HELD_BYTES: Final = 256 << 20
"""Bytes of one page, and of all pages that are being read."""

_ACCEPT: Final = "text/plain;version=0.0.4, application/openmetrics-text;version=1.0.0;q=0.5, */*;q=0.1"


class ScrapeError(Exception):
    """A scrape that gave no usable page; ``detail`` is one line that holds no secret and no part of the page."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Page:
    """One fetched page.

    ``duration_s`` is to the last byte, ``date`` the server's clock (whole seconds), ``date_after_s`` when it arrived.
    ``framed`` says whether the transport told where the body ends: if not, a page that was cut looks like a whole one.
    """

    body: bytes
    duration_s: float
    date: datetime | None = None
    date_after_s: float = 0.0
    framed: bool = True
    openmetrics: bool | None = None


class Scraper:
    """Fetches pages; ``connection`` gives credentials and trust for every target.

    Each scrape has a connection of its own: one pool over a thousand targets is searched as a whole for each request.
    """

    def __init__(self, connection: Connection, *, timeout_s: float, held_bytes: int = HELD_BYTES) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._limit_bytes = held_bytes
        self._held_bytes = 0
        self._headers = connection.request_headers()
        self._tls = connection.tls()

    async def fetch(self, url: str) -> Page:
        """Return the page at ``url``; raises ScrapeError."""
        import httpx  # noqa: PLC0415

        with contextlib.suppress(InputError):  # in the middle of a rotation: the credentials of before hold
            self._headers = self._connection.request_headers()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._get(url)
        except (TimeoutError, httpx.TimeoutException):
            raise ScrapeError("timeout", f"no whole page within {self._timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise _explained(error) from error

    async def _get(self, url: str) -> Page:
        began_s = time.monotonic()
        async with (
            async_client(self._connection, timeout_s=self._timeout_s, use_proxies=False, tls=self._tls) as client,
            client.stream("GET", url, headers={"Accept": _ACCEPT, **self._headers}) as response,
        ):
            head_s = time.monotonic() - began_s
            if response.is_redirect:
                raise ScrapeError("redirect", "the server redirects, which is not followed")
            if response.status_code != 200:
                raise ScrapeError("status", f"HTTP status {response.status_code}")
            if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise ScrapeError("protocol", "the page is compressed, which was not asked for")
            body = await self._body(response)
            media = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            return Page(
                body,
                time.monotonic() - began_s,
                _http_date(response),
                head_s,
                "Content-Length" in response.headers or "Transfer-Encoding" in response.headers,
                {"application/openmetrics-text": True, "text/plain": False}.get(media),
            )

    async def _body(self, response: httpx.Response) -> bytes:
        held = bytearray()
        try:
            async for piece in response.aiter_bytes():
                held += piece
                self._held_bytes += len(piece)
                if len(held) > PAGE_BYTES:
                    raise ScrapeError("too_large", f"the page has more than {PAGE_BYTES} bytes")
                if self._held_bytes > self._limit_bytes:
                    raise ScrapeError("too_large", f"pages of more than {self._limit_bytes} bytes arrive at a time")
        finally:
            self._held_bytes -= len(held)
        return bytes(held)


def _http_date(response: httpx.Response) -> datetime | None:
    try:
        date = parsedate_to_datetime(response.headers["Date"])
    except (KeyError, ValueError, TypeError, IndexError, OverflowError):
        return None
    return date.replace(tzinfo=UTC) if date.tzinfo is None else date.astimezone(UTC)


def _explained(error: Exception) -> ScrapeError:
    import httpx  # noqa: PLC0415

    text = (str(error) or type(error).__name__).splitlines()[0][:160]
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return ScrapeError("tls", text)
        if isinstance(cause, ConnectionRefusedError):
            return ScrapeError("refused", "nobody listens there")
        cause = cause.__cause__ or cause.__context__
    if "connection attempts failed" in text:  # one for each address of the name
        return ScrapeError("refused", "nobody listens there")
    kind: FailureKind = "unreachable"
    if isinstance(error, httpx.RemoteProtocolError) and ("incomplete" in text or "peer closed" in text):
        kind, text = "truncated", "the body ended before its announced end"
    elif isinstance(error, httpx.RemoteProtocolError) and "without sending" in text:
        text = "the connection was closed without an answer"
    elif isinstance(error, httpx.ProtocolError | httpx.DecodingError | httpx.InvalidURL):
        kind = "protocol"
    return ScrapeError(kind, text)
