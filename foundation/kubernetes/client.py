"""The Kubernetes client: requests, lists and watches with timeouts, retries and a rate limit.

Objects are plain JSON: the models of the ``kubernetes`` package reject objects from API servers of other versions, and
drop unknown fields when an object is written back.
"""

import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, Literal, TypeVar, cast
from urllib.parse import urlencode

import orjson
import urllib3
import urllib3.connection

from foundation.errors import InputError
from foundation.http import retry_after_s, retry_policy
from foundation.kubernetes.api import (
    DEFAULT_LIMITS,
    GONE,
    PAGE_SIZE,
    ApiRefused,
    ClientLimits,
    Object,
    Response,
    Unreachable,
    is_named,
)
from foundation.running import backoff_s

MERGE_PATCH: Final = "application/merge-patch+json"
STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"

METADATA_ONLY: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
"""``Accept`` header for reads that need only metadata: 500 bytes instead of up to 500 kB an object."""

WATCH_S: Final = 70
"""Requested ``timeoutSeconds`` of a watch, with 20 % jitter. It is below IDLE_S because a 1.20 API server sends nothing
on a watch without events (newer ones send a bookmark every minute), which would look like a dead connection."""

IDLE_S: Final = 100.0
"""A watch that receives nothing for this long is considered dead."""

MAX_RESPONSE_BYTES: Final = 64 * 2**20
"""Limit on a response; a page of a list is about a hundredth of it."""

_MAX_LINE_BYTES: Final = 16 * 2**20
_LISTINGS: Final = 3
_MAX_PAGES: Final = 10_000  # five million objects at 500 a page
_MIN_PAUSE_S: Final = 0.1
_MAX_RETRY_AFTER_S: Final = 86_400.0
_TRANSIENT: Final = frozenset({408, 429, 500, 502, 503, 504})
_UNAUTHORIZED: Final = 401
_RENEW_S: Final = 10.0

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]
T = TypeVar("T")


class _Bounded:
    """A connection with a timeout for the whole response: urllib3's read timeout restarts with every byte."""

    timeout: float
    sock: socket.socket | None
    _reading: socket.socket | None = None

    def getresponse(self) -> Any:
        self._reading = self.sock  # the connection drops it for a response without a length
        with self.cut_after(self.timeout):
            return super().getresponse()  # type: ignore[misc]  # a mixin before http.client's connections

    @contextmanager
    def cut_after(self, seconds: float) -> Iterator[None]:
        """Shut down the connection if the block takes longer."""
        timer = threading.Timer(seconds, self._cut)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _cut(self) -> None:
        with suppress(OSError):
            if self._reading is not None:
                self._reading.shutdown(socket.SHUT_RDWR)


class _Http(urllib3.HTTPConnectionPool):
    ConnectionCls = type("Connection", (_Bounded, urllib3.connection.HTTPConnection), {})


class _Https(urllib3.HTTPSConnectionPool):
    ConnectionCls = type("Connection", (_Bounded, urllib3.connection.HTTPSConnection), {})


Credentials = tuple[urllib3.PoolManager, Callable[[], Mapping[str, str]]]
"""Connection pool with the certificates, and the headers with the token."""


