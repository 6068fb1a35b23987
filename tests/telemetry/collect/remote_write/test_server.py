"""The receiver on a port: where it may listen, whom it keeps out, and our own client talking to it."""

import asyncio
import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uvicorn

from foundation.errors import InputError
from foundation.http import parse_listen
from foundation.server.connections import refuse_open_port, serving
from foundation.server.token_file import own_token_file
from telemetry.collect.pushing import Deferred, HttpTarget, Rejected
from telemetry.collect.remote_write.group_commit import ReceiverSettings
from telemetry.collect.remote_write.receiver import Receiver, application, serve
from telemetry.staging.folder import StagingFolder
from tests.processes import PREDRAIN, invoke, running
from tests.telemetry.collect.builders import staged
from tests.waiting import free_port, wait

TOKEN = "0123456789abcdef0123"


@pytest.mark.parametrize(
    ("text", "pair"),
    [("127.0.0.1:9201", ("127.0.0.1", 9201)), ("[::1]:0", ("::1", 0)), ("h.example:1", ("h.example", 1))],
)
def test_addresses(text: str, pair: tuple[str, int]) -> None:
    assert parse_listen(text) == pair
    for wrong in ("9201", ":9201", "host:", "host:x", "host:70000"):
        with pytest.raises(InputError, match=r"is not a listen address \(--listen\). Write HOST:PORT"):
            parse_listen(wrong)


def test_without_tokens_only_this_machine_may_write() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        refuse_open_port(host, has_tokens=False)
    refuse_open_port("0.0.0.0", has_tokens=True)
    for host in ("0.0.0.0", "10.0.0.1", "::", "node7"):
        with pytest.raises(InputError, match="could write telemetry"):
            refuse_open_port(host, has_tokens=False)


def test_on_this_machine_too_only_who_can_read_the_token_writes(tmp_path: Path) -> None:
    number = free_port()
    command = [*PREDRAIN, "collect", "receive", "--listen", f"127.0.0.1:{number}", "--dataset", tmp_path / "fleet"]
    token, url = tmp_path / "fleet.receive-token", f"http://127.0.0.1:{number}"
    with running(command, tmp_path / "log"):
        wait(lambda: urllib.request.urlopen(f"{url}/readyz", timeout=60).read())
        assert httpx.get(f"{url}/metrics").is_success
        refused, taken = (
            httpx.post(f"{url}/api/v1/write", headers=headers).status_code
            for headers in ({}, {"Authorization": f"Bearer {token.read_text().strip()}"})
        )
    assert refused == 401
    assert taken != 401
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert str(token) in (tmp_path / "log").read_text()


def test_a_token_file_that_others_may_read_or_replace_is_refused_and_another_start_takes_the_same(tmp_path):
    file = own_token_file(tmp_path / "d" / "token")
    written = file.read_text()
    assert len(written) == 65
    assert own_token_file(file).read_text() == written
    file.chmod(0o640)
    with pytest.raises(InputError, match="other users can read or replace"):
        own_token_file(file)
    link = tmp_path / "link"
    link.symlink_to(file)
    with pytest.raises(InputError, match="other users can read or replace"):
        own_token_file(link)


