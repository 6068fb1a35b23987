"""The connection, against an HTTP server that misbehaves as a test prepares."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml

from foundation.errors import InputError
from foundation.kubernetes.api import ApiRefused, ClientLimits, Unreachable
from foundation.kubernetes.client import KubernetesClient, RequestRate, connect
from tests.http_server import Handler, serving


def answer(status: int, content: Any, headers: str = "", *, cut: int = 0) -> list[bytes | float]:
    """Write a whole answer, or one that ends ``cut`` bytes early."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    head = f"HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return [head.encode() + body[: len(body) - cut]]


def stream(*chunks: bytes, end: bytes = b"0\r\n\r\n") -> list[bytes | float]:
    """Write an answer in chunks."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [head, *(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks), end]


class Server:
    """Gives prepared answers, one a request, with pauses in seconds between their pieces; then it hangs up."""

    def __init__(self) -> None:
        self.answers: list[list[bytes | float]] = []
        self.paths: list[str] = []
        self.tokens: list[str | None] = []
        self.stack = ExitStack()
        prepared = self

        class Answering(Handler):
            protocol_version = "HTTP/1.0"
            wbufsize = 0

            def handle_request(self) -> None:
                prepared.paths.append(self.path)
                prepared.tokens.append(self.headers.get("Authorization"))
                for piece in prepared.answers.pop(0):
                    if isinstance(piece, float):
                        threading.Event().wait(piece)
                    else:
                        self.wfile.write(piece)

            do_GET = do_PUT = handle_request

        self.url = self.stack.enter_context(serving(Answering))


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    with made.stack:
        yield made


@pytest.fixture
def cluster(server: Server) -> Iterator[KubernetesClient]:
    count = iter(range(100))
    limits = ClientLimits(read_timeout_s=2.0, retry_timeout_s=20.0)
    with urllib3.PoolManager() as pool:
        yield KubernetesClient(pool, server.url, lambda: {"Authorization": f"Bearer t{next(count)}"}, limits=limits)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []
    monkeypatch.setattr("tenacity.nap.time.sleep", made.append)
    return made


def test_what_may_pass_is_tried_again_with_a_fresh_token(
    server: Server, cluster: KubernetesClient, pauses: list[float]
) -> None:
    server.answers = [
        answer(429, {"message": "slow"}, "Retry-After: 3\r\n"),
        answer(429, {"message": "slow"}, "Retry-After: 0\r\n"),
        answer(200, {"a": 1}, cut=3),
        answer(200, b"no json"),
        answer(200, {"a": 1}),
    ]
    assert cluster.get("/x") == {"a": 1}
    assert pauses[0] == 3.0
    assert all(0.1 <= pause <= 5 for pause in pauses)
    assert server.tokens == [f"Bearer t{number}" for number in range(5)]


def test_credentials_that_fail_for_a_while_are_asked_for_again(server: Server, pauses: list[float]) -> None:
    given = iter([[], [("Authorization", "Bearer t")]])
    server.answers = [answer(200, {"a": 1})]
    with urllib3.PoolManager() as pool:
        assert KubernetesClient(pool, server.url, lambda: dict([next(given)[0]])).get("/x") == {"a": 1}
    assert len(pauses) == 1


@pytest.mark.parametrize(
    ("given", "error", "tries"),
    [
        (answer(403, {"message": "not you"}), "HTTP 403: not you", 1),
        (answer(302, b"", "Location: http://127.0.0.1:1/\r\n"), "HTTP 302", 1),
        # a wait that is longer than the time that is left is not waited
        (answer(429, {"message": "slow"}, "Retry-After: 30\r\n"), "GET /x: HTTP 429: slow", 1),
        (answer(500, {"message": "ill"}), "GET /x: HTTP 500: ill", 5),
    ],
)
def test_what_does_not_pass_is_given_up(
    server: Server, cluster: KubernetesClient, pauses: list[float], given: list[bytes | float], error: str, tries: int
) -> None:
    server.answers = [given] * tries
    with pytest.raises((ApiRefused, Unreachable), match=error):
        cluster.get("/x")
    assert len(pauses) == tries - 1


def test_a_request_that_was_not_sent_is_distinguished_from_one_without_an_answer(
    cluster: KubernetesClient, server: Server, pauses: list[float]
) -> None:
    server.answers = [answer(200, {"a": 1}, cut=3)] * 5
    with pytest.raises(Unreachable, match="no whole answer") as error:
        cluster.request("PUT", "/x", body={})
    assert error.value.sent
    server.stack.close()
    with pytest.raises(Unreachable, match="cannot be reached") as error:
        cluster.request("PUT", "/x", body={})
    assert not error.value.sent
    assert len(pauses) == 8


def test_an_answer_that_drips_ends_at_the_deadline_for_all_of_it(server: Server, cluster: KubernetesClient) -> None:
    whole = answer(200, {"a": "x" * 9000})[0]
    assert isinstance(whole, bytes)
    server.answers = [[whole[:200], *[b"x", 0.02] * 500]]  # each single read is in time
    began = time.monotonic()
    with pytest.raises(Unreachable, match="/api/v1/nodes: the answer was not complete in time"):
        cluster.request("GET", "/api/v1/nodes", timeout=timedelta(seconds=0.5))
    assert time.monotonic() - began < 9, "while the answer goes on for longer than ten seconds"
    server.answers += [[whole]]
    assert cluster.get("/x") == {"a": "x" * 9000}, "and the next one has a connection of its own"


BEGUN: list[str] = []


def watched(cluster: KubernetesClient) -> list[str]:
    return [event["type"] for event in cluster.watch("/w", {}, "5", lambda: BEGUN.append("/w"))]


def test_a_watch_is_read_line_by_line_however_it_is_cut(server: Server, cluster: KubernetesClient) -> None:
    server.answers = [stream(b'{"type": "ADDED"', b', "object": {}}\n{"ty', b'pe": "DELETED"}\n\n')]
    BEGUN.clear()
    assert watched(cluster) == ["ADDED", "DELETED"]
    assert BEGUN == ["/w"]
    assert "resourceVersion=5" in server.paths[0]
    assert "allowWatchBookmarks=true" in server.paths[0]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (stream(b'{"type": "ADDED"}\n', end=b""), "the watch was cut"),
        (stream(b"nonsense\n"), "the watch was cut"),
        (answer(410, {"message": "too old"}), "HTTP 410: too old"),
    ],
    ids=["cut", "nonsense", "gone"],
)
def test_a_watch_that_is_cut_or_refused_says_so(
    server: Server, cluster: KubernetesClient, given: list[bytes | float], error: str
) -> None:
    server.answers = [given]
    with pytest.raises((Unreachable, ApiRefused), match=error):
        watched(cluster)


def test_a_silent_watch_ends(server: Server, cluster: KubernetesClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.kubernetes.client.IDLE_S", 0.3)
    server.answers = [[*stream(b'{"type": "ADDED"}\n', end=b""), 3.0]]
    assert watched(cluster) == ["ADDED"]


def test_a_kubeconfig_gives_address_and_token(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "config"
    content = {
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file.write_text(yaml.safe_dump(content))
    server.answers = [answer(200, {"a": 1})]
    assert connect(file).get("/x") == {"a": 1}
    assert server.tokens == ["Bearer secret"]
    with pytest.raises(InputError, match=r"no connection to the Kubernetes API server.*--kubeconfig and --context"):
        connect(file, "nothing")


@pytest.mark.parametrize("content", [None, "", "a: [", "clusters: 5", "[]"])
def test_a_kubeconfig_that_cannot_be_used(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "config"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=r"no connection to the Kubernetes API server.*config\)"):
        connect(file)


def test_without_the_package_it_says_how_to_get_it() -> None:
    code = (
        "import sys\nsys.modules['kubernetes'] = None\nfrom foundation.errors import InputError\n"
        "try:\n    from foundation.kubernetes.client import connect\n    connect()\n"
        "except InputError as error:\n    print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "not installed" in run.stdout
    assert "pip install 'predrain[kubernetes]'" in run.stdout


def test_requests_are_held_to_their_rate_after_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr("time.sleep", sleep)
    rate, times = RequestRate(10.0, 5), []
    for taken in range(32):
        now += 100 if taken == 25 else 0
        rate.wait()
        times.append(now)
    assert (times[4], times[24], times[29], times[30]) == pytest.approx((0.0, 2.0, 102.0, 102.1))
