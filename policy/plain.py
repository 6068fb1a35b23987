"""Value objects as plain JSON and back, strictly: what is not as it should be is refused with its place."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from policy.fleet import Level

_REQUIRED: Any = object()
_AS_THEY_ARE = frozenset((str, int, float, bool, type(None)))


def to_plain(value: Any) -> Any:  # noqa: PLR0911 - one line a kind
    """Write a value object as plain JSON: fields with their default left out, times in ISO 8601 and UTC.

    ``value``: a dataclass of numbers, texts, times, levels, tuples, mappings with text keys, and further dataclasses.
    """
    kind: Any = type(value)
    if kind in _AS_THEY_ARE:  # most values by far
        return value
    shape = _written(kind)
    if shape is not None:
        made = {}
        for name, default in shape:
            each = getattr(value, name)
            if default is _REQUIRED or each != default:
                made[name] = each if type(each) in _AS_THEY_ARE else to_plain(each)
        return made
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, Level):
        return value.name.lower()
    if isinstance(value, tuple | list):
        return [to_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {name: to_plain(each) for name, each in value.items()}
    return value


@cache
def _written(kind: type) -> tuple[tuple[str, Any], ...] | None:
    return tuple((name, default) for name, _, default in _shape(kind)) if is_dataclass(kind) else None


@cache
def _shape(kind: type) -> tuple[tuple[str, Any, Any], ...]:
    hints = get_type_hints(kind)
    made = []
    for each in fields(kind):
        default: Any = _REQUIRED
        if each.default_factory is not MISSING:
            default = each.default_factory()
        elif each.default is not MISSING:
            default = each.default
        made.append((each.name, hints[each.name], default))
    return tuple(made)


@cache
def _defaults(kind: type) -> Mapping[str, Any]:
    return {name: default for name, _, default in _shape(kind)}


def from_plain(kind: Any, value: Any, where: str) -> Any:
    """Read what :func:`to_plain` wrote.

    Raises ``ValueError`` where the value is not of the type; names the place.
    """
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        chosen = next(each for each in get_args(kind) if each is not type(None))
        return None if value is None else from_plain(chosen, value, where)
    if origin is not None:
        return _generic(origin, get_args(kind), value, where)
    if is_dataclass(kind) and isinstance(kind, type):
        return _object(kind, value, where)
    return _scalar(kind, value, where)


def _generic(origin: Any, kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if origin is Literal:
        return _checked(value, value in kinds, where, f"one of {', '.join(map(str, kinds))}")
    if origin is tuple:
        return _tuple(kinds, value, where)
    _checked(value, isinstance(value, dict), where, "an object")
    return {str(name): from_plain(kinds[1], each, f"{where}.{name}") for name, each in value.items()}


def _tuple(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    _checked(value, isinstance(value, list), where, "a list")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(from_plain(kinds[0], each, f"{where}[{at}]") for at, each in enumerate(value))
    _checked(value, len(value) == len(kinds), where, f"a list of {len(kinds)}")
    return tuple(from_plain(k, each, f"{where}[{at}]") for at, (k, each) in enumerate(zip(kinds, value, strict=True)))


def _object(kind: type, value: Any, where: str) -> Any:
    _checked(value, isinstance(value, dict), where, "an object")
    known = _defaults(kind)
    for name in value:
        if name not in known:
            raise ValueError(f"{where} holds {name!r}: expected only {', '.join(known)}")
    made = {}
    for name, hint, default in _shape(kind):
        if name in value:
            made[name] = from_plain(hint, value[name], f"{where}.{name}")
        elif default is _REQUIRED:
            raise ValueError(f"{where} lacks {name}")
    return kind(**made)


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is datetime:
        try:
            when = datetime.fromisoformat(value)
        except (TypeError, ValueError):
            when = None
        _checked(value, when is not None and when.tzinfo is not None, where, "a time with a zone")
        return when
    if kind is Level:
        names = [each.name.lower() for each in Level]
        return Level[_checked(value, value in names, where, f"one of {', '.join(names)}").upper()]
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(_checked(value, number and math.isfinite(value), where, "a number"))
    exact = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    return _checked(value, exact, where, f"a value of type {kind.__name__}")


def _checked(value: Any, good: bool, where: str, wanted: str) -> Any:
    if not good:
        raise ValueError(f"{where} is {value!r}: expected {wanted}")
    return value
