"""The connection against a misbehaving server, and following a resource across all that servers do."""

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml

from foundation.errors import InputError
from foundation.kubernetes.api import ApiRefused, ClientLimits, Object, Unreachable
from foundation.kubernetes.client import KubernetesClient, RequestRate
from foundation.kubernetes.credentials import connect
from foundation.kubernetes.watching import ChangeKind, Resource, Tracker, follow
from telemetry.dataset.event import Event
from tests.http_server import Handler, certify, serving
from tests.telemetry.collect.kubernetes.memory_api import NODES, MemoryApi
from tests.telemetry.collect.kubernetes.objects import NOW
from tests.waiting import wait


def answer(status: int, content: Any, headers: str = "", *, cut: int = 0) -> list[bytes | float]:
    """Write a whole answer, or one that ends ``cut`` bytes early."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    head = f"HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return [head.encode() + body[: len(body) - cut]]


def stream(*chunks: bytes, end: bytes = b"0\r\n\r\n") -> list[bytes | float]:
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


def test_what_may_pass_is_tried_again_with_a_fresh_token(server, cluster, pauses):
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
        (answer(429, {"message": "slow"}, "Retry-After: 1000000000000\r\n"), "GET /x: HTTP 429: slow", 1),
        (answer(429, {"message": "slow"}, "Retry-After: Fri, 31 Dec 9999 23:59:59 GMT\r\n"), "HTTP 429: slow", 5),
        (answer(500, {"message": "ill"}), "GET /x: HTTP 500: ill", 5),
    ],
)
def test_what_does_not_pass_is_given_up(server, cluster, pauses, given, error, tries):
    server.answers = [given] * tries
    with pytest.raises((ApiRefused, Unreachable), match=error):
        cluster.get("/x")
    assert len(pauses) == tries - 1


def test_a_request_that_was_not_sent_is_distinguished_from_one_without_an_answer(cluster, server, pauses):
    server.answers = [answer(200, {"a": 1}, cut=3)] * 5
    with pytest.raises(Unreachable, match="sent an incomplete response") as error:
        cluster.request("PUT", "/x", body={})
    assert error.value.sent
    server.stack.close()
    with pytest.raises(Unreachable, match="cannot be reached") as error:
        cluster.request("PUT", "/x", body={})
    assert not error.value.sent
    assert len(pauses) == 8


def test_a_server_whose_certificate_is_not_trusted_is_named_and_was_sent_nothing(tmp_path, pauses):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certify(tmp_path, "another"))
    with (
        serving(Handler, tls=context) as url,
        urllib3.PoolManager() as pool,
        pytest.raises(Unreachable, match=r"the certificate of 127\.0\.0\.1:\d+ is rejected") as error,
    ):
        KubernetesClient(pool, url, dict).request("PUT", "/x", body={})
    assert not error.value.sent
    assert len(pauses) == 4


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
        (stream(b'{"type": "ADDED"}\n', end=b""), "the watch was interrupted"),
        (stream(b"nonsense\n"), "the watch was interrupted"),
        (answer(410, {"message": "too old"}), "HTTP 410: too old"),
    ],
    ids=["cut", "nonsense", "gone"],
)
def test_a_watch_that_is_cut_or_refused_says_so(server, cluster, given, error):
    server.answers = [given]
    with pytest.raises((Unreachable, ApiRefused), match=error):
        watched(cluster)


def test_a_silent_watch_ends(server: Server, cluster: KubernetesClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.kubernetes.client.IDLE_S", 0.3)
    server.answers = [[*stream(b'{"type": "ADDED"}\n', end=b""), 3.0]]
    assert watched(cluster) == ["ADDED"]


def kubeconfig(folder: Path, server: Mapping[str, str], user: Mapping[str, Any]) -> Path:
    content = {
        "clusters": [{"name": "c", "cluster": server}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (folder / "config").write_text(yaml.safe_dump(content))
    return folder / "config"


@pytest.mark.parametrize("by_provider", [False, True])
def test_a_credential_plug_in_that_hangs_is_ended(tmp_path, monkeypatch, by_provider):
    monkeypatch.setattr("foundation.kubernetes.credentials._PLUGIN_S", 2.0)
    plugin, started = tmp_path / "plugin", tmp_path / "started"
    plugin.write_text(f"#!/bin/sh\necho $$ > {started}\nexec sleep 600\n")
    plugin.chmod(0o755)
    command = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin), "interactiveMode": "Never"}
    provider = {"name": "gcp", "config": {"cmd-path": str(plugin), "cmd-args": "token"}}
    user = {"auth-provider": provider} if by_provider else {"exec": command}
    with pytest.raises(InputError, match="timed out") if by_provider else nullcontext():
        connect(kubeconfig(tmp_path, {"server": "http://127.0.0.1:9"}, user))
    process = Path(f"/proc/{int(started.read_text())}/stat")
    wait(lambda: not process.exists() or process.read_text().split()[2] == "Z")


class Authenticating(Handler):
    """Accepts one token, and under TLS also requests without one."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        token = self.headers.get("Authorization")
        status = 200 if token == "Bearer new" or (token is None and isinstance(self.connection, ssl.SSLSocket)) else 401
        body = json.dumps({"message": "Unauthorized"}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.parametrize(
    ("rejected", "error"),
    [
        ("token", "401: Unauthorized .an unknown or expired token or client certificate"),
        ("client", "possibly because it rejects the client certificate"),
        ("server", "the certificate of .* is rejected"),
    ],
)
def test_rotated_credentials_are_loaded_once_the_server_rejects_the_old_ones(tmp_path, pauses, rejected, error):
    pairs = {name: certify(tmp_path, name) for name in ("server", "client", "old")}
    context = None
    if rejected != "token":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*pairs["server"])
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(pairs["client"][0])
    with serving(Authenticating, tls=context) as url:

        def configured(**old: str) -> Path:
            certificate, key = pairs[old.get("client", "client")]
            (tmp_path / "token").write_text("old\n" if old else "new\n")
            user = {"tokenFile": "token"}
            if context is not None:
                user = {"client-certificate": str(certificate), "client-key": str(key)}
            authority = str(pairs[old.get("server", "server")][0])
            return kubeconfig(tmp_path, {"server": url, "certificate-authority": authority}, user)

        cluster = connect(configured(**{rejected: "old"}))
        with pytest.raises((ApiRefused, Unreachable), match=error):
            cluster.get("/x")
        configured()
        cluster._renewed_s = float("-inf")  # the last renewal was a while ago
        assert cluster.get("/x")


