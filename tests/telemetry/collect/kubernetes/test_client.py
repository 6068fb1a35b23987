"""The connection, against an HTTP server that misbehaves as told."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml

from telemetry.collect.kubernetes.api import ClientLimits, Refused, Unreachable
from telemetry.collect.kubernetes.client import KubernetesClient, RateLimit, connect
from telemetry.errors import InputError

Answer = Callable[[BaseHTTPRequestHandler], None]


def say(status: int, content: Any, headers: dict[str, str] | None = None, *, cut: int = 0) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        handler.send_response(status)
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: len(body) - cut])
        if cut:
            handler.close_connection = True

    return answer


def stream(*chunks: bytes, finish: bool = True, hold: threading.Event | None = None) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for chunk in chunks:
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            handler.wfile.flush()
        if hold is not None:
            hold.wait(10)
        if finish:
            handler.wfile.write(b"0\r\n\r\n")
        else:
            handler.close_connection = True

    return answer


class Server:
    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.paths: list[str] = []
        self.tokens: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_request(self) -> None:
                outer.paths.append(self.path)
                outer.tokens.append(self.headers.get("Authorization"))
                outer.answers.pop(0)(self)

            do_GET = do_PUT = handle_request

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def cluster(server: Server) -> Iterator[KubernetesClient]:
    count = iter(range(100))
    limits = ClientLimits(read_timeout_s=2.0, retry_timeout_s=20.0)
    with urllib3.PoolManager() as pool:
        made = KubernetesClient(pool, server.url, lambda: {"Authorization": f"Bearer t{next(count)}"}, limits=limits)
        yield made


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    made: list[float] = []
    monkeypatch.setattr("tenacity.nap.time.sleep", made.append)
    return made


def test_what_may_pass_is_tried_again_with_a_fresh_token(
    server: Server, cluster: KubernetesClient, pauses: list[float]
) -> None:
    server.answers = [
        say(429, {"message": "slow"}, {"Retry-After": "3"}),
        say(429, {"message": "slow"}, {"Retry-After": "0"}),
        say(200, {"a": 1}, cut=3),
        say(200, b"no json"),
        say(200, {"a": 1}),
    ]
    assert cluster.get("/x") == {"a": 1}
    assert pauses[0] == 3.0
    assert all(0.1 <= pause <= 5 for pause in pauses)
    assert server.tokens == [f"Bearer t{n}" for n in range(5)]


@pytest.mark.parametrize(
    ("answer", "error", "tries"),
    [
        (say(403, {"message": "not you"}), "HTTP 403: not you", 1),
        (say(302, b"", {"Location": "http://127.0.0.1:1/"}), "HTTP 302", 1),
        # a wait that is longer than the time that is left is not waited
        (say(429, {"message": "slow"}, {"Retry-After": "30"}), "GET /x: HTTP 429: slow", 1),
        (say(500, {"message": "ill"}), "GET /x: HTTP 500: ill", 5),
    ],
)
def test_what_does_not_pass_is_not_tried_again(
    server: Server, cluster: KubernetesClient, pauses: list[float], answer: Answer, error: str, tries: int
) -> None:
    server.answers = [answer] * tries
    with pytest.raises((Refused, Unreachable), match=error):
        cluster.get("/x")
    assert len(pauses) == tries - 1


def test_a_request_that_did_not_leave_is_told_from_one_without_an_answer(
    cluster: KubernetesClient, server: Server, pauses: list[float]
) -> None:
    server.answers = [say(200, {"a": 1}, cut=3)] * 5
    with pytest.raises(Unreachable, match="no whole answer") as error:
        cluster.request("PUT", "/x", body={})
    assert error.value.sent
    server.close()
    with pytest.raises(Unreachable, match="cannot be reached") as error:
        cluster.request("PUT", "/x", body={})
    assert not error.value.sent
    assert len(pauses) == 8


def test_credentials_that_fail_for_a_while_are_asked_for_again(server: Server, pauses: list[float]) -> None:
    given = iter([False, True])

    def headers() -> dict[str, str]:
        if not next(given):
            raise RuntimeError("the plug-in fell over")
        return {}

    server.answers = [say(200, {"a": 1})]
    with urllib3.PoolManager() as pool:
        assert KubernetesClient(pool, server.url, headers).get("/x") == {"a": 1}
    assert len(pauses) == 1


def test_a_watch_is_read_line_by_line_however_it_is_cut(server: Server, cluster: KubernetesClient) -> None:
    server.answers = [stream(b'{"type": "ADDED"', b', "object": {}}\n{"ty', b'pe": "DELETED"}\n\n')]
    assert [event["type"] for event in cluster.watch("/w", {}, "5")] == ["ADDED", "DELETED"]
    assert "resourceVersion=5" in server.paths[0]
    assert "allowWatchBookmarks=true" in server.paths[0]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (stream(b'{"type": "ADDED"}\n', finish=False), "the watch was cut"),
        (stream(b"nonsense\n"), "the watch was cut"),
        (say(410, {"message": "too old"}), "HTTP 410: too old"),
    ],
    ids=["cut", "nonsense", "gone"],
)
def test_a_watch_that_is_cut_or_refused_says_so(
    server: Server, cluster: KubernetesClient, answer: Answer, error: str
) -> None:
    server.answers = [answer]
    with pytest.raises((Unreachable, Refused), match=error):
        list(cluster.watch("/w", {}, "5"))


def test_a_silent_watch_ends(server: Server, cluster: KubernetesClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telemetry.collect.kubernetes.client.IDLE_S", 0.2)
    hold = threading.Event()
    server.answers = [stream(b'{"type": "ADDED"}\n', hold=hold)]
    assert len(list(cluster.watch("/w", {}, "5"))) == 1
    hold.set()


def test_a_kubeconfig_gives_address_and_token(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "config"
    content = {
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file.write_text(yaml.safe_dump(content))
    server.answers = [say(200, {"a": 1})]
    cluster = connect(file)
    assert cluster.get("/x") == {"a": 1}
    assert server.tokens == ["Bearer secret"]
    with pytest.raises(InputError, match=r"no way to the Kubernetes API server.*--kubeconfig and --context"):
        connect(file, "nothing")


@pytest.mark.parametrize("content", ["", "a: [", "clusters: 5", "[]"])
def test_a_kubeconfig_that_cannot_be_used(tmp_path: Path, content: str) -> None:
    file = tmp_path / "config"
    file.write_text(content)
    with pytest.raises(InputError, match=r"no way to the Kubernetes API server.*config\)"):
        connect(file)
    with pytest.raises(InputError, match="no way to the Kubernetes API server"):
        connect(tmp_path / "missing")


@pytest.mark.parametrize("package", ["kubernetes", "urllib3"])
def test_without_the_package_it_says_how_to_get_it(package: str) -> None:
    code = (
        f"import sys\nsys.modules[{package!r}] = None\nfrom telemetry.errors import InputError\n"
        "try:\n    from telemetry.collect.kubernetes.client import connect\n    connect()\n"
        "except InputError as error:\n    print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "not installed" in run.stdout
    assert "pip install 'predrain[kubernetes]'" in run.stdout


def test_a_server_that_drips_its_answer_holds_nobody_beyond_the_time_for_all_of_it(
    server: Server, cluster: KubernetesClient
) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> None:
        with contextlib.suppress(OSError):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n")
            for _ in range(8000):  # each single read is answered in time
                handler.wfile.write(b"x")
                handler.wfile.flush()
                time.sleep(0.02)
        handler.close_connection = True

    server.answers += [drip]
    with pytest.raises(Unreachable, match=r"/api/v1/nodes: timed out: the answer was not complete in time"):
        cluster.request("GET", "/api/v1/nodes", timeout=timedelta(seconds=0.5))
    server.answers += [say(200, {"items": []})]
    assert cluster.get("/x") == {"items": []}, "and the next one has a connection of its own"


def test_requests_are_held_to_their_rate_after_a_burst() -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    rate = RateLimit(10.0, 5, lambda: now, sleep)
    for _ in range(5):
        rate.wait()
    assert now == 0.0
    for _ in range(20):
        rate.wait()
    assert now == pytest.approx(2.0)
    now += 100
    for _ in range(6):
        rate.wait()
    assert now == pytest.approx(102.1)
