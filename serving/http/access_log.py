"""One line of JSON a request, written by a thread of its own: a full pipe must not hold up answers."""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, TextIO

_WAITING: Final = 10_000
_LONGEST: Final = 200


class JsonLines(logging.Formatter):
    """Writes the process's other messages as lines of JSON, too."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one message."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class AccessLog:
    """Writes what was answered; holds neither headers nor queries nor bodies, so no secret.

    ``stream``: where to; None: nowhere.
    ``dropped``: lines left out because the stream did not keep up.
    """

    def __init__(self, stream: TextIO | None = sys.stderr, clock: Callable[[], datetime] | None = None) -> None:
        self.dropped = 0
        self._stream = stream
        self._clock = clock or (lambda: datetime.now(UTC))
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        if stream is not None:
            self._thread.start()

    def write(
        self,
        *,
        method: str,
        path: str,
        route: str,
        status: int,
        seconds: float,
        bytes_in: int,
        token: str | None,
        client: tuple[str, int] | None,
        trace: str | None = None,
    ) -> None:
        """Note one answer; ``trace`` is what the caller names it by."""
        if self._stream is None:
            return
        line = {
            "time": self._clock().isoformat(timespec="milliseconds"),
            "method": method,
            "path": path[:_LONGEST],
            "route": route,
            "status": status,
            "ms": round(seconds * 1000, 3),
            "bytes_in": bytes_in,
            "token": token,
            "client": client[0] if client else None,
        }
        if trace is not None:
            line["trace"] = trace
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what waits, for two seconds at most."""
        if self._stream is None:
            return
        try:
            self._lines.put(None, timeout=1)
        except queue.Full:
            return
        self._thread.join(2)

    def _run(self) -> None:
        assert self._stream is not None
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(json.dumps(line) + "\n")
                if self._lines.empty():
                    self._stream.flush()
            except (OSError, ValueError):  # nobody reads it any more
                self.dropped += 1
