"""Callers that ask too often are told when to come back; others are not held up."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.http.limits import RateLimit
from serving.http.settings import ServiceSettings
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
    tokens.write_text("".join(f"read sha256:{hashlib.sha256(each.encode()).hexdigest()} {each}\n" for each in "ab"))
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
