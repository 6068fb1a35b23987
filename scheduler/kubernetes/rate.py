"""A bound on requests a second, shared by all threads of a process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class TokenBucket:
    """Lets so many requests a second through, and a burst of some at once; what is more waits.

    ``burst``: at least 1.
    ``elapsed``: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        per_second: float,
        burst: int,
        elapsed: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._per_second = per_second
        self._burst = float(burst)
        self._elapsed = elapsed
        self._sleep = sleep
        self._left = self._burst
        self._at = elapsed()
        self._lock = threading.Lock()

    def take(self) -> float:
        """Take the right to one request, and wait until it holds; gives the seconds waited.

        The right is taken before the waiting: threads that wait at once wait one after another.
        """
        with self._lock:
            now = self._elapsed()
            self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._per_second)
            self._at = now
            self._left -= 1.0
            wait = max(0.0, -self._left / self._per_second)
        if wait:
            self._sleep(wait)
        return wait
