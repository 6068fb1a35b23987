from dataclasses import replace
from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from policy.fleet import UnitView
from policy.node_tier.hysteresis import (
    HysteresisConfig,
    NodeRiskConfig,
    Thresholds,
    TierState,
    adopt,
    advance,
    explain_tier,
    read_node,
)
from policy.tiers import TIERS
from tests.policy.decide_world import HOUR, STEP, T0, THRESHOLDS, node, score

RISKS = NodeRiskConfig()


def follow(risks, *, rise_after=2, fall_after=3, every=STEP, **others):
    """The tiers of a one-GPU node that is scored again and again."""
    thresholds = Thresholds(THRESHOLDS, HysteresisConfig(rise_after, fall_after=fall_after, **others))
    state, tiers = TierState(), []
    for k, risk in enumerate(risks):
        now = T0 + k * every
        state = advance(state, read_node(node("n", risk, at=now), RISKS, now), thresholds, RISKS, now)
        tiers.append(state.tier)
    return tiers


def test_watch_comes_at_once_and_elevated_and_high_after_consecutive_decisions():
    assert follow([0.2]) == ["watch"]
    assert follow([0.4, 0.4]) == ["watch", "elevated"]
    assert follow([0.7, 0.7]) == ["watch", "high"]
    assert follow([0.7, 0.4, 0.7, 0.7]) == ["watch", "elevated", "elevated", "high"]
    assert follow([0.7, 0.01, 0.7, 0.01, 0.7]) == ["watch"] * 5


def test_a_tier_falls_only_below_its_lower_threshold_and_to_what_the_calm_still_reaches():
    assert follow([0.7, 0.7, 0.35, 0.35, 0.35]) == ["watch", "high", "high", "high", "high"]
    assert follow([0.7, 0.7, 0.2, 0.16, 0.2]) == ["watch", "high", "high", "high", "elevated"]
    assert follow([0.7, 0.7, 0.01, 0.01, 0.01]) == ["watch", "high", "high", "high", "clear"]
    assert follow([0.7, 0.7, 0.01, 0.01, 0.4, 0.01, 0.01])[-1] == "high"


def test_the_same_score_read_again_and_again_is_no_new_evidence():
    # A controller that counted its own rounds would be at `high` after two rounds of one score.
    thresholds = Thresholds(THRESHOLDS, HysteresisConfig(2))
    state = TierState()
    for minutes in range(0, 60, 5):
        now = T0 + timedelta(minutes=minutes)
        state = advance(state, read_node(node("n", 0.9), RISKS, now), thresholds, RISKS, now)
    assert state.tier == "watch"
    assert explain_tier(state, 0.9, thresholds) == (
        "from clear to watch: a risk of 90 % at 2026-03-01 00:00 UTC",
        "a risk of 90 % is high, but only 1 of 2 consecutive decisions agree",
    )


def test_evidence_after_a_gap_does_not_continue_a_streak():
    assert follow([0.7, 0.7], every=13 * HOUR) == ["watch", "watch"]
    assert follow([0.7, 0.7], every=12 * HOUR) == ["watch", "high"]


def rising(*risks):
    thresholds = Thresholds(THRESHOLDS, HysteresisConfig(1))
    return thresholds, advance(TierState(), read_node(node("n", *risks), RISKS, T0), thresholds, RISKS, T0)


def test_an_unknown_score_keeps_the_tier_until_the_last_known_one_expires_and_no_longer():
    thresholds, state = rising(0.9, 0.01)
    sick = node("n", None, 0.01, at=T0 + STEP)
    at = T0 + STEP
    assert advance(state, read_node(sick, RISKS, at), thresholds, RISKS, at).tier == "high"
    at = T0 + 2 * STEP
    fallen = advance(state, read_node(node("n", None, 0.01, at=at), RISKS, at), thresholds, RISKS, at)
    assert fallen.tier == "clear"
    assert fallen.moved == "from high to clear: the prediction on n-0 expired at 2026-03-01 12:00 UTC"


def test_an_expired_part_of_the_evidence_falls_at_once_to_what_the_rest_holds():
    thresholds, state = rising(0.9, 0.2)
    now = T0 + 2 * STEP
    later = node("n", None, 0.2, at=now)
    assert advance(state, read_node(later, RISKS, now), thresholds, RISKS, now).tier == "watch"


def test_another_device_in_the_slot_or_a_passed_diagnostic_ends_what_the_old_one_held_up():
    thresholds, state = rising(0.9, 0.01)
    now = T0 + HOUR
    old = node("n", 0.9, 0.01)
    swapped = replace(old, units=(UnitView("other", score(0.01)), old.units[1]))
    assert advance(state, read_node(swapped, RISKS, now), thresholds, RISKS, now).tier == "clear"
    repaired = replace(old, units=(replace(old.units[0], valid_from=now), old.units[1]))
    fallen = advance(state, read_node(repaired, RISKS, now), thresholds, RISKS, now)
    assert fallen.tier == "clear"
    assert fallen.moved == "from high to clear: n-0 was repaired or passed a diagnostic"


def test_scores_counted_under_a_clock_that_ran_ahead_do_not_stop_the_counting():
    thresholds = Thresholds(THRESHOLDS, HysteresisConfig(1))
    ahead = T0 + timedelta(days=3000)
    state = advance(TierState(), read_node(node("n", 0.01, at=ahead), RISKS, ahead), thresholds, RISKS, ahead)
    assert advance(state, read_node(node("n", 0.9), RISKS, T0), thresholds, RISKS, T0).tier == "high"


def test_marks_of_which_nothing_is_remembered_are_adopted_only_as_far_as_the_risk_goes():
    thresholds = Thresholds(THRESHOLDS, HysteresisConfig(2))
    for risk, tier in [(0.9, "high"), (0.31, "high"), (0.2, "elevated"), (0.01, "clear"), (None, "clear")]:
        assert adopt("high", read_node(node("n", risk), RISKS, T0), thresholds, RISKS).tier == tier
    assert adopt("elevated", read_node(node("n", 0.9), RISKS, T0), thresholds, RISKS).tier == "elevated"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0, 1, width=16), min_size=1, max_size=25), st.integers(1, 3), st.integers(1, 3),
    st.floats(0.1, 1),
)  # fmt: skip
def test_a_tier_is_only_reached_by_enough_risks_in_a_row_and_only_left_by_enough_calm(risks, rise, fall, share):
    tiers = follow(risks, rise_after=rise, fall_after=fall, fall_share=share)
    values = dict(THRESHOLDS.items())
    for k, tier in enumerate(tiers):
        before = tiers[k - 1] if k else "clear"
        if TIERS.index(tier) > TIERS.index(before):
            need = 1 if tier == "watch" else rise
            assert k + 1 >= need
            assert all(risk >= values[tier] for risk in risks[k - need + 1 : k + 1])
        if TIERS.index(tier) < TIERS.index(before):
            assert all(risk < values[before] * share for risk in risks[k - fall + 1 : k + 1])
            assert k + 1 > fall
