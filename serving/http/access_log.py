"""What is told of requests: a line of JSON each, written by a thread, and OpenTelemetry spans where wanted."""

from __future__ import annotations

import json
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TextIO

from starlette.requests import Request

from features.errors import InputError

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_WAITING: Final = 10_000
_LONGEST: Final = 200
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_NO_TRACE: Final = "0" * 32
_FAULT: Final = 500

Tell = Callable[[str, int], None]


class AccessLog:
    """Writes what was answered; holds neither headers nor queries nor bodies, so no secret.

    ``stream``: where to; None: nowhere.
    ``dropped``: lines left out because the stream did not keep up.
    """

    def __init__(self, stream: TextIO | None = sys.stderr, clock: Callable[[], datetime] | None = None) -> None:
        self.dropped = 0
        self._stream = stream
        self._clock = clock or (lambda: datetime.now(UTC))
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        if stream is not None:
            self._thread.start()

    def write(
        self,
        *,
        method: str,
        path: str,
        route: str,
        status: int,
        seconds: float,
        bytes_in: int,
        token: str | None,
        client: tuple[str, int] | None,
        trace: str | None = None,
    ) -> None:
        """Note one answer; ``trace`` is what the caller names it by."""
        if self._stream is None:
            return
        line = {
            "time": self._clock().isoformat(timespec="milliseconds"),
            "method": method,
            "path": path[:_LONGEST],
            "route": route,
            "status": status,
            "ms": round(seconds * 1000, 3),
            "bytes_in": bytes_in,
            "token": token,
            "client": client[0] if client else None,
        }
        if trace is not None:
            line["trace"] = trace
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what waits, for two seconds at most."""
        if self._stream is None:
            return
        try:
            self._lines.put(None, timeout=1)
        except queue.Full:
            return
        self._thread.join(2)

    def _run(self) -> None:
        assert self._stream is not None
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(json.dumps(line) + "\n")
                if self._lines.empty():
                    self._stream.flush()
            except (OSError, ValueError):  # nobody reads it any more
                self.dropped += 1


class Tracing:
    """Makes a span of each request, as OpenTelemetry's conventions for HTTP servers name it.

    ``tracer``: Default: of the global provider. Without an SDK that one makes spans that go nowhere;
    ``opentelemetry-instrument predrain serve …`` sets one up from its environment.
    Raises ``InputError`` if opentelemetry-api is not installed.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        try:
            from opentelemetry import propagate, trace  # noqa: PLC0415 - optional, and off by default
        except ImportError:
            raise InputError(
                "opentelemetry-api is not installed", "--tracing", "Install it, with an SDK, or leave --tracing out."
            ) from None
        self._trace = trace
        self._extract = propagate.extract
        self._tracer = tracer or trace.get_tracer("predrain")

    @contextmanager
    def span(self, request: Request) -> Iterator[Tell]:
        """Begin a request's span, a child of the caller's where it names one.

        Yields: to be told the route and the status at the end; the name of the span is method and route, never the
        path, and nothing of query, headers or body is kept.
        """
        method = request.method if request.method in ("GET", "HEAD", "POST") else "_OTHER"
        with self._tracer.start_as_current_span(
            method,
            context=self._extract(request.headers),
            kind=self._trace.SpanKind.SERVER,
            attributes={"http.request.method": method, "url.scheme": request.url.scheme},
        ) as span:

            def tell(route: str, status: int) -> None:
                span.update_name(f"{method} {route}")
                span.set_attribute("http.route", route)
                span.set_attribute("http.response.status_code", status)
                if status >= _FAULT:
                    span.set_status(self._trace.StatusCode.ERROR)

            yield tell


def trace_of(headers: Mapping[str, str]) -> str | None:
    """Return the trace that a request's ``traceparent`` names (W3C Trace Context), None if there is none."""
    match = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    return match[1] if match is not None and match[1] != _NO_TRACE else None
