"""One scrape over HTTP: a whole page within the bounds, or a :class:`ScrapeError` that says what went wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final, Literal, get_args

from telemetry.errors import InputError
from telemetry.http import Answer, BodyTooLarge, Connection, HttpError, NoAnswerInTime, async_client, exchange

FailureKind = Literal["unreachable", "timeout", "tls", "status", "truncated", "too_large", "protocol", "parse", "empty"]
"""Kinds of failed scrapes.

``unreachable``: nobody listens, no such name, connection lost. ``status``: other than 200, redirects among them.
``truncated``: the body ended early. ``too_large``: over a bound of bytes or rows. ``protocol``: no plain HTTP.
``parse``: no page of an exporter. ``empty``: no series of any device.
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

    ``duration_s`` is to the last byte, ``date`` the server's clock (whole seconds). ``framed`` says whether the
    transport told where the body ends: if not, a page that was cut looks like a whole one.
    """

    body: bytes
    duration_s: float
    date: datetime | None = None
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
        with contextlib.suppress(InputError):  # in the middle of a rotation: the credentials of before hold
            self._headers = self._connection.request_headers()
        body = bytearray()

        def take(piece: bytes) -> None:
            body.extend(piece)
            self._held_bytes += len(piece)
            if self._held_bytes > self._limit_bytes:
                raise ScrapeError("too_large", f"pages of more than {self._limit_bytes} bytes arrive at a time")

        try:
            answer = await self._get(url, take)
        except NoAnswerInTime:
            raise ScrapeError("timeout", f"no whole page within {self._timeout_s:g} s") from None
        except BodyTooLarge as error:
            raise ScrapeError("too_large", str(error)) from None
        except InputError as error:
            raise ScrapeError("tls", error.what) from None
        except HttpError as error:
            text = str(error).splitlines()[0][:160]
            kind: FailureKind = "protocol" if text.startswith("RemoteProtocolError") else "unreachable"
            if "peer closed connection without sending complete" in text:
                kind = "truncated"
            elif "disconnected without sending" in text:
                kind = "unreachable"
            raise ScrapeError(kind, text) from error
        finally:
            self._held_bytes -= len(body)
        if answer.status != 200:
            raise ScrapeError("status", f"HTTP status {answer.status}")
        if answer.headers.get("content-encoding", "identity").lower() != "identity":
            raise ScrapeError("protocol", "the page is compressed, which was not asked for")
        media = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
        return Page(
            bytes(body),
            answer.duration_s,
            _http_date(answer.headers.get("date", "")),
            "content-length" in answer.headers or "transfer-encoding" in answer.headers,
            {"application/openmetrics-text": True, "text/plain": False}.get(media),
        )

    async def _get(self, url: str, take: Callable[[bytes], None]) -> Answer:
        async with async_client(
            self._connection, timeout_s=self._timeout_s, use_proxies=False, tls=self._tls
        ) as client:
            return await exchange(
                client,
                "GET",
                url,
                timeout_s=self._timeout_s,
                max_bytes=PAGE_BYTES,
                sink=take,
                headers={"Accept": _ACCEPT, **self._headers},
            )


def _http_date(text: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    return date.replace(tzinfo=UTC) if date.tzinfo is None else date.astimezone(UTC)
