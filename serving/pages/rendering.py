"""Renders pages from templates, with the headers of every page."""

import gzip
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import Response

from features.wording import duration
from foundation.text import percent
from policy.risk_record import format_utc
from serving.scores.reading import span


def instant(value: datetime | str | None) -> str:
    """Format a time, or an ISO 8601 text, to the minute: ``2026-01-01 06:00 UTC``."""
    if value is None:
        return "not known"
    time = datetime.fromisoformat(value) if isinstance(value, str) else value
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


_HERE: Final = Path(__file__).parent / "templates"
_ZIP_FROM: Final = 2_048
_HTML: Final = "text/html; charset=utf-8"

POLICY: Final = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Pages only load resources of this service; no inline scripts or styles."""

_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

ASSETS: Final = {
    "style.css": "text/css; charset=utf-8",
    "script.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
"""Static files of the pages, with their media types."""


def page(request: Request, template: str, status: int = 200, **values: Any) -> Response:
    """Render a template, compressed if the client accepts that and the page is large enough.

    ``template``: name in ``templates/``, without ``.html.j2``.
    """
    text = _environment().get_template(f"{template}.html.j2").render(**values)
    return _packed(request, text.encode(), status, _HTML, _HEADERS)


def asset(request: Request, name: str) -> Response:
    """Return one of :data:`ASSETS`; URLs contain a digest, so that browsers can cache them."""
    headers = {**_HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}
    return _packed(request, _content(name), 200, ASSETS[name], headers)


def _packed(request: Request, body: bytes, status: int, media: str, headers: Mapping[str, str]) -> Response:
    headers = {**headers, "Vary": "Accept-Encoding"}
    if len(body) >= _ZIP_FROM and "gzip" in request.headers.get("accept-encoding", ""):
        body, headers["Content-Encoding"] = gzip.compress(body, 3, mtime=0), "gzip"
    return Response(body, status, headers, media)


@cache
def _content(name: str) -> bytes:
    return (_HERE / name).read_bytes()


def _address(name: str) -> str:
    return f"/page/{name}?v={sha256(_content(name)).hexdigest()[:12]}"


def _quoted(name: str) -> str:
    return quote(name, safe="")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters.update(
        {"percent": percent, "span": span, "instant": instant, "iso": format_utc, "hours": duration, "name": _quoted}
    )
    environment.globals["asset"] = _address
    return environment
