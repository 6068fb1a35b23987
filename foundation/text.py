"""Counts with their noun, percentages, suggestions for misspelled names, and text that UTF-8 can encode."""

import difflib
from collections.abc import Iterable


def closest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name closest to ``name``, ignoring case; None if none is close."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(str(name)[:200].lower(), by_lower, n=1, cutoff=0.65)
    return by_lower[matches[0]] if matches else None


def nearest_hint(name: object, known: Iterable[str], fallback: str = "") -> str:
    """Return "Did you mean …?" with the closest known name, or ``fallback`` if none is close."""
    name_found = closest(name, known)
    return fallback if name_found is None else f"Did you mean {name_found!r}?"


def quantity(number: int, noun: str) -> str:
    """Format a count with its noun.

    >>> quantity(1, "node"), quantity(12000, "GPU")
    ('1 node', '12,000 GPUs')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent(value: float | None) -> str:
    """Format a probability with up to two significant digits: ``34 %``, ``1.2 %``, ``0.05 %``, ``< 0.01 %``.

    >>> percent(0.342), percent(0.0123), percent(0.00002), percent(0), percent(None)
    ('34 %', '1.2 %', '< 0.01 %', '0 %', 'not known')
    """
    if value is None:
        return "not known"
    scaled = value * 100
    if 0 < scaled < 0.01:
        return "< 0.01 %"
    if scaled > 99.5 and value < 1:
        return "> 99 %"
    digits = 0 if scaled >= 9.95 or scaled == 0 else 1 if scaled >= 0.995 else 2
    return f"{scaled:.{digits}f} %"


def storable(text: str) -> str:
    """Replace lone surrogates, which JSON can express and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()
