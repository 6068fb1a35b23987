"""The connection to a Kubernetes API server: the only module that needs the ``kubernetes`` package.

Objects are read as plain JSON rather than as the package's models: those refuse objects that a server of another age
sends (an event without ``eventTime``, a field that became required), and a collector has to read what is there.
"""

from __future__ import annotations

import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

import yaml

from telemetry.collect.kubernetes.answers import Api, NotSent, Object, Refused, Reply, Unreachable
from telemetry.errors import InputError

if TYPE_CHECKING:
    from telemetry.collect.kubernetes.deadline import Overdue
    from telemetry.collect.kubernetes.executing import Executed, Tls

__all__ = ["Api", "Cluster", "NotSent", "Object", "Refused", "Reply", "Unreachable", "connect"]

log = logging.getLogger(__name__)

PAGE_SIZE: Final = 500
"""Objects a page of a listing, as kubectl asks for."""

REQUEST_TIMEOUT_S: Final = 30.0
CONNECT_TIMEOUT_S: Final = 10.0
ANSWER_S: Final = 60.0
"""An answer that is not whole after so long is given up, also where bytes of it still come."""

WATCH_S: Final = 70
"""A watch is asked to end after this long, spread by a fifth: sooner than IDLE_S, for a server of 1.20 says nothing on
a watch on which nothing happens (newer ones send a bookmark each minute), and silence would look like a dead line."""

IDLE_S: Final = 100.0
"""A watch that says nothing for so long, and has not ended either, is taken for dead."""

ANSWER_BYTES: Final = 64 * 2**20
"""An answer of more bytes is given up; a page of a listing has a hundredth of it."""

_ATTEMPTS: Final = 5
_LONGEST_PAUSE_S: Final = 20.0
_LINE_BYTES: Final = 16 * 2**20
_IN_CLUSTER_TOKEN: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_AGAIN: Final = frozenset({408, 429, 500, 502, 503, 504})


