"""Ranges of settings: declared with the type of a field, checked when the object is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Annotated, Any, get_args, get_type_hints

_ZERO = timedelta(0)


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a field may have: in words for the error, and as a test. None is always allowed."""

    text: str
    holds: Callable[[Any], bool]


Share = Annotated[float, Range("a number from 0 to 1", lambda value: 0 <= value <= 1)]
PositiveInt = Annotated[int, Range("a positive number", lambda value: value >= 1)]
NonNegativeInt = Annotated[int, Range("zero or more", lambda value: value >= 0)]
PositiveTime = Annotated[timedelta, Range("a positive time", lambda value: value > _ZERO)]
NonNegativeTime = Annotated[timedelta, Range("a time of zero or more", lambda value: value >= _ZERO)]


class RangeChecked:
    """Base of a dataclass that checks nothing but the ranges of its fields."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Check them."""
        check_ranges(self)


def check_ranges(settings: Any) -> None:
    """Check the fields of a dataclass.

    Raises ``ValueError`` with the name and value of the first field out of its range.
    """
    kind: Any = type(settings)
    for name, allowed in _ranges(kind):
        value = getattr(settings, name)
        if value is not None and not allowed.holds(value):
            raise ValueError(f"{name} is {value}: give {allowed.text}")


@lru_cache
def _ranges(kind: Any) -> tuple[tuple[str, Range], ...]:
    hints = get_type_hints(kind, include_extras=True)
    parts = [(name, part) for name, hint in hints.items() for part in (hint, *get_args(hint))]  # ``Share | None``
    return tuple(
        (name, allowed)
        for name, part in parts
        for allowed in getattr(part, "__metadata__", ())
        if isinstance(allowed, Range)
    )
