"""The receiver as a process of its own: Starlette on uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette

from telemetry.collect.remote_write.connections import (
    BACKLOG,
    ConnectionBounds,
    ConnectionGate,
    QuietServer,
    listen,
    quiet_accept_errors,
    raise_descriptor_limit,
    server_config,
)
from telemetry.collect.remote_write.receiver import Receiver

_LOG = logging.getLogger(__name__)


def application(receiver: Receiver) -> Starlette:
    """Return the ASGI application; what waits is written when it is shut down."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await receiver.close()

    return Starlette(routes=receiver.routes(), lifespan=lifespan)


def serve(receiver: Receiver, host: str, port: int, *, started: Callable[[int], None] | None = None) -> None:
    """Run until SIGTERM or SIGINT; requests under way are answered first.

    The soft limit of file descriptors is raised to the hard one; at most half of them are connections.

    ``host``, ``port``: where to listen; port 0 takes a free one.
    ``started``: told of the port when the receiver listens.
    Raises ``InputError`` if the port cannot be listened on.
    """
    bounds = ConnectionBounds.of(raise_descriptor_limit())
    gate = ConnectionGate(bounds.connections, receiver.settings.head_timeout_s)
    config = server_config(application(receiver), gate, bounds.backlog, lifespan="on")
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
        listener.listen(BACKLOG)  # whoever is told that the receiver listens may connect
        address: Any = listener.getsockname()
        _LOG.info("receiving on %s:%d, up to %d connections", host, address[1], bounds.connections)
        if started is not None:
            started(int(address[1]))
        await server.serve(sockets=[listener])

    asyncio.run(run())
