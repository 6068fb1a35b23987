"""One scrape over HTTP: connect, ask, read the whole body within bounds, and say precisely what went wrong."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urljoin, urlsplit

from telemetry.errors import InputError
from telemetry.exporters.body import BodyReader, MemoryBudget
from telemetry.exporters.credentials import Credentials
from telemetry.exporters.failures import FailureKind, ScrapeError
from telemetry.exporters.settings import ScrapeSettings

if TYPE_CHECKING:  # a second of import time that `--help` need not pay
    import aiohttp

_HEADERS: Final = {
    "Accept": "text/plain;version=0.0.4, application/openmetrics-text;version=1.0.0;q=0.5, */*;q=0.1",
    "Accept-Encoding": "gzip",
    "User-Agent": "predrain",
}
_FORMATS: Final = {"application/openmetrics-text": True, "text/plain": False}
_MAX_REDIRECTS: Final = 3
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_RETRY_STATUS: Final = (429, 503)


@dataclass(frozen=True, slots=True)
class Fetched:
    """One page.

    ``duration_s``: seconds from the start of the scrape to the body's last byte.
    ``date``: the server's clock by the answer's ``Date`` (whole seconds, UTC).
    ``date_after_s``: seconds from the start of the scrape to the answer's head, which holds the ``Date``.
    ``framed``: whether the transport said where the body ends; if not, a page that was cut looks like a whole one.
    ``openmetrics``: whether the page is OpenMetrics, by its Content-Type; None if that does not tell.
    """

    body: bytes
    duration_s: float
    date: datetime | None = None
    date_after_s: float = 0.0
    framed: bool = True
    openmetrics: bool | None = None


class Fetcher(Protocol):
    """Where pages come from."""

    async def fetch(self, url: str) -> Fetched:
        """Return the page at ``url``; raise :class:`~telemetry.exporters.failures.ScrapeError`."""
        ...


class HttpFetcher:
    """Fetches pages over HTTP; use it as an asynchronous context manager.

    ``ca_file``: certificates (PEM) to trust instead of the system's.
    ``max_kept``: servers to which the connection is kept from one scrape to the next: one open file each.
    ``clock``: gives the wall clock, for ``Retry-After`` with a date.
    Raises ``InputError`` if ``ca_file`` cannot be used.
    """

    def __init__(
        self,
        settings: ScrapeSettings,
        *,
        credentials: Credentials | None = None,
        ca_file: Path | None = None,
        max_kept: int = 100_000,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._settings = settings
        self._credentials = credentials or Credentials()
        self._max_kept = max_kept
        self._kept: set[str] = set()
        self._clock = clock
        self._budget = MemoryBudget(settings.max_in_flight_bytes)
        self._session: aiohttp.ClientSession | None = None
        self._aiohttp: Any = None
        try:
            self._tls = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
        except (OSError, ssl.SSLError) as error:
            raise InputError(
                f"holds no certificates: {error.strerror or error}", str(ca_file), "Give a file of PEM certificates."
            ) from None

    async def __aenter__(self) -> HttpFetcher:
        import aiohttp  # noqa: PLC0415  # as above

        self._aiohttp = aiohttp
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, ssl=self._tls, ttl_dns_cache=300, keepalive_timeout=2 * self._settings.interval_s + 5
            ),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=_HEADERS,
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def fetch(self, url: str) -> Fetched:
        """Return the page at ``url``.

        Raises ``ScrapeError`` if there is none, or it is not whole, within the time and the bounds of the settings.
        """
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await self._follow(url)
        except TimeoutError:
            raise ScrapeError("timeout", f"no whole page within {self._settings.timeout_s:g} s") from None

    async def _follow(self, url: str) -> Fetched:
        started_s = time.monotonic()
        for _ in range(_MAX_REDIRECTS + 1):
            try:
                answer = await self._ask(url, started_s)
            except (self._aiohttp.ClientError, OSError, ValueError) as error:
                raise _explained(error, self._aiohttp) from error
            if isinstance(answer, Fetched):
                return answer
            url = _redirected(url, answer)
        raise ScrapeError("redirect", f"more than {_MAX_REDIRECTS} redirects")

    async def _ask(self, url: str, started_s: float) -> Fetched | str:
        """Return the page, or where the server sends us."""
        assert self._session is not None
        header = self._credentials.header()
        headers = {} if header is None else {"Authorization": header}
        server = urlsplit(url).netloc
        if server not in self._kept:
            if len(self._kept) < self._max_kept:
                self._kept.add(server)
            else:
                headers["Connection"] = "close"
        async with self._session.get(url, headers=headers, allow_redirects=False) as response:
            head_s = time.monotonic() - started_s
            if response.status in _REDIRECTS and "Location" in response.headers:
                return response.headers["Location"]
            if response.status != 200:
                rest = response.headers.get("Retry-After") if response.status in _RETRY_STATUS else None
                raise ScrapeError("status", f"HTTP status {response.status}", retry_after_s=self._seconds(rest))
            bounds = self._settings
            body = BodyReader(
                response.headers.get("Content-Encoding", ""),
                max_bytes=bounds.max_body_bytes,
                max_lines=bounds.max_lines,
                budget=self._budget,
            )
            try:
                if (response.content_length or 0) > bounds.max_body_bytes:
                    raise ScrapeError("too_large", f"the page has more than {bounds.max_body_bytes} bytes")
                async for data in response.content.iter_any():
                    body.feed(data)
                whole = body.finish()
            except ScrapeError:
                response.close()  # the rest is not worth reading
                raise
            finally:
                body.close()
            return Fetched(
                whole,
                time.monotonic() - started_s,
                _http_date(response.headers.get("Date")),
                head_s,
                response.content_length is not None or "Transfer-Encoding" in response.headers,
                _FORMATS.get(response.content_type),
            )

    def _seconds(self, rest: str | None) -> float | None:
        if rest is None:
            return None
        with contextlib.suppress(ValueError):
            return max(float(int(rest)), 0.0)
        date = _http_date(rest)
        return None if date is None else max((date - self._clock()).total_seconds(), 0.0)


def _http_date(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return date.replace(tzinfo=UTC) if date.tzinfo is None else date.astimezone(UTC)


def _redirected(url: str, location: str) -> str:
    """Return where a redirect leads; credentials must not follow one to another host or out of TLS."""
    onward = urljoin(url, location)
    old, new = urlsplit(url), urlsplit(onward)
    if new.hostname != old.hostname or new.scheme not in ("http", "https"):
        raise ScrapeError("redirect", "the server redirects to another host, which is not followed")
    if old.scheme == "https" and new.scheme != "https":
        raise ScrapeError("redirect", "the server redirects out of TLS, which is not followed")
    return onward


def _explained(error: Exception, aiohttp: Any) -> ScrapeError:
    if isinstance(error, aiohttp.ClientPayloadError):
        return ScrapeError("truncated", "the body ended before its announced end")
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return ScrapeError("tls", _short(error))
    if isinstance(error, OSError) and error.errno == errno.ECONNREFUSED:
        return ScrapeError("refused", "nobody listens there")
    if isinstance(error, OSError):  # most of aiohttp's connection errors are OSErrors, and so are Python's timeouts
        kind: FailureKind = "timeout" if isinstance(error, TimeoutError) else "unreachable"
        return ScrapeError(kind, _short(error))
    if isinstance(error, aiohttp.ClientConnectionError):
        return ScrapeError("unreachable", "the connection was closed without an answer")
    return ScrapeError("protocol", _short(error))


def _short(error: Exception) -> str:
    text = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
    return text[:160]
