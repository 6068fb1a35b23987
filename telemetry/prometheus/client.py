"""Asking a server: one request at a time, with its bounds on time, size and patience."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from telemetry.errors import InputError
from telemetry.prometheus.answer import Matrix, Unreadable, read_json, read_matrix, said_to_be_missing
from telemetry.prometheus.connection import Connection
from telemetry.prometheus.refusals import Later, TooMuch, refuse

_log = logging.getLogger(__name__)

_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 30.0
_SLOW_TRIES: Final = 2
_UNREADABLE_TRIES: Final = 5
_ERROR_BODY: Final = 65536
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_NEVER_REDIRECTED = range(300, 400)

# Each server takes the ones it knows. Thanos: one sample a series instead of one a replica, whole answers or none, raw
# resolution. VictoriaMetrics: no answers from its cache.
_PARAMETERS: Final = {"dedup": "true", "max_source_resolution": "0s", "nocache": "1"}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one request may take.

    ``request_s``: seconds for one answer; Prometheus itself gives up after 120 by default.
    ``silence_s``: seconds between two pieces of an answer once it began; a body slower than that is given up.
    ``body_bytes``: bytes of one answer, decompressed; a larger one is asked for in halves.
    ``patience_s``: seconds for which a request is repeated to a server that is down, overloaded or not whole.
    ``first_patience_s``: the same until the server has answered once: a wrong address should be said soon.
    """

    request_s: float = 150.0
    connect_s: float = 10.0
    silence_s: float = 60.0
    body_bytes: int = 32 << 20
    patience_s: float = 300.0
    first_patience_s: float = 10.0


