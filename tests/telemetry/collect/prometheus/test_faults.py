"""Answers of servers: samples, faults that pass, refusals, and what is no answer."""

import json
import shutil
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from foundation.http import HttpError, connect_to, retry_after_s
from telemetry.collect.prometheus.client import Bounds, RawSamples, TooMuch, read_matrix, refuse, split_samples
from tests.http_server import certify
from tests.telemetry.collect.prometheus.fake_prometheus import (
    HOUR_MS,
    START,
    START_MS,
    TEMPERATURE,
    Asked,
    FakePrometheus,
    Reply,
    Site,
    error,
    fill,
    gpu_labels,
    serving,
)
from tests.waiting import free_port

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
def test_what_passes_is_survived(site: Site, reply: Callable[[], Reply]) -> None:
    expected = fill(site.fake)
    fault = Sometimes(reply)
    site.fake.fault = fault
    result = site.fetch()
    assert fault.given > 3
    assert site.values() == expected
    if reply().status in (429, 500, 503):
        assert result["asked again"] >= fault.given  # a busy machine may let a whole answer time out as well


def test_a_body_that_stops_in_the_middle_is_asked_for_again_and_then_in_halves(site: Site) -> None:
    expected = fill(site.fake, hours=1)

    def slow_when_long(asked: Asked) -> Reply | None:
        if not asked.parameters.get("query", "").endswith(f"[{HOUR_MS + 1}ms]"):
            return None
        made = site.fake.whole(asked)
        return Reply(made.status, made.body, made.headers, pause_s=1.5)

    site.fake.fault = slow_when_long
    site.fetch(bounds=Bounds(request_s=1.0, first_retry_for_s=60.0), end=START.replace(hour=1))
    assert site.values() == {k: v for k, v in expected.items() if k[1] <= START_MS + HOUR_MS}


def test_an_outage_that_lasts_is_reported_and_the_next_run_goes_on(site: Site) -> None:
    expected = fill(site.fake)
    site.fake.fault = lambda asked: error(500, "disk on fire") if len(site.fake.queries()) > 5 else None
    with pytest.raises(InputError) as caught:
        site.fetch(concurrency=1)
    text = str(caught.value)
    assert text.startswith("no usable response for ")
    assert f"s: HTTP 500: disk on fire ({site.fake.url})." in text
    assert "start the same command again" in text
    site.fake.fault = None
    site.fetch()
    assert site.values() == expected


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (lambda: Reply(401, b"Unauthorized"), "the server requires a login (HTTP 401: 'Unauthorized') ({url}). Give"),
        (lambda: Reply(403, b""), "the server denies access (HTTP 403: no details) ({url}). Ask for permission"),
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
def test_what_does_not_pass_is_reported_immediately(site: Site, reply: Callable[[], Reply], message: str) -> None:
    fill(site.fake)
    site.fake.fault = lambda asked: reply() if len(site.fake.queries()) > 3 else None
    with pytest.raises(InputError) as caught:
        site.fetch()
    assert str(caught.value).startswith(message.format(url=site.fake.url))


def test_a_server_that_is_not_there_is_reported_soon(site: Site) -> None:
    site.fake.url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(InputError) as caught:
        site.fetch()
    assert "ConnectError" in str(caught.value)
    assert str(caught.value).endswith("Check the address, and that the server runs.")


def test_credentials_and_headers_are_sent_and_no_secret_is_logged(site, tmp_path, caplog):
    site.fake.add(TEMPERATURE, gpu_labels(0), [(START_MS, 40.0)])
    site.fake.fault = Sometimes(lambda: error(500, "oops"))
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    caplog.set_level("DEBUG", logger="telemetry")
    site.fetch(
        connection=connect_to(f"{site.fake.url}/prefix/", bearer_token_file=token, headers=["X-Scope-OrgID=hpc"])
    )
    assert {asked.headers["Authorization"] for asked in site.fake.asked} == {"Bearer s3cret"}
    assert {asked.headers["X-Scope-OrgID"] for asked in site.fake.asked} == {"hpc"}
    assert {asked.path.split("/api/")[0] for asked in site.fake.asked} == {"/prefix"}
    assert "oops; retrying" in caplog.text
    assert "recovered" in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed: apt-get install openssl")
def test_only_the_given_authority_is_trusted_and_the_client_shows_its_certificate(site: Site, tmp_path: Path) -> None:
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
            site.fetch(connection=connect_to(secure.url))
        trusting = connect_to(secure.url, ca_file=public, client_cert=both, basic_auth_file=login)
        assert site.fetch(connection=trusting)["rows"] == 1
    assert {asked.headers["Authorization"] for asked in secure.asked} == {"Basic bWU6c2VjcmV0"}


MEANINGS = {"too much": TooMuch, "later": HttpError, "wrong": InputError}


