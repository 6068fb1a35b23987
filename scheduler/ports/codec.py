"""Value objects as plain JSON and back: what the ledger and a scheduler keep."""

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
    """Write a value object as plain JSON, all fields of it, so that another version's defaults change nothing.

    Times are in ISO 8601 and UTC, durations as ISO 8601 or as people write them, levels by name.
    """
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, Mapping):
        return {str(name): plain_of(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain_of(item) for item in value]
    kind: Any = type(value)
    return _adapter(kind).dump_python(value, mode="json")


def object_of(kind: Any, value: Any, where: str) -> Any:
    """Read what :func:`plain_of` wrote, or what a person wrote; fields with a default may be left out.

    Raises ``ValueError`` with the place where the value is not of the type ``kind``; suggests the nearest known field.
    """
    try:
        # as JSON, whose lists may be tuples and whose texts may be times, and nothing else may be converted
        return _adapter(kind).validate_json(orjson.dumps(value), strict=True, extra="forbid")
    except ValidationError as error:
        place, problem, do = first_problem(error, kind)
        raise ValueError(f"{where}{place and '.'}{place}: {problem}{do and '. '}{do}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def instant(text: Any) -> datetime | None:
    """Read an instant of another program (ISO 8601 with a zone) in UTC; None: it is none, or not within UTC's years."""
    try:
        return parse_utc(text)
    except ValueError:
        return None


def read_json(text: str | bytes) -> Any:
    """Read JSON that another program or a person wrote; raises ``ValueError`` if it is none.

    Half a surrogate pair, as a program leaves that cuts a text, becomes ``?``: no file or database takes it.
    """
    try:
        return orjson.loads(text)
    except ValueError:  # not strict JSON: half a pair, NaN, or none at all
        try:
            content = json.loads(text)
            if "\\ud" not in str(text).lower():
                return content
            return json.loads(json.dumps(content, ensure_ascii=False).encode(errors="replace"))
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from None


def json_object(text: str | bytes | None) -> dict[str, Any]:
    """Read a JSON object as :func:`read_json` does; an empty one where it is none."""
    try:
        content = read_json(text or b"null")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
