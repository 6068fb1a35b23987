"""Close matches of misspelt names, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def nearest_hint(name: str, known: Sequence[str]) -> str:
    """Return a sentence with the known name nearest to ``name``, or an empty text if none is near."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return f"Did you mean {by_lower[near[0]]!r}?" if near else ""
