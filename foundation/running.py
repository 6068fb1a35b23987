"""What collectors that run for long share: leaving on a signal, waiting, and how long to wait after a failure."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

Wait = Callable[[float], bool]
"""Waits up to so many seconds; True: the collector shall leave. The ``wait`` of a :class:`threading.Event` is one."""

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Give an event that SIGTERM and SIGINT set; outside of the main thread, which alone gets signals, nothing does."""
    stop = threading.Event()

    def set_stop(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, set_stop) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def backoff_s(failures: int, *, first_s: float = 1.0, max_s: float = 60.0) -> float:
    """Return how long to wait after so many failures in a row (from 1): doubling, bounded, and spread by a quarter."""
    bounded = min(first_s * 2.0 ** min(failures - 1, 30), max_s)
    return bounded * random.uniform(0.75, 1.25)  # noqa: S311 - spreads retries of many nodes, no secret
