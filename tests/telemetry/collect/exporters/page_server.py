"""A real HTTP server whose pages move with each request, for collectors that are real processes."""

import contextlib
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.telemetry.collect.exporters.exporter_pages import exporter_page

ROOT = Path(__file__).resolve().parents[4]


class PageServer:
    """Serves ``/NODE``; the energy on a page is the number of the node's request."""

    def __init__(self) -> None:
        self.requests: dict[str, list[float]] = defaultdict(list)
        self.port = 0

    def targets(self, count: int) -> str:
        return ",".join(f"127.0.0.1:{self.port}/n{number}" for number in range(count))

    def wait_for(self, requests: int, timeout_s: float = 90.0) -> None:
        """Wait until so many requests more have come."""
        wanted = self.total() + requests
        deadline = time.monotonic() + timeout_s
        while self.total() < wanted:
            assert time.monotonic() < deadline, f"{self.total()} requests of {wanted}"
            time.sleep(0.02)

    def total(self) -> int:
        return sum(map(len, list(self.requests.values())))


@contextlib.contextmanager
def page_server() -> Iterator[PageServer]:
    """Serve until the block ends."""
    served = PageServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            node = self.path.strip("/")
            served.requests[node].append(time.monotonic())
            body = exporter_page(node, len(served.requests[node])).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            """Clients that are killed are what the tests are about."""

    with Server(("127.0.0.1", 0), Handler) as server:
        served.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()


def start_collector(dataset: Path, targets: str, *options: str, interval: str = "0.25s") -> subprocess.Popen[str]:
    """Start the command itself."""
    command = [sys.executable, "-c", "from predrain.command import main; main()", "collect", "exporters"]
    pace = ["--interval", interval, "--timeout", interval]
    return subprocess.Popen(
        [*command, "--targets", targets, "--dataset", str(dataset), *pace, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
