"""From a path to its handler, with what every request goes through: limits, tokens, problems, counts, one log line."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from serving.http.access_log import AccessLog
from serving.http.hosts import AllowedHosts
from serving.http.limits import RateLimit
from serving.http.metrics import RequestCounts
from serving.http.request import Answer, AsgiReceive, AsgiScope, AsgiSend, Disconnected, Held, Request
from serving.http.settings import ServiceSettings
from serving.http.strict_json import shown
from serving.http.tokens import Grant, Scope, ScopedTokens
from serving.http.tracing import Tracing, trace_of
from telemetry.receiving.problems import Refused

_LOG = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Answer]]

_PIECE: Final = 2**18
UNMATCHED: Final = "unmatched"
"""Route label of requests to no route."""


class Visitors(Protocol):
    """People with a browser: they show a cookie in place of a token, and read refusals as pages."""

    def grant(self, request: Request) -> Grant | None:
        """Return what the request's cookie allows, None if it has none that holds."""

    def refusal(self, request: Request, refused: Refused) -> Answer:
        """Return a refusal as a page."""


@dataclass(frozen=True, slots=True)
class Route:
    """One route.

    ``method``: ``GET`` (which serves ``HEAD`` as well) or ``POST``.
    ``path``: ends in ``/{NAME}`` where the rest of the path is a parameter; it may hold slashes.
    ``scope``: what a token must allow; None: open to all.
    ``visitors``: for pages. Default: bearer tokens only, and problem bodies.
    """

    method: str
    path: str
    handler: Handler
    scope: Scope | None = None
    always: bool = False
    visitors: Visitors | None = None


