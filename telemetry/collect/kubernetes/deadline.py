"""An end to requests as a whole: a server that sends a byte now and then answers each read in time, and never ends."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

_KEPT_S: Final = 5.0
"""The thread ends itself when nothing was asked of it for so long."""

_asking = threading.local()


class Overdue:
    """One request under way.

    ``over``: whether its time ended before it did.
    """

    __slots__ = ("_lock", "_socket", "ended", "over")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.ended = False
        self.over = False

    def goes_over(self, connected: socket.socket | None) -> None:
        """Take note of the socket that it goes over."""
        with self._lock:
            self._socket = connected
            late = self.over
        if late:
            _shut(connected)

    def end(self) -> None:
        """Take note that it is done: its socket may serve the next request."""
        with self._lock:
            self.ended = True
            self._socket = None

    def stop(self) -> None:
        """End it from another thread, which reads nothing more from it."""
        with self._lock:
            if self.ended:
                return
            self.over = True
            _shut(self._socket)


class Deadlines:
    """Ends requests at their time, by one thread that is there only while there are any.

    ``elapsed``: seconds of a clock that never goes back.
    """

    def __init__(self, elapsed: Callable[[], float] = time.monotonic) -> None:
        self._elapsed = elapsed
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, Overdue]] = []
        self._numbers = itertools.count()
        self._running = False

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[Overdue]:
        """Give what the block's one request may take altogether; :attr:`Overdue.over` tells afterwards."""
        request = Overdue()
        with self._changed:
            ends = self._elapsed() + seconds
            first = not self._waiting or ends < self._waiting[0][0]
            heapq.heappush(self._waiting, (ends, next(self._numbers), request))
            if not self._running:
                self._running = True
                threading.Thread(target=self._watch, name="kubernetes-deadlines", daemon=True).start()
            elif first:
                self._changed.notify()
        before = getattr(_asking, "request", None)
        _asking.request = request
        try:
            yield request
        finally:
            _asking.request = before
            request.end()

    def _watch(self) -> None:
        while True:
            with self._changed:
                while self._waiting and self._waiting[0][2].ended:
                    heapq.heappop(self._waiting)
                if not self._waiting:
                    if not self._changed.wait(_KEPT_S) and not self._waiting:
                        self._running = False
                        return
                    continue
                left = self._waiting[0][0] - self._elapsed()
                if left > 0:
                    self._changed.wait(left)
                    continue
                _, _, request = heapq.heappop(self._waiting)
            request.stop()


def heed_deadlines(pool: Any) -> None:
    """Make the connections of a pool manager tell the request that they carry which socket it goes over."""
    if isinstance(pool, urllib3.PoolManager):
        pool.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}


class _Told(HTTPConnection):
    def request(self, *given: Any, **others: Any) -> None:
        request = getattr(_asking, "request", None)
        if request is not None:
            if self.sock is None:
                self.connect()  # bounded by its own time
            request.goes_over(self.sock)
        super().request(*given, **others)


class _HttpsTold(_Told, HTTPSConnection):
    pass


class _HttpPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Told


class _HttpsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _HttpsTold


def _shut(connected: socket.socket | None) -> None:
    if connected is None:
        return
    with contextlib.suppress(OSError, ValueError, TypeError):  # TypeError: TLS within a proxy's TLS is no socket
        # of a TLS socket too the plain one: its own method forgets the session that another thread reads from
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
