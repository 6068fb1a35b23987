"""Scrapes against servers that answer well, badly, slowly and never."""

import asyncio
import gzip
import time
import zlib
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from telemetry.errors import InputError
from telemetry.exporters.credentials import Credentials
from telemetry.exporters.failures import ScrapeError
from telemetry.exporters.fetching import Fetched, HttpFetcher
from telemetry.exporters.settings import ScrapeSettings
from tests.telemetry.exporters.exporter_pages import exporter_page

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
    handler: Handler, *, settings: ScrapeSettings | None = None, credentials: Credentials | None = None, times: int = 1
) -> list[Fetched | ScrapeError]:
    """Start a server, scrape it so often, return what came of it."""

    async def work() -> list[Fetched | ScrapeError]:
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
        found: list[Fetched | ScrapeError] = []
        async with HttpFetcher(settings or ScrapeSettings(timeout_s=5), credentials=credentials) as fetcher:
            for _ in range(times):
                try:
                    found.append(await fetcher.fetch(url))
                except ScrapeError as error:
                    found.append(error)
            assert fetcher._budget.used == 0
        server.close()
        await asyncio.sleep(0.01)
        return found

    return asyncio.run(work())


def failure(handler: Handler, **options: object) -> ScrapeError:
    (found,) = fetch(handler, **options)
    assert isinstance(found, ScrapeError), found
    return found


def test_a_page_comes_with_its_time_and_the_servers_clock() -> None:
    head = ("Content-Type: text/plain; version=0.0.4; charset=utf-8", "Date: Sun, 01 Mar 2026 00:00:07 GMT")
    (found,) = fetch(always(answer(PAGE, *head)))
    assert isinstance(found, Fetched)
    assert (found.body, found.framed, found.openmetrics) == (PAGE, True, False)
    assert found.date == datetime(2026, 3, 1, 0, 0, 7, tzinfo=UTC)
    assert 0 < found.date_after_s <= found.duration_s < 5


@pytest.mark.parametrize(
    ("packed", "encoding"),
    [
        (gzip.compress(PAGE), "gzip"),
        (gzip.compress(PAGE[:100]) + gzip.compress(PAGE[100:]), "gzip"),
        (zlib.compress(PAGE), "deflate"),
    ],
)
def test_a_packed_page_is_unpacked(packed: bytes, encoding: str) -> None:
    (found,) = fetch(always(answer(packed, f"Content-Encoding: {encoding}")))
    assert isinstance(found, Fetched)
    assert found.body == PAGE