class KubernetesClient:
    """Thread-safe client for one API server.

    ``headers``: called for each attempt, as tokens are rotated.
    ``renew``: loads the credentials again after the server rejected them.
    ``response_date``: header ``Date`` of the last response; None: none yet, or it has none.
    """

    response_date: str | None = None

    def __init__(
        self,
        pool: urllib3.PoolManager,
        host: str,
        headers: Callable[[], Mapping[str, str]],
        *,
        limits: ClientLimits = DEFAULT_LIMITS,
        agent: str = "predrain",
        renew: Callable[[], Credentials] | None = None,
    ) -> None:
        self.host = host.rstrip("/")
        self.name = self.host.split("://", 1)[-1]
        self._renew, self._renewed_s, self._renewing = renew, float("-inf"), threading.Lock()
        self._use((pool, headers))
        self._limits = limits
        self._rate = RequestRate(limits.requests_per_second, limits.burst)
        self._agent = agent

    def _use(self, credentials: Credentials) -> None:
        pool, self._headers = credentials
        pool.pool_classes_by_scheme = {"http": _Http, "https": _Https}
        self._pool = pool

    def _replace(self, rejected: urllib3.PoolManager) -> None:
        """Load other credentials than the rejected ones, at most every 10 s."""
        with self._renewing:
            is_due = time.monotonic() - self._renewed_s >= _RENEW_S
            if self._renew is not None and self._pool is rejected and is_due:
                self._renewed_s = time.monotonic()
                with suppress(Exception):  # a file that is being replaced, or a plug-in, may fail in any way
                    self._use(self._renew())

    def request(
        self,
        method: Method,
        path: str,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        *,
        content_type: str = "application/json",
        accept: str = "application/json",
        final: frozenset[int] = frozenset(),
        timeout: timedelta | None = None,
    ) -> Response:
        """Send a request, retry transient failures, and return the response.

        408, 429 and 5xx are retried, honoring ``Retry-After``, except for the statuses in ``final``. A request may
        arrive twice, so ``body`` (sent as JSON) must be idempotent: a resourceVersion, a ``test`` or a unique name.
        ``timeout`` shortens the time for all attempts together.

        Raises ``Unreachable`` if no attempt succeeds in time.
        """
        timeout_s = self._limits.retry_timeout_s
        if timeout is not None:
            timeout_s = min(timeout.total_seconds(), timeout_s)
        end = time.monotonic() + timeout_s
        data = None if body is None else orjson.dumps(body)
        headers = {"Accept": accept} if data is None else {"Accept": accept, "Content-Type": content_type}
        sent, failures = False, 0

        def pause(error: Exception) -> bool | float:
            nonlocal sent, failures
            if not isinstance(error, Unreachable):
                return False
            sent, failures = sent or error.sent, failures + 1
            wait = backoff_s(failures, first_s=0.2, max_s=5.0)
            if error.retry_after_s is not None:
                wait = max(error.retry_after_s, _MIN_PAUSE_S)
            return time.monotonic() + wait < end and wait

        try:
            for attempt in retry_policy(attempts=self._limits.attempts, on=pause):
                with attempt:
                    if time.monotonic() >= end:
                        raise Unreachable("no time is left", sent=False)
                    self._rate.wait()
                    pool = self._pool
                    response = self._send(method, _url(path, params), data, headers, end)
                    # Retry with the renewed credentials within the same attempt.
                    if response.status == _UNAUTHORIZED and self._pool is not pool:
                        response = self._send(method, _url(path, params), data, headers, end)
                    if response.status in _TRANSIENT and response.status not in final:
                        raise Unreachable(response.problem, retry_after_s=response.retry_after_s)
                    return response
        except Unreachable as error:
            raise Unreachable(f"{method} {path}: {error}", sent=sent or error.sent) from error
        raise AssertionError("unreachable")

    def get(
        self,
        path: str,
        params: Mapping[str, str] | None = None,
        *,
        accept: str = "application/json",
        named: str | None = None,
    ) -> Object:
        """Read one object, or one page of a list; ``named``: the expected name of the object.

        Raises ``ApiRefused`` if the server rejects the request; ``Unreachable`` for no response, or another object.
        """
        response = self.request("GET", path, params, accept=accept)
        if not response.ok:
            raise ApiRefused(response.status, response.message, response.retry_after_s)
        if named is not None and not is_named(response.content, named):
            raise Unreachable(f"{path}: the answer is not {named}")
        return response.content

    def list_all(
        self, path: str, params: Mapping[str, str], view: Callable[[Object], T | None], page_size: int = PAGE_SIZE
    ) -> tuple[list[T], str]:
        """List objects with pagination (``page_size`` 0: one page) and convert each by ``view`` (None drops it).

        Returns the views and the list's resourceVersion. If a continue token expires (410), the list is restarted, up
        to three attempts. Raises like :meth:`get`, also for an incomplete list, which must never pass for an empty
        cluster.
        """
        for _ in range(_LISTINGS):
            views: list[T] = []
            query = {**params, **({"limit": str(page_size)} if page_size else {})}
            tokens: set[str] = set()
            try:
                while len(tokens) < _MAX_PAGES:
                    page = self.get(path, query)
                    items, version, token = _page(path, page)
                    views += [item_view for item in items if (item_view := view(item)) is not None]
                    if not token:
                        return views, version
                    if token in tokens:
                        raise Unreachable(f"{path}: the listing never ends: a continue token repeats")
                    tokens.add(token)
                    query["continue"] = token
                raise Unreachable(f"{path}: the listing does not end after {_MAX_PAGES} pages")
            except ApiRefused as refused:
                if refused.status != GONE:
                    raise
        raise ApiRefused(GONE, f"the listing expired {_LISTINGS} times before its last page")

    def watch(
        self, path: str, params: Mapping[str, str], version: str, on_open: Callable[[], object] = lambda: None
    ) -> Iterator[Object]:
        """Yield events after ``version`` as ``{"type": …, "object": …}`` until the server ends the watch.

        ``on_open``: called once the server accepts the watch, possibly long before the first event.

        Raises ``ApiRefused`` if the server rejects the watch; ``Unreachable`` if the connection is interrupted. A
        silent connection ends the watch without an error.
        """
        query = {
            **params,
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(int(WATCH_S * random.uniform(0.8, 1.2))),  # noqa: S311 - spreads load, no secret
        }
        accept, timeout = {"Accept": "application/json"}, urllib3.Timeout(IDLE_S)
        with (
            self._open(
                "GET", _url(path, query), None, accept, timeout, 2 * IDLE_S, "the watch was interrupted"
            ) as response,
            suppress(urllib3.exceptions.ReadTimeoutError),
        ):
            if response.status != 200:
                answer = _response(response.status, response.read1(2**16), response.headers)
                raise ApiRefused(answer.status, answer.message, answer.retry_after_s)
            on_open()
            remainder = b""
            for chunk in response.stream(2**16):
                *lines, remainder = (remainder + chunk).split(b"\n")
                if len(remainder) > _MAX_LINE_BYTES:
                    raise Unreachable("a watched object exceeds the size limit of the API server")
                yield from (orjson.loads(line) for line in lines if line.strip())

    def _send(self, method: Method, url: str, data: bytes | None, headers: Mapping[str, str], end: float) -> Response:
        remaining_s, content = max(end - time.monotonic(), 0.001), bytearray()
        limits = self._limits
        timeout = urllib3.Timeout(min(limits.connect_timeout_s, remaining_s), min(limits.read_timeout_s, remaining_s))
        with self._open(
            method, url, data, headers, timeout, remaining_s, f"{self.name} sent an incomplete response"
        ) as response:
            while chunk := response.read1(2**16):
                content += chunk
                if len(content) > MAX_RESPONSE_BYTES:
                    raise Unreachable(f"the answer is larger than {MAX_RESPONSE_BYTES} bytes")
                if time.monotonic() >= end:
                    raise Unreachable("the response timed out")
            response.release_conn()
            self.response_date = response.headers.get("Date")
            return _response(response.status, bytes(content), response.headers)

    @contextmanager
    def _open(
        self,
        method: Method,
        url: str,
        data: bytes | None,
        headers: Mapping[str, str],
        timeout: urllib3.Timeout,
        longest_s: float,
        problem: str,
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """Yield the response to one request for at most ``longest_s``; ``problem`` starts the message of its errors."""
        pool = self._pool
        try:
            headers = {"User-Agent": self._agent, **headers, **self._headers()}
        except Exception as error:  # a credential plug-in may fail in any way, and succeed on retry
            raise Unreachable(f"no credentials for {self.name}: {error}", sent=False) from error
        try:
            with closing(
                pool.request(
                    method, self.host + url, body=data, headers=headers, timeout=timeout, retries=False,
                    redirect=False, preload_content=False, decode_content=False,
                )
            ) as response:  # fmt: skip
                if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                    raise Unreachable(f"{problem}: it is compressed, which was not requested")
                if response.status == _UNAUTHORIZED:
                    self._replace(pool)
                with cast("_Bounded", response.connection).cut_after(longest_s):
                    yield response
        except (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError) as error:
            raise Unreachable(f"{self.name} cannot be reached: {error}", sent=False) from error
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            causes = [cause for cause in error.args if isinstance(cause, ssl.SSLError)]
            if causes:
                self._replace(pool)
                if isinstance(causes[0], ssl.SSLCertVerificationError):
                    raise Unreachable(f"the certificate of {self.name} is rejected: {error}", sent=False) from error
                problem = f"{self.name} ended the TLS connection, possibly because it rejects the client certificate"
            raise Unreachable(f"{problem}: {error}") from error


class RequestRate:
    """Client-side rate limiter with a burst, shared by all threads of a process."""

    def __init__(self, per_second: float, burst: int) -> None:
        self._interval_s = 1.0 / per_second
        self._burst_s = burst / per_second
        self._due_s = float("-inf")
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Wait until one request is allowed."""
        with self._lock:
            now_s = time.monotonic()
            self._due_s = max(self._due_s, now_s - self._burst_s) + self._interval_s
            pause_s = self._due_s - now_s
        if pause_s > 0:
            time.sleep(pause_s)  # its slot is reserved already: threads wait one after another


def input_error(error: ApiRefused | Unreachable, api: KubernetesClient, path: str) -> InputError:
    """Return the InputError for a rejected request or an unreachable server."""
    if isinstance(error, Unreachable):
        return InputError(
            f"the Kubernetes API server does not respond: {error}", api.name, "Check that it is running, then retry."
        )
    actions = {
        401: "Give a token or certificate that the server knows; a kubeconfig's may have expired.",
        403: "Grant get, list and watch as deploy/kubernetes/collector-rbac.yaml does.",
    }
    advice = actions.get(error.status, "Check the server's address and version.")
    return InputError(f"the Kubernetes API server rejects the request: {error.message}", f"{api.name}{path}", advice)


def _page(path: str, page: Object) -> tuple[list[Object], str, str]:
    """Return the items of one page, the list's resourceVersion, and the continue token (empty: last page)."""
    items, metadata = page.get("items"), page.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(items, list):
        raise Unreachable(f"{path}: the response is not a list")
    if not all(isinstance(item, dict) for item in items):
        raise Unreachable(f"{path}: an item of the list is not an object")
    # even an empty list has a version: a response without one is not from the API server
    version, token = metadata.get("resourceVersion"), metadata.get("continue") or ""
    if not isinstance(version, str) or not version or not isinstance(token, str):
        raise Unreachable(f"{path}: the response is not a list")
    return items, version, token


def _url(path: str, params: Mapping[str, str] | None) -> str:
    return f"{path}?{urlencode(params)}" if params else path


def _response(status: int, data: bytes, headers: Mapping[str, str]) -> Response:
    try:
        content = orjson.loads(data) if data else {}
    except ValueError as error:
        if 200 <= status < 300:
            raise Unreachable("the response is not JSON") from error
        content = {"message": data[:2000].decode("utf-8", "replace").strip()}
    if not isinstance(content, dict):
        raise Unreachable("the response is not an object")
    return Response(status, content, retry_after_s(headers.get("Retry-After"), longest_s=_MAX_RETRY_AFTER_S))
