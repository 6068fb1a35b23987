"""uvicorn server with connection limits: request heads time out, and idle connections are closed to make room.

Any client that reaches the port can open connections before it presents a token. uvicorn closes connections that are
idle between two requests, but waits forever for the rest of a request's head.
"""

import asyncio
import contextlib
import functools
import ipaddress
import logging
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Generator
from typing import Any, Final, Literal, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from foundation.errors import InputError

_GRACE_S: Final = 20
_KEEP_ALIVE_S: Final = 75
_MAX_CONNECTIONS: Final = 4096
BACKLOG: Final = 1024
_CONNECTION_SHARE: Final = 2
_BACKLOG_SHARE: Final = 16
# asyncio accepts up to a whole backlog before the first `connection_made`: the other half of the file descriptors is
# for these connections and for open files.

_LOG = logging.getLogger(__name__)


class GuardedProtocol(H11Protocol):
    """uvicorn's protocol with a timeout for request heads and a limit on the server's connections.

    Above the limit, the longest idle connections are closed, a tenth of the limit at a time.
    """

    def __init__(self, *, max_connections: int, head_timeout_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._max_connections, self._head_timeout_s = max_connections, head_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._idle_since_s = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own does
        """Start the timeout of the first request head."""
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > self._max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers of the connection."""
        self._cancel_head_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data; start the timeout if a request head is incomplete."""
        super().data_received(data)
        if self._is_serving():
            self._cancel_head_timer()
        else:
            self._await_head()

    def on_response_complete(self) -> None:
        """Restart the idle time, and continue with the next request."""
        self._cancel_head_timer()
        self._idle_since_s = self.loop.time()
        super().on_response_complete()

    def _make_room(self) -> None:
        connections = [
            connection
            for connection in self.connections
            if isinstance(connection, GuardedProtocol) and not connection.transport.is_closing()
        ]
        if len(connections) > self._max_connections:
            _warn_once(self._max_connections)
            idle = [connection for connection in connections if not connection._is_serving()]
            idle.sort(key=lambda connection: connection._idle_since_s)
            for connection in idle[: 1 + self._max_connections // 10]:
                connection.transport.abort()

    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self._head_timeout_s, self.transport.abort)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


@functools.cache
def _warn_once(max_connections: int) -> None:
    _LOG.warning("over %d connections: idle ones are closed to make room (logged once)", max_connections)


def _descriptors() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if limit >= 0 else _MAX_CONNECTIONS * _CONNECTION_SHARE


def max_connections(servers: int = 1) -> int:
    """Return the connection limit of each server if ``servers`` of them share half of the file descriptors."""
    return max(1, min(_MAX_CONNECTIONS, _descriptors() // _CONNECTION_SHARE) // servers)


def refuse_open_port(
    host: str, *, has_tokens: bool, allows: str = "write telemetry", option: str = "--listen without --tokens"
) -> None:
    """Raise ``InputError`` if there are no tokens and the address is not a loopback one."""
    loopback = host == "localhost"
    with contextlib.suppress(ValueError):
        loopback = ipaddress.ip_address(host).is_loopback
    if not has_tokens and not loopback:
        raise InputError(
            f"any client that reaches {host} could {allows}",
            option,
            "Give --tokens FILE, or listen on 127.0.0.1.",
        )


class QuietServer(uvicorn.Server):
    """uvicorn's server without signal handlers, which would raise the signals again on exit."""

    port = 0

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Install no signal handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with a backlog larger than asyncio's default."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)


def listen(host: str, port: int, option: str = "--listen") -> socket.socket:
    """Return a socket bound to the address; raises ``InputError`` if it is in use or not local."""
    try:
        # with its protocol: asyncio sets TCP_NODELAY only on sockets created with IPPROTO_TCP
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise InputError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            option,
            "Choose another address, or stop the process that listens there.",
        ) from error
    return listener


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    option: str = "--listen",
    head_timeout_s: float = 10.0,
    servers: int = 1,
    grace_s: int = _GRACE_S,
    lifespan: Literal["on", "off"] = "off",
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[QuietServer]:
    """Serve an application within the context, then finish in-flight requests; ``port`` of the server is set.

    ``servers``: servers of this process, which share the file descriptors. Raises ``InputError``, which names
    ``option``, if the address is unavailable.
    """
    listener = listen(host, port, option)
    protocol = functools.partial(
        GuardedProtocol, max_connections=max_connections(servers), head_timeout_s=head_timeout_s
    )
    config = uvicorn.Config(
        cast("Any", app),
        http=cast("type[asyncio.Protocol]", protocol),
        ws="none",
        log_config=None,
        # At lower levels uvicorn logs every request that is not HTTP: any client could fill the disk.
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # client headers are not trusted
        backlog=max(1, min(BACKLOG, _descriptors() // _BACKLOG_SHARE)),
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=grace_s,
        lifespan=lifespan,
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )
    server = QuietServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        listener.listen(BACKLOG)  # before the port is known to callers, who may connect immediately
        server.port = int(listener.getsockname()[1])
        yield server
    finally:
        server.should_exit = True
        await task
        listener.close()
