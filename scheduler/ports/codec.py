"""Value objects as plain JSON and back, durations included: what the ledger records and what settings are read from."""

from __future__ import annotations

import itertools
import json
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from functools import cache, lru_cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import orjson

from foundation.durations import parse_duration
from foundation.text import closest
from policy.risk_record import parse_utc

_AS_THEY_ARE = frozenset((str, int, float, bool, type(None)))


def plain_of(value: Any) -> Any:  # noqa: PLR0911 - one line a kind
    """Write a value object as plain JSON, all fields of it, so that another version's defaults change nothing.

    Times are in ISO 8601 and UTC, durations as ``90s``, levels by name.
    """
    kind: Any = type(value)
    if kind in _AS_THEY_ARE:  # most values by far: a fleet is some hundred thousand of them each round
        return value
    names = _names(kind)
    if names is not None:
        return {name: item if type(item := getattr(value, name)) in _AS_THEY_ARE else plain_of(item) for name in names}
    if isinstance(value, datetime):
        return _instant(value)
    if isinstance(value, timedelta):
        return f"{value.total_seconds()!r}s"
    if isinstance(value, IntEnum):
        return value.name.lower()
    if isinstance(value, tuple | list):
        return [plain_of(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): plain_of(item) for name, item in value.items()}
    return value


def object_of(kind: Any, value: Any, where: str) -> Any:
    """Read what :func:`plain_of` wrote, or what a person wrote; fields with a default may be left out.

    Raises ``ValueError`` with the place where the value is not of the type ``kind``; suggests the nearest known field.
    """
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(kind):
            return None
        chosen = next(option for option in get_args(kind) if option is not type(None))
        return object_of(chosen, value, where)
    if origin is not None:
        return _generic(origin, get_args(kind), value, where)
    if is_dataclass(kind) and isinstance(kind, type):
        return _object(kind, value, where)
    return _scalar(kind, value, where)


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


@lru_cache(maxsize=4096)
def _instant(when: datetime) -> str:
    return when.astimezone(UTC).isoformat()


@cache
def _names(kind: type) -> tuple[str, ...] | None:
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None


@cache
def _shape(kind: type) -> tuple[tuple[str, Any, bool], ...]:
    hints = get_type_hints(kind)
    return tuple(
        (field.name, hints[field.name], field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
        if field.init
    )


def _generic(origin: Any, kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if origin is Literal:
        return _checked(value, value in kinds, where, f"one of {', '.join(map(str, kinds))}")
    if origin in (tuple, Sequence):
        count = None if kinds[-1] is Ellipsis or origin is Sequence else len(kinds)
        good = isinstance(value, list) and count in (None, len(value))
        _checked(value, good, where, "a list" if count is None else f"a list of {count}")
        items = zip(itertools.repeat(kinds[0]) if count is None else kinds, value, strict=False)
        return tuple(object_of(kind, item, f"{where}[{index}]") for index, (kind, item) in enumerate(items))
    _checked(value, isinstance(value, dict), where, "an object")
    return {str(name): object_of(kinds[1], item, f"{where}.{name}") for name, item in value.items()}


def _object(kind: type, value: Any, where: str) -> Any:
    _checked(value, isinstance(value, dict), where, "an object")
    shape = _shape(kind)
    known = [name for name, _, _ in shape]
    for name in value:
        if name not in known:
            near = closest(name, known)
            do = f"did you mean {near!r}?" if near else f"expected only {', '.join(known)}"
            raise ValueError(f"{where} holds {name!r}: {do}")
    made = {}
    for name, hint, needed in shape:
        if name in value:
            made[name] = object_of(hint, value[name], f"{where}.{name}")
        elif needed:
            raise ValueError(f"{where} lacks {name}")
    try:
        return kind(**made)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is datetime:
        _checked(value, (when := instant(value)) is not None, where, "a time with a zone")
        return when
    if kind is timedelta:
        try:
            return parse_duration(value)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if isinstance(kind, type) and issubclass(kind, IntEnum):
        names = [level.name.lower() for level in kind]
        return kind[_checked(value, value in names, where, f"one of {', '.join(names)}").upper()]
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(_checked(value, number and math.isfinite(value), where, "a number"))
    if kind is Any:
        return value
    exact = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    return _checked(value, exact, where, f"a value of type {kind.__name__}")


def _checked(value: Any, good: bool, where: str, wanted: str) -> Any:
    if not good:
        raise ValueError(f"{where} is {value!r}: expected {wanted}")
    return value
