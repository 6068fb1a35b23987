"""How many requests a caller may send in a time: one bucket a token or, where there are none, a peer's address."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

_MOST: Final = 20_000


class RateLimit:
    """Token buckets. Lives in the event loop.

    ``per_s``: requests a second in the long run.
    ``burst``: requests at once after a rest.
    ``monotonic``: seconds that never go back.

    At most 20,000 callers are remembered; the one that was not heard for longest is forgotten first, which gives it a
    full bucket again.
    """

    def __init__(self, per_s: float, burst: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        if per_s <= 0 or burst < 1:
            raise ValueError(f"{per_s} requests a second with bursts of {burst}: give a positive rate and at least 1")
        self.refused = 0
        self._per_s = per_s
        self._burst = burst
        self._monotonic = monotonic
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what was left, and when

    def wait_s(self, caller: str) -> float:
        """Take one request of a caller.

        Returns: 0: it is let through. Else it is not, and this is after how many seconds the next would be.
        """
        now_s = self._monotonic()
        left, then_s = self._buckets.pop(caller, (self._burst, now_s))
        left = min(self._burst, left + (now_s - then_s) * self._per_s)
        allowed = left >= 1
        self._buckets[caller] = (left - 1 if allowed else left, now_s)
        if len(self._buckets) > _MOST:
            self._buckets.popitem(last=False)
        if allowed:
            return 0.0
        self.refused += 1
        return (1 - left) / self._per_s
