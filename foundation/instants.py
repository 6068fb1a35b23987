"""Instants as integer milliseconds since 1970 UTC, the representation used throughout."""

from datetime import UTC, datetime, timedelta
from typing import Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def to_ms(instant: datetime) -> int:
    """Return milliseconds since 1970 UTC, rounded down: rounding up could move an instant into the future."""
    return (instant - _EPOCH) // timedelta(milliseconds=1)


def from_ms(ms: int) -> datetime:
    """Return an aware datetime from milliseconds since 1970 UTC."""
    return _EPOCH + timedelta(milliseconds=int(ms))  # may be a numpy integer
