"""The wall clock, watched for jumps by the monotonic one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from typing import Final

JUMP_S: Final = 2.0
"""A step of the wall clock against the monotonic one of more than this, between two looks, is a jump: time
services slew by at most half a millisecond a second."""

_log = logging.getLogger(__name__)


class WallClock:
    """Tells the time, and when it was set.

    ``monotonic``: gives seconds that never go back.
    ``jumps``, ``jumps_back``: jumps seen, and those of them that went back.
    """

    def __init__(self, clock: Callable[[], datetime], monotonic: Callable[[], float]) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._offset_s: float | None = None
        self.jumps = 0
        self.jumps_back = 0

    def now(self) -> datetime:
        """Return the wall clock; log and count a jump since the last call."""
        now = self._clock()
        offset_s = now.timestamp() - self._monotonic()
        if self._offset_s is not None and abs(step_s := offset_s - self._offset_s) > JUMP_S:
            self.jumps += 1
            self.jumps_back += step_s < 0
            _log.warning(
                "this machine's clock was set %s by %.1f s, to %s%s",
                "forward" if step_s > 0 else "back",
                abs(step_s),
                now.isoformat(timespec="seconds"),
                "" if step_s > 0 else "; rows that are not newer than all before of their GPU are dropped",
            )
        self._offset_s = offset_s
        return now

    def monotonic_s(self) -> float:
        """Return the monotonic clock, in seconds."""
        return self._monotonic()
