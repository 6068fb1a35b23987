"""The API's instants: RFC 3339 text, with or without fractions of a second."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from telemetry.milliseconds import to_ms


def stamp_ms(text: Any) -> int | None:
    """Return milliseconds since 1970 UTC; None where there is no instant, or the zero one that Go writes for none.

    None as well where it lies outside the years that UTC can tell: anybody may write an annotation.
    """
    if not isinstance(text, str) or not text:
        return None
    try:
        when = datetime.fromisoformat(text)
        when = when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    ms = to_ms(when)
    return ms if ms > 0 else None
