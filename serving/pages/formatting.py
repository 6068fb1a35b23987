"""Numbers and times as the pages write them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


def percent(value: float | None) -> str:
    """Write a probability with two digits that say something: ``34 %``, ``1.2 %``, ``0.05 %``, ``< 0.01 %``.

    Examples
    --------
    >>> percent(0.342), percent(0.0123), percent(0.00002), percent(None)
    ('34 %', '1.2 %', '< 0.01 %', 'not known')
    """
    if value is None:
        return "not known"
    scaled = value * 100
    if 0 < scaled < 0.01:
        return "< 0.01 %"
    if scaled > 99.5 and value < 1:
        return "> 99 %"
    digits = 0 if scaled >= 9.95 else 1 if scaled >= 0.995 else 2
    return f"{scaled:.{digits}f} %"


def span(seconds: float | None) -> str:
    """Write a length of time in its two largest units: ``40 s``, ``12 min``, ``5 h 10 min``, ``3 d 4 h``."""
    if seconds is None:
        return "not known"
    if seconds < 0:
        return f"-{span(-seconds)}"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def instant(when: datetime | None) -> str:
    """Write a time to the minute: ``2026-01-01 06:00 UTC``."""
    return "not known" if when is None else f"{when.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def iso(when: datetime) -> str:
    """Write a time for programs."""
    return when.astimezone(UTC).isoformat(timespec="seconds")


def hours(length: timedelta) -> str:
    """Write a horizon: ``24 h``."""
    return f"{length.total_seconds() / 3600:g} h"


def number(value: float | None) -> str:
    """Write a channel's value: three digits that count, thousands apart."""
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    size = abs(value)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"
