"""Bodies of requests and answers: strict JSON, gzip that cannot blow up, and what a refusal says of a wrong value."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn

import orjson
from starlette.requests import Request
from starlette.responses import Response

from telemetry.collect.remote_write.problems import Refused

JSON: Final = "application/json"
ARROW: Final = "application/vnd.apache.arrow.stream"
PROBLEM: Final = "application/problem+json"
_SHOWN: Final = 80
_CHUNK: Final = 2**20
_GZIP: Final = 16 + zlib.MAX_WBITS
_MOST_MEMBERS: Final = 64


def read_json(body: bytes, *, containers: int | None = None, values: int | None = None) -> Any:
    """Read a JSON text; a number beyond a float's range is read as infinity, which the caller looks for.

    ``containers``: most arrays and objects: an empty one takes two bytes of text and thirty times as many of memory.
    ``values``: most commas, about as many as values: a short key takes fifteen times its bytes, and reading many of
    them holds the interpreter, and so every other answer, for seconds.
    Raises ``Refused``: 400, if it is not JSON, holds ``NaN`` or ``Infinity``, or is nested too deeply; 413 for too many
    containers or values.
    """
    if containers is not None and body.count(b"{") + body.count(b"[") > containers:
        raise Refused(413, f"the body holds more than {containers} arrays and objects: send fewer rows", "too_large")
    # Counting what comes often takes as long as a fifth of the reading; a body of fewer bytes cannot hold so many.
    if values is not None and len(body) > values and body.count(b",") > values:
        raise Refused(413, f"the body holds more than {values} values: send fewer rows", "too_large")
    with suppress(ValueError):  # what it refuses is read again by the library that says where
        return orjson.loads(body)
    with _refusing():
        return json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant)


def write_json(value: Any) -> bytes:
    """Write a value as JSON; NaN and infinity, which JSON does not have, as null."""
    try:
        return orjson.dumps(value)
    except TypeError:  # half a surrogate pair from a request, repeated in its answer
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def as_json(value: Any, status: int = 200) -> Response:
    """Answer with a value, past the framework's own encoder."""
    return Response(write_json(value), status, media_type=JSON)


def shown(value: object) -> str:
    """Return a value from outside as short text for an error's detail."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def media_of(request: Request) -> str:
    """Return the body's content type without its parameters, in lower case."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def plain(request: Request, body: bytes, limit: int) -> bytes:
    """Return a request's body without its content encoding; may be called in a thread.

    Raises ``Refused``: 415 for another encoding than gzip, 413 for more than ``limit`` bytes, 400 for a damaged one.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("identity", ""):
        return body
    if encoding not in ("gzip", "x-gzip"):
        raise Refused(415, f"content encoding {shown(encoding)}: send the body plain or with gzip", "encoding")
    return gunzip(body, limit)


def gunzip(body: bytes, limit: int) -> bytes:
    """Decompress gzip, of one member or several (RFC 1952), never making more than ``limit`` bytes.

    Raises ``Refused``: 413 for more than ``limit``, 400 if it is damaged or cut short.
    """
    chunks: list[bytes] = []
    size = 0
    rest = body
    members = 0
    while rest:
        members += 1
        if members > _MOST_MEMBERS:  # each member copies what follows it: many small ones would take for ever
            raise Refused(413, f"the body is gzip of more than {_MOST_MEMBERS} members", "too_large")
        member = zlib.decompressobj(_GZIP)
        while not member.eof:
            try:
                chunk = member.decompress(rest, _CHUNK)
            except zlib.error:
                raise Refused(400, "the body is no gzip", "garbage") from None
            rest = member.unconsumed_tail
            size += len(chunk)
            if size > limit:
                raise Refused(413, f"the body unpacks to more than {limit} bytes: send smaller ones", "too_large")
            chunks.append(chunk)
            if not chunk and not rest and not member.eof:
                raise Refused(400, "the body is gzip that was cut short", "garbage")
        rest = member.unused_data
    return b"".join(chunks)


def unknown_name(name: str, known: tuple[str, ...] | list[str], what: str) -> str:
    """Return the detail of a refusal of a name, with the nearest valid one."""
    from difflib import get_close_matches  # noqa: PLC0415 - only a mistake needs it

    near = get_close_matches(name[:200], known, n=1, cutoff=0.5)
    if near:
        return f"{what} {shown(name)} is not known: did you mean {near[0]!r}?"
    if not known:
        return f"{what} {shown(name)} is not known: this route takes none"
    hint = f"choose of {', '.join(known)}" if len(known) < 20 else "manifest.json of the bundle lists what is"
    return f"{what} {shown(name)} is not known: {hint}"


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except Refused:
        raise
    except RecursionError:
        raise Refused(400, "the body is nested too deeply: send flat JSON", "garbage") from None
    except UnicodeDecodeError as error:
        raise Refused(400, f"the body is not UTF-8: byte {error.start}", "garbage") from None
    except json.JSONDecodeError as error:
        raise Refused(400, f"the body is not JSON: {error.msg} at character {error.pos}", "garbage") from None
    except ValueError:  # an integer of more digits than the interpreter reads
        raise Refused(400, "the body holds a number that is too long", "garbage") from None


def _refuse_constant(name: str) -> NoReturn:
    raise Refused(400, f"the body holds {name}, which is not JSON: leave a missing value out or send null", "garbage")
