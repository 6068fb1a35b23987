"""``/metrics`` and ``/healthz`` of a running collector."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from foundation.http import parse_listen
from telemetry.accounting import Accounting, metrics

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from starlette.applications import Starlette


@contextlib.contextmanager
def exposing(
    address: str | None,
    accounting: Callable[[], Accounting],
    *,
    problem: Callable[[], str | None] = lambda: None,
    extra: "Callable[[], Iterable[Metric]]" = tuple,
) -> Iterator[None]:
    """Serve a collector's accounting at ``host:port`` from a thread within the context; None serves nothing.

    ``problem``: reason why the collector is unhealthy, or None. ``extra``: additional metrics.
    Raises ``InputError`` if the address is invalid.
    """
    if address is None:
        yield
        return
    from foundation.server.connections import serving

    host, port = parse_listen(address if not address.startswith(":") else f"127.0.0.1{address}")
    app = _application(accounting, problem, extra)
    loop, stop, ready, errors = asyncio.new_event_loop(), asyncio.Event(), threading.Event(), list[Exception]()

    async def serve() -> None:
        try:
            async with serving(app, host, port):
                ready.set()
                await stop.wait()
        except Exception as error:  # raised in the collector's thread
            errors.append(error)
        ready.set()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), name="metrics", daemon=True)
    thread.start()
    ready.wait()
    try:
        if errors:
            raise errors[0]
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def _application(
    accounting: Callable[[], Accounting],
    problem: Callable[[], str | None],
    extra: "Callable[[], Iterable[Metric]]",
) -> "Starlette":
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route

    class Account:
        def collect(self) -> "Iterator[Metric]":
            yield from metrics(accounting())
            yield from extra()

    registry = CollectorRegistry()
    registry.register(Account())

    async def page(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def healthz(_: Request) -> Response:
        if (reason := problem()) is not None:
            return PlainTextResponse(f"cannot write: {reason}\n", 503)
        return PlainTextResponse("ok\n")

    return Starlette(routes=[Route("/metrics", page), Route("/healthz", healthz)])
