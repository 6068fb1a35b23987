"""When a target is scraped: spread evenly over the interval, on a fixed grid, rarer while it is dead."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from telemetry.exporters.targets import target_hash

MAX_BACKOFF: Final = 4
"""A dead target is asked at least once in so many intervals."""

MAX_RETRY_AFTER_S: Final = 3600.0
"""A server that asks for more rest than this is asked again after it."""

_PHASES: Final = 1 << 20


class Schedule:
    """The times of every target's scrapes, on the monotonic clock.

    ``wall_s``, ``monotonic_s``: both clocks at one moment. The grid is that of the wall clock at this moment, so that a
    collector that is started again goes on at the same times; a later change of the wall clock does not move it.
    ``random``: gives numbers in [0, 1), for the jitter.
    """

    def __init__(self, interval_s: float, wall_s: float, monotonic_s: float, random: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._origin_s = monotonic_s - math.fmod(wall_s, interval_s)
        self._random = random

    def phase_s(self, url: str) -> float:
        """Return the target's place within the interval, in seconds: the same in every process."""
        return target_hash(url) % _PHASES / _PHASES * self._interval_s

    def next_slot_s(self, url: str, after_s: float) -> float:
        """Return the target's first time after ``after_s`` (monotonic seconds)."""
        first = self._origin_s + self.phase_s(url)
        slot = first + (math.floor((after_s - first) / self._interval_s) + 1) * self._interval_s
        return slot if slot > after_s else slot + self._interval_s

    def after_failure_s(
        self, url: str, due_s: float, failures: int, retry_after_s: float | None, now_s: float
    ) -> float:
        """Return when to ask again after a failure.

        ``failures``: failures in a row, this one counted.

        The first failure is followed by the usual next time, so that a restart costs one sample. Then the distance
        doubles, up to four intervals, less a random part of up to a quarter, so that targets that died together
        (a rack, a switch) are not asked together for ever.
        """
        factor = min(2 ** min(failures - 1, 8), MAX_BACKOFF)
        if factor == 1:
            again = self.next_slot_s(url, max(due_s, now_s))
        else:
            again = max(due_s + factor * self._interval_s * (1 - 0.25 * self._random()), now_s)
        if retry_after_s is not None:
            again = max(again, now_s + min(retry_after_s, MAX_RETRY_AFTER_S))
        return again
