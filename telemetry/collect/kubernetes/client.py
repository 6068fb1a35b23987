"""The Kubernetes client: the only module that imports the ``kubernetes`` package.

The package finds the credentials (kubeconfig, service account with token rotation, plug-ins) and makes the connection
pool. Objects are read as plain JSON rather than as the package's models: those refuse objects that a server of another
age sends, and drop the fields that they do not know from what is written back.
"""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlencode

import orjson
import stamina
import yaml

from telemetry.collect.kubernetes.api import (
    DEFAULT_LIMITS,
    PAGE_SIZE,
    Api,
    ClientLimits,
    Object,
    Refused,
    Response,
    Unreachable,
    is_named,
)
from telemetry.errors import InputError


def _not_installed() -> InputError:
    return InputError(
        "the Kubernetes client is not installed",
        "package kubernetes",
        "Install it with: pip install 'predrain[kubernetes]'",
    )


try:
    import urllib3
except ImportError:
    raise _not_installed() from None

JSON_PATCH: Final = "application/json-patch+json"
MERGE_PATCH: Final = "application/merge-patch+json"
STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"

METADATA_ONLY: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
"""``Accept`` of a reading that needs no content: an object of 500 kB is then answered by 500 bytes."""

WATCH_S: Final = 70
"""A watch is asked to end after this long, spread by a fifth: sooner than IDLE_S, for a server of 1.20 is silent on
a watch on which nothing happens (newer ones send a bookmark each minute), and silence would look like a dead line."""

IDLE_S: Final = 100.0
"""A watch that is silent for so long, and has not ended either, is taken for dead."""

MAX_RESPONSE_BYTES: Final = 64 * 2**20
"""A larger answer is given up; a page of a listing has a hundredth of it."""

_MAX_LINE_BYTES: Final = 16 * 2**20
_MAX_BACKOFF_S: Final = 5.0
_MIN_PAUSE_S: Final = 0.1
_MAX_RETRY_AFTER_S: Final = 86_400
_TRANSIENT: Final = frozenset({408, 429, 500, 502, 503, 504})
_IN_CLUSTER_TOKEN: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")

Method = Literal["GET", "POST", "PUT", "PATCH", "DELETE"]


@contextmanager
def _shut_after(seconds: float, shut: Callable[[], object]) -> Iterator[None]:
    """Call ``shut`` from another thread while the block takes longer: a socket's timeout is of each single read."""

    def at_deadline() -> None:
        with suppress(OSError, ValueError, RuntimeError, AttributeError):  # closed by itself
            shut()

    timer = threading.Timer(seconds, at_deadline)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _HttpConnection(urllib3.connection.HTTPConnection):
    """Gives all headers of an answer together the time of one read."""

    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]
        answered = self.sock
        with _shut_after(float(self.timeout or IDLE_S), lambda: answered.shutdown(socket.SHUT_RDWR)):
            return super().getresponse()


class _HttpsConnection(_HttpConnection, urllib3.connection.HTTPSConnection):
    pass


class _HttpPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _HttpConnection


class _HttpsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _HttpsConnection


