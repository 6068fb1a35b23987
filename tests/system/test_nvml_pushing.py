"""What the NVML collector pushes arrives once, whoever is killed meanwhile."""

import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.system.nvml_node import PREDRAIN, Node, build_library, daemons_of
from tests.waiting import wait

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("library"))


@pytest.fixture
def node(tmp_path: Path, library: Path) -> Node:
    return Node(tmp_path, library)


@pytest.fixture
def daemons(node: Node) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    with daemons_of(node) as start:
        yield start


def arrived(node: Node, live: Path, events: int) -> bool:
    return len(node.rows("events", live)) >= events


def test_the_service_gets_everything_once_though_it_comes_late_and_is_killed(
    node: Node, daemons: Callable[..., subprocess.Popen[str]]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tokens = node.folder / "tokens"
    tokens.write_text("s3cret-" * 8 + "\n")

    def receive() -> subprocess.Popen[str]:
        with (node.folder / "receive.txt").open("a") as log:
            return subprocess.Popen(
                [
                    *(*PREDRAIN, "collect", "receive", "--dataset", str(node.folder / "fleet")),
                    *("--listen", f"127.0.0.1:{port}", "--tokens", str(tokens)),
                ],
                cwd=node.folder,
                stderr=log,
                stdout=log,
                text=True,
            )

    live = node.folder / "fleet.live"
    daemons("--interval", "1s", "--push", f"http://127.0.0.1:{port}", "--bearer-token-file", str(tokens))
    wait(lambda: "listening for XIDs" in node.log())
    wait(lambda: "pushing waits" in node.log())
    node.set(xid="1:0:79")
    wait(lambda: node.rows("events"))
    heard = 1
    for _ in range(2):
        server = receive()
        try:
            wait(partial(arrived, node, live, heard))
            heard += 1
            node.set(xid=f"{heard}:1:48")
            wait(partial(arrived, node, live, heard))
        finally:
            server.kill()
            server.wait(120)
        heard += 1
        node.set(xid=f"{heard}:0:31")
        wait(lambda: node.rows("events"))
    server = receive()
    try:
        wait(lambda: len(node.rows("events", live)) >= heard and not node.rows("events"))
    finally:
        server.terminate()
        server.wait(120)
    assert [event["code"] for event in sorted(node.rows("events", live), key=lambda each: each["timestamp"])] == [
        *("79", "48", "31", "48", "31")
    ]
    assert "s3cret" not in node.log()
