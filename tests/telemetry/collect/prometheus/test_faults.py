"""Faults of servers and of what stands before them: survived where they pass, reported clearly where they do not."""

import shutil
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import InputError
from foundation.http import connect_to
from telemetry.collect.prometheus.client import Bounds
from tests.http_server import certify
from tests.telemetry.collect.prometheus.fake_prometheus import (
    HOUR_MS,
    START,
    START_MS,
    Asked,
    FakePrometheus,
    Reply,
    error,
    gpu_labels,
    serving,
)
from tests.telemetry.collect.prometheus.test_backfill import TEMPERATURE, fill, landed, values_of

Fetch = Callable[..., dict[str, Any]]
JSON = {"Content-Type": "application/json"}


class Sometimes:
    """Gives a reply to every third sample query, each query once."""

    def __init__(self, reply: Callable[[], Reply]) -> None:
        self.reply = reply
        self.seen: set[tuple[str, str]] = set()
        self.given = 0

    def __call__(self, asked: Asked) -> Reply | None:
        key = (asked.parameters.get("query", ""), asked.parameters.get("time", ""))
        if not key[0] or key in self.seen:
            return None
        self.seen.add(key)
        if len(self.seen) % 3 != 1:
            return None
        self.given += 1
        return self.reply()


@pytest.mark.parametrize(
    "reply",
    [
        lambda: error(429, "slow down", **{"Retry-After": "7"}),
        lambda: error(500, "oops"),
        lambda: Reply(503, b"Service Unavailable"),
        lambda: Reply(502, b"<html>bad gateway</html>", {"Content-Type": "text/html"}),
        lambda: Reply(200, b'{"status":"success","data":{"resultType":"matrix","result":[{"metric"', JSON),
        lambda: Reply(200, b'{"status":"success","data":{"resultTy', JSON, length=5000),
        lambda: Reply(200, b"\x00\xff not json", JSON),
        lambda: Reply(200, b'{"status":"error","errorType":"internal","error":"oops"}', JSON),
    ],
    ids=["429", "500", "503", "502-html", "cut-json", "truncated", "garbage", "error-in-200"],
)
def test_what_passes_is_survived(
    fake: FakePrometheus, fetch: Fetch, tmp_path: Path, reply: Callable[[], Reply]
) -> None:
    expected = fill(fake)
    fault = Sometimes(reply)
    fake.fault = fault
    result = fetch()
    assert fault.given > 3
    assert values_of(landed(tmp_path), "gpu_temp_c") == expected
    if reply().status in (429, 500, 503):
        assert result["asked again"] >= fault.given  # a busy machine may let a whole answer time out as well


def test_a_body_that_stops_in_the_middle_is_asked_for_again_and_then_in_halves(
    fake: FakePrometheus, fetch: Fetch, tmp_path: Path
) -> None:
    expected = fill(fake, hours=1)

    def slow_when_long(asked: Asked) -> Reply | None:
        if not asked.parameters.get("query", "").endswith(f"[{HOUR_MS + 1}ms]"):
            return None
        made = fake.whole(asked)
        return Reply(made.status, made.body, made.headers, pause_s=1.5)

    fake.fault = slow_when_long
    fetch(bounds=Bounds(request_s=1.0, first_retry_for_s=60.0), end=START.replace(hour=1))
    assert values_of(landed(tmp_path), "gpu_temp_c") == {
        k: v for k, v in expected.items() if k[1] <= START_MS + HOUR_MS
    }


def test_an_outage_that_lasts_is_reported_and_the_next_run_goes_on(
    fake: FakePrometheus, fetch: Fetch, tmp_path: Path
) -> None:
    expected = fill(fake)
    fake.fault = lambda asked: error(500, "disk on fire") if len(fake.queries()) > 5 else None
    with pytest.raises(InputError) as caught:
        fetch(concurrency=1)
    text = str(caught.value)
    assert text.startswith("no usable answer for ")
    assert f"s: HTTP 500: disk on fire ({fake.url})." in text
    assert "start the same command again" in text
    fake.fault = None
    fetch()
    assert values_of(landed(tmp_path), "gpu_temp_c") == expected


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (lambda: Reply(401, b"Unauthorized"), "the server requires a login (HTTP 401: 'Unauthorized') ({url}). Give"),
        (lambda: Reply(403, b""), "the server denies access (HTTP 403: no details) ({url}). Ask for the right"),
        (
            lambda: Reply(302, b"", {"Location": "https://login.example/?next=secret"}),
            "the server redirects (HTTP 302 to https://login.example/) ({url}). Give that address if it is the same ",
        ),
        (
            lambda: error(400, "parse error: unexpected end of input"),
            "the server refuses the query (HTTP 400: parse error: unexpected end of input) ({url}). ",
        ),
    ],
    ids=["401", "403", "redirect", "bad-query"],
)
def test_what_does_not_pass_is_reported_immediately(
    fake: FakePrometheus, fetch: Fetch, reply: Callable[[], Reply], message: str
) -> None:
    fill(fake)
    fake.fault = lambda asked: reply() if len(fake.queries()) > 3 else None
    with pytest.raises(InputError) as caught:
        fetch()
    assert str(caught.value).startswith(message.format(url=fake.url))


def test_a_server_that_is_not_there_is_reported_soon(fake: FakePrometheus, fetch: Fetch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        fake.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(InputError) as caught:
            fetch()
    assert "ConnectError" in str(caught.value)
    assert str(caught.value).endswith("Check the address, and that the server runs.")


def test_credentials_and_headers_are_sent_and_no_secret_is_logged(
    fake: FakePrometheus, fetch: Fetch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake.add(TEMPERATURE, gpu_labels(0), [(START_MS, 40.0)])
    fake.fault = Sometimes(lambda: error(500, "oops"))
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    caplog.set_level("DEBUG", logger="telemetry")
    fetch(connection=connect_to(f"{fake.url}/prefix/", bearer_token_file=token, headers=["X-Scope-OrgID=hpc"]))
    assert {asked.headers["Authorization"] for asked in fake.asked} == {"Bearer s3cret"}
    assert {asked.headers["X-Scope-OrgID"] for asked in fake.asked} == {"hpc"}
    assert {asked.path.split("/api/")[0] for asked in fake.asked} == {"/prefix"}
    assert "oops; retrying" in caplog.text
    assert "works again" in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed: apt-get install openssl")
def test_only_the_given_authority_is_trusted_and_the_client_shows_its_certificate(
    fake: FakePrometheus, fetch: Fetch, tmp_path: Path
) -> None:
    public, key = certify(tmp_path, "server")
    both, login = tmp_path / "both.pem", tmp_path / "login"
    both.write_bytes(key.read_bytes() + public.read_bytes())
    login.write_text("me:secret")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(both)
    context.load_verify_locations(public)
    context.verify_mode = ssl.CERT_OPTIONAL
    secure = FakePrometheus()
    secure.add(TEMPERATURE, gpu_labels(0), [(START_MS, 40.0)])
    with serving(secure, tls=context):
        with pytest.raises(
            InputError, match=r"the secure connection failed: .*\)\. Give the authority's certificate as "
        ):
            fetch(connection=connect_to(secure.url))
        trusting = connect_to(secure.url, ca_file=public, client_cert=both, basic_auth_file=login)
        assert fetch(connection=trusting)["rows"] == 1
    assert {asked.headers["Authorization"] for asked in secure.asked} == {"Basic bWU6c2VjcmV0"}
