"""Value objects as plain JSON and back, durations included: what the ledger records and what settings are read from."""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from functools import cache, lru_cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from telemetry.config import parse_duration

_AS_THEY_ARE = frozenset((str, int, float, bool, type(None)))


def plain_of(value: Any) -> Any:  # noqa: PLR0911 - one line a kind
    """Write a value object as plain JSON, all fields of it, so that another version's defaults change nothing.

    ``value``: a dataclass of numbers, texts, times, durations, levels, tuples, mappings with text keys, and further
    dataclasses.
    Returns: times in ISO 8601 and UTC; durations as ``90s``.
    """
    kind: Any = type(value)
    if kind in _AS_THEY_ARE:  # most values by far: a fleet is some hundred thousand of them each round
        return value
    names = _names(kind)
    if names is not None:
        return {name: each if type(each := getattr(value, name)) in _AS_THEY_ARE else plain_of(each) for name in names}
    if isinstance(value, datetime):
        return _instant(value)
    if isinstance(value, timedelta):
        return f"{value.total_seconds()!r}s"
    if isinstance(value, IntEnum):
        return value.name.lower()
    if isinstance(value, tuple | list):
        return [plain_of(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): plain_of(each) for name, each in value.items()}
    return value


def object_of(kind: Any, value: Any, where: str) -> Any:
    """Read what :func:`plain_of` wrote, or what a person wrote with less in it.

    ``kind``: the type, as an annotation. Fields with a default may be left out.
    Raises ``ValueError`` where the value is not of the type; names the place, and for an unknown field the nearest that
    there is.
    """
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(kind):
            return None
        chosen = next(each for each in get_args(kind) if each is not type(None))
        return object_of(chosen, value, where)
    if origin is not None:
        return _generic(origin, get_args(kind), value, where)
    if is_dataclass(kind) and isinstance(kind, type):
        return _object(kind, value, where)
    return _scalar(kind, value, where)


def instant(text: Any) -> datetime | None:
    """Read an instant that somebody else wrote (ISO 8601 with a zone), in UTC.

    Returns: None: it is none, has no zone, or lies outside the years that UTC can tell, as
    ``9999-12-31T23:59:59-05:00`` does.
    """
    try:
        when = datetime.fromisoformat(text)
        return when.astimezone(UTC) if when.tzinfo is not None else None
    except (TypeError, ValueError, OverflowError):
        return None


@lru_cache(maxsize=4096)
def _instant(when: datetime) -> str:
    return when.astimezone(UTC).isoformat()


@cache
def _names(kind: type) -> tuple[str, ...] | None:
    return tuple(each.name for each in fields(kind)) if is_dataclass(kind) else None


@cache
def _shape(kind: type) -> tuple[tuple[str, Any, bool], ...]:
    hints = get_type_hints(kind)
    return tuple(
        (each.name, hints[each.name], each.default is MISSING and each.default_factory is MISSING)
        for each in fields(kind)
        if each.init
    )


def _generic(origin: Any, kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if origin is Literal:
        return _checked(value, value in kinds, where, f"one of {', '.join(map(str, kinds))}")
    if origin is tuple and not (len(kinds) == 2 and kinds[1] is Ellipsis):
        _checked(value, isinstance(value, list) and len(value) == len(kinds), where, f"a list of {len(kinds)}")
        return tuple(
            object_of(k, each, f"{where}[{at}]") for at, (k, each) in enumerate(zip(kinds, value, strict=True))
        )
    if origin in (tuple, Sequence):
        _checked(value, isinstance(value, list), where, "a list")
        return tuple(object_of(kinds[0], each, f"{where}[{at}]") for at, each in enumerate(value))
    _checked(value, isinstance(value, dict), where, "an object")
    return {str(name): object_of(kinds[1], each, f"{where}.{name}") for name, each in value.items()}


def _object(kind: type, value: Any, where: str) -> Any:
    _checked(value, isinstance(value, dict), where, "an object")
    shape = _shape(kind)
    known = [name for name, _, _ in shape]
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            do = f"did you mean {near[0]!r}?" if near else f"expected only {', '.join(known)}"
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
        when = instant(value)
        _checked(value, when is not None, where, "a time with a zone")
        return when
    if kind is timedelta:
        return _duration(value, where)
    if isinstance(kind, type) and issubclass(kind, IntEnum):
        names = [each.name.lower() for each in kind]
        return kind[_checked(value, value in names, where, f"one of {', '.join(names)}").upper()]
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(_checked(value, number and math.isfinite(value), where, "a number"))
    if kind is Any:
        return value
    exact = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    return _checked(value, exact, where, f"a value of type {kind.__name__}")


def _duration(value: Any, where: str) -> timedelta:
    try:
        return parse_duration(value)
    except ValueError:
        raise ValueError(f"{where} is {value!r}: expected a duration such as 6h") from None


def _checked(value: Any, good: bool, where: str, wanted: str) -> Any:
    if not good:
        raise ValueError(f"{where} is {value!r}: expected {wanted}")
    return value
