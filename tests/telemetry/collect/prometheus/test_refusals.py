"""Refusals: which of the servers' real messages mean less, later or never."""

import json

import pytest

from foundation.errors import InputError
from foundation.http import HttpError, retry_after_s
from telemetry.collect.prometheus.client import TooMuch, refuse

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
