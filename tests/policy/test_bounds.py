import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from evaluation.backtest.threshold_choice import clusters_needed
from policy.bounds import binomial_lower, precision_bound


@settings(deadline=None, max_examples=60)
@given(trials=st.integers(1, 800), share=st.floats(0, 1), confidence=st.sampled_from([0.8, 0.9, 0.975]))
def test_the_binomial_bound_is_clopper_and_pearsons(trials, share, confidence):
    hits = round(share * trials)
    expected = stats.binomtest(hits, trials, alternative="greater").proportion_ci(confidence, method="exact").low
    assert binomial_lower(hits, trials, confidence) == pytest.approx(expected, abs=1e-8)


def test_independent_alerts_get_the_exact_bound():
    hit = np.arange(50) < 45
    bound = precision_bound(hit, np.arange(50), 0.9)
    assert bound.effective == pytest.approx(50, rel=0.03)
    assert bound.lower == pytest.approx(binomial_lower(45, 50, 0.9), abs=0.005)


def test_alerts_of_one_unit_count_once_even_if_all_were_right():
    bound = precision_bound(np.ones(400, bool), np.repeat(np.arange(10), 40), 0.9)
    assert bound.effective == pytest.approx(10)
    assert bound.lower == pytest.approx(0.1 ** (1 / 10))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), confidence=st.sampled_from([0.8, 0.9]))
def test_the_bound_lies_below_the_precision_and_falls_with_the_confidence(seed, confidence):
    rng = np.random.default_rng(seed)
    cluster = rng.integers(0, 1 + rng.integers(1, 40), rng.integers(1, 200))
    hit = rng.random(len(cluster)) < rng.random()
    bound = precision_bound(hit, cluster, confidence)
    assert 0 <= bound.lower <= bound.precision
    assert bound.effective <= max(1, bound.clusters) + 1e-9
    assert precision_bound(hit, cluster, 0.99).lower <= bound.lower + 1e-12


@pytest.mark.parametrize(("target", "confidence"), [(0.3, 0.9), (0.5, 0.9), (0.85, 0.9), (0.85, 0.95)])
def test_units_needed_is_where_all_right_is_just_enough(target, confidence):
    n = clusters_needed(target, confidence)
    assert binomial_lower(n, n, confidence) >= target - 1e-9
    assert n == 1 or binomial_lower(n - 1, n - 1, confidence) < target
