"""The collector's own page: ``/metrics`` and ``/healthz``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from telemetry.errors import InputError
from telemetry.exporters.collector import Collector
from telemetry.exporters.status import illness, metrics_text
from telemetry.exposition.writer import MEDIA


def parse_listen(text: str) -> tuple[str, int]:
    """Read ``host:port`` or ``:port`` (loopback).

    Raises ``InputError`` if it is neither.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise InputError(f"{text!r} is no address to listen on", "--listen", "Write host:port, such as 127.0.0.1:9210.")
    return host.strip("[]") or "127.0.0.1", int(port)


@contextlib.asynccontextmanager
async def listening(collector: Collector, address: str | None) -> AsyncIterator[int | None]:
    """Serve the collector's page while the context lasts.

    ``address``: ``host:port``; port 0 is any free one. None serves nothing.
    Raises ``InputError`` if the address cannot be used.
    """
    if address is None:
        yield None
        return
    from aiohttp import web  # noqa: PLC0415  # a second of import time that `--help` need not pay

    async def metrics(_: web.Request) -> web.Response:
        text = metrics_text(collector, collector.clock.now())
        return web.Response(text=text, headers={"Content-Type": MEDIA})

    async def health(_: web.Request) -> web.Response:
        ill = illness(collector)
        return web.Response(text=f"{ill or 'ok'}\n", status=200 if ill is None else 503)

    host, port = parse_listen(address)
    app = web.Application(client_max_size=1024)
    app.add_routes([web.get("/metrics", metrics), web.get("/healthz", health)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
        except OSError as error:
            raise InputError(
                f"cannot listen on {address}: {error.strerror}", "--listen", "Give a free address of this machine."
            ) from None
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
