"""How long to wait before the next try."""

from __future__ import annotations

import random
from collections.abc import Callable


class Backoff:
    """Pauses that double up to a limit, each shortened by chance so that many clients do not come back at once.

    ``chance``: gives numbers in [0, 1).
    """

    def __init__(self, first_s: float, longest_s: float, chance: Callable[[], float] = random.random) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._chance = chance
        self._failures = 0

    @property
    def failures(self) -> int:
        """Failures in a row."""
        return self._failures

    def pause_s(self) -> float:
        """Count a failure; return the seconds to wait after it: between half of the pause and all of it."""
        full = min(self._longest_s, self._first_s * 2.0 ** min(self._failures, 30))
        self._failures += 1
        return full * (0.5 + 0.5 * self._chance())

    def succeeded(self) -> None:
        """Begin anew with the first pause."""
        self._failures = 0
