"""Who may ask, and how often: own names without tokens, and a rate for each caller."""

import http.client
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.http.limits import AllowedHosts, RateLimit
from serving.http.settings import ServiceSettings
from tests.serving.http.test_guards import READ, line
from tests.serving.http.world import running, small_fleet, write_scores


@given(st.floats(0.1, 50), st.integers(1, 20), st.lists(st.floats(0, 2), min_size=1, max_size=60))
def test_no_more_pass_than_rate_and_burst_allow(per_s: float, burst: int, gaps: list[float]) -> None:
    now = [0.0]
    limit = RateLimit(per_s, burst, lambda: now[0])
    passed: list[float] = []
    for gap in gaps:
        now[0] += gap
        wait_s = limit.wait_s("a")
        if wait_s:
            assert 0 < wait_s <= 1 / per_s + 1e-9
            before = now[0]
            now[0] += wait_s + 1e-6
            assert limit.wait_s("a") == 0, "who waits as long as told is let through"
            passed.append(now[0])
            assert now[0] > before
        else:
            passed.append(now[0])
        assert limit.wait_s(f"another {len(passed)} {now[0]}") == 0
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            assert last - first + 1 <= burst + (passed[last] - passed[first]) * per_s + 1e-6


def test_the_callers_remembered_are_bounded() -> None:
    limit = RateLimit(1, 1, lambda: 0.0)
    for number in range(50_000):
        assert limit.wait_s(str(number)) == 0
    assert len(limit._buckets) <= 20_000
    assert limit.wait_s("49999") == 1
    with pytest.raises(ValueError, match="give a positive rate"):
        RateLimit(0, 1)


def test_the_service_answers_429_and_when_to_come_back(tmp_path: Path) -> None:
    write_scores(tmp_path / "scores", small_fleet())
    tokens = tmp_path / "tokens"
    tokens.write_text(line("read", "a") + line("read", "b"))
    settings = ServiceSettings(rate_per_s=0.01, rate_burst=3)
    with running(tmp_path / "scores", tokens=tokens, settings=settings) as service:
        one, other, nobody = service.client("a"), service.client("b"), service.client("wrong")
        assert [one.send("GET", "/v1/nodes/n1")[0] for _ in range(4)] == [200, 200, 200, 429]
        status, told, headers = one.send("GET", "/v1/nodes/n1")
        assert (status, told["status"]) == (429, 429)
        assert 90 <= int(headers["Retry-After"]) <= 100
        assert other.send("GET", "/v1/nodes/n1")[0] == 200, "each token has its own"
        assert [nobody.send("GET", "/v1/nodes")[0] for _ in range(4)] == [401, 401, 401, 429]
        status, body, headers = nobody.send("GET", "/")
        assert status == 429
        assert "Too many requests" in body.decode()
        assert headers["Retry-After"]
        for path in ("/healthz", "/readyz"):
            assert [nobody.send("GET", path)[0] for _ in range(5)] == [200] * 5
        assert [one.send("GET", "/metrics")[0] for _ in range(5)] == [200] * 5


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        (None, True),
        ("localhost", True),
        ("LocalHost:8080", True),
        ("localhost.", True),
        ("127.0.0.1:8080", True),
        ("[::1]:8080", True),
        ("10.0.0.7", True),  # an address cannot be rebound
        ("predrain.example:80", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("predrain.example.evil", False),
        ("evil.example:80:80", False),
        ("a@localhost", False),
        ("", False),
        ("[::1", False),
        ("127.0.0.1.evil.example", False),
    ],
)
def test_only_own_names_and_addresses_are_answered(header: str | None, allowed: bool) -> None:
    hosts = AllowedHosts(["Predrain.example."])
    assert hosts.allows(header) is allowed
    assert hosts.allows(header) is allowed  # what is remembered says the same


def ask(port: int, host: str, path: str = "/v1/nodes", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path, headers={"Host": host} | headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def test_a_page_that_rebinds_its_name_reads_nothing_of_a_service_without_tokens(tmp_path: Path) -> None:
    write_scores(tmp_path / "scores", small_fleet())
    with running(tmp_path / "scores", hosts=["proxy.example"]) as service:
        for path in ("/", "/v1/nodes", "/readyz", "/metrics", "/openapi.json", "/nowhere"):
            status, content = ask(service.port, f"evil.example:{service.port}", path)
            problem = json.loads(content)
            assert (status, problem["status"]) == (421, 421)
            assert problem["detail"].startswith("this service is not 'evil.example:")
            assert problem["detail"].endswith("ask localhost, or start it with --allow-host NAME")
        assert ask(service.extender_port, "evil.example", "/healthz")[0] == 421
        for host in ("localhost", f"127.0.0.1:{service.port}", "proxy.example"):
            assert ask(service.port, host)[0] == 200
        assert ask(service.extender_port, "127.0.0.1:8081", "/healthz")[0] == 200


def test_who_shows_a_token_may_come_under_any_name(tmp_path: Path) -> None:
    write_scores(tmp_path / "scores", small_fleet())
    tokens = tmp_path / "tokens"
    tokens.write_text(line("read", READ))
    with running(tmp_path / "scores", tokens=tokens) as service:
        assert ask(service.port, "predrain.example", Authorization=f"Bearer {READ}")[0] == 200
        assert ask(service.port, "predrain.example")[0] == 401