def test_a_watch_that_is_rejected_is_begun_again_with_rotated_credentials(server: Server) -> None:
    server.answers = [answer(401, {"message": "Unauthorized"}), stream(b'{"type": "ADDED"}\n')]
    with urllib3.PoolManager() as old, urllib3.PoolManager() as new:
        cluster = KubernetesClient(
            old, server.url, lambda: {"Authorization": "old"}, renew=lambda: (new, lambda: {"Authorization": "new"})
        )
        with pytest.raises(ApiRefused, match="401"):
            watched(cluster)
        assert watched(cluster) == ["ADDED"]
    assert server.tokens == ["old", "new"]


def test_another_clusters_credentials_are_not_sent_once_the_current_context_is_another(tmp_path: Path) -> None:
    tokens: list[str | None] = []

    class Refusing(Authenticating):
        def do_GET(self) -> None:
            tokens.append(self.headers.get("Authorization"))
            super().do_GET()

    with serving(Refusing) as url:
        content = {
            "clusters": [{"name": "c", "cluster": {"server": url}}, {"name": "d", "cluster": {"server": f"{url}/d"}}],
            "users": [{"name": name, "user": {"token": name}} for name in ("old", "new")],
            "contexts": [
                {"name": "x", "context": {"cluster": "c", "user": "old"}},
                {"name": "y", "context": {"cluster": "d", "user": "new"}},
            ],
            "current-context": "x",
        }
        (tmp_path / "config").write_text(yaml.safe_dump(content))
        with pytest.raises(InputError, match=r"no connection to the Kubernetes API server.*--kubeconfig and --context"):
            connect(tmp_path / "config", "nothing")
        cluster = connect(tmp_path / "config")
        (tmp_path / "config").write_text(yaml.safe_dump({**content, "current-context": "y"}))
        with pytest.raises(ApiRefused, match="401"):
            cluster.get("/x")
    assert set(tokens) == {"Bearer old"}


@pytest.mark.parametrize("content", [None, "", "a: [", "clusters: 5", "[]"])
def test_a_kubeconfig_that_cannot_be_used(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "config"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=r"no connection to the Kubernetes API server.*config\)"):
        connect(file)


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


