"""What the NVML collector pushes arrives once, whoever is killed meanwhile."""

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.system.nvml_node import PREDRAIN, Node, build_library, daemons_of, stop
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


def test_what_is_pushed_to_a_folder_arrives_once_whenever_the_daemon_is_killed(
    node: Node, daemons: Callable[..., subprocess.Popen[str]]
) -> None:
    """Kill at several moments: every row that left the spool is in the target, none twice, no half file anywhere."""
    heard = 0
    for pause_s in (0.9, 1.3):
        daemon = daemons("--interval", "1s", "--push", str(node.target))
        lines = node.log().count("listening for XIDs")
        wait(partial(listened, node, lines))
        for _ in range(3):
            heard += 1
            node.set(xid=f"{heard}:{heard % 2}:79")
            wait(partial(told, node, heard))
        time.sleep(pause_s % 0.5)
        daemon.kill()
        daemon.wait(10)
    lines = node.log().count("listening for XIDs")
    daemon = daemons("--interval", "1s", "--push", str(node.target))
    wait(lambda: node.log().count("listening for XIDs") > lines)
    wait(lambda: not list((node.spool / "events").glob("*.parquet")))
    stop(daemon)
    events = node.rows("events", node.target)
    assert len(events) == heard
    assert len({event["timestamp"] for event in events}) == heard
    samples = node.rows("samples", node.target)
    assert len(samples) == len({(row["gpu"], row["timestamp"]) for row in samples}) > 0
    assert [path for kind in ("samples", "events", "inventory") for path in (node.spool / kind).glob("*.parquet")] == []


def listened(node: Node, lines: int) -> bool:
    return node.log().count("listening for XIDs") > lines


def told(node: Node, events: int) -> bool:
    return len(codes(node)) >= events


def arrived(node: Node, live: Path, events: int) -> bool:
    return len(node.rows("events", live)) >= events


def codes(node: Node) -> set[Any]:
    return {event["timestamp"] for root in (node.spool, node.target) for event in node.rows("events", root)}


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
    daemons("--interval", "1s", "--push", f"http://127.0.0.1:{port}", "--token-file", str(tokens))
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
            server.wait(10)
        heard += 1
        node.set(xid=f"{heard}:0:31")
        wait(lambda: node.rows("events"))
    server = receive()
    try:
        wait(lambda: len(node.rows("events", live)) >= heard and not node.rows("events"))
    finally:
        server.terminate()
        server.wait(20)
    assert [event["code"] for event in sorted(node.rows("events", live), key=lambda each: each["timestamp"])] == [
        *("79", "48", "31", "48", "31")
    ]
    assert "s3cret" not in node.log()