class PrometheusClient:
    """Asks one server, retrying what may pass.

    ``concurrency``: requests at once.
    ``allow_partial``: whether answers with warnings (of Thanos: a store did not answer) count.
    ``clock``: the time, aware; only for dates in Retry-After headers.
    ``monotonic``: seconds on a clock that never jumps.

    An asynchronous context manager. Bodies are read piece by piece against ``body_bytes``; numbers are parsed in a
    thread. ``TooMuch`` leaves to the caller what to ask for instead.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        bounds: Bounds = Bounds(),
        concurrency: int = 4,
        allow_partial: bool = False,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._bounds = bounds
        self._places = asyncio.Semaphore(concurrency)
        self._concurrency = concurrency
        self._allow_partial = allow_partial
        self._clock = clock
        self._sleep = sleep
        self._monotonic = monotonic
        self._session: aiohttp.ClientSession | None = None
        self._good_at: float | None = None
        self._by_get = False
        self._in_trouble = False
        self._proxy = _proxy_for(connection.url)
        self.requests = 0
        self.retries = 0

    async def __aenter__(self) -> PrometheusClient:
        tls = self._connection.tls()
        connector = aiohttp.TCPConnector(limit=self._concurrency, ssl=tls if tls is not None else True)
        bounds = self._bounds
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(
                total=bounds.request_s, sock_connect=bounds.connect_s, sock_read=min(bounds.silence_s, bounds.request_s)
            ),
            # Not trust_env: it would also take a login from ~/.netrc, which nobody asked for.
            proxy=self._proxy,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def samples(self, query: str, at_ms: int) -> Matrix:
        """Ask an instant query whose result is raw samples.

        ``at_ms``: its time, milliseconds since 1970 in UTC.
        Raises ``TooMuch`` if the server, or our own bound on an answer, does not allow that much.
        Raises ``InputError`` if the server refuses for good, or could not answer for too long.
        """
        parameters = {"query": query, "time": _seconds(at_ms), **_PARAMETERS}

        def read(body: bytes) -> Matrix:
            matrix = read_matrix(body)
            self._check_whole(matrix.warnings)
            return matrix

        return await self._asked("/api/v1/query", parameters, read)

    async def metric_names(self, match: str | None, start_ms: int, end_ms: int) -> list[str]:
        """Return the names of the metrics that match within the time."""
        parameters = self._span(start_ms, end_ms) | ({"match[]": match} if match else {})
        names = await self._asked("/api/v1/label/__name__/values", parameters, self._data, by_get=True)
        if not isinstance(names, list):
            raise self._strange("a list of names was asked for")
        return [str(name) for name in names]

    async def series(self, match: str, start_ms: int, end_ms: int) -> list[dict[str, str]]:
        """Return the labels of the series that match within the time."""
        parameters = self._span(start_ms, end_ms) | {"match[]": match}
        found = await self._asked("/api/v1/series", parameters, self._data)
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise self._strange("a list of series was asked for")
        return [{str(name): str(value) for name, value in each.items()} for each in found]

    def _span(self, start_ms: int, end_ms: int) -> dict[str, str]:
        return {"start": _seconds(start_ms), "end": _seconds(end_ms), **_PARAMETERS}

    def _data(self, body: bytes) -> Any:
        document = read_json(body)
        self._check_whole(said_to_be_missing(document))
        return document.get("data")

    def _check_whole(self, warnings: tuple[str, ...]) -> None:
        if warnings and not self._allow_partial:
            raise Later(f"the answer is not whole: {'; '.join(warnings)[:300]}")

    def _strange(self, what: str) -> InputError:
        return InputError(
            f"{what}, and the server answered something else", self._connection.url, "Is this a Prometheus API?"
        )

    async def _asked(
        self, path: str, parameters: Mapping[str, str], read: Callable[[bytes], Any], *, by_get: bool = False
    ) -> Any:
        """Ask until there is an answer, with growing pauses, for as long as patience lasts."""
        began = self._monotonic()
        tries, slow, unreadable = 0, 0, 0
        while True:
            try:
                async with self._places:
                    body = await self._once(path, parameters, by_get=by_get)
                    answer = await asyncio.to_thread(read, body)
            except Later as error:
                told: Exception = error
            except Unreadable as error:
                unreadable += 1
                told = error
            except TimeoutError as error:
                slow += 1
                if slow >= _SLOW_TRIES and self._good_at is not None:
                    raise TooMuch(f"no whole answer within {self._bounds.request_s:g} s") from error
                told = Later("the server is too slow")
            else:
                self._good_at = self._monotonic()
                if self._in_trouble:
                    self._in_trouble = False
                    _log.info("%s answers again", self._connection.url)
                return answer
            tries += 1
            self.retries += 1
            now = self._monotonic()
            first = self._good_at is None
            patience = self._bounds.first_patience_s if first else self._bounds.patience_s
            waited = now - began
            pause = random.uniform(0.5, 1.0) * min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(tries, 8))  # noqa: S311
            if isinstance(told, Later) and told.after_s is not None:
                pause = max(pause, told.after_s)
            if waited >= patience or unreadable >= _UNREADABLE_TRIES:
                raise self._given_up(told, waited, first=first)
            if not self._in_trouble:
                self._in_trouble = True
                _log.warning("%s: %s; asking again for up to %.0f s", self._connection.url, told, patience)
            await self._sleep(pause)

    def _given_up(self, told: Exception, waited: float, *, first: bool) -> InputError:
        if isinstance(told, Unreadable):
            do = "Give the address of a Prometheus API; a proxy in between may have cut or replaced its answers."
        elif first:
            do = "Check the address, and that the server runs."
        else:
            do = "What has landed stays: start the same command again to go on where it stopped."
            if str(told).startswith("the answer is not whole"):
                do += " --allow-partial takes what there is."
        return InputError(f"no usable answer for {waited:.0f} s: {told}", self._connection.url, do)

    async def _once(self, path: str, parameters: Mapping[str, str], *, by_get: bool) -> bytes:
        assert self._session is not None, "use the client as a context manager"
        self.requests += 1
        url = self._connection.url + path
        own = {**parameters, "partial_response": "true" if self._allow_partial else "false"}
        # Compressing costs a server more than sending: numbers in JSON keep one core busy at a few 10 MB/s.
        headers = {"Accept-Encoding": "identity", **self._connection.request_headers()}
        get = by_get or self._by_get
        try:
            async with self._session.request(
                "GET" if get else "POST",
                url,
                params=own if get else None,
                data=None if get else own,
                headers=headers,
                allow_redirects=False,
            ) as response:
                if response.status == 405 and not get:  # a gateway that lets only GET through
                    self._by_get = True
                    raise Later("HTTP 405 to POST; asking by GET from now on", 0.0)
                if response.status in _NEVER_REDIRECTED:
                    raise self._redirected(response.status, response.headers.get("Location", "nowhere"))
                bound = self._bounds.body_bytes if response.status == 200 else _ERROR_BODY
                body, whole = await _body(response, bound)
                if response.status != 200:
                    refuse(
                        response.status,
                        body,
                        url=self._connection.url,
                        retry_after=response.headers.get("Retry-After"),
                        now=self._clock(),
                    )
                if not whole:
                    raise TooMuch(f"an answer of more than {bound >> 20} MiB")
                self._check_kind(response.headers.get("Content-Type", ""), body)
                return body
        except aiohttp.ConnectionTimeoutError as error:  # a timeout too, but one that asking for less does not help
            raise Later(f"no connection within {self._bounds.connect_s:g} s") from error
        except TimeoutError:
            raise
        except aiohttp.ClientConnectorCertificateError as error:
            raise self._untrusted(str(error.certificate_error)) from error
        except aiohttp.ClientSSLError as error:
            raise self._untrusted(str(error.os_error or error)) from error
        except aiohttp.InvalidURL as error:
            raise InputError("the address cannot be used", url, "Correct --url.") from error
        except (aiohttp.ClientError, ConnectionError, ssl.SSLError) as error:
            raise Later(f"{type(error).__name__}: {str(error)[:200]}") from error

    def _check_kind(self, content_type: str, body: bytes) -> None:
        if "html" in content_type.lower() or body[:64].lstrip()[:1] == b"<":
            raise InputError(
                "the server answers with a web page instead of JSON, perhaps that of a login",
                self._connection.url,
                "Give the address of the API behind the proxy, or a login that it takes "
                "(--bearer-token-file, --basic-auth-file, --header).",
            )
        if body[:32].startswith(b'{"status":"error"'):
            refuse(200, body, url=self._connection.url, retry_after=None, now=self._clock())

    def _redirected(self, status: int, to: str) -> InputError:
        target = to.split("?", 1)[0][:200]
        return InputError(
            f"the server sends us elsewhere (HTTP {status} to {target})",
            self._connection.url,
            "Give that address as --url if it is the same server; a login page means that a login is missing. "
            "Redirects are not followed, so that no credentials go astray.",
        )

    def _untrusted(self, told: str) -> InputError:
        return InputError(
            f"the secure connection failed: {told[:300]}",
            self._connection.url,
            "Give the authority's certificate as --ca-file (and --client-cert where the server asks for one).",
        )


async def _body(response: aiohttp.ClientResponse, most: int) -> tuple[bytes, bool]:
    """Read a body piece by piece; give up, closing the connection, once it is longer than ``most``."""
    length = response.headers.get("Content-Length", "")
    if length.isdigit() and int(length) > most and response.status == 200:
        response.close()
        return b"", False
    held = bytearray()
    async for piece in response.content.iter_any():
        held += piece
        if len(held) > most:
            response.close()
            return bytes(held[:most]), False
    return bytes(held), True


def _proxy_for(url: str) -> str | None:
    """Return the proxy that the environment names for an address; this machine itself is never asked through one."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host in _LOOPBACK or proxy_bypass(parts.netloc):
        return None
    return getproxies().get(parts.scheme)


def _seconds(ms: int) -> str:
    """Write milliseconds as seconds, exactly."""
    sign, whole = ("-", -ms) if ms < 0 else ("", ms)
    return f"{sign}{whole // 1000}.{whole % 1000:03d}"