class Values(Tracker[tuple[str, int], int]):
    """The last value of each name, and all of them in their order."""

    key = staticmethod(lambda view: view[0])

    def __init__(self) -> None:
        super().__init__({})
        self.heard: list[int] = []

    def update(self, view: tuple[str, int], at: datetime) -> list[Event]:
        if self.known.get(view[0]) != view[1]:
            self.heard.append(view[1])
        self.known[view[0]] = view[1]
        return []


class Followed:
    """A resource followed for some rounds; ``between`` happens before each."""

    def __init__(self, api: MemoryApi, rounds: int, *between: Callable[[], object], version: str | None = None) -> None:
        self.values = Values()
        self.listings = 0
        self.waits: list[float] = []
        self._rounds = rounds
        self._between = list(between)
        self.resource = Resource("nodes", NODES, {}, _read, self.values, version)
        follow(api, self.resource, self._take, self._wait)

    def _take(self, resource: Resource, kind: ChangeKind, views: list[Any], version: str) -> None:
        self.listings += kind == "listed"
        self.values.take(kind, views, NOW)
        resource.version = version

    def _wait(self, seconds: float) -> bool:
        if seconds:
            self.waits.append(seconds)
        if self._between:
            self._between.pop(0)()
        self._rounds -= 1
        return self._rounds < 0


def _read(item: Object) -> tuple[str, int]:
    return item["metadata"]["name"], 10 // item["value"]


def item(name: str, value: int) -> dict[str, Any]:
    return {"metadata": {"name": name}, "value": value}


@pytest.fixture
def api() -> MemoryApi:
    made = MemoryApi()
    made.put(NODES, item("n", 10))
    return made


def change(api: MemoryApi, *failures: Exception) -> None:
    api.put(NODES, item("n", 5))
    api.put(NODES, item("n", 2))
    api.failures = list(failures)


def test_changes_come_once_each_also_after_a_cut(api: MemoryApi) -> None:
    cut = Unreachable("the watch was interrupted")
    seen = Followed(api, 4, lambda: None, lambda: change(api, cut), lambda: None, lambda: api.remove(NODES, "n"))
    assert (seen.values.heard, seen.values.known, seen.listings) == ([1, 2, 5], {}, 1)
    assert seen.resource.version == str(api.version), "a bookmark moves on too"


def test_the_server_was_heard_of_with_each_watch_that_it_accepts_and_not_since_it_refused(api: MemoryApi) -> None:
    def refuse() -> None:
        api.failures = [ApiRefused(403, "no")]

    began = time.monotonic()
    assert began <= Followed(api, 2).resource.heard_s <= time.monotonic()
    assert Followed(api, 2, lambda: None, refuse).resource.heard_s == float("-inf")


def test_a_forgetful_server_is_listed_again(api: MemoryApi) -> None:
    def forget() -> None:
        api.put(NODES, item("b", 5))
        api.remove(NODES, "n")
        api.forget()

    seen = Followed(api, 4, lambda: None, forget)
    assert (seen.values.known, seen.listings) == ({"b": 2}, 2)


def test_from_a_version_there_is_no_listing(api: MemoryApi) -> None:
    version = str(api.version)
    change(api)
    seen = Followed(api, 1, version=version)
    assert (seen.values.heard, seen.listings) == ([2, 5], 0)


def test_a_refusal_is_waited_out_as_long_as_asked_and_logged_once(api, caplog):
    caplog.set_level("INFO")
    api.failures = [ApiRefused(429, "slow down", 7.0), ApiRefused(403, "no"), Unreachable("gone"), Unreachable("gone")]
    seen = Followed(api, 6)
    assert seen.waits[0] == 7.0
    assert all(wait > 0 for wait in seen.waits)
    assert [record.message.split(": ", 1)[1] for record in caplog.records] == [
        "nodes cannot be followed, retrying: HTTP 429: slow down",
        "watching nodes again",
    ]


def test_an_object_that_cannot_be_read_is_left_out_and_the_rest_is_not(api, caplog):
    api.put(NODES, {"metadata": {"name": "bad"}})
    assert Followed(api, 1).values.known == {"n": 1}
    assert "unreadable 'bad'" in caplog.text


def test_a_server_that_ends_watches_immediately_is_not_asked_in_a_hurry() -> None:
    class Curt(MemoryApi):
        def watch(
            self, path: str, params: Mapping[str, str], version: str, begun: Callable[[], object]
        ) -> Iterator[Object]:
            self.asked.append("watch")
            begun()
            yield from ()

    api = Curt()
    assert len(Followed(api, 5).waits) == api.asked.count("watch") == 5
