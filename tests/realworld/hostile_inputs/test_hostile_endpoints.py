"""Each client against servers that are slow, endless, wrong or cut, on real sockets: an error in time, and no leak."""

import asyncio
import contextlib
import gzip
import itertools
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import urllib3

from foundation.errors import InputError
from foundation.http import Connection, connect_to
from foundation.kubernetes.api import ApiRefused, ClientLimits, Unreachable
from foundation.kubernetes.client import KubernetesClient
from scheduler.evacuation.hooks import Webhook
from scheduler.evacuation.settings import WebhookSettings
from telemetry.accounting import Accounting
from telemetry.collect import pushing
from telemetry.collect.exporters import PageWatch, fleet_catalogue
from telemetry.collect.gpud import read_events
from telemetry.collect.prometheus.client import Bounds, PrometheusClient, TooMuch
from telemetry.collect.scraping.collector import ScrapeError, Scraper
from telemetry.collect.scraping.targets import parse_target
from telemetry.collect.series.mapping import SourceMapping
from telemetry.dataset.channels import CATALOGUE

TIMEOUT_S = 0.4
ATTEMPTS = 5
"""A busy machine may use up the timeout before the request is sent: such an attempt proves nothing."""
SECRET = "geheim-" + "x" * 20
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
BOMB = gzip.compress(gzip.compress(bytes(1 << 26)))


def whole(body: bytes, *headers: str, length: int | None = None) -> bytes:
    head = [f"Content-Length: {len(body) if length is None else length}", *headers]
    return OK + "\r\n".join(head).encode() + b"\r\n\r\n" + body


def drip(before: bytes, piece: bytes = b"x") -> Iterator[bytes]:
    yield before
    while True:
        time.sleep(0.05)
        yield piece


Answer = Callable[[str], Iterator[bytes]]
ANSWERS: dict[str, Answer] = {
    "slow headers": lambda _: drip(OK + b"X-Slow: "),
    "slow interim answers": lambda _: drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "slow body": lambda _: drip(whole(b"", length=1_000_000)),
    "slow chunk size": lambda _: drip(CHUNKED, b"0"),
    "endless headers": lambda _: itertools.chain([OK], itertools.repeat(b"X-More: " + b"y" * 1000 + b"\r\n")),
    "endless body": lambda _: itertools.chain([CHUNKED], itertools.repeat(b"10000\r\n" + bytes(65536) + b"\r\n")),
    "endless trailers": lambda _: itertools.chain(
        [CHUNKED + b"0\r\n"], itertools.repeat(b"X: " + b"y" * 1000 + b"\r\n")
    ),
    "gzip bomb": lambda _: iter([whole(BOMB, "Content-Encoding: gzip, gzip", "Content-Type: application/json")]),
    "redirects in a loop": lambda _: iter([b"HTTP/1.1 302 Found\r\nLocation: /again\r\nContent-Length: 0\r\n\r\n"]),
    "redirect to another host": lambda other: iter(
        [f"HTTP/1.1 307 Temporary Redirect\r\nLocation: {other}/x\r\nContent-Length: 0\r\n\r\n".encode()]
    ),
    "login page": lambda _: iter([whole(b"<html><body>Log in</body></html>", "Content-Type: text/html")]),
    "truncated body": lambda _: iter([whole(b'{"status": "success", "data": [', length=900)]),
    "no UTF-8": lambda _: iter([whole(b'{"status": "\xff\xfe", "items": [\xc3]}', "Content-Type: application/json")]),
    "huge numbers": lambda _: iter([whole(b"[" + b"9" * 100_000 + b"]", "Content-Type: application/json")]),
    "not HTTP": lambda _: iter([b"SSH-2.0-OpenSSH_9.6\r\n\r\n"]),
    "reset after the headers": lambda _: iter([whole(b"", length=50), b""]),
}


@contextlib.contextmanager
def endpoint(answer: Iterator[bytes] | None, heads: list[bytes]) -> Iterator[str]:
    """Answer each request so, then end the connection; None: take it and say nothing."""
    stop = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            head = connection.recv(1 << 20)
            if not head:  # the client gave up before it had asked
                return
            heads.append(head)
            for piece in answer or ():
                if stop.is_set():
                    return
                connection.sendall(piece)
                if not piece:  # a reset instead of an end
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stop.set()
        listener.close()