class KubernetesClient:
    """A connection to one API server, shared by threads; ``headers`` is called for each attempt: tokens are rotated."""

    def __init__(
        self,
        pool: urllib3.PoolManager,
        host: str,
        headers: Callable[[], Mapping[str, str]],
        *,
        limits: ClientLimits = DEFAULT_LIMITS,
        agent: str = "predrain",
    ) -> None:
        self.host = host.rstrip("/")
        self.name = self.host.split("://", 1)[-1]
        self._pool = pool
        self._pool.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}
        self._headers = headers
        self._limits = limits
        self._bucket = TokenBucket(limits.requests_per_second, limits.burst)
        self._agent = agent
        self._watches: set[Any] = set()
        self._lock = threading.Lock()
        self._closed = False

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
        """Send a request until the server answers with something that waiting does not change, and return that.

        429 and 5xx are retried, as ``Retry-After`` says, except for the statuses in ``final``. Whatever is sent may
        arrive twice: ``body``, written as JSON, must be such that the second time changes nothing (a version, a
        ``test``, a name of its own). ``timeout`` shortens the time for all attempts.

        Raises ``Unreachable`` if there was no such answer in time.
        """
        patience_s = self._limits.retry_timeout_s
        if timeout is not None:
            patience_s = min(timeout.total_seconds(), patience_s)
        end = time.monotonic() + patience_s
        data = None if body is None else orjson.dumps(body)
        headers = {"Accept": accept} if data is None else {"Accept": accept, "Content-Type": content_type}
        sent, failures = False, 0

        def backoff(error: Exception) -> bool | float:
            nonlocal sent, failures
            if not isinstance(error, Unreachable) or self._closed:
                return False
            sent = sent or error.sent
            failures += 1
            wait = None if error.retry_after_s is None else max(error.retry_after_s, _MIN_PAUSE_S)
            if wait is None:
                wait = min(_MAX_BACKOFF_S, 0.1 * 2.0 ** min(failures, 10)) * random.uniform(0.75, 1.25)  # noqa: S311 - no secret
            return time.monotonic() + wait < end and wait

        try:
            for attempt in stamina.retry_context(on=backoff, attempts=self._limits.attempts, timeout=None):
                with attempt:
                    if time.monotonic() >= end:
                        raise Unreachable("no time is left", sent=False)
                    self._bucket.take()
                    response = self._send_once(method, path, params, data, headers, end)
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
        """Read one object or one page of a listing; ``named``: it must be the object of this name.

        Raises ``Refused`` if the server refuses; ``Unreachable`` if it does not answer, or with something else.
        """
        response = self.request("GET", path, params, accept=accept)
        if not response.ok:
            raise Refused(response.status, response.message, response.retry_after_s)
        if named is not None and not is_named(response.content, named):
            raise Unreachable(f"{path}: the answer is not {named}")
        return response.content

    def pages(self, path: str, params: Mapping[str, str] | None = None, page_size: int = PAGE_SIZE) -> Iterator[Object]:
        """List page by page; each page has ``items`` and ``metadata.resourceVersion``.

        Raises ``Refused`` as :meth:`get`; 410 where the server forgot the listing between two pages.
        """
        query = {**(params or {}), **({"limit": str(page_size)} if page_size else {})}
        while True:
            page = self.get(path, query)
            items, metadata = page.get("items"), page.get("metadata")
            # also an empty listing has a version: an answer without one comes from somewhere else
            has_version = isinstance(metadata, dict) and metadata.get("resourceVersion")
            if not has_version or not (items is None or isinstance(items, list)):
                raise Unreachable(f"{path}: the answer is no listing")
            yield page
            token = page["metadata"].get("continue")
            if not token:
                return
            query = {**query, "continue": str(token)}

    def watch(self, path: str, params: Mapping[str, str] | None, version: str) -> Iterator[Object]:
        """Yield what happens after ``version`` as ``{"type": …, "object": …}`` until the server ends the watch.

        Raises ``Refused`` if the server refuses to begin; ``Unreachable`` if the connection is cut. A silent
        one ends the watch as the server's own end does.
        """
        query = {
            **(params or {}),
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(int(WATCH_S * random.uniform(0.8, 1.2))),  # noqa: S311 - spreads load, no secret
        }
        response = self._open("GET", path, query, None, {"Accept": "application/json"}, IDLE_S, IDLE_S)
        with self._lock:
            if self._closed:
                response.close()
                return
            self._watches.add(response)
        try:
            with closing(response):
                if response.status != 200:
                    answer = _response(response.status, response.read1(2**16), response.headers)
                    raise Refused(answer.status, answer.message, answer.retry_after_s)
                yield from _lines(response)
        finally:
            with self._lock:
                self._watches.discard(response)

    def close(self) -> None:
        """End all requests, also watches in which another thread waits; a later request is an error."""
        with self._lock:
            self._closed = True
            responses = list(self._watches)
        for response in responses:
            with suppress(OSError, ValueError):
                response.shutdown()

    def _send_once(
        self,
        method: Method,
        path: str,
        params: Mapping[str, str] | None,
        data: bytes | None,
        headers: Mapping[str, str],
        end: float,
    ) -> Response:
        left = max(end - time.monotonic(), 0.001)
        connect_s, read_s = min(self._limits.connect_timeout_s, left), min(self._limits.read_timeout_s, left)
        try:
            response = self._open(method, path, params, data, headers, connect_s, read_s)
        except Unreachable as error:
            if error.sent:
                _check_in_time(end)
            raise
        content = bytearray()
        try:
            with _shut_after(max(end - time.monotonic(), 0.001), response.shutdown):
                while chunk := response.read1(2**16):
                    content += chunk
                    if len(content) > MAX_RESPONSE_BYTES:
                        raise Unreachable(f"the answer is larger than {MAX_RESPONSE_BYTES} bytes")
            _check_in_time(end)
        except (urllib3.exceptions.HTTPError, OSError, ValueError, AttributeError) as error:
            # AttributeError: urllib3 loses its socket when the response is shut down while it reads
            response.close()
            _check_in_time(end)
            raise Unreachable(f"the answer was cut: {error}") from error
        except Unreachable:
            response.close()
            raise
        response.release_conn()
        return _response(response.status, bytes(content), response.headers)

    def _open(
        self,
        method: Method,
        path: str,
        params: Mapping[str, str] | None,
        data: bytes | None,
        headers: Mapping[str, str],
        connect_s: float,
        read_s: float,
    ) -> urllib3.BaseHTTPResponse:
        if self._closed:
            raise Unreachable("the connection was closed", sent=False)
        query = f"?{urlencode(params)}" if params else ""
        try:
            return self._pool.request(
                method, f"{self.host}{path}{query}", body=data, headers=self._all_headers(headers),
                timeout=urllib3.Timeout(connect=connect_s, read=read_s), retries=False, redirect=False,
                preload_content=False,
            )  # fmt: skip
        except (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError) as error:
            raise Unreachable(f"{self.name} cannot be reached: {error}", sent=False) from error
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise Unreachable(f"{self.name} cannot be reached: {error}") from error

    def _all_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        try:
            return {"User-Agent": self._agent, **headers, **self._headers()}
        except Exception as error:  # a credential plug-in may fail in any way, and work the next time
            raise Unreachable(f"no credentials for {self.name}: {error}", sent=False) from error


