"""Instants as whole milliseconds since 1970 UTC, as they are kept everywhere."""

from datetime import UTC, datetime, timedelta
from typing import Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def to_ms(when: datetime) -> int:
    """Return milliseconds since 1970 UTC, rounded towards the past: a later instant might lie in the future."""
    return (when - _EPOCH) // timedelta(milliseconds=1)


def from_ms(ms: int) -> datetime:
    """Return the aware instant of milliseconds since 1970 UTC."""
    return _EPOCH + timedelta(milliseconds=int(ms))  # of numpy too
