"""Formats numbers, times and intervals of the report as text."""

import math
from datetime import datetime

NONE = "–"
"""Placeholder for an undefined number."""


def percent(value: float) -> str:
    """Format a proportion: one decimal, more below 1 %.

    >>> percent(0.2634), percent(0.00339), percent(1.0), percent(float("nan"))
    ('26.3 %', '0.34 %', '100 %', '–')
    """
    if not math.isfinite(value):
        return NONE
    hundred = 100 * value
    if 0 < abs(hundred) < 1:
        return f"{hundred:.2g} %"
    return f"{hundred:.0f} %" if hundred in (0.0, 100.0) else f"{hundred:.1f} %"


def percent_at_least(value: float) -> str:
    """Format a lower bound like :func:`percent`, but rounded down, so that it still holds.

    >>> percent_at_least(0.07361), percent_at_least(0.00347), percent_at_least(float("nan"))
    ('7.3 %', '0.34 %', '–')
    """
    if not math.isfinite(value):
        return NONE
    steps = 1000 if value >= 0.01 else 10000
    return percent(math.floor(steps * value) / steps)


def number(value: float, digits: int = 2) -> str:
    """Format a number with ``digits`` decimals.

    >>> number(0.12345, 3), number(float("nan"))
    ('0.123', '–')
    """
    return f"{value:.{digits}f}" if math.isfinite(value) else NONE


def count(value: float) -> str:
    """Format an integer with thousands separators.

    >>> count(120000)
    '120,000'
    """
    return f"{int(value):,}"


def hours(value: float) -> str:
    """Format hours.

    >>> hours(13.42), hours(float("nan"))
    ('13.4 h', '–')
    """
    return f"{value:.1f} h" if math.isfinite(value) else NONE


def points(value: float) -> str:
    """Format a difference of proportions in percentage points, signed.

    >>> points(0.1186), points(-0.004)
    ('+11.9', '−0.4')
    """
    return signed(100 * value, 1)


def signed(value: float, digits: int = 3) -> str:
    """Format a difference with ``digits`` decimals, signed.

    >>> signed(0.0432), signed(-0.1)
    ('+0.043', '−0.100')
    """
    if not math.isfinite(value):
        return NONE
    text = f"{value:+.{digits}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def interval_text(low: str, high: str) -> str:
    """Format an interval; empty if it has no bounds.

    >>> interval_text("1.0 %", "2.0 %"), interval_text("–", "–")
    ('[1.0, 2.0 %]', '')
    """
    return "" if NONE in (low, high) else f"[{low.removesuffix(' %')}, {high}]"


def day(value: datetime) -> str:
    """Format a date (UTC)."""
    return value.strftime("%Y-%m-%d")


def minute(value: datetime) -> str:
    """Format a time to the minute (UTC)."""
    return value.strftime("%Y-%m-%d %H:%M")


def verdict(low: float, high: float) -> str:
    """Interpret the confidence interval of a difference.

    >>> verdict(0.01, 0.2), verdict(-0.2, -0.01), verdict(-0.1, 0.1), verdict(float("nan"), 0.1)
    ('better', 'worse', 'not significant', 'no interval')
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        return "no interval"
    if low > 0:
        return "better"
    return "worse" if high < 0 else "not significant"


def join(parts: list[str]) -> str:
    """Join words as in a sentence.

    >>> join(["a"]), join(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""
