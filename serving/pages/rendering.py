"""Pages from templates, with the headers that every page carries."""

from __future__ import annotations

import gzip
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from serving.http.request import Answer, Request
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


def page(request: Request, template: str, status: int = 200, **values: Any) -> Answer:
    """Render a template.

    ``request``: says whether the answer may be compressed.
    ``template``: name in ``templates/``, without ``.html.j2``.
    """
    text = _environment().get_template(f"{template}.html.j2").render(**values)
    return packed(request, Answer(text.encode(), status, _HTML, dict(_HEADERS)))


def packed(request: Request, answer: Answer) -> Answer:
    """Return an answer compressed where the client takes that and it is worth it."""
    answer.headers["Vary"] = "Accept-Encoding"
    takes = request.headers.get("accept-encoding", "")
    if len(answer.body) < _ZIP_FROM or "gzip" not in takes:
        return answer
    headers = answer.headers | {"Content-Encoding": "gzip"}
    return Answer(gzip.compress(answer.body, 3, mtime=0), answer.status, answer.media, headers)


def asset(request: Request, name: str) -> Answer:
    """Return one of :data:`ASSETS`; addresses carry a digest, so that browsers may keep them."""
    headers = _HEADERS | {"Cache-Control": "public, max-age=31536000, immutable"}
    return packed(request, Answer(_content(name), 200, ASSETS[name], headers))


def redirect(address: str, **headers: str) -> Answer:
    """Send a browser elsewhere on this service, by GET."""
    return Answer(b"", 303, "text/plain; charset=utf-8", {"Location": address, **headers})


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
