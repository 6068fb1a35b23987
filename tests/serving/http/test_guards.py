"""Who may ask, how much, and what is told of it: tokens, limits, bodies, metrics, the log, the OpenAPI document."""

import contextlib
import http.client
import io
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foundation.errors import InputError
from serving.http.limits import ServiceSettings, is_own_host
from serving.http.middleware import ScopedTokens
from serving.logs import AccessLog
from serving.service import Service
from tests.serving.http.world import Running, record, routes_of, running, small_fleet, token_line
from tests.serving.score_folder import write_scores
from tests.waiting import wait

READ, WRITE, ADMIN = "read-token-0123456789", "write-token-0123456789", "admin-token-0123456789"
OPEN = {"/healthz", "/readyz", "/ping", "/openapi.json", "/page/{file}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scores")
    write_scores(folder, small_fleet())
    return folder


@pytest.fixture(scope="module")
def log() -> io.StringIO:
    return io.StringIO()


@pytest.fixture(scope="module")
def guarded(folder: Path, log: io.StringIO, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text(
        "# who asks\n"
        + token_line("read", READ, "the scheduler")
        + token_line("write", WRITE)
        + token_line("admin", ADMIN)
    )
    limits = ServiceSettings(body_bytes=100_000, decoded_bytes=200_000, rows=50, body_timeout_s=60, poll_s=0.1)
    with running(folder, tokens=tokens, settings=limits, log=AccessLog(log)) as started:
        yield started


def begun(service: Running, path: str = "/v1/predict", sent: bytes = b"", length: int = 40) -> socket.socket:
    """A request whose body is longer than what is sent of it."""
    connection = socket.create_connection(("127.0.0.1", service.port), timeout=60)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + sent)
    return connection


def test_a_request_without_a_token_or_with_a_wrong_one_is_401_and_out_of_scope_403(guarded: Running) -> None:
    for path in ("/v1/nodes", "/v1/nodes/n1", "/metrics"):
        for token in (None, "wrong-token-0123456789"):
            status, problem, headers = guarded.client(token).send("GET", path)
            assert status == 401
            assert headers["WWW-Authenticate"] == 'Bearer realm="predrain"'
            assert problem["detail"] == "send one of the service's tokens: `Authorization: Bearer TOKEN`"
        status, problem, _ = guarded.client(WRITE).send("GET", path)
        assert (status, problem["detail"]) == (403, "this token lacks the scope read")
        assert guarded.client(READ).send("GET", path)[0] == 200
        assert guarded.client(ADMIN).send("GET", path)[0] == 200
    for path in ("/v1/predict", "/invocations"):
        assert guarded.client().send("POST", path, {"nodes": ["n1"]})[0] == 401
        assert guarded.client(WRITE).send("POST", path, {"nodes": ["n1"]})[0] == 403


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", f"Basic {READ}", READ, f"Bearer {READ}x", "Bearer \xe9"])
def test_a_header_that_is_no_bearer_token_is_401(guarded: Running, header: str) -> None:
    assert guarded.client().send("GET", "/v1/nodes", Authorization=header)[0] == 401


def test_the_token_file_may_change_while_the_service_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tokens"
    path.write_text(token_line("read,write", READ))
    tokens = ScopedTokens(path)
    grant = tokens.grant(f"bearer {READ}")
    assert (grant.covers("read"), grant.covers("write"), grant.covers("admin")) == (True, True, False)
    assert grant.name == "line 1"
    path.write_text(token_line("admin", ADMIN, "me"))
    assert tokens.grant(f"Bearer {READ}") is None
    assert tokens.grant(f"Bearer {ADMIN}") is not None
    path.unlink()
    assert tokens.grant(f"Bearer {ADMIN}") is not None
    assert "the previous tokens stay valid" in caplog.text


@pytest.mark.parametrize("others", ["", "\n# nobody\n", "nonsense\n", "read no-digest\n"])
def test_a_token_that_was_taken_out_of_the_file_is_never_valid_again(tmp_path: Path, others: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(token_line("read", READ) + token_line("admin", ADMIN))
    tokens = ScopedTokens(path)
    for left in (others + token_line("admin", ADMIN), others):
        path.write_text(left)
        assert tokens.grant(f"Bearer {READ}") is None
        assert (tokens.grant(f"Bearer {ADMIN}") is not None) == (ADMIN in left or "admin" in left)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("# none\n\n", r"no token \(.*tokens\)\. Write lines of `SCOPE\[,SCOPE\] sha256:HEX"),
        ("secret-token-that-stands-alone\n", r"tokens, line 1\)\. Choose from read, write, admin\. Write lines of"),
        ("read secret-token\n", r"no SHA-256 of a token \(.*tokens, line 1\)"),
        (f"read sha256:secret{'z' * 58}\n", r"no SHA-256 of a token \(.*tokens, line 1\)"),
        (token_line("read", READ) + token_line("admin", READ), r"a duplicate token \(.*tokens, line 2\)"),
    ],
)
def test_a_wrong_token_file_is_refused_without_repeating_what_may_be_a_token(tmp_path, content, message):
    (tmp_path / "tokens").write_text(content)
    with pytest.raises(InputError, match=message) as error:
        ScopedTokens(tmp_path / "tokens")
    assert "secret" not in str(error.value)
    assert READ not in str(error.value)


