"""Conversion of value objects to JSON and back, for the ledger and for state stored in a scheduler."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from foundation.settings import first_problem
from policy.risk_record import parse_utc


def plain_of(value: Any) -> Any:
    """Convert a value object to JSON values, with all fields, so that it does not depend on a version's defaults.

    Times are ISO 8601 in UTC, durations ISO 8601 or like ``6h``, levels by name.
    """
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, Mapping):
        return {str(name): plain_of(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain_of(item) for item in value]
    kind: Any = type(value)
    return _adapter(kind).dump_python(value, mode="json")


def object_of(kind: Any, value: Any, location: str) -> Any:
    """Convert JSON values from :func:`plain_of` or a settings file; fields with a default are optional.

    Raises ``ValueError`` with the location if the value is not of type ``kind``; suggests the closest known field.
    """
    try:
        # strict JSON mode accepts lists as tuples and strings as times, and coerces nothing else
        return _adapter(kind).validate_json(orjson.dumps(value), strict=True, extra="forbid")
    except ValidationError as error:
        place, problem, advice = first_problem(error, kind)
        raise ValueError(f"{location}{place and '.'}{place}: {problem}{advice and '. '}{advice}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def instant(text: Any) -> datetime | None:
    """Parse an ISO 8601 time with a zone from another program as UTC; None if it is invalid or out of range."""
    try:
        return parse_utc(text)
    except ValueError:
        return None


def read_json(text: str | bytes) -> Any:
    """Parse JSON from another program or a person; raises ``ValueError`` if it is invalid.

    Lone surrogates, left by programs that truncate strings, become ``?`` because they cannot be stored.
    """
    try:
        return orjson.loads(text)
    except ValueError:  # not strict JSON: a lone surrogate, NaN, or no JSON at all
        try:
            content = json.loads(text)
            if "\\ud" not in str(text).lower():
                return content
            return json.loads(json.dumps(content, ensure_ascii=False).encode(errors="replace"))
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from None


def json_object(text: str | bytes | None) -> dict[str, Any]:
    """Parse a JSON object like :func:`read_json`; empty if it is invalid."""
    try:
        content = read_json(text or b"null")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