def test_who_a_client_says_it_forwards_for_is_taken_from_nobody() -> None:
    async def client_of(scope: Any, _: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["client"][0].encode()})

    async def ask() -> str:
        async with serving(client_of, "127.0.0.1", 0) as server, httpx.AsyncClient() as session:
            headers = {"X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "https"}
            return (await session.get(f"http://127.0.0.1:{server.port}/", headers=headers)).text

    assert asyncio.run(ask()) == "127.0.0.1"


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        receiver = Receiver(StagingFolder(tmp_path, writer="t"))
        with pytest.raises(InputError, match="cannot listen on"):
            serve(receiver, "127.0.0.1", taken.getsockname()[1])


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "tokens").write_text(TOKEN)
    staging = StagingFolder(tmp_path / "d.live", writer="receive")
    receiver = Receiver(staging, ReceiverSettings(tokens=tmp_path / "tokens", request_rows=5))
    server = uvicorn.Server(uvicorn.Config(application(receiver), port=0, log_config=None, lifespan="on"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield int(server.servers[0].sockets[0].getsockname()[1])
    server.should_exit = True
    thread.join(60)


def test_our_own_client_pushes_what_a_node_has_staged(tmp_path: Path, port: int) -> None:
    def table(rows: int) -> pa.Table:
        times = pa.array(range(1_772_323_200_000, 1_772_323_200_000 + rows)).cast(pa.timestamp("ms", "UTC"))
        return pa.table({"timestamp": times, "node": ["n"] * rows, "gpu": ["g"] * rows, "xid_last": [79] * rows})

    on_node = StagingFolder(tmp_path / "node", writer="nvml")
    good, large = on_node.stage("samples", table(2), name="a"), on_node.stage("samples", table(6), name="b")
    for url in (f"http://127.0.0.1:{port}/", f"http://127.0.0.1:{port}/v1/telemetry"):
        target = HttpTarget(url, token_file=tmp_path / "tokens")
        target.send(good)  # again: the first answer was lost
    with pytest.raises(Rejected, match="413: the body has more than 5 rows"):
        target.send(large)
    (tmp_path / "wrong").write_text("x" * 20)
    with pytest.raises(Deferred, match="401"):
        HttpTarget(f"http://127.0.0.1:{port}", token_file=tmp_path / "wrong").send(good)
    (staged,) = (tmp_path / "d.live" / "samples").iterdir()
    assert pq.read_table(staged).column("xid_last").to_pylist() == [79, 79]


def test_a_kernel_log_is_sent_from_a_spool_once(port: int, tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text("2026-03-01T10:00:00+00:00 h1 kernel: NVRM: Xid (PCI:0000:10:00): 79, GPU has fallen off the bus.\n")
    words = ["collect", "kernel-log", "--source", log, "--once", "--spool", tmp_path / "spool", "--json", "--push"]
    words += [f"http://127.0.0.1:{port}", "--bearer-token-file", tmp_path / "tokens"]
    first, second = (json.loads(invoke(*words).stdout) for _ in range(2))
    assert (first["events_written"], first["files_pushed"], first["files_pending"]) == (1, 1, 0)
    assert (second["events_written"], second["files_pushed"]) == (0, 0)
    (event,) = staged(StagingFolder(tmp_path / "d.live", writer="test"))
    assert (event["node"], event["code"]) == ("h1", "79")


HALF = b"POST /api/v1/write HTTP/1.1\r\nHost: x\r\n"
CHILD = """
import logging, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from telemetry.staging.folder import StagingFolder
from telemetry.collect.remote_write.receiver import Receiver
from telemetry.collect.remote_write.receiver import serve
from telemetry.collect.remote_write.group_commit import ReceiverSettings
logging.basicConfig(level=logging.INFO)
root = Path(sys.argv[1])
settings = ReceiverSettings(tokens=root / "tokens", head_timeout_s=0.6)
receiver = Receiver(StagingFolder(root / "d.live", writer="t"), settings)
serve(receiver, "127.0.0.1", 0, started=lambda port: print(port, flush=True))
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[int, int]]:
    (tmp_path / "tokens").write_text("0123456789abcdef0123")
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, stderr=log) as process,
    ):
        yield int(process.stdout.readline()), process.pid
        process.terminate()
        assert process.wait(60) == 0


def healthy(port: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=60) as answer:
        return bool(answer.read() == b"ok\n")


def connect(stack: contextlib.ExitStack, port: int, content: bytes) -> socket.socket:
    made = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
    made.sendall(content)
    return made


def ended(connection: socket.socket) -> bool:
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


def test_idle_connections_keep_no_client_out(tmp_path: Path, server: tuple[int, int]) -> None:
    port, pid = server
    with contextlib.ExitStack() as stack:
        flood = [connect(stack, port, HALF) for _ in range(300)]
        assert healthy(port)
        assert len(os.listdir(f"/proc/{pid}/fd")) < 100
        time.sleep(0.8)
        assert all(ended(connection) for connection in flood)
        assert healthy(port)
    log = (tmp_path / "log").read_text()
    assert "up to 64 connections" in log  # half of the descriptors
    assert log.count("are closed to make room") == 1
    assert len(log) < 2000


def test_heads_that_trickle_are_given_up_and_kept_connections_are_not(server: tuple[int, int]) -> None:
    port, _ = server
    request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    with contextlib.ExitStack() as stack:
        silent = connect(stack, port, b"")
        kept = connect(stack, port, request)
        second = connect(stack, port, request + HALF)  # a whole request, then half of one
        refused = connect(stack, port, HALF + b"Content-Length: 1000000\r\n\r\n")  # no token: 401, and no end
        slow = connect(stack, port, HALF)
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 60:
                for connection in (slow, second, refused):
                    connection.sendall(b"X: y\r\n")
                    time.sleep(0.02)
        assert time.monotonic() - began < 50
        assert all(map(ended, (silent, slow, second, refused)))
        assert b"200 OK" in kept.recv(65536)
        kept.sendall(request)
        assert b"200 OK" in kept.recv(65536)


def test_what_is_no_http_is_not_logged(tmp_path: Path, server: tuple[int, int]) -> None:
    port, _ = server
    with contextlib.ExitStack() as stack:
        for content in (
            b"\x00\x01\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        ):
            connection = connect(stack, port, content)
            assert connection.recv(65536).startswith(b"HTTP/1.1 40")
        assert healthy(port)
    assert len((tmp_path / "log").read_text().splitlines()) == 1
