"""Long jobs say how far they are, also where there is no terminal."""

import re

import pytest

from predrain import console
from predrain.console import progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_a_long_job_says_now_and_then_how_far_it_is_how_fast_and_how_long_still(clock, capsys):
    with progress("features") as advance:
        advance(2_000_000, 10_000_000)  # an earlier run had done so much
        for step in range(1, 61):
            clock[0] += 1
            advance(2_000_000 + 50_000 * step, 10_000_000)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "predrain: features: 3,500,000 of 10,000,000 (35%), 50,000 a second, about 0:02:10 left",
        "predrain: features: 5,000,000 of 10,000,000 (50%), 50,000 a second, about 0:01:40 left",
    ]


def test_slow_and_standing_jobs_are_reported_too(clock, capsys):
    with progress("backtest") as advance:
        advance(0, 12)
        clock[0] += 40
        advance(0, 12)
        clock[0] += 40
        advance(1, 12)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "predrain: backtest: 0 of 12 (0%)"
    assert re.fullmatch(r"predrain: backtest: 1 of 12 \(8%\), 0\.013 a second, about 0:14:40 left", second)
