"""OpenTelemetry spans of requests, where it is installed and wanted; where they go is the process's own affair."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from features.errors import InputError
from serving.http.request import Request

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_NO_TRACE: Final = "0" * 32
_FAULT: Final = 500

Tell = Callable[[str, int], None]


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
            attributes={"http.request.method": method, "url.scheme": "https" if request.secure else "http"},
        ) as span:

            def tell(route: str, status: int) -> None:
                span.update_name(f"{method} {route}")
                span.set_attribute("http.route", route)
                span.set_attribute("http.response.status_code", status)
                if status >= _FAULT:
                    span.set_status(self._trace.StatusCode.ERROR)

            yield tell


def trace_of(request: Request) -> str | None:
    """Return the trace that a request's ``traceparent`` names (W3C Trace Context), None if there is none."""
    found = _TRACEPARENT.fullmatch(request.headers.get("traceparent", ""))
    return found[1] if found is not None and found[1] != _NO_TRACE else None
