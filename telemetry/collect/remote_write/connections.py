"""The connections of the receiver: none of them may wait for ever, and idle ones make room for new ones.

Anybody who reaches the port may open connections, before any token is shown. uvicorn closes one that is silent between
two requests, but waits without end for the rest of a request's head.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Self

from uvicorn.protocols.http.h11_impl import H11Protocol

_MOST_CONNECTIONS: Final = 4096
_MOST_BACKLOG: Final = 1024
_CONNECTION_SHARE: Final = 2
_BACKLOG_SHARE: Final = 16
# asyncio accepts a whole backlog at a time, and a few of them before the first protocol is told of its connection: the
# other half of the descriptors must hold those, and the files that land.


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """What a number of file descriptors allows."""

    connections: int
    backlog: int

    @classmethod
    def of(cls, descriptors: int) -> Self:
        """Return the bounds under a limit of file descriptors: at most half of them are connections."""
        return cls(
            max(1, min(_MOST_CONNECTIONS, descriptors // _CONNECTION_SHARE)),
            max(1, min(_MOST_BACKLOG, descriptors // _BACKLOG_SHARE)),
        )


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of file descriptors to its hard one; return the limit that then holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError) as error:
            _LOG.warning("the limit of %d file descriptors cannot be raised to %d: %s", soft, hard, error)
        else:
            soft = hard
    # "Without limit" is -1 here.
    return soft if soft >= 0 else _MOST_CONNECTIONS * _CONNECTION_SHARE


_LOG = logging.getLogger(__name__)
_SAID_AGAIN_S: Final = 60.0


class Sparing:
    """Tells when a warning may be logged: once a minute.

    ``monotonic``: seconds that never go back.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._next_s: float | None = None
        self._count = 0

    def due(self) -> int:
        """Count one more; return how many there were since the last that was told, or 0 if it is too early."""
        self._count += 1
        now_s = self._monotonic()
        if self._next_s is not None and now_s < self._next_s:
            return 0
        self._next_s = now_s + _SAID_AGAIN_S
        count, self._count = self._count, 0
        return count


class ConnectionGate:
    """Bounds the connections of one server. Lives in its event loop.

    ``most``: most connections; one more closes the one that has been idle for longest.
    ``head_timeout_s``: longest time in which a client must have sent a request's head.
    ``monotonic``: seconds that never go back, for the log.
    ``closed``: connections closed to make room so far.
    """

    def __init__(self, most: int, head_timeout_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.head_timeout_s = head_timeout_s
        self.closed = 0
        self._open: set[GuardedProtocol] = set()
        self._idle: dict[GuardedProtocol, None] = {}  # longest idle first
        self._sparing = Sparing(monotonic)

    def enter(self, connection: GuardedProtocol) -> None:
        """Take a new connection; close another, or itself if none is idle, where there are too many."""
        self._open.add(connection)
        self._idle[connection] = None
        if len(self._open) > self.most:
            oldest = next(iter(self._idle))
            self.leave(oldest)
            self.closed += 1
            count = self._sparing.due()
            if count:
                _LOG.warning("over %d connections: %d idle ones were closed to make room", self.most, count)
            oldest.transport.abort()

    def mark(self, connection: GuardedProtocol, *, idle: bool) -> None:
        """Note whether a connection may be closed to make room."""
        if connection not in self._open or (connection in self._idle) == idle:
            return
        if idle:
            self._idle[connection] = None
        else:
            del self._idle[connection]

    def leave(self, connection: GuardedProtocol) -> None:
        """Forget a connection."""
        self._open.discard(connection)
        self._idle.pop(connection, None)


class GuardedProtocol(H11Protocol):
    """uvicorn's protocol, with a time-out for what comes before a request is served."""

    def __init__(self, *, gate: ConnectionGate, **more: Any) -> None:
        super().__init__(**more)
        self._gate = gate
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own does
        """Take the connection; its first head is awaited from now on."""
        super().connection_made(transport)
        self._await_head()
        self._gate.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._forget_timer()
        self._unset_keepalive_if_required()
        self._gate.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read; a head that has begun must be whole in time."""
        super().data_received(data)
        self._look()
        if not self._is_serving():
            self._await_head()

    def on_response_complete(self) -> None:
        """Go on with the next request, or wait for it."""
        self._forget_timer()
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        """Wait for a client that does not read its answers: such a one may be closed to make room."""
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        """Write on."""
        super().resume_writing()
        self._look()

    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _look(self) -> None:
        serving = self._is_serving()
        if serving:
            self._forget_timer()
        self._gate.mark(self, idle=not serving or self.flow.write_paused)

    def _await_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self._gate.head_timeout_s, self.transport.abort)

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def quiet_accept_errors(loop: asyncio.AbstractEventLoop, monotonic: Callable[[], float] = time.monotonic) -> None:
    """Log once a minute, in one line, that no connection can be accepted; asyncio does so thousands of times."""
    sparing = Sparing(monotonic)

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "socket.accept()" not in str(context.get("message")):
            loop.default_exception_handler(context)
            return
        count = sparing.due()
        if count:
            _LOG.error("connections cannot be accepted (%d times): %s", count, context.get("exception"))

    loop.set_exception_handler(handle)
