"""JSON as RFC 8259 has it: no NaN or infinity comes in or goes out, and no depth ends the process."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from telemetry.receiving.problems import Refused

try:  # three times as fast on feature rows; DVC brings it along, and nothing depends on its being there
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]

_SHOWN = 80


def read_json(body: bytes, *, containers: int | None = None, values: int | None = None, finite: bool = True) -> Any:
    """Read a JSON text.

    ``body``: UTF-8, with or without a byte order mark.
    ``containers``: most arrays and objects: an empty one takes two bytes of text and thirty times as many of memory.
    ``values``: most commas, about as many as values: a short key takes fifteen times its bytes, and reading many of
    them holds the interpreter, and so every other answer, for seconds.
    ``finite``: whether numbers beyond a float's range are refused here; else they are read as infinity, which is
    several times faster, and the caller looks for it.
    Raises ``Refused``: 400, if it is not JSON, holds ``NaN`` or ``Infinity``, or is nested too deeply; 413 for too many
    containers or values.
    """
    if containers is not None and body.count(b"{") + body.count(b"[") > containers:
        raise Refused(413, f"the body holds more than {containers} arrays and objects: send fewer rows", "too_large")
    # Counting what comes often takes as long as a fifth of the reading; a body of fewer bytes cannot hold so many.
    if values is not None and len(body) > values and body.count(b",") > values:
        raise Refused(413, f"the body holds more than {values} values: send fewer rows", "too_large")
    with _refusing():
        if not finite and orjson is not None:
            # What it refuses is read again below, so that refusals and their words are the same with and without it.
            with suppress(ValueError):
                return orjson.loads(body)
        parse_float = _finite if finite else None
        return json.loads(body.decode("utf-8-sig"), parse_constant=_refuse_constant, parse_float=parse_float)


def may_hold_booleans(body: bytes) -> bool:
    """Tell whether a JSON text may hold ``true`` or ``false``, at the cost of a search for either."""
    return b"true" in body or b"false" in body


def write_json(value: Any) -> bytes:
    """Write a value as JSON in ASCII, so that no text can make it invalid.

    Raises ``ValueError`` if it holds a NaN or an infinity: a bug of ours, never to be sent.
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def shown(value: object) -> str:
    """Return a value from outside as short text for an error's detail."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


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


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise Refused(400, f"the body holds {shown(text)}, which is beyond the numbers that can be held", "garbage")
    return value
