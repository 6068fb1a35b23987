"""A server and its connections: none of them may wait for ever, and idle ones make room for new ones.

Anybody who reaches the port may open connections, before any token is shown. uvicorn closes one that is silent between
two requests, but waits without end for the rest of a request's head.
"""

from __future__ import annotations

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

from telemetry.errors import InputError

_GRACE_S: Final = 20
_KEEP_ALIVE_S: Final = 75
_MOST_CONNECTIONS: Final = 4096
BACKLOG: Final = 1024
"""Connections that the kernel keeps waiting."""

_CONNECTION_SHARE: Final = 2
_BACKLOG_SHARE: Final = 16
# asyncio accepts a whole backlog at a time, and a few of them before the first protocol is told of its connection: the
# other half of the descriptors must hold those, and the files that are written.

_LOG = logging.getLogger(__name__)


class ConnectionGate:
    """Bounds the connections of one server to half of the file descriptors. Lives in its event loop.

    ``head_timeout_s``: longest time in which a client must have sent a request's head. ``servers``: how many servers of
    this process share the descriptors. One connection too many closes the one that has been idle for longest.
    """

    def __init__(self, head_timeout_s: float, *, servers: int = 1) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors < 0:  # without limit
            descriptors = _MOST_CONNECTIONS * _CONNECTION_SHARE
        self.most = max(1, min(_MOST_CONNECTIONS, descriptors // _CONNECTION_SHARE) // servers)
        self.backlog = max(1, min(BACKLOG, descriptors // _BACKLOG_SHARE))
        self.head_timeout_s = head_timeout_s
        self._is_full = False
        self._open: set[GuardedProtocol] = set()
        self._idle: dict[GuardedProtocol, None] = {}  # longest idle first

    def enter(self, connection: GuardedProtocol) -> None:
        """Take a new connection; close another, or itself if none is idle, where there are too many."""
        self._open.add(connection)
        self._idle[connection] = None
        if len(self._open) > self.most:
            if not self._is_full:
                self._is_full = True
                _LOG.warning("over %d connections: idle ones are closed to make room (said once)", self.most)
            oldest = next(iter(self._idle))
            self.leave(oldest)
            oldest.transport.abort()

    def mark(self, connection: GuardedProtocol, *, idle: bool) -> None:
        """Note whether a connection may be closed to make room."""
        if connection in self._open and idle:
            self._idle.setdefault(connection)
        else:
            self._idle.pop(connection, None)

    def leave(self, connection: GuardedProtocol) -> None:
        """Forget a connection."""
        self._open.discard(connection)
        self._idle.pop(connection, None)


class GuardedProtocol(H11Protocol):
    """uvicorn's protocol, with a time-out for what comes before a request is served."""

    def __init__(self, *, gate: ConnectionGate, **more: Any) -> None:
        super().__init__(**more)
        self._gate = gate
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own does
        """Take the connection; its first head is awaited from now on."""
        super().connection_made(transport)
        self._await_head()
        self._gate.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._forget_timer()
        self._unset_keepalive_if_required()
        self._gate.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read; a head that has begun must be whole in time."""
        super().data_received(data)
        self._update()
        if not self._is_serving():
            self._await_head()

    def on_response_complete(self) -> None:
        """Go on with the next request, or wait for it."""
        self._forget_timer()
        super().on_response_complete()
        self._update()

    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _update(self) -> None:
        if self._is_serving():
            self._forget_timer()
        self._gate.mark(self, idle=not self._is_serving())

    def _await_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self._gate.head_timeout_s, self.transport.abort)

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def parse_listen(text: str, option: str = "--listen") -> tuple[str, int]:
    """Read ``HOST:PORT`` (``[HOST]:PORT`` for IPv6).

    Raises ``InputError`` if it is no such pair.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise InputError(f"{text!r} is no address to listen on", option, "Write HOST:PORT, such as 127.0.0.1:9201.")
    return host, int(port)


def refuse_open_port(
    host: str, *, has_tokens: bool, allows: str = "write telemetry", option: str = "--listen without --tokens"
) -> None:
    """Refuse to serve anybody on a network.

    Raises ``InputError`` if there are no tokens and the address is not a loopback one.
    """
    loopback = host == "localhost"
    with contextlib.suppress(ValueError):
        loopback = ipaddress.ip_address(host).is_loopback
    if not has_tokens and not loopback:
        raise InputError(
            f"anybody who reaches {host} could {allows}",
            option,
            "Give --tokens FILE, or listen on 127.0.0.1.",
        )


class QuietServer(uvicorn.Server):
    """uvicorn's server, which leaves the signals to its caller (it would raise them again after its end)."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; the kernel keeps more connections waiting than asyncio takes in one go."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)


def listen(host: str, port: int, option: str = "--listen") -> socket.socket:
    """Return a socket bound to the address; raises InputError if it is taken or not of this machine."""
    try:
        # with its protocol: asyncio switches off the delay of small answers only on sockets that say TCP
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
            "Choose another address, or end what listens there.",
        ) from error
    return listener


def server_config(
    app: ASGIApp,
    gate: ConnectionGate,
    *,
    grace_s: int = _GRACE_S,
    lifespan: Literal["on", "off"] = "off",
    tls: ssl.SSLContext | None = None,
) -> uvicorn.Config:
    """Configure uvicorn for connections that a gate bounds."""
    return uvicorn.Config(
        cast("Any", app),
        http=cast("type[asyncio.Protocol]", functools.partial(GuardedProtocol, gate=gate)),
        ws="none",
        log_config=None,
        # Below an error uvicorn logs a line for each request that is no HTTP: anybody could fill the disk.
        log_level="error",
        access_log=False,
        server_header=False,
        backlog=gate.backlog,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=grace_s,
        lifespan=lifespan,
        ssl_context_factory=None if tls is None else lambda *_: tls,
    )


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp, host: str, port: int, *, head_timeout_s: float = 10.0, lifespan: Literal["on", "off"] = "off"
) -> AsyncIterator[int]:
    """Serve an application while the context lasts; yields the port. Requests under way are answered at the end.

    Raises InputError if the address cannot be used.
    """
    gate = ConnectionGate(head_timeout_s)
    listener = listen(host, port)
    server = QuietServer(server_config(app, gate, lifespan=lifespan))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        listener.listen(BACKLOG)  # whoever is told of the port may connect
        bound = int(listener.getsockname()[1])
        _LOG.info("listening on %s:%d, up to %d connections", host, bound, gate.most)
        yield bound
    finally:
        server.should_exit = True
        await task
        listener.close()
