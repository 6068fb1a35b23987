"""The page of the controller's numbers, and whether it is alive: ``/metrics`` and ``/healthz``."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from scheduler.metrics import RoundMetrics
from scheduler.ports import Clock
from scheduler.report import RoundReport
from telemetry.errors import InputError
from telemetry.exposition.writer import MEDIA

_ANSWER_WITHIN_S = 5.0
_ROUNDS = 3


class MetricsPage:
    """What the page shows; rounds are noted by one thread, pages written by others.

    ``most_time``: what a round may take.
    """

    def __init__(self, clock: Clock, every: timedelta, most_time: timedelta) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._metrics = RoundMetrics()
        self._silent = _ROUNDS * (every + most_time)
        self._since: datetime = clock.now()

    def note(self, report: RoundReport, seconds: float) -> None:
        """Count a round that has ended."""
        with self._lock:
            self._metrics.note(report, seconds)
            self._since = self._clock.now()

    def text(self) -> str:
        """Write the numbers."""
        with self._lock:
            return self._metrics.exposition()

    def illness(self) -> str | None:
        """Say why the process should be started anew; None: it works. A scheduler that is down is not its illness."""
        with self._lock:
            silent = self._clock.now() - self._since
        return f"no round has ended for {silent.total_seconds():.0f} s" if silent > self._silent else None


@contextlib.contextmanager
def listening(page: MetricsPage, address: str) -> Iterator[int]:
    """Serve a page while the context lasts.

    ``address``: ``host:port``; port 0 is any free one.
    Raises ``InputError`` if it is no address, or cannot be listened on.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise InputError(
            f"{address!r} is no address to listen on", "--listen", "Write host:port, such as 127.0.0.1:9220."
        )
    try:
        server = _Server(host.strip("[]") or "127.0.0.1", int(port), _handler(page))
    except OSError as error:
        raise InputError(
            f"cannot listen on {address}: {error.strerror}", "--listen", "Give a free address of this machine."
        ) from None
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), handler)


def _handler(page: MetricsPage) -> type[BaseHTTPRequestHandler]:
    routes: dict[str, Callable[[], tuple[int, str, str]]] = {
        "/metrics": lambda: (200, page.text(), MEDIA),
        "/healthz": lambda: _health(page),
    }

    class Handler(BaseHTTPRequestHandler):
        timeout = _ANSWER_WITHIN_S
        server_version = "predrain"
        sys_version = ""

        def do_GET(self) -> None:
            route = routes.get(self.path.split("?", 1)[0])
            status, text, media = route() if route else (404, "not found\n", "text/plain; charset=utf-8")
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", media)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: whoever scrapes would fill the log."""

    return Handler


def _health(page: MetricsPage) -> tuple[int, str, str]:
    ill = page.illness()
    return (200 if ill is None else 503), f"{ill or 'ok'}\n", "text/plain; charset=utf-8"