def test_the_connection_is_kept_and_a_server_that_closed_it_is_no_failure() -> None:
    connections = 0

    async def handler(_: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.write(answer(PAGE))
        if connections == 2:
            await writer.drain()
            writer.close()

    found = fetch(handler, times=4)
    assert all(isinstance(each, Fetched) for each in found)


def test_a_body_without_a_length_is_not_known_to_be_whole() -> None:
    (found,) = fetch(always(b"HTTP/1.0 200 OK\r\n\r\n" + PAGE, close=True))
    assert isinstance(found, Fetched)
    assert not found.framed


CUT_CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"%x\r\n" % len(PAGE) + PAGE[:500]
PACKED = gzip.compress(PAGE)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (answer(PAGE, length=len(PAGE) + 10), "truncated"),
        (CUT_CHUNKS, "truncated"),
        (answer(PACKED[: len(PACKED) // 2], "Content-Encoding: gzip"), "truncated"),
        (answer(b"no gzip at all", "Content-Encoding: gzip"), "protocol"),
        (answer(PAGE, "Content-Encoding: br"), "protocol"),
        (answer(b"oops", status="500 Internal Server Error"), "status"),
        (answer(b"", status="401 Unauthorized"), "status"),
        (answer(b"", "Location: http://elsewhere.example/metrics", status="302 Found"), "redirect"),
        (answer(b"", "Location: /metrics", status="302 Found"), "redirect"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "protocol"),
        (b"", "unreachable"),
    ],
)
def test_what_a_broken_answer_is_called(data: bytes, kind: str) -> None:
    assert failure(always(data, close=True)).kind == kind


def test_a_redirect_on_the_same_host_is_followed() -> None:
    async def handler(head: bytes, writer: asyncio.StreamWriter) -> None:
        moved = answer(b"", "Location: /other", status="301 Moved")
        writer.write(answer(PAGE) if b"/other" in head else moved)

    (found,) = fetch(handler)
    assert isinstance(found, Fetched)


@pytest.mark.parametrize(
    ("rest", "least", "most"),
    [("17", 17, 17), (None, None, None), ("soon", None, None), ("Fri, 01 Jan 2100 00:00:00 GMT", 1e8, 1e10)],
)
def test_retry_after_is_read(rest: str | None, least: float | None, most: float | None) -> None:
    headers = [] if rest is None else [f"Retry-After: {rest}"]
    found = failure(always(answer(b"", *headers, status="429 Too Many Requests"))).retry_after_s
    assert found is None if least is None or most is None else least <= (found or 0) <= most


def test_a_byte_a_second_ends_with_the_timeout() -> None:
    async def handler(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"", length=100_000))
        for _ in range(100):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    started_s = time.monotonic()
    assert failure(handler, settings=ScrapeSettings(timeout_s=0.3)).kind == "timeout"
    assert time.monotonic() - started_s < 2


def test_nobody_listens() -> None:
    async def work() -> ScrapeError:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        async with HttpFetcher(ScrapeSettings(timeout_s=2)) as fetcher:
            with pytest.raises(ScrapeError) as caught:
                await fetcher.fetch(f"http://127.0.0.1:{port}/metrics")
        return caught.value

    assert str(asyncio.run(work())) == "refused: nobody listens there"


def test_a_page_of_a_million_lines_is_refused_before_it_has_arrived() -> None:
    async def handler(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = b"a 1\n" * 10_000
        for _ in range(100):
            writer.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    error = failure(handler)
    assert str(error) == "too_large: the page has more than 50000 lines"


def test_a_gzip_bomb_is_refused_without_being_unpacked() -> None:
    bomb = gzip.compress(b"a" * (200 << 20), 9)
    error = failure(always(answer(bomb, "Content-Encoding: gzip")))
    assert str(error) == f"too_large: the page has more than {8 << 20} bytes"


def test_all_pages_under_way_share_one_bound() -> None:
    settings = ScrapeSettings(timeout_s=5, max_in_flight_bytes=2 << 20)
    error = failure(always(answer(b"a" * (3 << 20))), settings=settings)
    assert error.kind == "too_large"


def test_credentials_are_shown_and_read_again(tmp_path: Path) -> None:
    heads: list[bytes] = []

    async def handler(head: bytes, writer: asyncio.StreamWriter) -> None:
        heads.append(head)
        writer.write(answer(PAGE))
        token.with_suffix(".new").write_text("second\n")
        token.with_suffix(".new").replace(token)

    token = tmp_path / "token"
    token.write_text("first\n")
    fetch(handler, credentials=Credentials(token), times=2)
    assert b"Authorization: Bearer first\r\n" in heads[0]
    assert b"Authorization: Bearer second\r\n" in heads[1]


def test_basic_credentials(tmp_path: Path) -> None:
    path = tmp_path / "basic"
    path.write_text("user:pass word\n")
    assert Credentials(basic_auth_file=path).header() == "Basic dXNlcjpwYXNzIHdvcmQ="


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file does not hold one line of credentials ({path}). Write exactly one line."),
        ("a\nb", "the file does not hold one line of credentials ({path}). Write exactly one line."),
        ("secret", "the file does not hold a name and a password ({path}). Write user:password."),
    ],
)
def test_credentials_that_cannot_be_used_are_named_without_their_content(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "basic"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        Credentials(basic_auth_file=path)
    assert str(caught.value) == message.format(path=path)


def test_certificates_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_text("no certificate")
    with pytest.raises(InputError, match="holds no certificates"):
        HttpFetcher(ScrapeSettings(), ca_file=path)
