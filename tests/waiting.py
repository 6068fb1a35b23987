"""A port that is free, and waiting for a fact rather than for a time."""

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

_GIVEN: set[int] = set()


def free_port() -> int:
    """Return a port that nothing listens on just now, and a different one each time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    if port in _GIVEN:  # the kernel may offer it again before anything listens
        return free_port()
    _GIVEN.add(port)
    return port


def wait(what: Callable[[], Any], within_s: float = 300.0) -> Any:
    """Wait until something is so, and return it; a connection that fails is tried again."""
    deadline = time.monotonic() + within_s
    while True:
        with contextlib.suppress(OSError):
            if outcome := what():
                return outcome
        assert time.monotonic() < deadline, f"it did not come about within {within_s} s"
        time.sleep(0.05)


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
