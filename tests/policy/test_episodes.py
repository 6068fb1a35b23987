"""Episodes: which alerts open one, by the rule read alert after alert, and which units may open another."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.backtest.frames import newly_alerted
from evaluation.backtest.threshold_choice import ScoredDecisions, for_precisions
from policy.episodes import NEW_EVIDENCE, openings

HOUR = 3_600_000
ROWS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 12), st.sampled_from([0.01, 0.02, 0.04, 0.3, float("nan")])),
    unique_by=lambda row: row[:2], max_size=50,
)  # fmt: skip


def one_by_one(unit, time, reach):
    """The rule, alert after alert."""
    opened_at: dict[int, int] = {}
    out = []
    for who, when in zip(unit.tolist(), time.tolist(), strict=True):
        out.append(who not in opened_at or when - opened_at[who] > reach or reach == 0)
        if out[-1]:
            opened_at[who] = when
    return out


@given(
    alerts=st.lists(st.tuples(st.integers(-3, 9), st.integers(0, 40)), unique=True, max_size=60),
    reach=st.integers(0, 20),
    first=st.sampled_from([0, -7, 500_000]),
)
def test_a_unit_opens_its_next_episode_when_the_last_is_over_in_any_order_of_rows(alerts, reach, first):
    def opened(listed, kernel):
        unit = np.array([who for who, _ in listed], dtype=np.int64)
        time = np.array([(when + first) * HOUR for _, when in listed], dtype=np.int64)
        return dict(zip(listed, kernel(unit, time, reach * HOUR), strict=True))

    assert opened(alerts, openings) == opened(sorted(alerts), one_by_one)


def choose(rows, budget, reach, cooldown):
    """The rule of selection, time after time; four times are a day."""
    last: dict[int, tuple[int, float]] = {}
    chosen = set()
    for now in sorted({when for _, when, _ in rows}):
        left = budget - sum(now - at < 4 for at, _ in last.values())
        for who, when, risk in sorted(rows, key=lambda row: (row[1], rank_of(row))):
            at, level = last.get(who, (-1000, 0.0))
            new = now - at > reach and risk >= NEW_EVIDENCE * level
            if when == now and left > 0 and (now - at > max(reach, cooldown) or new):
                last[who] = now, risk
                chosen.add((who, now))
                left -= 1
    return chosen


def rank_of(row):
    return (1.0 if np.isnan(row[2]) else -row[2], row[0])


def selected(rows, budget, reach, cooldown):
    ranked = sorted(rows, key=rank_of)
    unit, time = (np.array([row[at] for row in rows], dtype=np.int64) for at in (0, 1))
    rank, risk = np.array([ranked.index(row) for row in rows], dtype=np.int64), np.array([row[2] for row in rows])
    step = 6 * HOUR
    alert = newly_alerted(unit, time * step, rank, risk, budget, reach_ms=reach * step, cooldown_ms=cooldown * step)
    return {(who, when) for (who, when, _), taken in zip(rows, alert, strict=True) if taken}


@given(
    rows=ROWS, budget=st.integers(1, 3), reach=st.integers(0, 5), cooldown=st.integers(0, 9), until=st.integers(0, 12)
)
def test_selection_follows_the_rule_causally_and_each_alert_opens_an_episode(rows, budget, reach, cooldown, until):
    alerts = selected(rows, budget, reach, cooldown)
    assert alerts == choose(rows, budget, reach, cooldown)
    known = [row for row in rows if row[1] <= until]
    assert selected(known, budget, reach, cooldown) == {alert for alert in alerts if alert[1] <= until}
    unit, time = (np.array([alert[at] for alert in sorted(alerts)], dtype=np.int64) for at in (0, 1))
    assert openings(unit, time, reach).all()


def test_a_promise_counts_drains_by_their_first_alert():
    """Eighty units alerted four times each; the failure follows the last alert only, or already the first."""
    unit, time = np.repeat(np.arange(80), 4), np.tile(np.arange(4) * 6 * HOUR, 80)
    risk = np.full(320, 0.9)
    quiet = np.zeros(3200)
    rows = np.r_[unit, np.repeat(np.arange(100, 900), 4)], np.r_[time, np.tile(np.arange(4) * 6 * HOUR, 800)]
    for first_hit, promised in ((0, True), (3, False)):
        hit = np.r_[np.tile(np.arange(4) >= first_hit, 80), quiet > 0]
        data = ScoredDecisions(np.r_[risk, quiet], hit, *rows, *[np.where(hit, rows[0], -1)] * 2, 24 * HOUR)
        (decision,) = for_precisions(data, (0.85,), 0.9)
        assert decision.promised is promised
        assert decision.bound.alerts == 80
        assert decision.bound.hits == (80 if promised else 0)
        if promised:
            assert decision.drains_per_decision == pytest.approx(20)
            assert decision.recall == 1.0
