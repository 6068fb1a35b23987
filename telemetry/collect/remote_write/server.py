"""The receiver as a process of its own: Starlette on uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette

from telemetry.collect.remote_write.connections import (
    ConnectionBounds,
    ConnectionGate,
    GuardedProtocol,
    quiet_accept_errors,
    raise_descriptor_limit,
)
from telemetry.collect.remote_write.receiver import Receiver
from telemetry.errors import InputError

_LOG = logging.getLogger(__name__)
_GRACE_S = 20
_KEEP_ALIVE_S = 75
_BACKLOG = 1024


def parse_listen(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT`` (``[HOST]:PORT`` for IPv6).

    Raises ``InputError`` if it is no such pair.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise InputError(f"{text!r} is no address to listen on", "--listen", "Write HOST:PORT, such as 127.0.0.1:9201.")
    return host, int(port)


def refuse_open_port(host: str, *, has_tokens: bool) -> None:
    """Refuse to take telemetry from anybody on a network.

    Raises ``InputError`` if there are no tokens and the address is not a loopback one.
    """
    loopback = host == "localhost"
    with contextlib.suppress(ValueError):
        loopback = ipaddress.ip_address(host).is_loopback
    if not has_tokens and not loopback:
        raise InputError(
            f"anybody who reaches {host} could write telemetry",
            "--listen without --tokens",
            "Give --tokens FILE with one bearer token a line, or listen on 127.0.0.1.",
        )


def application(receiver: Receiver) -> Starlette:
    """Return the ASGI application; what waits is written when it is shut down."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await receiver.close()

    return Starlette(routes=receiver.routes(), lifespan=lifespan)


class QuietServer(uvicorn.Server):
    """uvicorn's server, which leaves the signals to :func:`serve` (it would raise them again after its end)."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; the kernel keeps more connections waiting than asyncio takes in one go."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(_BACKLOG)


def listen(host: str, port: int) -> socket.socket:
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
            "--listen",
            "Choose another address, or end what listens there.",
        ) from error
    return listener


def serve(receiver: Receiver, host: str, port: int, *, started: Callable[[int], None] | None = None) -> None:
    """Run until SIGTERM or SIGINT; requests under way are answered first.

    The soft limit of file descriptors is raised to the hard one; at most half of them are connections.

    ``host``, ``port``: where to listen; port 0 takes a free one.
    ``started``: told of the port when the receiver listens.
    Raises ``InputError`` if the port cannot be listened on.
    """
    bounds = ConnectionBounds.of(raise_descriptor_limit())
    gate = ConnectionGate(bounds.connections, receiver.settings.head_timeout_s)
    config = uvicorn.Config(
        application(receiver),
        http=cast("type[asyncio.Protocol]", functools.partial(GuardedProtocol, gate=gate)),
        ws="none",
        log_config=None,
        # Below an error uvicorn logs a line for each request that is no HTTP: anybody could fill the disk.
        log_level="error",
        access_log=False,
        server_header=False,
        backlog=bounds.backlog,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
        lifespan="on",
    )
    listener = listen(host, port)
    server = QuietServer(config)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        quiet_accept_errors(loop)

        def leave(number: signal.Signals) -> None:
            _LOG.info("%s: leaving once what waits is written", number.name)
            server.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, leave, number)
        listener.listen(_BACKLOG)  # whoever is told that the receiver listens may connect
        address: Any = listener.getsockname()
        _LOG.info("receiving on %s:%d, up to %d connections", host, address[1], bounds.connections)
        if started is not None:
            started(int(address[1]))
        await server.serve(sockets=[listener])

    asyncio.run(run())
