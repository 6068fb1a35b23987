"""Expiry of another process's lease: once it was observed unchanged for its duration, without comparing clocks."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

LONGEST_FOREIGN_S: Final = 3600.0
"""Upper limit on the duration that another process's lease can claim."""


def bounded_s(claimed_s: float | None) -> float:
    """Return the duration of a lease from its claim; an invalid claim counts as the longest."""
    good = claimed_s is not None and math.isfinite(claimed_s) and 0 < claimed_s <= LONGEST_FOREIGN_S
    return claimed_s if good and claimed_s is not None else LONGEST_FOREIGN_S


@dataclass(slots=True)
class ObservedLease:
    """Another process's lease, as observed by this process's monotonic clock.

    ``renewed``: whether the last observation differed from the one before.
    """

    renewed: bool = False
    _seen: tuple[Hashable, float] | None = None

    def left_s(self, beat: Hashable, claimed_s: float | None, now_s: float) -> float:
        """Return the seconds until it expires; zero or less: expired.

        ``beat``: changes with each renewal. ``claimed_s``: its claimed duration.
        """
        earlier, self.renewed = self._seen, False
        if earlier is None or earlier[0] != beat:
            self.renewed = earlier is not None
            earlier = self._seen = beat, now_s
        return earlier[1] + bounded_s(claimed_s) - now_s

    def forget(self) -> None:
        """Reset the observation, because the lease is free or ours."""
        self.renewed, self._seen = False, None
