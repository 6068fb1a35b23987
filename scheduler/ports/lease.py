"""Expiry of another process's lease: once it was observed unchanged for its duration, without comparing clocks."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

MAX_FOREIGN_LEASE_S: Final = 3600.0
"""Upper limit on the duration that another process's lease can claim."""


def bounded_s(claimed_s: float | None) -> float:
    """Return the duration of a lease from its claim; an invalid claim counts as the longest."""
    is_valid = claimed_s is not None and math.isfinite(claimed_s) and 0 < claimed_s <= MAX_FOREIGN_LEASE_S
    return claimed_s if is_valid and claimed_s is not None else MAX_FOREIGN_LEASE_S


@dataclass(slots=True)
class ObservedLease:
    """Another process's lease, as observed by this process's monotonic clock."""

    renewed: bool = False
    _last_beat: tuple[Hashable, float] | None = None

    def left_s(self, beat: Hashable, claimed_s: float | None, now_s: float) -> float:
        """Return the seconds until it expires; zero or less: expired.

        ``beat``: changes with each renewal. ``claimed_s``: its claimed duration.
        """
        last_beat, self.renewed = self._last_beat, False
        if last_beat is None or last_beat[0] != beat:
            self.renewed = last_beat is not None
            last_beat = self._last_beat = beat, now_s
        return last_beat[1] + bounded_s(claimed_s) - now_s

    def forget(self) -> None:
        """Reset the observation, because the lease is free or ours."""
        self.renewed, self._last_beat = False, None