class Application:
    """An ASGI application of some routes.

    ``tokens``: Default: anybody may do everything.
    ``limit``: Default: callers may send as many requests as they like.
    ``tracing``: Default: no spans are made.
    ``hosts``: Default: requests may name any host.
    """

    def __init__(
        self,
        routes: list[Route],
        settings: ServiceSettings,
        counts: RequestCounts,
        log: AccessLog,
        *,
        tokens: ScopedTokens | None = None,
        held: Held | None = None,
        limit: RateLimit | None = None,
        tracing: Tracing | None = None,
        hosts: AllowedHosts | None = None,
    ) -> None:
        self.routes = routes
        self._settings = settings
        self._counts = counts
        self._log = log
        self._tokens = tokens
        self._held = held or Held()
        self._limit = limit
        self._tracing = tracing
        self._hosts = hosts
        self._active = 0
        self._exact: dict[str, dict[str, Route]] = {}
        self._prefixes: dict[str, dict[str, Route]] = {}
        for route in routes:
            place, path = (
                (self._prefixes, route.path.partition("{")[0]) if "{" in route.path else (self._exact, route.path)
            )
            place.setdefault(path, {})[route.method] = route

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        """Answer one request."""
        if scope["type"] != "http":  # there is nothing else: no lifespan, no WebSocket
            return
        request = Request(scope, receive, self._settings, self._held)
        if self._tracing is None:
            await self._serve(request, send)
            return
        with self._tracing.span(request) as tell:
            tell(*await self._serve(request, send))

    async def _serve(self, request: Request, send: AsgiSend) -> tuple[str, int]:
        """Answer; return the route and the status, for what watches over it."""
        began = time.perf_counter()
        label, name = UNMATCHED, None
        visitors: Visitors | None = None
        status = 499  # as nginx counts a client that went away
        self._active += 1
        self._counts.active += 1
        try:
            try:
                self._check_framing(request)
                self._check_host(request)
                route, parameter = self._match(request)
                label, request.parameter, visitors = route.path, parameter, route.visitors
                name = self._admit(route, request)
                answer = await self._handle(route, request)
                request.hold(len(answer.body))  # until it is read
            except Refused as refused:
                answer = self._refusal(refused, request, visitors)
            except Disconnected:
                return label, status
            except Exception:
                answer = self._refusal(self._fault(request), request, visitors)
            try:
                await _send(send, answer, request, self._settings.body_timeout_s)
            except TimeoutError:  # a client that does not read must not keep its place for ever
                return label, status
            status = answer.status
            return label, status
        finally:
            request.release()
            self._active -= 1
            self._counts.active -= 1
            seconds = time.perf_counter() - began
            self._counts.note(label, status, seconds)
            self._log.write(
                method=request.method,
                path=request.path,
                route=label,
                status=status,
                seconds=seconds,
                bytes_in=request.bytes_in,
                token=name,
                client=request.client,
                trace=trace_of(request),
            )

    @staticmethod
    def _check_framing(request: Request) -> None:
        """Refuse a body of two lengths: a proxy that goes by the other one would take its end for another's request."""
        if "content-length" in request.headers and "transfer-encoding" in request.headers:
            raise Refused(400, "send Content-Length or Transfer-Encoding, not both", "invalid")

    def _check_host(self, request: Request) -> None:
        host = request.headers.get("host")
        if self._hosts is not None and not self._hosts.allows(host):
            detail = f"this service is not {shown(host)}: ask localhost, or start it with --allow-host NAME"
            raise Refused(421, detail, "host")

    def _match(self, request: Request) -> tuple[Route, str]:
        methods, parameter = self._find(request.path)
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        if not methods:
            raise Refused(404, "there is nothing here: /openapi.json lists what there is", "path")
        if route is None:
            raise Refused(405, f"send {' or '.join(self._methods(request.path))}", "method")
        return route, parameter

    def _find(self, path: str) -> tuple[Mapping[str, Route], str]:
        if path in self._exact:
            return self._exact[path], ""
        for prefix, methods in self._prefixes.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                return methods, path[len(prefix) :]
        return {}, ""

    def _methods(self, path: str) -> list[str]:
        methods = self._find(path)[0]
        return [*(["HEAD"] if "GET" in methods else []), *sorted(methods)]

    def _admit(self, route: Route, request: Request) -> str | None:
        """Check tokens and load; return the token's name."""
        name = None
        if self._tokens is not None and route.scope is not None:
            grant = self._tokens.grant(request.headers.get("authorization"))
            if grant is None and route.visitors is not None:
                grant = route.visitors.grant(request)
            self._take_turn(route, request, grant)
            if grant is None:
                raise Refused(401, "send one of the service's tokens: `Authorization: Bearer TOKEN`", "token")
            name = grant.name
            if not grant.covers(route.scope):
                raise Refused(403, f"this token lacks the scope {route.scope}", "scope")
        else:
            self._take_turn(route, request, None)
        if self._active > self._settings.concurrency and not route.always:
            raise Refused(503, "too many requests at a time", "concurrency", retry_after_s=self._settings.retry_after_s)
        return name

    def _take_turn(self, route: Route, request: Request, grant: Grant | None) -> None:
        """Refuse a caller that asks too often; who shows no token that holds is known by the address."""
        if self._limit is None or route.always:
            return
        caller = f"token {grant.name}" if grant is not None else f"peer {request.client[0] if request.client else ''}"
        wait_s = self._limit.wait_s(caller)
        if wait_s:
            detail = "too many requests in a short time: ask for more at once, or less often"
            raise Refused(429, detail, "rate", retry_after_s=math.ceil(wait_s))

    async def _handle(self, route: Route, request: Request) -> Answer:
        limit = self._settings.body_timeout_s + self._settings.work_timeout_s
        try:
            async with asyncio.timeout(limit):
                return await route.handler(request)
        except TimeoutError:
            raise Refused(
                503, f"no answer within {limit:g} s: ask for less", "time", retry_after_s=self._settings.retry_after_s
            ) from None

    def _refusal(self, refused: Refused, request: Request, visitors: Visitors | None) -> Answer:
        answer = Answer.problem(refused) if visitors is None else visitors.refusal(request, refused)
        if refused.status == 405:
            answer.headers["Allow"] = ", ".join(self._methods(request.path))
        return answer

    @staticmethod
    def _fault(request: Request) -> Refused:
        number = secrets.token_hex(8)
        _LOG.exception("fault %s while answering %s %s", number, request.method, request.path[:200])
        return Refused(500, f"a fault of the service; its log tells more under {number}", "fault")


async def _send(send: AsgiSend, answer: Answer, request: Request, timeout_s: float) -> None:
    """Send an answer piece by piece, each within a time.

    uvicorn waits before a piece for the one before it to be read, so that answers do not pile up in memory.
    """
    headers = {
        "Content-Type": answer.media,
        "Content-Length": str(len(answer.body)),
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
    } | answer.headers
    if not request.body_read:  # the rest of it would be taken for the next request's head, or be waited for
        headers["Connection"] = "close"
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": pairs})
    body = b"" if request.method == "HEAD" else answer.body
    for start in range(0, max(1, len(body)), _PIECE):
        more = start + _PIECE < len(body)
        async with asyncio.timeout(timeout_s):
            await send({"type": "http.response.body", "body": body[start : start + _PIECE], "more_body": more})