class TokenBucket:
    """A bound on requests per second, shared by all threads of a process."""

    def __init__(
        self,
        per_second: float,
        burst: int,
        elapsed: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._per_second = per_second
        self._burst = float(burst)
        self._elapsed = elapsed
        self._sleep = sleep
        self._left = self._burst
        self._at = elapsed()
        self._lock = threading.Lock()

    def take(self) -> float:
        """Take the right to one request, wait until it holds, and return the seconds waited."""
        with self._lock:
            now = self._elapsed()
            self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._per_second) - 1.0
            self._at = now
            wait = max(0.0, -self._left / self._per_second)
        if wait:
            self._sleep(wait)  # the right is taken already: threads wait one after another
        return wait


def connect(
    kubeconfig: Path | None = None,
    context: str | None = None,
    *,
    limits: ClientLimits = DEFAULT_LIMITS,
    agent: str = "predrain",
) -> KubernetesClient:
    """Connect with ``kubeconfig`` where given, else as the pod that this runs in, else as ``kubectl`` does.

    Raises ``InputError`` if the package is missing, or there is no usable configuration.
    """
    try:
        from kubernetes import config  # noqa: PLC0415 - an optional package, slow to import
        from kubernetes.client import ApiClient, Configuration  # noqa: PLC0415 - as above
        from kubernetes.config.config_exception import ConfigException  # noqa: PLC0415 - as above
    except ImportError:
        raise _not_installed() from None

    configuration = Configuration()
    in_cluster = kubeconfig is None and context is None and _IN_CLUSTER_TOKEN.exists()
    in_cluster = in_cluster and "KUBERNETES_SERVICE_HOST" in os.environ
    where = str(kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config")
    try:
        if in_cluster:
            where = "the pod's service account"
            config.load_incluster_config(client_configuration=configuration)
        else:
            config.load_kube_config(
                config_file=None if kubeconfig is None else str(kubeconfig),
                context=context,
                client_configuration=configuration,
                persist_config=False,
            )
    except (ConfigException, yaml.YAMLError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).strip().splitlines()
        raise InputError(
            f"no way to the Kubernetes API server: {reason[0] if reason else type(error).__name__}",
            where,
            "Give --kubeconfig and --context (predrain act: kubernetes.kubeconfig and kubernetes.context in its "
            "settings), or run in a pod with a service account.",
        ) from error
    configuration.connection_pool_maxsize = 8

    def headers() -> dict[str, str]:
        token = configuration.auth_settings().get("BearerToken")
        return {"Authorization": token["value"]} if token and token["value"] else {}

    pool = ApiClient(configuration).rest_client.pool_manager
    return KubernetesClient(pool, configuration.host, headers, limits=limits, agent=agent)


def not_allowed(refused: Refused, path: str, api: Api) -> InputError:
    """Return what to tell the user of an answer that waiting does not change."""
    if refused.status == 401:
        do = "Give a token or certificate that the server knows; a kubeconfig's may have expired."
    elif refused.status == 403:
        do = "Grant get, list and watch as deploy/kubernetes/collector-rbac.yaml does."
    else:
        do = "Check the server's address and version."
    return InputError(f"the Kubernetes API server refuses: {refused.message}", f"{api.name}{path}", do)


def unreachable(error: Exception, api: Api) -> InputError:
    """Return what to tell the user of a server that no attempt reached."""
    return InputError(
        f"the Kubernetes API server does not answer: {error}", api.name, "Check that it runs, then retry."
    )


def _check_in_time(end: float) -> None:
    if time.monotonic() >= end:
        raise Unreachable("timed out: the answer was not complete in time")


def _response(status: int, data: bytes, headers: Mapping[str, str]) -> Response:
    try:
        content = orjson.loads(data) if data else {}
    except ValueError as error:
        if 200 <= status < 300:
            raise Unreachable("the answer is no JSON") from error
        content = {"message": data[:2000].decode("utf-8", "replace").strip()}
    if not isinstance(content, dict):
        raise Unreachable("the answer is no object")
    wait = (headers.get("Retry-After") or "").strip()
    return Response(status, content, min(int(wait), _MAX_RETRY_AFTER_S) if wait.isascii() and wait.isdigit() else None)


def _lines(response: urllib3.BaseHTTPResponse) -> Iterator[Object]:
    held = b""
    try:
        for chunk in response.stream(2**16, decode_content=False):
            *lines, held = (held + chunk).split(b"\n")
            if len(held) > _MAX_LINE_BYTES:
                raise Unreachable("a watched object is larger than any that a server can hold")
            for line in lines:
                if line.strip():
                    yield json.loads(line)
    except urllib3.exceptions.ReadTimeoutError:
        return  # quiet, or dead: the next request finds out
    except (urllib3.exceptions.HTTPError, OSError, ValueError, AttributeError) as error:
        # AttributeError: urllib3 loses its socket when the response is shut down while it reads
        raise Unreachable(f"the watch was cut: {error}") from error
