"""Under which names a service without tokens answers."""

import http.client
import json
from pathlib import Path

import pytest

from serving.http.limits import is_own_host
from tests.serving.http.test_guards import READ
from tests.serving.http.world import running, small_fleet, token_line, write_scores


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
    tokens.write_text(token_line("read", READ))
    with running(tmp_path / "scores", tokens=tokens) as service:
        assert ask(service.port, "predrain.example", Authorization=f"Bearer {READ}")[0] == 200
        assert ask(service.port, "predrain.example")[0] == 401