def token_in(folder: Path) -> Path:
    file = folder / "token"
    file.write_text(SECRET)
    return file


def prometheus(url: str, folder: Path) -> None:
    bounds = Bounds(request_s=TIMEOUT_S, body_bytes=1 << 20, retry_for_s=0.1, first_retry_for_s=0.1)

    async def names() -> None:
        connection = connect_to(url, bearer_token_file=token_in(folder))
        async with PrometheusClient(connection, bounds=bounds, concurrency=1, allow_partial=False) as client:
            await client.metric_names(None, 0, 1)

    asyncio.run(names())


def scraper(folder: Path) -> Scraper:
    return Scraper(Connection("http://targets", bearer_token_file=token_in(folder)), timeout_s=TIMEOUT_S)


def exporter(url: str, folder: Path) -> None:
    watch = PageWatch(parse_target(url, ""), fleet_catalogue(CATALOGUE, SourceMapping()), Accounting())
    asyncio.run(watch.scrape(scraper(folder).fetch, datetime.now(UTC), 0.0))


def gpud(url: str, folder: Path) -> None:
    read_events(asyncio.run(scraper(folder).fetch(url)).body, "n1", lambda when: when)


def push(url: str, folder: Path) -> None:
    (folder / "samples").mkdir(exist_ok=True)
    pq.write_table(pa.table({"node": ["n1"]}), folder / "samples" / "f.parquet")
    pushing.HttpTarget(url, token_file=token_in(folder)).send(folder / "samples" / "f.parquet")


def kubernetes(url: str, folder: Path) -> None:
    limits = ClientLimits(read_timeout_s=TIMEOUT_S, retry_timeout_s=2 * TIMEOUT_S, attempts=1)
    headers = {"Authorization": f"Bearer {SECRET}"}
    KubernetesClient(urllib3.PoolManager(), url, lambda: headers, limits=limits).list_all("/api/v1/nodes", {}, dict)


def webhook(url: str, folder: Path) -> None:
    settings = WebhookSettings(url=url, token_file=str(token_in(folder)), timeout=timedelta(seconds=TIMEOUT_S))
    reply = Webhook(settings, "predrain").tell({"node": "n1"}, "key")
    if reply.kind in ("timeout", "refused"):
        raise ApiRefused(0, str(reply))


CLIENTS: dict[str, Callable[[str, Path], None]] = {
    function.__name__: function for function in (prometheus, exporter, gpud, push, kubernetes, webhook)
}
ERRORS = (InputError, TooMuch, ScrapeError, pushing.Deferred, pushing.Rejected, ApiRefused, Unreachable)
TAKEN = {("webhook", "no UTF-8"), ("webhook", "huge numbers"), ("webhook", "endless body")}
# Of a webhook the status alone counts.


@pytest.fixture(autouse=True)
def short_timeout_of_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushing, "TIMEOUT_S", TIMEOUT_S)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("name", ANSWERS)
def test_a_hostile_answer_ends_in_an_error_in_time_and_leaks_no_token(client: str, name: str, tmp_path: Path) -> None:
    heads, elsewhere = list[bytes](), list[bytes]()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with endpoint(None, elsewhere) as other, endpoint(ANSWERS[name](other), heads) as url:
        for _ in range(ATTEMPTS):
            expected: Any = contextlib.nullcontext() if (client, name) in TAKEN else pytest.raises(ERRORS)
            started_s = time.monotonic()
            with expected as caught:
                CLIENTS[client](url, tmp_path)
            assert time.monotonic() - started_s < 20 * TIMEOUT_S
            if heads:
                break
    assert SECRET.encode() in heads[0]
    assert elsewhere == []
    assert caught is None or SECRET not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 200_000


@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_without_tls_and_a_silent_one_end_in_an_error(client: str, tmp_path: Path) -> None:
    for scheme, answer in (("https", iter([b"HTTP/1.1 400 Bad Request\r\n\r\n"])), ("http", drip(b"", b""))):
        with endpoint(answer, []) as url, pytest.raises(ERRORS):
            CLIENTS[client](url.replace("http", scheme), tmp_path)
