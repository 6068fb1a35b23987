"""Text: close matches of misspelt names, for error messages; characters that UTF-8 can store."""

import difflib
from collections.abc import Iterable


def closest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name nearest to ``name``, whatever its case; None if none is near."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(str(name)[:200].lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[near[0]] if near else None


def nearest_hint(name: object, known: Iterable[str], otherwise: str = "") -> str:
    """Return a sentence with the known name nearest to ``name``, or ``otherwise`` if none is near."""
    near = closest(name, known)
    return otherwise if near is None else f"Did you mean {near!r}?"


def storable(text: str) -> str:
    """Replace half surrogates, which JSON can spell and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()