def test_a_body_that_is_too_large_is_refused_before_it_is_read(guarded: Running) -> None:
    client = guarded.client(READ)
    status, problem, headers = client.send("POST", "/v1/predict", b"", Content_Length="100001")
    assert (status, problem["detail"]) == (413, "the body is larger than 100000 bytes: send a smaller one")
    assert headers["Connection"] == "close"
    client.connection.close()
    chunked = guarded.client(READ)
    chunked.connection.request(
        "POST",
        "/v1/predict",
        body=iter([b"x" * 60_000] * 2),
        headers=chunked.headers | {"Content-Type": "application/json"},
        encode_chunked=True,
    )
    assert chunked.connection.getresponse().status == 413


def test_a_body_that_comes_too_slowly_is_408_and_a_slow_head_is_cut_off(folder: Path) -> None:
    with running(folder, settings=ServiceSettings(body_timeout_s=0.5, head_timeout_s=1)) as service:
        client = service.client()
        status, problem, _ = client.send("POST", "/v1/predict", b"{", Content_Length="10")
        assert (status, problem["detail"]) == (408, "the body did not arrive within 0.5 s")
        client.connection.close()
        with socket.create_connection(("127.0.0.1", service.port), timeout=60) as slow:
            slow.sendall(b"GET /healthz HTT")
            with contextlib.suppress(ConnectionResetError):
                assert slow.recv(10) == b""


def test_a_body_of_two_lengths_is_refused_and_what_follows_it_is_nobodys_request(guarded: Running) -> None:
    head = f"POST /v1/predict HTTP/1.1\r\nHost: l\r\nAuthorization: Bearer {READ}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: 40\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode())
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: l\r\n\r\n")
        response = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := connection.recv(4096):
                response += chunk
    assert response.startswith(b"HTTP/1.1 400 ")
    assert b"send Content-Length or Transfer-Encoding, not both" in response
    assert response.count(b"HTTP/1.1") == 1


def test_a_client_that_goes_away_harms_nobody(guarded: Running) -> None:
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=60) as gone:
        head = f"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\nAuthorization: Bearer {READ}\r\n"
        gone.sendall(f"{head}Content-Type: application/json\r\n\r\n{{".encode())
    assert guarded.client().get("/healthz") == b"ok\n"


def test_a_client_that_does_not_read_its_answer_loses_its_place(folder: Path) -> None:
    with running(folder, settings=ServiceSettings(body_timeout_s=0.3)) as service:
        body = json.dumps({"nodes": ["n1"] * 10_000}).encode()
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.settimeout(20)
            deaf.connect(("127.0.0.1", service.port))
            head = "POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            deaf.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            wait(lambda: service.active == 1)
            wait(lambda: service.active == 0)
        page = service.client().get("/metrics").decode()
        assert 'predrain_http_requests_total{route="/v1/predict",status="499"} 1.0' in page


def test_a_body_with_a_content_encoding_is_refused(guarded: Running) -> None:
    status, problem, _ = guarded.client(READ).send("POST", "/v1/predict", b"\x1f\x8b", Content_Encoding="gzip")
    assert (status, problem["detail"]) == (415, "send the body without a content encoding")


def test_more_requests_at_a_time_than_allowed_get_503_with_retry_after(folder: Path) -> None:
    with running(folder, settings=ServiceSettings(concurrent_reads=2, poll_s=0.1)) as service:
        sockets = [begun(service) for _ in range(2)]  # two whose bodies never come
        client = service.client()
        wait(lambda: client.send("GET", "/v1/nodes")[0] == 503)
        status, problem, headers = client.send("GET", "/v1/nodes")
        assert (status, problem["detail"], headers["Retry-After"]) == (503, "too many concurrent requests", "2")
        for path in ("/healthz", "/readyz", "/metrics"):
            assert client.send("GET", path)[0] == 200
        for connection in sockets:
            connection.close()
        wait(lambda: client.send("GET", "/v1/nodes")[0] == 200)


