"""Request middleware: authentication by token and scope, concurrency and body limits, access log."""

import asyncio
import base64
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foundation.errors import InputError
from foundation.server.problems import RequestRefused
from foundation.server.token_file import TokenFile
from serving.http.bodies import quoted
from serving.http.limits import ServiceSettings, is_own_host
from serving.http.metrics import RequestMetrics
from serving.logs import AccessLog

_LOG = logging.getLogger(__name__)

SCOPES: Final = ("read", "write", "admin")
"""``read`` is for queries, ``write`` for pushing telemetry; ``admin`` covers every scope."""

_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})", re.IGNORECASE | re.ASCII)
HOW_TO_WRITE: Final = (
    "Write lines of `SCOPE[,SCOPE] sha256:HEX [NAME]`: TOKEN=$(openssl rand -hex 32); "
    'printf %s "$TOKEN" | sha256sum gives HEX.'
)


@dataclass(frozen=True, slots=True)
class TokenGrant:
    """Permissions of a token; ``name`` identifies it in the log."""

    name: str
    scopes: frozenset[str]

    def covers(self, scope: str) -> bool:
        """Return whether the token has ``scope`` or ``admin``."""
        return scope in self.scopes or "admin" in self.scopes


EVERYTHING: Final = TokenGrant("", frozenset({"admin"}))
"""Permissions of every caller if no tokens are configured."""


def scoped_token(line: str, number: int, location: str) -> tuple[bytes, TokenGrant]:
    """Parse a line: scopes, ``sha256:`` with the hexadecimal SHA-256 of the token, and a name for the log."""
    written, *words = line.split()
    scopes = frozenset(written.split(","))
    if not scopes <= set(SCOPES):
        # The word may be a token written without a scope, so the error must not contain it.
        raise InputError(
            "a line does not begin with scopes", location, f"Choose from {', '.join(SCOPES)}. {HOW_TO_WRITE}"
        )
    match = _DIGEST.fullmatch(words[0]) if words else None
    if match is None:
        raise InputError("a line has no SHA-256 of a token", location, HOW_TO_WRITE)
    return bytes.fromhex(match[1]), TokenGrant(" ".join(words[1:]) or f"line {number}", scopes)


class ScopedTokens:
    """Tokens of a file in the format of :func:`scoped_token`; raises ``InputError`` if the file is unusable."""

    def __init__(self, path: Path) -> None:
        self._file = TokenFile(path, scoped_token, HOW_TO_WRITE)

    def grant(self, header: str | None, *, basic: bool = False) -> TokenGrant | None:
        """Return the permissions of the token in an ``Authorization`` header; None if it is not in the file.

        ``basic``: also accept it as a password from a browser (RFC 7617).
        """
        scheme, _, token = (header or "").partition(" ")
        if basic and scheme.lower() == "basic":
            try:
                token = base64.b64decode(token, validate=True).decode().partition(":")[2]
            except ValueError:
                return None
        elif scheme.lower() != "bearer":
            return None
        return self._file.grant(token)


ALWAYS: Final = frozenset({"/healthz", "/readyz", "/ping", "/metrics"})
"""Paths exempt from the concurrency limits."""

UNMATCHED: Final = "unmatched"
"""Route label of requests that match no route."""

RequestClass = Literal["anonymous", "read", "page"]
"""Kinds of clients: ``anonymous`` has no valid token although one is required, ``page`` is a browser."""

_PIECE: Final = 2**18
_GONE: Final = 499  # nginx's status for a client that disconnected


@dataclass(frozen=True, slots=True)
class Access:
    """Authentication and error rendering of an application.

    ``grant``: returns the permissions of a request's token, None if missing or invalid; itself None: no authentication.
    ``is_page``: returns whether a path belongs to a page, whose errors are pages too.
    """

    grant: Callable[[Request], TokenGrant | None] | None
    is_page: Callable[[str], bool]
    refusal: Callable[[Request, RequestRefused], Response]


