"""Request and response bodies: strict JSON, and error details for invalid values."""

import json
from codecs import BOM_UTF8
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response

from foundation.server.problems import RequestRefused
from foundation.text import closest

JSON: Final = "application/json"
ARROW: Final = "application/vnd.apache.arrow.stream"
PROBLEM: Final = "application/problem+json"
_MAX_QUOTED: Final = 80


def read_json(body: bytes, *, containers: int | None = None, values: int | None = None) -> Any:
    """Parse JSON.

    ``containers``: maximum number of arrays and objects: an empty one is two bytes of text and 30 times that in memory.
    ``values``: maximum number of commas, about that of values: a short key takes 15 times its bytes in memory, and
    parsing many holds the GIL, and so every other response, for seconds.
    Raises ``RequestRefused``: 400 for invalid JSON, a number outside the range of a float or too deep nesting; 413 for
    too many containers or values.
    """
    if containers is not None and body.count(b"{") + body.count(b"[") > containers:
        raise RequestRefused(
            413, f"the body holds more than {containers} arrays and objects: send fewer rows", "too_large"
        )
    # Counting commas takes up to a fifth of the parsing time; a body shorter than the limit cannot exceed it.
    if values is not None and len(body) > values and body.count(b",") > values:
        raise RequestRefused(413, f"the body holds more than {values} values: send fewer rows", "too_large")
    try:
        return orjson.loads(body.removeprefix(BOM_UTF8))
    except orjson.JSONDecodeError as error:
        detail = f"the body is not JSON, which has no NaN and no infinity: {error.msg} at character {error.pos}"
        raise RequestRefused(400, detail, "garbage") from None


def write_json(value: Any) -> bytes:
    """Serialize a value as JSON, with NaN and infinity as null."""
    try:
        return orjson.dumps(value)
    except TypeError:  # a lone surrogate, e.g. of a non-UTF-8 file name in an error
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def as_json(value: Any) -> Response:
    """Return a JSON response, bypassing FastAPI's encoder."""
    return Response(write_json(value), media_type=JSON)


def quoted(value: object) -> str:
    """Return the truncated repr of a value from a request, for error details."""
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…"


def media_of(request: Request) -> str:
    """Return the body's content type without its parameters, in lower case."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def one_of(content: Any, keys: tuple[str, ...]) -> tuple[str, Any]:
    """Return the only key of an object and its value; raises ``RequestRefused`` (422) if there is not exactly one."""
    if not isinstance(content, dict):
        raise RequestRefused(422, f"send an object with one of {', '.join(keys)}", "invalid")
    for key in content:
        if key not in keys:
            raise RequestRefused(422, unknown_name(key, keys, "key"), "invalid")
    if len(content) != 1:
        raise RequestRefused(422, f"send exactly one of {', '.join(keys)}", "invalid")
    return next(iter(content.items()))


def unknown_name(name: str, known: tuple[str, ...] | list[str], kind: str) -> str:
    """Return the error detail for an unknown name, with the closest valid one."""
    closest_name = closest(name, known)
    if closest_name:
        return f"{kind} {quoted(name)} is not known: did you mean {closest_name!r}?"
    if not known:
        return f"{kind} {quoted(name)} is not known: this route takes none"
    hint = f"choose from {', '.join(known)}" if len(known) < 20 else "manifest.json of the bundle lists the known ones"
    return f"{kind} {quoted(name)} is not known: {hint}"