def test_a_flood_without_a_token_holds_up_nobody_who_shows_one(folder: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(token_line("read", READ))
    with running(folder, tokens=tokens, settings=ServiceSettings(concurrent_anonymous=4)) as service:
        # those of no token are refused at once, those of open routes wait for their body
        flood = [begun(service, path, b"t") for path in ("/openapi.json", "/v1/predict") * 150]
        client, stranger = service.client(READ), service.client()
        paths = [path for path in ("/v1/nodes", "/v1/nodes/n1", "/") for _ in range(5)]
        assert [client.send("GET", path)[0] for path in paths] == [200] * 15
        assert client.post("/v1/predict", {"nodes": ["n1"]})["nodes"][0]["tier"] == "high"
        assert stranger.send("GET", "/healthz")[0] == 200
        for connection in flood:
            connection.close()


def test_bodies_in_memory_are_bounded_over_all_requests(folder: Path) -> None:
    with running(folder, settings=ServiceSettings(held_bytes=10_000, body_timeout_s=60)) as service:
        body = json.dumps({"nodes": ["n1"] * 1200}).encode()
        first = begun(service, sent=body[:-1], length=len(body))
        client = service.client()
        wait(lambda: client.send("POST", "/v1/predict", body)[0] == 503)
        response = client.send("POST", "/v1/predict", body)
        assert response[1]["detail"] == "too many bodies are in memory"
        assert client.send("GET", "/openapi.json")[0] == 200  # an answer is made already: refusing it frees nothing
        assert client.send("GET", "/nothing")[0] == 404
        # nor do they stop the extender, which kube-scheduler waits for
        response = service.extender().post("/scheduler/filter", {"NodeNames": ["n1"] * 900})
        assert response["NodeNames"] == ["n1"]
        first.close()
        wait(lambda: client.send("POST", "/v1/predict", body)[0] == 200)  # one body is always taken


def test_a_fault_of_ours_is_a_problem_that_tells_nothing(guarded: Running, caplog: pytest.LogCaptureFixture) -> None:
    fleet = guarded.service.score_cache.served.fleet
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet, "states", lambda _: 1 / 0)
        status, problem, _ = guarded.client(READ).send("GET", "/v1/nodes")
    assert status == 500
    assert "ZeroDivisionError" not in json.dumps(problem)
    assert problem["detail"].split()[-1] in caplog.text


def test_metrics_are_read_by_prometheus_and_their_labels_are_bounded(guarded: Running) -> None:
    client = guarded.client(READ)
    for number in range(20):
        client.send("GET", f"/v1/nodes/n{number}")
        client.send("GET", f"/nowhere/{number}")
    page = client.get("/metrics").decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    requests = {
        (sample.labels["route"], sample.labels["status"]): sample.value
        for sample in families["predrain_http_requests"].samples
    }
    assert requests["/v1/nodes/{node}", "200"] >= 5
    assert requests["/v1/nodes/{node}", "404"] >= 15
    assert requests["unmatched", "404"] >= 20
    ports = (guarded.service.api, guarded.service.extender)
    known = {route.path_format for port in ports for route in routes_of(port)}
    assert {route for route, _ in requests} <= known | {"unmatched"}
    latency = families["predrain_http_request_duration_seconds"]
    counts = {sample.labels["route"]: sample.value for sample in latency.samples if sample.name.endswith("_count")}
    assert counts["unmatched"] == sum(value for (route, _), value in requests.items() if route == "unmatched")
    tiers = {sample.labels["tier"]: sample.value for sample in families["predrain_units"].samples}
    assert tiers == {"clear": 5, "watch": 1, "elevated": 1, "high": 1, "unknown": 1}
    assert families["predrain_scores_age_seconds"].samples[0].value == 3600
    assert families["predrain_ready"].samples[0].value == 1
    assert {sample.value for sample in families["predrain_sample_age_seconds"].samples} == {4200}


def test_the_log_holds_a_line_a_request_and_no_secret(guarded: Running, log: io.StringIO) -> None:
    client = guarded.client(READ)
    client.send("GET", "/v1/nodes?decision=query-secret")
    client.send("GET", "/x\ny".replace("\n", "%0A"))
    client.send("POST", "/v1/predict", {"nodes": ["body-secret"]})
    wait(lambda: '"/x\\ny"' in log.getvalue() and '"/v1/predict"' in log.getvalue().splitlines()[-1])
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    last = lines[-1]
    assert [last[key] for key in ("method", "route", "status")] == ["POST", "/v1/predict", 200]
    assert last["token"] == "the scheduler"
    assert last["client"] == "127.0.0.1"
    assert last["bytes_in"] == len(b'{"nodes": ["body-secret"]}')
    for secret in (READ, WRITE, ADMIN, "query-secret", "body-secret", "wrong-token"):
        assert secret not in log.getvalue()


