"""Loops of long-running verbs: a turn now and then, until SIGTERM or SIGINT."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType


def until_stopped(pause: timedelta) -> Iterator[int]:
    """Yield the number of each turn, ``pause`` apart, until the process is asked to stop.

    ``pause``: from the beginning of one turn to the beginning of the next; a turn that takes longer is followed at
    once.
    Yields: 0, 1, 2, …; a signal ends the loop after the turn that it came in.
    """
    stopped = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopped.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        turn = 0
        while not stopped.is_set():
            began = time.monotonic()
            yield turn
            turn += 1
            stopped.wait(max(0.0, pause.total_seconds() - (time.monotonic() - began)))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