@pytest.mark.parametrize(
    ("status", "text", "meaning"),
    [
        (422, "query processing would load too many samples into memory in query execution", "too much"),
        (503, "query timed out in expression evaluation", "too much"),
        (503, "Service Unavailable", "later"),
        (504, "gateway time-out", "too much"),
        (422, "error when executing query: cannot select more than -search.maxSamplesPerQuery=1 samples", "too much"),
        (400, "the query time range exceeds the limit (query length: 800h, limit: 721h)", "too much"),
        (500, "rpc error: code = ResourceExhausted desc = exceeded series limit", "too much"),
        (422, "expanding series: proxy Series(): rpc error: code = Unavailable desc = deadline exceeded", "later"),
        (422, "expanding series: dial tcp 10.0.0.1:10901: connect: connection refused", "later"),
        (429, "too many outstanding requests", "later"),
        (500, "oops", "later"),
        (400, 'invalid parameter "query": parse error: unexpected character', "wrong"),
        (418, "teapot", "wrong"),
    ],
)
def test_meanings(status: int, text: str, meaning: str) -> None:
    with pytest.raises(MEANINGS[meaning]):
        refuse(status, json.dumps({"error": text}).encode(), url="http://prom", retry_after=None)


def test_the_waiting_time_is_read_as_seconds_and_bounded() -> None:
    headers = (None, " 7 ", "86400", "Thu, 01 Jan 2026 00:00:30 GMT")
    assert [retry_after_s(header) for header in headers] == [None, 7, 300, None]


def test_a_reason_at_the_end_of_a_long_text_counts_and_is_shown() -> None:
    text = f"error when exporting data for query={'x' * 900}: cannot select more than -search.maxSamplesPerQuery=100"
    body = json.dumps({"status": "error", "error": text}).encode()
    with pytest.raises(TooMuch) as caught:
        refuse(422, body, url="http://vm", retry_after=None)
    assert str(caught.value).endswith("cannot select more than -search.maxSamplesPerQuery=100")
    assert len(str(caught.value)) < 320


label = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(['"values":[[1,"2"]]', "]]", "[["])
number = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers(0, 10**25).map(str),
    st.sampled_from(["NaN", "+Inf", "-Inf", "0", "-0", "1e-320", "1.7976931348623157e+308", "9223372036854775794"]),
)
instant = st.integers(0, 4_000_000_000_000).map(lambda ms: ms // 1000 if ms % 1000 == 0 else round(ms / 1000, 3))
series = st.fixed_dictionaries(
    {
        "metric": st.dictionaries(label, label, max_size=3),
        "values": st.lists(st.tuples(instant, number).map(list), max_size=5),
    }
)
SPELLINGS: list[dict[str, Any]] = [{}, {"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}]


def read(text: str) -> RawSamples:
    rest, arrays = split_samples(text.encode())
    return read_matrix(orjson.loads(rest)["data"], arrays)


@given(st.lists(series | st.just({"metric": {"a": "b"}, "histograms": [[1, {"count": "3"}]]}), max_size=4), st.data())
def test_samples_are_those_of_plain_json(result: list[Any], data: st.DataObject) -> None:
    spelling = data.draw(st.sampled_from(SPELLINGS))
    matrix = read(json.dumps({"data": {"resultType": "matrix", "result": result}}, **spelling))
    assert matrix.labels == [entry["metric"] for entry in result]
    expected = [(n, round(t * 1000), float(v)) for n, entry in enumerate(result) for t, v in entry.get("values", [])]
    assert list(zip(matrix.index.tolist(), matrix.ms.tolist(), strict=True)) == [row[:2] for row in expected]
    assert np.array_equal(matrix.values, np.array([row[2] for row in expected]), equal_nan=True)


def test_an_instant_beyond_all_time_costs_no_other_sample() -> None:
    entry = {"metric": {}, "values": [[1e300, "2"], [1767225600.5, "3"], [-1e17, "4"]]}
    matrix = read(json.dumps({"data": {"resultType": "matrix", "result": [entry]}}))
    assert [(ms, value) for ms, value in zip(matrix.ms, matrix.values, strict=True) if 0 < ms < 2**52] == [
        (1_767_225_600_500, 3.0)
    ]


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {"resultType": "vector", "result": []},
        {"resultType": "matrix", "result": {"metric": {}}},
        {"resultType": "matrix", "result": [[]]},
        {"resultType": "matrix", "values": [[1, "2"]], "result": []},
        *(
            {"resultType": "matrix", "result": [entry]}
            for entry in (
                {"metric": {}, "values": [[1, "x"]]},
                {"metric": {}, "values": [[1, "2"], ["3"]]},
                {"metric": {}, "values": [[1, "2", "3"]]},
                {"metric": {}, "values": [[1, {"a": "2"}]]},
                {"metric": {}, "values": [1, "2"]},
                {"metric": {}, "values": "values"},
                {"metric": 5, "values": [[1, "2"]]},
                {"metric": {"a": ["b"]}, "values": [[1, "2"]]},
                {"values": [[1, "2"]]},
            )
        ),
    ],
)
def test_what_is_no_matrix_is_refused(data: Any) -> None:
    with pytest.raises((ValueError, KeyError)):
        read(json.dumps({"data": data}))


@pytest.mark.parametrize(
    "piece", ['"values":[[', '"values":[[1,"2"]', '"values":[[{', '"values":[['.replace("[[", "[ [")]
)
def test_a_hostile_answer_takes_no_more_than_linear_time(piece: str) -> None:
    began = time.perf_counter()
    with pytest.raises((ValueError, KeyError)):
        read('{"data":' + piece * 200_000 + "]]}")
    assert time.perf_counter() - began < 5
