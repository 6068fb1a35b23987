"""The service as a process: two listeners on one event loop, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import ipaddress
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any, Final, cast

import uvicorn
from starlette.types import ASGIApp

from features.errors import InputError
from serving.http.tls import Tls
from serving.service import Service
from telemetry.collect.remote_write.connections import (
    ConnectionBounds,
    ConnectionGate,
    GuardedProtocol,
    quiet_accept_errors,
    raise_descriptor_limit,
)

_LOG = logging.getLogger(__name__)
_KEEP_ALIVE_S: Final = 75
_BACKLOG: Final = 1024
_HANDSHAKE_S: Final = 10.0
SWITCH_S: Final = 0.0005
"""How long a thread that computes may hold the interpreter while the event loop waits for it; Python's own is 5 ms, and
a look-up waits several times."""

GARBAGE: Final = (50_000, 20, 100)
"""Thresholds of the collector of cycles. A decision makes hundreds of thousands of objects, none of them in cycles;
with Python's own thresholds the whole heap was walked again and again, each time for up to 200 ms without an answer."""

_NOTIFY_SOCKET: Final = "NOTIFY_SOCKET"
EXTENDER_HOST: Final = "127.0.0.1"
"""The extender takes no tokens, so only its own machine reaches it."""


def refuse_open_port(host: str, *, has_tokens: bool) -> None:
    """Refuse to tell anybody on a network which nodes are at risk.

    Raises ``InputError`` if there are no tokens and the address is not a loopback one.
    """
    loopback = host == "localhost"
    with contextlib.suppress(ValueError):
        loopback = ipaddress.ip_address(host).is_loopback
    if not has_tokens and not loopback:
        raise InputError(
            f"anybody who reaches {host} could ask",
            "--host without --tokens",
            "Give --tokens FILE, or listen on 127.0.0.1.",
        )


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves the signals to :func:`serve` (two of them would fight over them)."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; the kernel keeps more connections waiting than asyncio takes in one go."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(_BACKLOG)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop in which a TLS handshake may not take for ever: before its end a connection is not counted."""

    async def create_server(self, *given: Any, **more: Any) -> asyncio.Server:
        """Listen."""
        if more.get("ssl") is not None:
            more.setdefault("ssl_handshake_timeout", _HANDSHAKE_S)
        return await super().create_server(*given, **more)


def serve(
    service: Service,
    host: str = "127.0.0.1",
    port: int = 8080,
    *,
    extender_port: int | None = 8081,
    tls: Tls | None = None,
    started: Callable[[int, int | None], None] | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Run until SIGTERM or SIGINT: then nothing new is accepted, and what was accepted is answered.

    ``host``, ``port``: where to listen; port 0 takes a free one.
    ``extender_port``: port of the scheduler extender on 127.0.0.1; None: none.
    ``started``: told of both ports when the service listens.
    ``stop``: ends the service as a signal would, where it runs in a thread that gets none.
    Raises ``InputError`` if a port cannot be listened on.
    """
    bounds = ConnectionBounds.of(raise_descriptor_limit())
    listeners = [(service.api, _listen(host, port, "--port"))]
    try:
        if extender_port is not None:
            listeners.append((service.extender, _listen(EXTENDER_HOST, extender_port, "--extender-port")))
    except InputError:
        listeners[0][1].close()
        raise
    share = max(1, bounds.connections // len(listeners))
    contexts = (None if tls is None else tls.context, None)  # the extender stays on this machine
    servers = [
        (_Server(_config(application, service, ConnectionBounds(share, bounds.backlog), encrypted)), listener)
        for (application, listener), encrypted in zip(listeners, contexts, strict=False)
    ]

    async def run() -> None:
        loop = asyncio.get_running_loop()
        quiet_accept_errors(loop)

        def end() -> None:
            notify("STOPPING=1")
            for server, _ in servers:
                server.should_exit = True

        def leave(number: signal.Signals) -> None:
            _LOG.info("%s: leaving once what was accepted is answered", number.name)
            end()

        if stop is None:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, leave, number)
        else:
            threading.Thread(target=_wait_for, args=(stop, loop, end), daemon=True).start()
        for _, listener in servers:
            listener.listen(_BACKLOG)  # whoever is told that the service listens may connect
        ports = [int(listener.getsockname()[1]) for _, listener in servers]
        _LOG.info("serving on %s:%d%s", host, ports[0], f", extender on {ports[1]}" if len(ports) > 1 else "")
        notify("READY=1")
        if started is not None:
            started(ports[0], ports[1] if len(ports) > 1 else None)
        service.start()
        if tls is not None:
            tls.start()
        await asyncio.gather(*(server.serve(sockets=[listener]) for server, listener in servers))

    try:
        with asyncio.Runner(loop_factory=_Loop) as runner:
            runner.run(run())
    finally:
        if tls is not None:
            tls.stop()
        service.close()


def _wait_for(stop: threading.Event, loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
    stop.wait()
    with contextlib.suppress(RuntimeError):  # the loop has ended by itself
        loop.call_soon_threadsafe(end)


def _config(
    application: ASGIApp, service: Service, bounds: ConnectionBounds, encrypted: ssl.SSLContext | None
) -> uvicorn.Config:
    gate = ConnectionGate(bounds.connections, service.settings.head_timeout_s)
    return uvicorn.Config(
        cast("Any", application),
        http=cast("type[asyncio.Protocol]", functools.partial(GuardedProtocol, gate=gate)),
        ws="none",
        log_config=None,
        # Below an error uvicorn logs a line for each request that is no HTTP: anybody could fill the disk.
        log_level="error",
        access_log=False,
        server_header=False,
        backlog=bounds.backlog,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=service.settings.grace_s,
        lifespan="off",
        ssl_context_factory=None if encrypted is None else lambda *_: encrypted,
    )


def _listen(host: str, port: int, option: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio switches Nagle's delay off only where it sees that the protocol is TCP: else an answer takes 40 ms.
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


def be_responsive() -> None:
    """Set both, for the whole process."""
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(*GARBAGE)


def notify(state: str) -> bool:
    """Send a state, such as ``READY=1``.

    ``state``: assignments as sd_notify(3) has them, one a line.
    Returns: whether it was sent; False where nobody asked for it.
    """
    address = os.environ.get(_NOTIFY_SOCKET, "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):  # an abstract name
        address = f"\0{address[1:]}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(1.0)
            sender.sendto(state.encode(), address)
    except OSError as error:  # a supervisor that cannot be told is no reason to serve nobody
        _LOG.warning("the supervisor cannot be told %s: %s", state, error)
        return False
    return True
