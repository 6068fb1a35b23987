"""Slurm's JSON across its versions: numbers became objects, states became lists, reports changed their shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

_NO_VALUE: Final = frozenset({0, 0xFFFFFFFE, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFE, 0xFFFFFFFFFFFFFFFF})
# NO_VAL and INFINITE of slurm.h, which older versions print as numbers; time 0 is "never".


class SlurmFormatError(ValueError):
    """Output of a Slurm command that is not what we know."""


def read_rows(report: str, key: str) -> list[dict[str, Any]]:
    """Return the objects that a report lists under ``key``; raises ``SlurmFormatError`` if there is no such list."""
    try:
        # Debug lines of plugins may come before the report.
        content = json.loads(report[max(report.find("{"), 0) :])
    except ValueError as error:
        raise SlurmFormatError(f"no JSON: {error}") from None
    listed = content.get(key) if isinstance(content, dict) else None
    if not isinstance(listed, list):
        raise SlurmFormatError(f"no list of {key} in it")
    rows = [row for row in listed if isinstance(row, dict)]
    if not rows and content.get("errors"):
        raise SlurmFormatError(f"Slurm reports {str(content['errors'])[:300]}")
    return rows


def number(value: object) -> int | None:
    """Return a whole number, from itself or from ``{"set": …, "infinite": …, "number": …}``; None for "no value"."""
    if isinstance(value, Mapping):
        if value.get("set") is False or value.get("infinite") is True:
            return None
        value = value.get("number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value)


def instant(value: object) -> datetime | None:
    """Return an aware instant from seconds since 1970; None for "never" and "unknown"."""
    seconds = number(value)
    if seconds is None or seconds in _NO_VALUE or not 0 < seconds < 1 << 36:
        return None
    return datetime.fromtimestamp(seconds, UTC)


def states_of(value: object) -> list[str]:
    """Return states in upper case, from one text or a list of texts."""
    if isinstance(value, str):
        value = value.replace("+", " ").replace(",", " ").split()
    return [str(state).upper() for state in value if str(state).strip()] if isinstance(value, list) else []


def text(value: object) -> str | None:
    """Return a text; None for empty ones and Slurm's ways to write none."""
    if not isinstance(value, str) or value.strip().lower() in ("", "none", "(null)", "n/a", "unknown"):
        return None
    return value.strip()
