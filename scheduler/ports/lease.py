"""The lease of another process: over once it was seen unchanged for its length, without comparing two clocks."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

LONGEST_FOREIGN_S: Final = 3600.0
"""A lease that claims to last longer is waited for no longer than this."""


def bounded_s(claimed_s: float | None) -> float:
    """Return how long a lease lasts that claims so; a length that no lease has counts as the longest."""
    good = claimed_s is not None and math.isfinite(claimed_s) and 0 < claimed_s <= LONGEST_FOREIGN_S
    return claimed_s if good and claimed_s is not None else LONGEST_FOREIGN_S


@dataclass(slots=True)
class ObservedLease:
    """Another process's lease, as this process has seen it on its own clock that is never set.

    ``renewed``: whether it was another one when it was last looked at than the time before.
    """

    renewed: bool = False
    _seen: tuple[Hashable, float] | None = None

    def left_s(self, beat: Hashable, claimed_s: float | None, now_s: float) -> float:
        """Return for how long it must still be respected; zero or less: it is over.

        ``beat``: changes with each renewal. ``claimed_s``: how long it lasts, as it says itself.
        """
        earlier, self.renewed = self._seen, False
        if earlier is None or earlier[0] != beat:
            self.renewed = earlier is not None
            earlier = self._seen = beat, now_s
        return earlier[1] + bounded_s(claimed_s) - now_s

    def forget(self) -> None:
        """Forget it: it is free, or ours."""
        self.renewed, self._seen = False, None
