"""A command in a container, through a server that speaks the channel protocol."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import urllib3
from aiohttp import web

from telemetry.collect.kubernetes.api import Refused, Unreachable
from telemetry.collect.kubernetes.client import KubernetesClient
from telemetry.collect.kubernetes.pod_exec import KEPT_BYTES, Executed
from tests.telemetry.collect.kubernetes.exec_server import ExecServer, ended, exec_server

PATH = "/api/v1/namespaces/team/pods/p1/exec"


@pytest.fixture
def server() -> Iterator[ExecServer]:
    with exec_server() as made:
        yield made


def run(server: ExecServer, *command: str, timeout_s: float = 5.0) -> Executed:
    with urllib3.PoolManager() as pool:
        cluster = KubernetesClient(pool, server.url, lambda: {"Authorization": "Bearer t"})
        return cluster.execute(PATH, command or ("true",), "main", timeout_s=timeout_s)


def test_a_command_runs_word_by_word_and_tells_its_exit_code_and_output(server: ExecServer) -> None:
    server.scripts = [ended(0, (1, b"one "), (2, b"warn"), (1, b"two")), ended(75), ended(3, (2, b"no"))]
    assert run(server, "save", "a b", "$x;y") == Executed(0, b"one two", b"warn")
    assert server.asked[0] == {
        "path": PATH, "command": ["save", "a b", "$x;y"], "container": "main", "token": "Bearer t", "stdin": "false",
        "tty": "false", "origin": None,
    }  # fmt: skip
    assert run(server).code == 75
    failed = run(server)
    assert (failed.code, failed.stderr, failed.message) == (
        3, b"no", "command terminated with non-zero exit code: exit status 3",
    )  # fmt: skip


def test_older_servers_and_their_protocol_do(server: ExecServer) -> None:
    server.protocols = ("v4.channel.k8s.io",)
    server.scripts = [ended(0)]
    assert run(server).code == 0
    server.protocols = ("channel.k8s.io",)
    server.scripts = [ended(0)]
    with pytest.raises(Unreachable, match=r"speaks none of|Invalid WebSocket Header"):
        run(server)


def test_what_a_command_writes_is_kept_from_its_end_only(server: ExecServer) -> None:
    server.scripts = [ended(0, *((1, b"x" * 30_000) for _ in range(10)), (1, b"the end"))]
    found = run(server)
    assert len(found.stdout) == KEPT_BYTES
    assert found.stdout.endswith(b"the end")


@pytest.mark.parametrize(("status", "message"), [(403, "no pods/exec"), (404, "no pod"), (500, "down")])
def test_a_refusal_is_told_with_its_words(server: ExecServer, status: int, message: str) -> None:
    server.refusals = [(status, message)]
    with pytest.raises(Refused) as refused:
        run(server)
    assert (refused.value.status, refused.value.message) == (status, message)


async def _silent(_link: web.WebSocketResponse) -> None:
    await asyncio.sleep(2)


async def _drips(link: web.WebSocketResponse) -> None:
    for _ in range(100):
        await link.send_bytes(b"\x01.")
        await asyncio.sleep(0.02)


async def _drips_a_frame(link: web.WebSocketResponse) -> None:
    assert link._req is not None
    transport = link._req.transport
    assert transport is not None
    transport.write(b"\x82\x7e\xff\xff")  # one frame of 65,535 bytes
    for _ in range(3000):
        transport.write(b"\x01")
        await asyncio.sleep(0.02)


async def _cut(link: web.WebSocketResponse) -> None:
    await link.close()


async def _fails(link: web.WebSocketResponse) -> None:
    status = {"status": "Failure", "message": "container not found", "reason": "InternalError", "code": 500}
    await link.send_bytes(b"\x03" + json.dumps(status).encode())


async def _mumbles(link: web.WebSocketResponse) -> None:
    await link.send_bytes(b"\x03what")


@pytest.mark.parametrize("script", [_silent, _drips, _drips_a_frame])
def test_a_command_that_does_not_end_is_left_in_time(server: ExecServer, script: object) -> None:
    server.scripts = [script]  # type: ignore[list-item]
    began = time.monotonic()
    with pytest.raises(Unreachable, match=r"timed out: the command did not end within 0\.3 s"):
        run(server, timeout_s=0.3)
    assert time.monotonic() - began < 30


def test_a_handshake_that_drips_is_left_in_time() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        connection, _ = listener.accept()
        with contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 101 Switching Protocols\r\nX-Long: ")
            for _ in range(3000):
                connection.sendall(b"x")
                time.sleep(0.02)
        connection.close()

    threading.Thread(target=drip, daemon=True).start()
    nowhere = ExecServer()
    nowhere.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    began = time.monotonic()
    with pytest.raises(Unreachable, match=r"did not end within 0\.5 s"):
        run(nowhere, timeout_s=0.5)
    assert time.monotonic() - began < 30
    listener.close()


def test_no_exit_code_is_no_success(server: ExecServer) -> None:
    server.scripts = [_cut, _fails, _mumbles]
    with pytest.raises(Unreachable, match="ended before the command's exit code was told"):
        run(server)
    found = run(server)
    assert (found.code, found.message) == (None, "container not found")
    assert run(server).code is None


def test_a_server_that_is_not_there_was_sent_nothing() -> None:
    nowhere = ExecServer()
    nowhere.url = "http://127.0.0.1:1"
    with pytest.raises(Unreachable) as error:
        run(nowhere)
    assert not error.value.sent
