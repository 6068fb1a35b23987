import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.drift.movement import changed_since_first, effect_of
from evaluation.drift.outcomes import (
    AlertCounts,
    count_alerts,
    count_in_windows,
    exact_interval,
    poisson_interval,
    precision_fell,
    rate_change,
)
from models.training.reference import shift_of, stability_index, summarise


def distance(before, now):
    """Slow oracle: the largest gap between the two empirical distribution functions."""
    first, second = np.asarray(before, dtype=np.float64), np.asarray(now, dtype=np.float64)
    return max(abs((first <= edge).mean() - (second <= edge).mean()) for edge in {*first.tolist(), *second.tolist()})


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-5, 20), min_size=1, max_size=200),
    st.lists(st.integers(-8, 25), min_size=1, max_size=200),
)
def test_the_distance_of_features_with_few_values_is_exactly_the_two_sample_one(before, now):
    shift = shift_of(summarise(np.array(before, dtype=np.float32)), np.array(now, dtype=np.float32))
    assert shift.ks == pytest.approx(distance(before, now), abs=2e-6)


@pytest.mark.parametrize("moved", [0.0, 0.1, 0.5, 3.0])
def test_the_distance_of_continuous_features_is_exact_to_a_knot(moved):
    rng = np.random.default_rng(1)
    before, now = rng.normal(size=4000).astype(np.float32), (rng.normal(size=3000) + moved).astype(np.float32)
    exact = distance(before, now)
    assert exact - 1 / 63 <= shift_of(summarise(before), now).ks <= exact + 1e-5


def test_the_stability_index_is_that_of_the_bins():
    reference = np.repeat([1.0, 2.0, 3.0, 4.0], [400, 300, 200, 100])
    now = np.repeat([1.0, 2.0, 3.0, 4.0], [100, 200, 300, 400])
    p, q = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])
    assert shift_of(summarise(reference), now).psi == pytest.approx(float(((q - p) * np.log(q / p)).sum()), abs=0.01)
    assert stability_index(np.array([5.0, 5.0]), np.array([5.0, 5.0])) == 0


def test_values_never_seen_before_count_even_where_the_reference_was_constant():
    constant = summarise(np.full(1000, 5.0))
    assert shift_of(constant, np.full(500, 5.0)).psi < 0.01
    for strange in (3.0, 8.0):
        assert shift_of(constant, np.full(500, strange)).psi > 5
        assert shift_of(constant, np.full(500, strange)).ks == 1


def test_what_is_missing_is_separate_from_what_moved():
    rng = np.random.default_rng(2)
    reference = rng.normal(size=5000)
    gone = np.where(rng.random(5000) < 0.4, np.nan, rng.normal(size=5000))
    shift = shift_of(summarise(reference), gone)
    assert shift.missing_before == 0
    assert shift.missing_now == pytest.approx(0.4, abs=0.03)
    assert shift.psi < 0.02
    nothing = shift_of(summarise(np.full(10, np.nan)), gone)
    assert (nothing.psi, nothing.ks, nothing.missing_before) == (0, 0, 1)


def test_the_yardstick_is_how_far_the_reference_s_own_weeks_lay_apart():
    rng = np.random.default_rng(3)
    blocks = np.repeat([0, 1, 2, 3], 500)
    steady = summarise(rng.normal(size=2000), blocks=blocks)
    restless = summarise(rng.normal(size=2000) + np.repeat([0.0, 1.0, -1.0, 0.0], 500), blocks=blocks)
    assert steady.usual_psi < 0.1
    assert restless.usual_psi > 0.5
    assert math.isnan(summarise(rng.normal(size=2000), blocks=np.zeros(2000, dtype=np.int64)).usual_psi)


def rollout(effect, everyone=0.0, nodes=24, days=30, seed=0, simultaneous=False):
    """Nodes of four units change driver between day 10 and 20; ``effect`` comes with it, ``everyone`` on day 15."""
    rng = np.random.default_rng(seed)
    day, unit = np.divmod(np.arange(days * nodes * 4), nodes * 4)
    node = unit // 4
    when = np.full(nodes, 15) if simultaneous else rng.integers(10, 21, nodes)
    changed = day >= when[node]
    values = rng.normal(size=len(day)) + rng.normal(size=nodes * 4)[unit] + effect * changed + everyone * (day >= 15)
    return changed, values, {"unit": unit, "day": day, "node": node}


def test_a_jump_that_came_with_the_driver_is_found_and_one_that_came_to_all_is_not():
    changed, values, keys = rollout(effect=1.0)
    jump = effect_of(changed, values, **keys)
    assert jump.significant
    assert jump.effect == pytest.approx(0.2, abs=0.06)
    changed, values, keys = rollout(effect=0.0, everyone=2.0)
    assert not effect_of(changed, values, **keys).significant


def test_where_all_nodes_change_on_one_day_nothing_is_claimed():
    changed, values, keys = rollout(effect=1.0, simultaneous=True)
    assert effect_of(changed, values, **keys) is None
    assert effect_of(np.zeros(len(values), dtype=bool), values, **keys) is None


def test_a_unit_has_changed_from_its_first_other_code_on():
    unit = np.array([0, 0, 0, 1, 1, 1])
    time = np.array([3, 1, 2, 1, 2, 3])
    code = np.array([1.0, 0.0, 0.0, 2.0, np.nan, 2.0])
    assert changed_since_first(unit, time, code).tolist() == [True, False, False, False, False, False]


def test_rates_are_compared_exactly():
    change = rate_change(10, 1000.0, 30, 1000.0)
    assert change.ratio == 3
    assert change.low < 3 < change.high
    assert change.p < 0.005
    even = rate_change(10, 2000.0, 5, 1000.0)
    assert even.ratio == 1
    assert even.p == pytest.approx(1.0)
    assert rate_change(0, 10.0, 0, 10.0).p == 1
    assert rate_change(0, 10.0, 3, 10.0).ratio == math.inf
    assert exact_interval(0, 0) == (0.0, 1.0)
    assert exact_interval(0, 5)[0] == poisson_interval(0)[0] == 0


def test_an_alerted_unit_counts_once_and_is_right_if_any_of_its_alerts_was():
    unit = np.array(["a", "a", "b", "b", "c", "c", "d"])
    label = np.array([0, 1, 0, 0, 0, -1, -1])
    assert count_alerts(unit, label) == AlertCounts(right=1, wrong=1, open=2)
    assert count_alerts(unit[:0], label[:0]) == AlertCounts(0, 0, 0)
    assert precision_fell(AlertCounts(40, 10, 0), AlertCounts(5, 40, 0)) < 1e-6
    assert precision_fell(AlertCounts(5, 40, 0), AlertCounts(40, 10, 0)) > 0.99
    assert precision_fell(AlertCounts(0, 0, 0), AlertCounts(4, 1, 3)) == 1


def test_alerts_are_counted_window_by_window_and_folds_too_few_for_one_are_left_out():
    folds = [(np.array(["a", "b"]), np.array([1, 0])) for _ in range(5)]
    assert count_in_windows(folds, 1) == AlertCounts(right=5, wrong=5, open=0)
    assert count_in_windows(folds, 2) == AlertCounts(right=2, wrong=2, open=0)
    assert count_in_windows([(np.array(["a"]), np.array([1])), *folds[:2]], 2) == AlertCounts(1, 1, 0)
    assert count_in_windows(folds, 6) == count_in_windows([], 1) == AlertCounts(0, 0, 0)
