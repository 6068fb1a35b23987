"""Scrapes against servers that answer well, badly, slowly and never."""

import asyncio
import gzip
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from foundation.http import Connection, HttpResponse
from telemetry.collect.scraping.scraper import PAGE_BYTES, ScrapeError, Scraper
from tests.telemetry.collect.exporters.exporter_pages import exporter_page

Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
PAGE = exporter_page("n1", 1).encode()


def answer(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def always(data: bytes, *, close: bool = False) -> Handler:
    async def handler(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        if close:
            writer.close()

    return handler


def fetch(
    handler: Handler, *, timeout_s: float = 60.0, token: Path | None = None, times: int = 1
) -> list[HttpResponse | ScrapeError]:
    """Start a server, scrape it some times, return the outcomes."""

    async def work() -> list[HttpResponse | ScrapeError]:
        async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while not writer.is_closing():
                    await handler(await reader.readuntil(b"\r\n\r\n"), writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(client, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics"
        outcomes: list[HttpResponse | ScrapeError] = []
        scraper = Scraper(Connection("http://targets", bearer_token_file=token), timeout_s=timeout_s)
        for _ in range(times):
            try:
                outcomes.append(await scraper.fetch(url))
            except ScrapeError as error:
                outcomes.append(error)
        server.close()
        await asyncio.sleep(0.01)
        return outcomes

    return asyncio.run(work())


def failure(handler: Handler, **options: object) -> ScrapeError:
    (outcome,) = fetch(handler, **options)
    assert isinstance(outcome, ScrapeError), outcome
    return outcome


def test_a_page_comes_with_its_time_and_the_servers_clock() -> None:
    head = ("Content-Type: text/plain; version=0.0.4; charset=utf-8", "Date: Sun, 01 Mar 2026 00:00:07 GMT")
    (outcome,) = fetch(always(answer(PAGE, *head)))
    assert isinstance(outcome, HttpResponse)
    assert outcome.body == PAGE
    assert outcome.headers["date"] == head[1].removeprefix("Date: ")
    assert 0 < outcome.duration_s < 60


CUT_CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"%x\r\n" % len(PAGE) + PAGE[:500]
PACKED = gzip.compress(PAGE)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (answer(PAGE, length=len(PAGE) + 10), "protocol"),
        (CUT_CHUNKS, "protocol"),
        (answer(PACKED, "Content-Encoding: gzip"), "protocol"),
        (answer(b"oops", status="500 Internal Server Error"), "status"),
        (answer(b"", status="401 Unauthorized"), "status"),
        (answer(b"", "Location: /metrics", status="302 Found"), "status"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "protocol"),
        (b"", "protocol"),
    ],
)
def test_kinds_of_broken_answers(data: bytes, kind: str) -> None:
    assert failure(always(data, close=True)).kind == kind


def test_a_byte_a_second_ends_with_the_timeout() -> None:
    async def handler(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"", length=100_000))
        while not writer.is_closing():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    assert failure(handler, timeout_s=0.3).kind == "timeout"


def test_an_endless_page_is_refused_before_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handler(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = b"a 1\n" * 100_000
        for _ in range(100):
            writer.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    error = failure(handler)
    assert str(error) == f"too_large: the answer has more than {PAGE_BYTES:,} bytes"
    monkeypatch.setattr("telemetry.collect.scraping.scraper.PAGES_BYTES", 1 << 20)
    assert "all pages under way have more than 1,048,576 bytes" in str(failure(handler))
    assert isinstance(fetch(always(answer(PAGE)), times=2)[1], HttpResponse)


def test_credentials_are_shown_and_read_again(tmp_path: Path) -> None:
    heads: list[bytes] = []

    async def handler(head: bytes, writer: asyncio.StreamWriter) -> None:
        heads.append(head)
        writer.write(answer(PAGE))
        token.with_suffix(".new").write_text("second\n")
        token.with_suffix(".new").replace(token)

    token = tmp_path / "token"
    token.write_text("first\n")
    fetch(handler, token=token, times=2)
    assert b"Authorization: Bearer first\r\n" in heads[0]
    assert b"Authorization: Bearer second\r\n" in heads[1]