def test_a_log_that_nobody_reads_holds_up_no_answer() -> None:
    class Stuck(io.StringIO):
        free = threading.Event()

        def write(self, text: str) -> int:
            self.free.wait(20)
            return super().write(text)

    stream = Stuck()
    written = AccessLog(stream)
    for _ in range(10_500):
        written.write(method="GET", path="/", route="/", status=200, seconds=0.1, bytes_in=0, token=None, client=None)
    assert 400 <= written.dropped <= 500
    stream.free.set()
    written.close()


def test_the_document_describes_who_may_ask_and_every_refusal(guarded: Running) -> None:
    content = guarded.client().get("/openapi.json")
    described = {
        (path, method): operation for path, methods in content["paths"].items() for method, operation in methods.items()
    }
    assert len(described) == len(list(routes_of(guarded.service.api)))
    for (path, method), operation in described.items():
        status = guarded.client().send(method.upper(), service_path(path))[0]
        assert {str(status), f"{status // 100}XX"} & operation["responses"].keys(), (path, status)
        assert (status == 401) == bool(operation.get("security")) == (path not in OPEN)
        assert "HTTPValidationError" not in json.dumps(operation)
    references = {part.split('"')[0] for part in json.dumps(content).split('"#/components/schemas/')[1:]}
    assert references <= content["components"]["schemas"].keys()


def service_path(path: str) -> str:
    return path.replace("{node}", "n1").replace("{gpu}", "GPU-n1-0").replace("{file}", "style.css")


def test_ready_tells_stale_scores_and_warns_of_a_scoring_that_fails(tmp_path: Path) -> None:
    write_scores(tmp_path, [record("g", "n", None)])
    (tmp_path / "status.json").write_text(json.dumps({"error": "no telemetry"}))
    limits = replace(ServiceSettings(), stale_after_s=3599.0, poll_s=0.05)
    service = Service(tmp_path, settings=limits, log=AccessLog(None))
    assert service.why_not_ready() == ["no scores can be served: the scores have not been read yet"]
    with running(tmp_path, settings=limits) as started:
        status, ready, _ = started.client().send("GET", "/readyz")
        assert status == 503
        assert ready["reasons"] == [
            "no unit has a known risk: check the telemetry",
            "the scores of 20260101T060000Z are stale, 3600 s old: score the fleet again",
        ]
        assert ready["warnings"] == ["the last attempt to score failed: no telemetry"]
    service.close()


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        (None, True),
        ("LocalHost:8080", True),
        ("[::1]:8080", True),
        ("10.0.0.7", True),  # an address cannot be rebound
        ("predrain.example:80", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("a@localhost", False),
        ("", False),
        ("[::1", False),
    ],
)
def test_only_own_names_and_addresses_are_answered(header: str | None, allowed: bool) -> None:
    assert is_own_host(header, ["Predrain.example."]) is allowed


def ask(port: int, host: str, path: str = "/v1/nodes", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path, headers={"Host": host} | headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, content


def test_a_page_that_rebinds_its_name_reads_nothing_of_a_service_without_tokens(tmp_path: Path) -> None:
    write_scores(tmp_path / "scores", small_fleet())
    with running(tmp_path / "scores", hosts=["proxy.example"]) as service:
        for path in ("/", "/v1/nodes", "/readyz", "/metrics", "/openapi.json", "/nowhere"):
            status, content = ask(service.port, f"evil.example:{service.port}", path)
            problem = json.loads(content)
            assert (status, problem["status"]) == (421, 421)
            assert problem["detail"].startswith("host 'evil.example:")
            assert problem["detail"].endswith("use localhost, or start the service with --allow-host NAME")
        assert ask(service.extender_port, "evil.example", "/healthz")[0] == 421
        for host in ("localhost", f"127.0.0.1:{service.port}", "proxy.example"):
            assert ask(service.port, host)[0] == 200
        assert ask(service.extender_port, "127.0.0.1:8081", "/healthz")[0] == 200


def test_who_shows_a_token_may_come_under_any_name(tmp_path: Path) -> None:
    write_scores(tmp_path / "scores", small_fleet())
    tokens = tmp_path / "tokens"
    tokens.write_text(token_line("read", READ))
    with running(tmp_path / "scores", tokens=tokens) as service:
        assert ask(service.port, "predrain.example", Authorization=f"Bearer {READ}")[0] == 200
        assert ask(service.port, "predrain.example")[0] == 401
