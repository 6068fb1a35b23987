"""Pages from templates, with the headers that every page carries."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import Response

from serving.pages import formatting

_HERE: Final = Path(__file__).parent / "templates"
_ZIP_FROM: Final = 2_048
_HTML: Final = "text/html; charset=utf-8"

POLICY: Final = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""A page loads what this service sends and nothing else; no inline script or style."""

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
"""Files that pages refer to, with their media types."""


def page(request: Request, template: str, status: int = 200, **values: Any) -> Response:
    """Render a template, compressed where the client takes that and it is worth it.

    ``template``: name in ``templates/``, without ``.html.j2``.
    """
    text = _environment().get_template(f"{template}.html.j2").render(**values)
    return _packed(request, text.encode(), status, _HTML, _HEADERS)


def asset(request: Request, name: str) -> Response:
    """Return one of :data:`ASSETS`; addresses carry a digest, so that browsers may keep them."""
    headers = {**_HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}
    return _packed(request, _content(name), 200, ASSETS[name], headers)


def redirect(address: str, **headers: str) -> Response:
    """Send a browser elsewhere on this service, by GET."""
    return Response(b"", 303, {"Location": address, **headers}, "text/plain; charset=utf-8")


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
        {name: getattr(formatting, name) for name in ("percent", "span", "instant", "iso", "hours", "number")}
    )
    environment.filters["name"] = _quoted
    environment.globals["asset"] = _address
    return environment