@dataclass(slots=True)
class RequestGuard:
    """ASGI middleware around an application; not thread-safe, runs in the event loop.

    ``hosts``: names of the service, see :func:`is_own_host`; None: any ``Host`` header is accepted.
    ``body_bytes``: bytes of request and response bodies in memory.
    """

    app: ASGIApp
    settings: ServiceSettings
    access: Access
    metrics: RequestMetrics
    log: AccessLog
    hosts: Sequence[str] | None = None
    body_bytes: int = 0
    active: Counter[RequestClass] = field(default_factory=Counter)

    def limit(self, request_class: RequestClass) -> int:
        """Return the maximum number of concurrent requests of a class."""
        of = self.settings
        return {"anonymous": of.concurrent_anonymous, "read": of.concurrent_reads, "page": of.concurrent_pages}[
            request_class
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] == "http":  # neither lifespan nor WebSocket is supported
            await _Exchange(self, scope, receive, send).run()


class _Exchange:
    """An in-flight request; its one deadline applies to the body, then the response, then each chunk sent."""

    def __init__(self, guard: RequestGuard, scope: Scope, receive: Receive, send: Send) -> None:
        self.guard = guard
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.scope = {**scope, "method": "GET"} if self.method == "HEAD" else scope  # the server sends no body to HEAD
        self.headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        self._receive, self._send = receive, send
        # A request with neither header has no body (RFC 9112, 6.3).
        self.body_read = self.headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in self.headers
        self.bytes_in = self.body_bytes = 0
        self.status = _GONE
        self.started = False
        self.grant: TokenGrant | None = None
        self.timer: asyncio.Timeout | None = None
        self.began_s = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Handle the request, record its metrics and log it."""
        guard, began_s = self.guard, time.perf_counter()
        guard.metrics.active.inc()
        try:
            await self._answer()
        finally:
            guard.body_bytes -= self.body_bytes
            guard.metrics.active.dec()
            route = UNMATCHED if self.status == 405 else getattr(self.scope.get("route"), "path_format", UNMATCHED)
            seconds = time.perf_counter() - began_s
            guard.metrics.note(route, self.status, seconds)
            client = self.scope.get("client")
            guard.log.write(
                method=self.method,
                path=self.path,
                route=route,
                status=self.status,
                seconds=seconds,
                bytes_in=self.bytes_in,
                token=None if self.grant is None else self.grant.name,
                client=client[0] if client else None,
            )

    async def _answer(self) -> None:
        guard, settings = self.guard, self.guard.settings
        request_class: RequestClass | None = None
        try:
            request_class = self._admit()
            limit = settings.body_timeout_s + (settings.work_timeout_s if self.body_read else 0.0)
            async with asyncio.timeout_at(self.began_s + limit) as self.timer:
                await guard.app(self.scope, self.receive, self.send)
        except ClientDisconnect:
            return
        except Exception as error:
            refused = self._refusal(error)
            if not self.started:
                await self._refuse(refused)
        finally:
            if request_class is not None:
                guard.active[request_class] -= 1

    def _refusal(self, error: Exception) -> RequestRefused:
        """Convert an exception to an error response; log it if it is internal."""
        settings = self.guard.settings
        if isinstance(error, RequestRefused):
            return error
        if isinstance(error, TimeoutError) and self.timer is not None and self.timer.expired():
            if self.started:  # a client that does not read must not hold its slot forever
                self.status = _GONE
            if not self.body_read:
                return RequestRefused(408, f"the body did not arrive within {settings.body_timeout_s:g} s", "slow")
            detail = f"no response within {settings.body_timeout_s + settings.work_timeout_s:g} s: request less data"
            return RequestRefused(503, detail, "time", retry_after_s=settings.retry_after_s)
        number = secrets.token_hex(8)
        _LOG.error("internal error %s in %s %s", number, self.method, self.path[:200], exc_info=error)
        return RequestRefused(500, f"internal error; see the service log for {number}", "fault")

    async def _refuse(self, refused: RequestRefused) -> None:
        response = self.guard.access.refusal(Request(self.scope, self._receive), refused)
        try:
            async with asyncio.timeout(self.guard.settings.body_timeout_s) as self.timer:
                await response(self.scope, self._receive, self.send)
        except TimeoutError:
            self.status = _GONE

    def _admit(self) -> RequestClass | None:
        """Check framing, host and token, and take a slot of the caller's class; None: the path is exempt."""
        guard, access, path = self.guard, self.guard.access, self.path
        # A proxy that honours the other header would take the rest of the body for a new request (request smuggling).
        if b"content-length" in self.headers and b"transfer-encoding" in self.headers:
            raise RequestRefused(400, "send Content-Length or Transfer-Encoding, not both", "framing")
        if self.headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise RequestRefused(415, "send the body without a content encoding", "encoding")
        if guard.hosts is not None:
            host = self.headers.get(b"host", b"").decode("latin-1") if b"host" in self.headers else None
            if not is_own_host(host, guard.hosts):
                detail = (
                    f"host {quoted(host)} is not allowed: use localhost, or start the service with --allow-host NAME"
                )
                raise RequestRefused(421, detail, "host")
        grant = self.grant = None if access.grant is None else access.grant(Request(self.scope))
        self.scope["grant"] = EVERYTHING if access.grant is None else grant  # the routes check it
        request_class: RequestClass | None = None
        if path not in ALWAYS:
            request_class = self._class(grant)
            if guard.active[request_class] >= guard.limit(request_class):
                retry = guard.settings.retry_after_s
                raise RequestRefused(503, "too many concurrent requests", "concurrency", retry_after_s=retry)
        if request_class is not None:
            guard.active[request_class] += 1
        return request_class

    def _class(self, grant: TokenGrant | None) -> RequestClass:
        if self.guard.access.grant is not None and grant is None:
            return "anonymous"
        if self.guard.access.is_page(self.path):
            return "page"
        return "read"

    def _until(self, deadline: float) -> None:
        if self.timer is not None and not self.timer.expired():
            self.timer.reschedule(deadline)

    async def receive(self) -> Message:
        """Pass on a chunk of the body, within the size and memory limits."""
        settings = self.guard.settings
        max_bytes = settings.body_bytes
        if self.bytes_in == 0 and not self.body_read:
            length = self.headers.get(b"content-length", b"0")
            if not length.isdigit() or int(length) > max_bytes:
                raise _too_large(max_bytes)
        message = await self._receive()
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self.bytes_in += size
            if self.bytes_in > max_bytes:
                raise _too_large(max_bytes)
            self._count_bytes(size)
            if not message.get("more_body", False) and not self.body_read:
                self.body_read = True
                self._until(self.began_s + settings.body_timeout_s + settings.work_timeout_s)
            # One request is always admitted.
            if self.guard.body_bytes > max(settings.held_bytes, self.body_bytes):
                raise RequestRefused(
                    503, "too many bodies are in memory", "memory", retry_after_s=settings.retry_after_s
                )
        return message

    async def send(self, message: Message) -> None:
        """Send a response in chunks, each with its own deadline.

        uvicorn waits until the previous chunk has been read, so that responses do not pile up in memory.
        """
        pause, loop = self.guard.settings.body_timeout_s, asyncio.get_running_loop()
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            if message["status"] < 500:
                self._count_bytes(int(headers.get(b"content-length", b"0")))  # until the request ends
            self.started, self.status = True, message["status"]
            self._until(loop.time() + pause)
            headers.setdefault(b"cache-control", b"no-store")
            headers[b"x-content-type-options"] = b"nosniff"
            if not self.body_read:  # its unread rest would be parsed as the next request's head
                headers[b"connection"] = b"close"
            await self._send({**message, "headers": list(headers.items())})
            return
        body: bytes = message.get("body", b"")
        if len(body) <= _PIECE:
            await self._send(message)
            return
        for start in range(0, len(body), _PIECE):
            self._until(loop.time() + pause)
            has_more = start + _PIECE < len(body) or message.get("more_body", False)
            await self._send({"type": message["type"], "body": body[start : start + _PIECE], "more_body": has_more})

    def _count_bytes(self, size: int) -> None:
        """Count bytes as held until the request ends."""
        self.body_bytes += size
        self.guard.body_bytes += size


def _too_large(limit: int) -> RequestRefused:
    return RequestRefused(413, f"the body is larger than {limit} bytes: send a smaller one", "too_large")