class Cluster:
    """A server that is asked for JSON.

    ``headers``: gives the headers that say who asks, anew for each request: tokens are rotated.
    ``tls``: for what does not go over the pool.
    """

    def __init__(
        self,
        pool: Any,
        host: str,
        headers: Callable[[], Mapping[str, str]],
        *,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        sleep: Callable[[float], object] = time.sleep,
        agent: str = "predrain",
        tls: Tls | None = None,
    ) -> None:
        self.host = host.rstrip("/")
        self.name = self.host.split("://", 1)[-1]
        self._pool = pool
        self._headers = headers
        self._timeout_s = request_timeout_s
        self._sleep = sleep
        self._agent = agent
        self._tls = tls
        self._open: set[Any] = set()
        self._lock = threading.Lock()
        self._closed = False
        from telemetry.collect.kubernetes.deadline import Deadlines, heed_deadlines  # noqa: PLC0415 - needs urllib3, as below

        self._deadlines = Deadlines()
        heed_deadlines(pool)

    def get(self, path: str, params: Mapping[str, str] | None = None) -> Object:
        """Read one object or one page of a listing; what may pass is tried five times.

        Raises ``Refused`` if the server refuses; 429 and 5xx only after the last try.
        Raises ``Unreachable`` if no try reached the server.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._get_once(path, params)
            except Refused as refused:
                if refused.status not in _AGAIN or attempt == _ATTEMPTS or self._closed:
                    raise
                pause_s = refused.retry_after_s
            except Unreachable:
                if attempt == _ATTEMPTS or self._closed:
                    raise
                pause_s = None
            if pause_s is None:
                pause_s = 0.25 * 2.0**attempt * random.uniform(0.75, 1.25)  # noqa: S311 - spreads retries, no secret
            self._sleep(min(pause_s, _LONGEST_PAUSE_S))
        raise AssertionError("unreachable")

    def pages(self, path: str, params: Mapping[str, str] | None = None) -> Iterator[Object]:
        """List page by page; each page has ``items`` and ``metadata.resourceVersion``.

        Raises ``Refused`` as :meth:`get`; 410 where the server forgot the listing between two pages: begin again.
        """
        asked = {**(params or {}), "limit": str(PAGE_SIZE)}
        while True:
            page = self.get(path, asked)
            yield page
            token = page.get("metadata", {}).get("continue")
            if not token:
                return
            asked = {**asked, "continue": token}

    def watch(self, path: str, params: Mapping[str, str] | None, version: str) -> Iterator[Object]:
        """Give what happens after ``version`` as ``{"type": …, "object": …}`` until the server ends the watch.

        Raises ``Refused`` if the server refuses to begin.
        Raises ``Unreachable`` if the connection is cut. A silent one ends the watch as the server's own end does.
        """
        asked = {
            **(params or {}),
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(int(WATCH_S * random.uniform(0.8, 1.2))),  # noqa: S311 - spreads load, no secret
        }
        with self._whole_within(ANSWER_S, path):  # until the watch begins
            response = self._request(path, asked, read_s=IDLE_S, preload=False)
        with self._lock:
            if self._closed:
                response.close()
                return
            self._open.add(response)
        try:
            with closing(response):
                self._check(response)
                yield from self._lines(response)
        finally:
            with self._lock:
                self._open.discard(response)

    def send(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        connect_s: float = CONNECT_TIMEOUT_S,
        read_s: float = REQUEST_TIMEOUT_S,
        total_s: float = ANSWER_S,
        most_bytes: int = ANSWER_BYTES,
    ) -> Reply:
        """Send one request, once, and give the answer whatever its status.

        ``connect_s``, ``read_s``: seconds until the connection stands, and of silence until the answer is given up.
        ``total_s``: seconds until an answer is given up that still comes, byte by byte.
        Raises ``NotSent`` if nothing of it reached the server.
        Raises ``Unreachable`` if no whole answer came: nobody knows whether it was carried out.
        """
        import urllib3  # noqa: PLC0415 - comes with the optional package

        with self._whole_within(total_s, path) as request:
            response = self._request(
                path, params, read_s=read_s, preload=False, method=method, body=body, headers=headers,
                connect_s=connect_s,
            )  # fmt: skip
            held = bytearray()
            whole = False
            try:
                for chunk in response.stream(2**16):
                    held += chunk
                    if len(held) > most_bytes:
                        raise Unreachable(f"{path}: the answer is larger than {most_bytes} bytes")
                whole = not request.over
            except (urllib3.exceptions.HTTPError, OSError) as error:
                raise Unreachable(f"{path}: the answer was cut: {error}") from error
            finally:
                if whole:
                    response.release_conn()
                else:
                    response.close()
        return Reply(response.status, response.headers, bytes(held))

    def execute(self, path: str, command: Sequence[str], container: str | None, *, total_s: float) -> Executed:
        """Run a command in a container, once; see :func:`telemetry.collect.kubernetes.executing.execute`."""
        from telemetry.collect.kubernetes.executing import Tls, execute  # noqa: PLC0415 - comes with the optional package

        return execute(
            self.host, path, command, container=container, headers=self._all_headers(None), tls=self._tls or Tls(),
            connect_s=min(CONNECT_TIMEOUT_S, total_s), total_s=total_s,
        )  # fmt: skip

    def close(self) -> None:
        """End all requests, also those in which another thread waits; asking again is an error."""
        with self._lock:
            self._closed = True
            responses = list(self._open)
        for response in responses:
            shutdown = getattr(response, "shutdown", None)  # urllib3 from 2.3 on; before, the thread waits it out
            if shutdown is not None:
                try:
                    shutdown()
                except (OSError, ValueError):
                    continue

    @contextmanager
    def _whole_within(self, seconds: float, path: str) -> Iterator[Overdue]:
        with self._deadlines.within(seconds) as request:
            try:
                yield request
            except Unreachable as error:
                if not request.over or isinstance(error, NotSent):
                    raise
        if request.over:
            raise Unreachable(f"{path}: timed out: the answer was not whole after {seconds:.3g} s")

    def _get_once(self, path: str, params: Mapping[str, str] | None) -> Object:
        with self._whole_within(max(ANSWER_S, 2 * self._timeout_s), path):
            response = self._request(path, params, read_s=self._timeout_s, preload=True)
        self._check(response)
        try:
            content = json.loads(response.data)
        except ValueError as error:
            raise Unreachable(f"{path}: the answer is no JSON: {error}") from error
        if not isinstance(content, dict):
            raise Unreachable(f"{path}: the answer is no object")
        return content

    def _request(
        self,
        path: str,
        params: Mapping[str, str] | None,
        *,
        read_s: float,
        preload: bool,
        method: str = "GET",
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        connect_s: float = CONNECT_TIMEOUT_S,
    ) -> Any:
        import urllib3  # noqa: PLC0415 - comes with the optional package

        if self._closed:
            raise Unreachable("the connection was closed")
        query = f"?{urlencode(params)}" if params else ""
        all_headers = self._all_headers(headers)
        timeout = urllib3.Timeout(connect=connect_s, read=read_s)
        try:
            return self._pool.request(
                method,
                f"{self.host}{path}{query}",
                body=body,
                headers=all_headers,
                timeout=timeout,
                retries=False,
                redirect=False,
                preload_content=preload,
            )
        except (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError) as error:
            raise NotSent(f"{self.name} cannot be reached: {error}") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unreachable(f"{self.name} cannot be reached: {error}") from error

    def _all_headers(self, headers: Mapping[str, str] | None) -> dict[str, str]:
        try:
            return {"Accept": "application/json", "User-Agent": self._agent, **(headers or {}), **self._headers()}
        except Exception as error:  # a credential plug-in may fail in any way, and work the next time
            raise Unreachable(f"no credentials for {self.name}: {error}") from error

    def _lines(self, response: Any) -> Iterator[Object]:
        import urllib3  # noqa: PLC0415 - comes with the optional package

        held = b""
        try:
            for chunk in response.stream(2**16, decode_content=False):
                *lines, held = (held + chunk).split(b"\n")
                if len(held) > _LINE_BYTES:
                    raise Unreachable("a watched object is larger than any that a server can hold")
                for line in lines:
                    if line.strip():
                        yield json.loads(line)
        except urllib3.exceptions.ReadTimeoutError:
            return  # quiet, or dead: who asks again will see
        except (urllib3.exceptions.HTTPError, OSError, ValueError, AttributeError) as error:
            # AttributeError: urllib3 loses its socket when the response is shut down while it reads.
            raise Unreachable(f"the watch was cut: {error}") from error

    def _check(self, response: Any) -> None:
        if 200 <= response.status < 300:
            return
        text = response.data[:2000].decode("utf-8", "replace")
        try:
            message = str(json.loads(text)["message"])
        except (ValueError, KeyError, TypeError):
            message = text.strip() or str(response.reason)
        wait = response.headers.get("Retry-After", "")
        raise Refused(response.status, message, float(wait) if wait.isdigit() else None)


def connect(
    kubeconfig: Path | None = None,
    context: str | None = None,
    *,
    request_timeout_s: float = REQUEST_TIMEOUT_S,
    sleep: Callable[[float], object] = time.sleep,
    agent: str = "predrain",
) -> Cluster:
    """Connect as a pod does, where this is one, and else as ``kubectl`` does.

    ``kubeconfig``: Given, this file is used wherever we run; else the service account of the pod that we run in, else
    the file that ``KUBECONFIG`` names, else ``~/.kube/config``.
    ``context``: of the file; default: its current one.
    Raises ``InputError`` if the package is missing, or there is no usable configuration.
    """
    try:
        from kubernetes import config  # noqa: PLC0415 - an optional package, slow to import
        from kubernetes.client import ApiClient, Configuration  # noqa: PLC0415 - as above
        from kubernetes.config.config_exception import ConfigException  # noqa: PLC0415 - as above
    except ImportError:
        raise InputError(
            "the Kubernetes client is not installed",
            "package kubernetes",
            "Install it with: pip install 'predrain[kubernetes]'",
        ) from None
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

    from telemetry.collect.kubernetes.executing import Tls  # noqa: PLC0415 - comes with the optional package

    tls = Tls(
        configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file, configuration.verify_ssl,
        configuration.tls_server_name,
    )  # fmt: skip
    pool = ApiClient(configuration).rest_client.pool_manager
    return Cluster(
        pool, configuration.host, headers, request_timeout_s=request_timeout_s, sleep=sleep, agent=agent, tls=tls
    )


def not_allowed(refused: Refused, path: str, api: Api) -> InputError:
    """Return what to tell the user of an answer that waiting does not mend."""
    if refused.status == 401:
        do = "Give a token or certificate that the server knows; a kubeconfig's may have expired."
    elif refused.status == 403:
        do = "Grant get, list and watch as deploy/kubernetes/collector-rbac.yaml does."
    else:
        do = "Check the server's address and version."
    return InputError(f"the Kubernetes API server refuses: {refused.message}", f"{api.name}{path}", do)


def unreachable(error: Exception, api: Api) -> InputError:
    """Return what to tell the user of a server that no try reached."""
    return InputError(
        f"the Kubernetes API server does not answer: {error}", api.name, "Check that it runs, then retry."
    )
