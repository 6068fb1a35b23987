"""The one middleware: who asks, how much of whom is let in, bounded bodies, slow clients, and what is told of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.http.access_log import AccessLog, Tracing, trace_of
from serving.http.bodies import shown
from serving.http.limits import AllowedHosts, ClassLimits, RateLimit, RequestClass
from serving.http.metrics import RequestMetrics
from serving.http.settings import ServiceSettings
from serving.http.tokens import Grant
from telemetry.collect.remote_write.problems import Refused

_LOG = logging.getLogger(__name__)

ALWAYS: Final = frozenset({"/healthz", "/readyz", "/ping", "/metrics"})
"""Answered however many requests are under way."""

UNMATCHED: Final = "unmatched"
"""Route label of requests to no route."""

GRANT: Final = "predrain.grant"
"""Key of the scope under which routes find what the caller's token allows."""

FORM_BYTES: Final = 4_096
"""Largest body that a page takes."""

_PIECE: Final = 2**18
_GONE: Final = 499  # as nginx counts a client that went away


class SlowReader(Exception):
    """The client does not read its answer."""


class HeldBytes:
    """Bytes of bodies in memory, shared by all requests of a process."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0


@dataclass(frozen=True, slots=True)
class Access:
    """How an application knows its callers.

    ``grant``: what a request's token or cookie allows; None where it shows none that holds.
    ``guarded``: whether routes ask for a token at all.
    ``is_page``: tells whether a path is a page's, whose refusals are pages too.
    ``refusal``: writes a refusal.
    """

    grant: Callable[[Request], Grant | None]
    guarded: bool
    is_page: Callable[[str], bool]
    refusal: Callable[[Request, Refused], Response]

    def request_class(self, path: str, grant: Grant | None) -> RequestClass:
        """Tell which limit a request counts under."""
        if self.guarded and grant is None:
            return "anonymous"
        if self.is_page(path):
            return "page"
        return "write" if grant is not None and not grant.covers("read") else "read"


@dataclass(slots=True)
class _Exchange:
    """One request while it is answered."""

    request: Request
    body_bytes: int
    body_read: bool
    bytes_in: int = 0
    held: int = 0
    status: int = _GONE
    started: bool = False
    grant: Grant | None = None
    timer: asyncio.Timeout | None = field(default=None)


class RequestGuard:
    """ASGI middleware around an application; lives in the event loop.

    ``rate``: Default: callers may send as many requests as they like.
    ``hosts``: Default: requests may name any host.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: ServiceSettings,
        access: Access,
        metrics: RequestMetrics,
        log: AccessLog,
        held: HeldBytes,
        rate: RateLimit | None = None,
        hosts: AllowedHosts | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._app = app
        self._settings = settings
        self._access = access
        self._metrics = metrics
        self._log = log
        self._held = held
        self._rate = rate
        self._hosts = hosts
        self._tracing = tracing
        limits: dict[RequestClass, int] = {
            "anonymous": settings.concurrent_anonymous,
            "read": settings.concurrent_reads,
            "write": settings.concurrent_writes,
            "page": settings.concurrent_pages,
        }
        self._classes = ClassLimits(limits, settings.retry_after_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":  # there is nothing else: no lifespan, no WebSocket
            return
        if self._tracing is None:
            await self._observe(scope, receive, send)
            return
        with self._tracing.span(Request(scope)) as tell:
            tell(*await self._observe(scope, receive, send))

    async def _observe(self, scope: Scope, receive: Receive, send: Send) -> tuple[str, int]:
        """Answer, count and log; return the route and the status."""
        began = time.perf_counter()
        method, path = scope["method"], scope["path"]
        inner = {**scope, "method": "GET"} if method == "HEAD" else scope  # the server sends no body to HEAD
        headers = Headers(scope=scope)
        # Of a request with neither header there is no body (RFC 9112, 6.3).
        empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        most = FORM_BYTES if self._access.is_page(path) else self._settings.body_bytes
        exchange = _Exchange(Request(inner, receive), most, empty)
        self._metrics.active += 1
        try:
            with contextlib.suppress(ClientDisconnect, SlowReader):
                await self._answer(exchange, receive, send)
        finally:
            self._held.total -= exchange.held
            self._metrics.active -= 1
            label = UNMATCHED if exchange.status == 405 else _route_of(inner)
            seconds = time.perf_counter() - began
            self._metrics.note(label, exchange.status, seconds)
            self._log.write(
                method=method,
                path=path,
                route=label,
                status=exchange.status,
                seconds=seconds,
                bytes_in=exchange.bytes_in,
                token=None if exchange.grant is None else exchange.grant.name,
                client=scope.get("client"),
                trace=trace_of(headers),
            )
        return label, exchange.status

    async def _answer(self, exchange: _Exchange, receive: Receive, send: Send) -> None:
        request = exchange.request

        async def bounded_receive() -> Message:
            return await self._receive(exchange, receive)

        async def bounded_send(message: Message) -> None:
            await self._send(exchange, message, send)

        try:
            with ExitStack() as place:
                self._admit(exchange, place)
                limit = self._settings.body_timeout_s + self._settings.work_timeout_s
                try:
                    async with asyncio.timeout(limit) as exchange.timer:
                        await self._app(request.scope, bounded_receive, bounded_send)
                except TimeoutError:
                    if exchange.started:
                        raise SlowReader from None
                    raise Refused(
                        503,
                        f"no answer within {limit:g} s: ask for less",
                        "time",
                        retry_after_s=self._settings.retry_after_s,
                    ) from None
                finally:
                    exchange.timer = None
        except Refused as refused:
            await self._refuse(exchange, refused, bounded_send)
        except (ClientDisconnect, SlowReader):
            raise
        except Exception:
            number = secrets.token_hex(8)
            _LOG.exception("fault %s while answering %s %s", number, request.method, request.url.path[:200])
            fault = Refused(500, f"a fault of the service; its log tells more under {number}", "fault")
            await self._refuse(exchange, fault, bounded_send)

    async def _refuse(self, exchange: _Exchange, refused: Refused, send: Send) -> None:
        if not exchange.started:
            request = exchange.request
            await self._access.refusal(request, refused)(request.scope, request.receive, send)

    def _admit(self, exchange: _Exchange, place: ExitStack) -> None:
        """Check framing, host, rate and the places of the caller's class."""
        request, access = exchange.request, self._access
        path: str = request.scope["path"]
        # A proxy that goes by the other length would take the body's end for another's request.
        if "content-length" in request.headers and "transfer-encoding" in request.headers:
            raise Refused(400, "send Content-Length or Transfer-Encoding, not both", "framing")
        host = request.headers.get("host")
        if self._hosts is not None and not self._hosts.allows(host):
            detail = f"this service is not {shown(host)}: ask localhost, or start it with --allow-host NAME"
            raise Refused(421, detail, "host")
        grant = exchange.grant = request.scope[GRANT] = access.grant(request)
        if path in ALWAYS:
            return
        if self._rate is not None:
            client = request.scope.get("client")
            caller = f"token {grant.name}" if grant is not None else f"peer {client[0] if client else ''}"
            wait_s = self._rate.wait_s(caller)
            if wait_s:
                detail = "too many requests in a short time: ask for more at once, or less often"
                raise Refused(429, detail, "rate", retry_after_s=math.ceil(wait_s))
        place.enter_context(self._classes.place(access.request_class(path, grant)))

    async def _receive(self, exchange: _Exchange, receive: Receive) -> Message:
        """Pass a piece of the body on, within its size and time."""
        if exchange.bytes_in == 0 and not exchange.body_read:
            length = exchange.request.headers.get("content-length", "0")
            if not (length.isascii() and length.isdigit()) or int(length) > exchange.body_bytes:
                raise _too_large(exchange.body_bytes)
        deadline = self._settings.body_timeout_s
        try:
            async with asyncio.timeout(None if exchange.body_read else deadline - self._waited(exchange)):
                message = await receive()
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {deadline:g} s", "slow") from None
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            exchange.bytes_in += size
            exchange.body_read = not message.get("more_body", False)
            if exchange.bytes_in > exchange.body_bytes:
                raise _too_large(exchange.body_bytes)
            self._hold(exchange, size)
        return message

    def _waited(self, exchange: _Exchange) -> float:
        """Return for how long the request has been under way."""
        whole = self._settings.body_timeout_s + self._settings.work_timeout_s
        until = None if exchange.timer is None else exchange.timer.when()
        return 0.0 if until is None else max(0.0, whole - (until - asyncio.get_running_loop().time()))

    async def _send(self, exchange: _Exchange, message: Message, send: Send) -> None:
        """Send an answer piece by piece, each within a time.

        uvicorn waits before a piece for the one before it to be read, so that answers do not pile up in memory.
        """
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            if not exchange.started and message["status"] < 500:
                self._count(exchange, int(headers.get("content-length", "0")))  # until it is read
            exchange.started, exchange.status = True, message["status"]
            if exchange.timer is not None:
                exchange.timer.reschedule(None)
            headers.setdefault("cache-control", "no-store")
            headers["x-content-type-options"] = "nosniff"
            if not exchange.body_read:  # the rest of it would be taken for the next request's head, or be waited for
                headers["connection"] = "close"
            await send(message)
            return
        body, last = message.get("body", b""), not message.get("more_body", False)
        try:
            for start in range(0, max(1, len(body)), _PIECE):
                more = start + _PIECE < len(body) or not last
                piece: dict[str, Any] = {"type": message["type"], "body": body[start : start + _PIECE]}
                async with asyncio.timeout(self._settings.body_timeout_s):
                    await send({**piece, "more_body": more})
        except TimeoutError:  # a client that does not read must not keep its place for ever
            exchange.status = _GONE
            raise SlowReader from None

    def _count(self, exchange: _Exchange, size: int) -> None:
        """Count bytes as held until the request ends."""
        exchange.held += size
        self._held.total += size

    def _hold(self, exchange: _Exchange, size: int) -> None:
        """Count bytes of a body, and refuse it where too many are held; one request is always let through."""
        self._count(exchange, size)
        if self._held.total > self._settings.held_bytes and self._held.total > exchange.held:
            raise Refused(503, "too many bodies are in memory", "memory", retry_after_s=self._settings.retry_after_s)


def _route_of(scope: Scope) -> str:
    return str(getattr(scope.get("route"), "path_format", UNMATCHED))


def _too_large(limit: int) -> Refused:
    return Refused(413, f"the body is larger than {limit} bytes: send smaller ones", "too_large")
