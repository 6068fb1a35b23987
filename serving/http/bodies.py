"""Bodies of requests and answers: strict JSON, and what a refusal says of a wrong value."""

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
_SHOWN: Final = 80


def read_json(body: bytes, *, containers: int | None = None, values: int | None = None) -> Any:
    """Read a JSON text.

    ``containers``: most arrays and objects: an empty one takes two bytes of text and thirty times as many of memory.
    ``values``: most commas, about as many as values: a short key takes fifteen times its bytes, and reading many of
    them holds the interpreter, and so every other answer, for seconds.
    Raises ``RequestRefused``: 400, if it is not JSON, holds a number beyond a float's range, or is nested too deeply;
    413 for too many containers or values.
    """
    if containers is not None and body.count(b"{") + body.count(b"[") > containers:
        raise RequestRefused(
            413, f"the body holds more than {containers} arrays and objects: send fewer rows", "too_large"
        )
    # Counting what comes often takes as long as a fifth of the reading; a body of fewer bytes cannot hold so many.
    if values is not None and len(body) > values and body.count(b",") > values:
        raise RequestRefused(413, f"the body holds more than {values} values: send fewer rows", "too_large")
    try:
        return orjson.loads(body.removeprefix(BOM_UTF8))
    except orjson.JSONDecodeError as error:
        detail = f"the body is not JSON, which has no NaN and no infinity: {error.msg} at character {error.pos}"
        raise RequestRefused(400, detail, "garbage") from None


def write_json(value: Any) -> bytes:
    """Write a value as JSON; NaN and infinity, which JSON does not have, as null."""
    try:
        return orjson.dumps(value)
    except TypeError:  # half a surrogate pair, such as a file name that is not UTF-8 in an error
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def as_json(value: Any) -> Response:
    """Answer with a value, past the framework's own encoder."""
    return Response(write_json(value), media_type=JSON)


def shown(value: object) -> str:
    """Return a value from outside as short text for an error's detail."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def media_of(request: Request) -> str:
    """Return the body's content type without its parameters, in lower case."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def one_of(content: Any, keys: tuple[str, ...]) -> tuple[str, Any]:
    """Return the one key of an object with its value; raises ``RequestRefused`` (422) if it has none or several."""
    if not isinstance(content, dict):
        raise RequestRefused(422, f"send an object with one of {', '.join(keys)}", "invalid")
    for key in content:
        if key not in keys:
            raise RequestRefused(422, unknown_name(key, keys, "key"), "invalid")
    if len(content) != 1:
        raise RequestRefused(422, f"send exactly one of {', '.join(keys)}", "invalid")
    return next(iter(content.items()))


def unknown_name(name: str, known: tuple[str, ...] | list[str], what: str) -> str:
    """Return the detail of a refusal of a name, with the nearest valid one."""
    near = closest(name, known)
    if near:
        return f"{what} {shown(name)} is not known: did you mean {near!r}?"
    if not known:
        return f"{what} {shown(name)} is not known: this route takes none"
    hint = f"choose from {', '.join(known)}" if len(known) < 20 else "manifest.json of the bundle lists the known ones"
    return f"{what} {shown(name)} is not known: {hint}"
