from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.thresholds import Evidence, drains_begun, for_precisions

HOUR = 3_600_000


def one_by_one(unit, time, repeat_ms):
    """The rule, alert after alert."""
    began: dict[int, int] = {}
    out = []
    for who, when in zip(unit.tolist(), time.tolist(), strict=True):
        out.append(who not in began or when - began[who] > repeat_ms or repeat_ms == 0)
        if out[-1]:
            began[who] = when
    return out


@given(
    alerts=st.sets(st.tuples(st.integers(-3, 9), st.integers(0, 40)), max_size=60),
    repeat=st.integers(0, 20),
    first=st.sampled_from([0, -7, 500_000]),
)
def test_a_unit_is_not_drained_again_within_the_horizon_of_a_drain(alerts, repeat, first):
    ordered = sorted(alerts)
    unit = np.array([who for who, _ in ordered], dtype=np.int64)
    time = np.array([(when + first) * HOUR for _, when in ordered], dtype=np.int64)
    assert drains_begun(unit, time, repeat * HOUR).tolist() == one_by_one(unit, time, repeat * HOUR)


def test_a_promise_counts_drains_by_their_first_alert():
    """Eighty units alerted four times each; the failure follows the last alert only, or already the first."""
    unit, time = np.repeat(np.arange(80), 4), np.tile(np.arange(4) * 6 * HOUR, 80)
    risk = np.full(320, 0.9)
    quiet = np.zeros(3200)
    rows = np.r_[unit, np.repeat(np.arange(100, 900), 4)], np.r_[time, np.tile(np.arange(4) * 6 * HOUR, 800)]
    for first_hit, promised in ((0, True), (3, False)):
        hit = np.r_[np.tile(np.arange(4) >= first_hit, 80), quiet > 0]
        data = Evidence(np.r_[risk, quiet], hit, *rows, np.where(hit, rows[0], -1), 24 * HOUR)
        (decision,) = for_precisions(data, (0.85,), 0.9)
        assert decision.promised is promised
        assert decision.bound.alerts == 80
        assert decision.bound.hits == (80 if promised else 0)
        if promised:
            assert decision.drains_per_decision == pytest.approx(20)
            assert decision.recall == 1.0
