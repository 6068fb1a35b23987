"""Connections without a token must not keep others out, nor fill the log."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

HALF = b"POST /api/v1/write HTTP/1.1\r\nHost: x\r\n"
CHILD = """
import logging, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from telemetry.landing.folder import Landing
from telemetry.collect.remote_write.receiver import Receiver
from telemetry.collect.remote_write.receiver import serve
from telemetry.collect.remote_write.group_commit import ReceiverSettings
logging.basicConfig(level=logging.INFO)
root = Path(sys.argv[1])
receiver = Receiver(Landing(root / "d.live", writer="t"), ReceiverSettings(tokens=root / "tokens", head_timeout_s=0.6))
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
