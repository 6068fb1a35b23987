"""A real HTTP server whose pages move with each request, for collectors that are real processes."""

import contextlib
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests import http_server
from tests.http_server import Handler
from tests.processes import PREDRAIN, ROOT
from tests.telemetry.collect.exporters.exporter_pages import exporter_page


class PageServer:
    """Serves ``/NODE``; the energy on a page is the number of the node's request."""

    def __init__(self) -> None:
        self.requests: dict[str, list[float]] = defaultdict(list)
        self.address = ""

    def targets(self, count: int) -> str:
        return ",".join(f"{self.address}/n{number}" for number in range(count))

    def wait_for(self, requests: int) -> None:
        """Wait until so many requests more have come."""
        wanted = self.total() + requests
        deadline = time.monotonic() + 90
        while self.total() < wanted:
            assert time.monotonic() < deadline, f"{self.total()} requests of {wanted}"
            time.sleep(0.02)

    def total(self) -> int:
        return sum(map(len, list(self.requests.values())))


@contextlib.contextmanager
def page_server() -> Iterator[PageServer]:
    served = PageServer()

    class Pages(Handler):
        def do_GET(self) -> None:
            node = self.path.strip("/")
            served.requests[node].append(time.monotonic())
            page = exporter_page(node, len(served.requests[node])).encode()
            self.reply(200, page, {"Content-Type": "text/plain; version=0.0.4"})

    with http_server.serving(Pages) as address:
        served.address = address.removeprefix("http://")
        yield served


def start_collector(dataset: Path, targets: str, *options: str) -> subprocess.Popen[str]:
    command = [*PREDRAIN, "collect", "exporters", "--interval", "1s", "--timeout", "1s", *options]
    command += ["--targets", targets, "--dataset", str(dataset)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
