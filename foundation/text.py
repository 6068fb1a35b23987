"""Counts with their noun, suggestions for misspelled names in error messages, and text that UTF-8 can encode."""

import difflib
from collections.abc import Iterable


def closest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name closest to ``name``, ignoring case; None if none is close."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(str(name)[:200].lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[near[0]] if near else None


def nearest_hint(name: object, known: Iterable[str], otherwise: str = "") -> str:
    """Return "Did you mean …?" with the closest known name, or ``otherwise`` if none is close."""
    near = closest(name, known)
    return otherwise if near is None else f"Did you mean {near!r}?"


def quantity(number: int, noun: str) -> str:
    """Format a count with its noun.

    >>> quantity(1, "node"), quantity(12000, "GPU")
    ('1 node', '12,000 GPUs')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def storable(text: str) -> str:
    """Replace lone surrogates, which JSON can express and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()
