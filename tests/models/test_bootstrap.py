"""Resampling of units and percentile intervals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.bootstrap import interval, resample_units


@given(st.integers(1, 40), st.integers(1, 20), st.integers(0, 5))
def test_every_sample_draws_as_many_units_as_there_are(units, replicates, seed):
    weights = resample_units(units, replicates, seed)
    assert weights.shape == (replicates, units)
    np.testing.assert_array_equal(weights.sum(axis=1), units)
    np.testing.assert_array_equal(weights, resample_units(units, replicates, seed))


def test_a_longer_bootstrap_begins_with_the_shorter_one():
    np.testing.assert_array_equal(resample_units(7, 30, 1)[:10], resample_units(7, 10, 1))


def test_no_replicates_and_no_units_give_empty_samples():
    assert resample_units(5, 0, 1).shape == (0, 5)
    assert resample_units(0, 3, 1).shape == (3, 0)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(3)
    covered = 0
    for seed in range(150):
        heads = rng.random(60) < 0.3
        bounds = interval(resample_units(60, 200, seed) @ heads / 60)
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
