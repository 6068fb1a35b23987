"""Resampling of units and percentile intervals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from evaluation.metrics.metrics import interval, resample, share_interval


@given(st.integers(1, 40), st.integers(1, 20), st.integers(0, 5))
def test_every_sample_draws_as_many_units_as_there_are(units, replicates, seed):
    weights = resample(units, replicates, seed)
    assert weights.shape == (replicates, units)
    np.testing.assert_array_equal(weights.sum(axis=1), units)
    np.testing.assert_array_equal(weights, resample(units, replicates, seed))


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(3)
    covered = 0
    for seed in range(150):
        heads = rng.random(60) < 0.3
        bounds = interval(resample(60, 200, seed) @ heads / 60)
        covered += bounds.low <= 0.3 <= bounds.high
    assert covered / 150 == pytest.approx(0.94, abs=0.05)


def test_interval_of_mostly_undefined_replicates_is_nan():
    values = np.full(100, np.nan)
    values[:49] = 1.0
    assert np.isnan(interval(values).low)
    values[49] = 1.0
    assert interval(values).low == 1
    assert np.isnan(interval(np.ones(19)).high)
    assert np.isnan(interval(np.empty(0)).high)


def test_a_share_without_a_hit_has_the_exact_bound_of_its_units():
    counts = np.array([4.0] * 30 + [0.0] * 10)
    bounds = share_interval(np.zeros(50), point=0.0, counts=counts)
    assert bounds.low == 0
    assert bounds.high == pytest.approx(binomtest(0, 30).proportion_ci(0.95, method="exact").high)
    full = share_interval(np.ones(50), point=1.0, counts=counts)
    assert full.high == 1
    assert full.low == pytest.approx(binomtest(30, 30).proportion_ci(0.95, method="exact").low)


def test_the_exact_bound_covers_rare_hits_where_the_percentiles_cannot():
    rng = np.random.default_rng(5)
    rate, honest, naive = 0.02, 0, 0
    for seed in range(120):
        hits = (rng.random(60) < rate) * 3.0  # all three rows of a unit share its fate
        counts = np.full(60, 3.0)
        values = resample(60, 100, seed) @ hits / 180
        honest += share_interval(values, point=float(hits.sum() / 180), counts=counts).high >= rate
        naive += interval(values).high >= rate
    assert naive < 0.85 * 120 < 0.93 * 120 < honest


def test_without_resamples_or_rows_there_is_no_interval():
    assert np.isnan(share_interval(np.empty(0), point=0.0, counts=np.ones(5)).high)
    assert np.isnan(share_interval(np.full(50, np.nan), point=np.nan, counts=np.zeros(5)).high)
    halves = np.linspace(0, 1, 101)
    assert share_interval(halves, point=0.5, counts=np.ones(5)) == interval(halves)
