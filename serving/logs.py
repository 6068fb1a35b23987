"""Logs as JSON lines: messages of the process, and an access log."""

import json
import logging
import sys
import threading
from collections import deque
from datetime import UTC, datetime
from typing import Any, Final, TextIO

_WAITING: Final = 10_000
_WRITE_EVERY_S: Final = 0.2
_MAX_LENGTH: Final = 200


class JsonLines(logging.Formatter):
    """Formats log records as lines of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr() -> None:
    """Log to standard error as lines of JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class AccessLog:
    """Writes one line per request in a thread, without headers, query strings and bodies, which may hold secrets.

    ``stream``: None: no access log.
    ``dropped``: number of lines dropped because the stream did not keep up.
    """

    def __init__(self, stream: TextIO | None = sys.stderr) -> None:
        self.dropped = 0
        self._stream = stream
        self._lines: deque[dict[str, Any]] = deque()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        if stream is not None:
            self._thread.start()

    def write(self, *, path: str, seconds: float, **facts: object) -> None:
        """Queue a line; the writer thread polls, because waking it would cost as much as a lookup."""
        if self._stream is None:
            return
        if len(self._lines) >= _WAITING:
            self.dropped += 1
            return
        now, ms = datetime.now(UTC), round(seconds * 1000, 3)
        self._lines.append({"time": now, "path": path[:_MAX_LENGTH], "ms": ms, **facts})

    def close(self) -> None:
        """Flush the queue, for at most 2 s."""
        if self._stream is not None:
            self._stopped.set()
            self._thread.join(2)

    def _run(self) -> None:
        assert self._stream is not None
        while not self._stopped.wait(_WRITE_EVERY_S) or self._lines:
            try:
                while self._lines:
                    line = self._lines.popleft()
                    line["time"] = line["time"].isoformat(timespec="milliseconds")
                    self._stream.write(json.dumps(line) + "\n")
                self._stream.flush()
            except (OSError, ValueError):  # the reader has gone away
                self.dropped += 1
