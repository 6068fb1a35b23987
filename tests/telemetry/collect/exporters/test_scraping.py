"""Targets, scrapes of servers that answer well, badly and never, and collectors that are processes."""

import asyncio
import gzip
import json
import re
import signal
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from filelock import FileLock

from foundation.errors import InputError
from foundation.http import Connection, HttpResponse
from telemetry.collect.kubernetes import discovery
from telemetry.collect.scraping.collector import PAGE_BYTES, ScrapeError, Scraper
from telemetry.collect.scraping.targets import Target, parse_target, read_targets
from telemetry.staging.folder import StagingFolder
from tests.processes import invoke
from tests.staged import staged_table
from tests.telemetry.collect.exporters.exporter_pages import exporter_page
from tests.telemetry.collect.exporters.page_server import page_server, start_collector
from tests.waiting import free_port

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


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (answer(PAGE, length=len(PAGE) + 10), "protocol"),
        (answer(gzip.compress(PAGE), "Content-Encoding: gzip"), "protocol"),
        (answer(b"oops", status="500 Internal Server Error"), "status"),
        (answer(b"", "Location: /metrics", status="302 Found"), "status"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "protocol"),
        (b"", "protocol"),
    ],
)
def test_kinds_of_broken_answers(data: bytes, kind: str) -> None:
    assert failure(always(data, close=True)).kind == kind


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
    monkeypatch.setattr("telemetry.collect.scraping.collector.PAGES_BYTES", 1 << 20)
    assert "the pages being read exceed 1,048,576 bytes" in str(failure(handler))
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


@pytest.mark.parametrize(
    ("text", "url", "address"),
    [
        ("node07", "http://node07:9400/metrics", "node07:9400"),
        ("node07:9100", "http://node07:9100/metrics", "node07:9100"),
        ("10.0.0.7:9400/gpu", "http://10.0.0.7:9400/gpu", "10.0.0.7:9400/gpu"),
        ("fd00::7", "http://[fd00::7]:9400/metrics", "[fd00::7]:9400"),
        ("[fd00::7]:81", "http://[fd00::7]:81/metrics", "[fd00::7]:81"),
        ("https://h/", "https://h/metrics", "h"),
        ("https://h:1/m?token=geheim", "https://h:1/m?token=geheim", "h:1/m"),
    ],
)
def test_targets_are_read_as_people_write_them(text: str, url: str, address: str) -> None:
    target = parse_target(text, "test")
    assert target.url == url
    assert target.address == address


@pytest.mark.parametrize(
    "text", ["node 07", "node:99999", "node:x", "ftp://h/m", "http://", "a:b:c", "/metrics", "http://h:70000/m"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"{text!r} is not the URL of a page (targets.txt, line 3)")):
        parse_target(text, "targets.txt, line 3")


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(InputError, match=r"node07 contains a password .*--basic-auth-file"):
        parse_target("http://user:geheim@node07/metrics", "test")


def test_a_text_file_is_read_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "gpu-nodes.txt"
    path.write_text("# all\nn1\nn2:81  worker-2  # new\n\n")
    assert read_targets([str(path)]) == [
        Target("http://n1:9400/metrics"),
        Target("http://n2:81/metrics", "worker-2"),
    ]
    path.write_text("n3\n")
    assert read_targets([str(path)]) == [Target("http://n3:9400/metrics")]


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_file_sd_is_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"targets{suffix}"
    path.write_text(
        '[{"targets": ["n1:9400", "n2:9400"], "labels": {"rack": "r1", "__metrics_path__": "/m", "job": "dcgm"}},'
        ' {"targets": ["n3:1"], "labels": {"node": "worker-3", "__scheme__": "https"}}, {"targets": []}]'
    )
    rack = (("rack", "r1"),)
    assert read_targets([str(path)]) == [
        Target("http://n1:9400/m", None, rack),
        Target("http://n2:9400/m", None, rack),
        Target("https://n3:1/metrics", "worker-3"),
    ]


def test_a_service_is_asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    running = [discovery.Exporter("http://10.0.0.1:9400", "n1")]
    asked = []

    def service_exporters(namespace: str, service: str, port: object) -> list[discovery.Exporter]:
        asked.append((namespace, service, port))
        return list(running)

    monkeypatch.setattr(discovery, "service_exporters", service_exporters)
    values = ["kubernetes:gpu-operator/dcgm:9400", "n9,n8:1"]
    assert [target.node for target in read_targets(values)].count("n1") == 1
    running.append(discovery.Exporter("http://10.0.0.2:9400", "n2"))
    assert len(read_targets(values)) == 4
    assert asked == [("gpu-operator", "dcgm", 9400)] * 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], r"no target is given \(--targets\)"),
        (["kubernetes:dcgm"], r"'kubernetes:dcgm' is not a service .*NAMESPACE/SERVICE\[:PORT\]"),
        (["missing.txt"], r"No such file or directory \(missing\.txt\)"),
    ],
)
def test_options_that_name_no_targets(values: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_targets(values)


def check_whole(live: Path) -> Counter[str]:
    """Check that every file can be read and no page counts twice; return the rows by GPU."""
    for kind in ("samples", "inventory", "events"):
        for path in (live / kind).glob("*"):
            assert path.suffix == ".parquet"
            assert pq.read_table(path).num_rows > 0
    rows = staged_table(live, "samples").to_pylist()
    assert max(Counter((row["gpu"], row["energy_mj"]) for row in rows).values()) == 1
    assert max(Counter((row["gpu"], row["timestamp"]) for row in rows).values()) == 1
    return Counter(row["gpu"] for row in rows)


def test_a_second_collector_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    command = ("collect", "exporters", "--once", "--dataset", tmp_path / "fleet", "--targets")
    with page_server() as server:
        lock = StagingFolder(tmp_path / "fleet.live", writer="exporters").state("exporters.lock")
        with FileLock(lock, fallback_to_soft=False):
            refused = invoke(*command, server.targets(4), code=1)
        assert "another exporter collector is running for this dataset" in refused.output
        invoke(*command, server.targets(4))
    assert len(check_whole(tmp_path / "fleet.live")) == 8


def test_a_signal_lands_everything_and_the_collector_reports_its_state(tmp_path: Path) -> None:
    dataset = tmp_path / "fleet"
    listen = f"127.0.0.1:{free_port()}"
    with page_server() as server:
        targets = server.targets(2) + ",127.0.0.1:1/dead"
        process = start_collector(dataset, targets, "--listen", listen, "--json")
        try:
            server.wait_for(6)
            assert urllib.request.urlopen(f"http://{listen}/healthz", timeout=60).read() == b"ok\n"
            metrics = urllib.request.urlopen(f"http://{listen}/metrics", timeout=60).read().decode()
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=90)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == 0, err
    scrapes, samples = (json.loads(out)["accounting"][name] for name in ("scrapes", "samples"))
    assert samples["used"] == 2 * scrapes["used"] == sum(check_whole(tmp_path / "fleet.live").values())
    assert scrapes["left_out"]
    assert "predrain_exporters_targets_owned 3.0\n" in metrics
    assert 'predrain_exporters_targets{state="failing"} 1.0\n' in metrics
