"""Durations as people write them: ``10m``, ``6h``, ``1h30m``."""

import re
from datetime import timedelta
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, PlainSerializer

_UNIT_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(min|[smhdw])\s*", re.ASCII)
_CLOCK = re.compile(r"(\d+):(\d\d):(\d\d)", re.ASCII)


def parse_duration(value: object) -> timedelta:
    """Parse a duration like ``10m``, ``6h`` or ``1h30m``.

    ``value``: a ``timedelta`` (returned unchanged) or a string of numbers with the units s, m or min, h, d, w.
    Raises ``ValueError`` if a number has no unit or the value is not a duration; the message has an example.
    """
    if isinstance(value, timedelta):
        return value
    text = value if isinstance(value, str) else ""
    parts = _PART.findall(text)
    if not parts or _PART.sub("", text):
        clock = _CLOCK.fullmatch(text.strip())
        hours, minutes, seconds = map(int, clock.groups()) if clock else (6, 0, 0)
        example = format_duration(timedelta(hours=hours, minutes=minutes, seconds=seconds))
        raise ValueError(
            f"{value!r} is not a duration: write numbers with units (s, m or min, h, d, w), such as '{example}'"
        )
    try:
        return timedelta(seconds=sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts))
    except OverflowError:
        raise ValueError(f"{value!r} is too long a duration: give less than 2,700,000 years") from None


def format_duration(value: timedelta) -> str:
    """Format a duration for :func:`parse_duration`, in the largest unit that divides it.

    >>> format_duration(timedelta(hours=48)), format_duration(timedelta(minutes=90)), format_duration(timedelta(0))
    ('2d', '90m', '0s')
    >>> format_duration(timedelta(seconds=1_234_567, milliseconds=500))  # exact, so that it round-trips
    '1234567.5s'
    """
    seconds = value.total_seconds()
    for unit in ("d", "h", "m"):
        if seconds and seconds % _UNIT_SECONDS[unit] == 0:
            return f"{int(seconds // _UNIT_SECONDS[unit])}{unit}"
    return f"{f'{seconds:f}'.rstrip('0').rstrip('.')}s"


def _positive(value: timedelta) -> timedelta:
    if value <= timedelta(0):
        raise ValueError("must be positive, such as '24h'")
    return value


Duration = Annotated[timedelta, BeforeValidator(parse_duration), PlainSerializer(format_duration, return_type=str)]
"""A duration parameter: a ``timedelta`` in code, ``10m``/``6h``/``30d`` in YAML."""

PositiveDuration = Annotated[Duration, AfterValidator(_positive)]
