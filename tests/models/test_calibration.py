from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from scipy.special import expit

from models.calibration.fitting import Calibrator, at_level, fit_calibrator
from models.rows.failure_rate import expected_rate, rate_at, recent_rate
from models.rows.training_set import Labels, TrainingRows
from tests.models.fake_matrix import FakeMatrix


def sample(n=4000, slope=0.6, intercept=-2.0, seed=0):
    rng = np.random.default_rng(seed)
    score = rng.normal(-3, 2, n)
    return score, (rng.random(n) < expit(intercept + slope * score)).astype(int)


def fit(score, label, n_incidents=50, base_rate=0.01, log_odds=True):
    return fit_calibrator(score, label, n_incidents=n_incidents, base_rate=base_rate, log_odds=log_odds)


@pytest.mark.parametrize("log_odds", [True, False])
def test_risks_match_frequencies(log_odds):
    score, label = sample()
    calibrator = fit(score, label, log_odds=log_odds)
    new_score, new_label = sample(seed=1)
    risk = calibrator.risk(new_score)
    assert risk.mean() == pytest.approx(new_label.mean(), rel=0.25)
    top = np.argsort(-risk)[:400]
    assert risk[top].mean() == pytest.approx(new_label[top].mean(), rel=0.35)


@settings(deadline=None, max_examples=60)
@given(
    scores=st.lists(st.floats(-40, 40), min_size=1, max_size=60),
    seed=st.integers(0, 10**6),
    incidents=st.integers(0, 20),
    log_odds=st.booleans(),
)
def test_risks_rise_with_the_score_and_stay_inside_zero_and_one(scores, seed, incidents, log_odds):
    score = np.array(scores)
    label = np.random.default_rng(seed).integers(-1, 2, len(score))
    calibrator = fit(score, label, incidents, 0.002, log_odds)
    grid = np.linspace(-60, 60, 501)
    risk = calibrator.risk(grid)
    assert (np.diff(risk) >= 0).all()
    assert ((risk > 0) & (risk < 1)).all()
    assert TypeAdapter(Calibrator).validate_json(TypeAdapter(Calibrator).dump_json(calibrator)) == calibrator


def test_too_few_incidents_leave_corrected_log_odds_as_they_are():
    score, label = sample(200)
    calibrator = fit(score, label, n_incidents=4)
    assert calibrator.method == "prior"
    np.testing.assert_allclose(calibrator.risk(score), expit(score), rtol=1e-6)


def test_too_few_incidents_give_an_order_the_base_rate():
    score, label = sample(500)
    calibrator = fit(score, label, n_incidents=0, base_rate=0.003, log_odds=False)
    assert calibrator.method == "prior"
    assert calibrator.risk(score).mean() == pytest.approx(0.003, rel=1e-3)
    empty = fit(np.zeros(0), np.zeros(0, int), n_incidents=0, base_rate=0.003, log_odds=False)
    assert empty.risk(np.zeros(1))[0] == pytest.approx(0.003, rel=1e-3)


def test_few_positives_move_the_map_little_and_many_move_it_far():
    rng = np.random.default_rng(0)
    score = rng.normal(-4, 1, 300)
    label = np.zeros(300, int)
    label[:5] = 1
    few = fit(score, label, n_incidents=5)
    assert 0.4 < few.slope < 1.6
    score, label = sample(50_000, slope=0.2, intercept=-2.5)
    assert fit(score, label).slope == pytest.approx(0.2, abs=0.05)


@pytest.mark.parametrize("rate", [0.0005, 0.01, 0.2])
def test_a_level_moves_the_mean_risk_and_leaves_the_order(rate):
    score, label = sample()
    fitted_map = fit(score, label)
    levelled = at_level(fitted_map, score, rate)
    assert levelled.risk(score).mean() == pytest.approx(rate, rel=1e-4)
    assert (np.diff(levelled.risk(np.sort(score))) >= 0).all()
    assert levelled.method == fitted_map.method


def test_the_newest_rate_is_drawn_to_the_one_before_and_its_trend_followed_half_of_the_way():
    assert recent_rate((100, 50_000), (200, 100_000)) == pytest.approx(0.002)
    assert 0.008 < recent_rate((400, 50_000), (200, 100_000)) < 0.016
    assert 0.5 * 0.001 < recent_rate((50, 50_000), (400, 100_000)) < 0.002
    calm, busy = recent_rate((0, 50_000), (6, 100_000)), recent_rate((4, 50_000), (2, 100_000))
    assert 0.6 * 6 / 150_000 < calm < 6 / 150_000 < busy < 1.6 * 6 / 150_000
    assert recent_rate((0, 0), (0, 50_000)) == 0


WEEK_ROWS = np.full(40, 2_000.0)


def test_a_burst_on_a_fleet_that_has_had_bursts_is_not_expected_to_last():
    incidents = np.ones(40)
    incidents[[8, 9, 17, 18, 26, 27]] = 12
    incidents[38:] = 12
    newest = recent_rate((24, 4_000), (4, 8_000))
    assert expected_rate(incidents, WEEK_ROWS) < 0.5 * newest
    assert incidents.mean() / 2_000 == pytest.approx(expected_rate(incidents, WEEK_ROWS), rel=0.6)


def test_a_rate_that_grew_for_months_and_one_that_doubled_are_followed():
    grown = np.round(np.exp(np.linspace(0, 3, 40)))
    assert expected_rate(grown, WEEK_ROWS) > 0.8 * grown[-4:].mean() / 2_000
    doubled = np.where(np.arange(40) < 26, 10.0, 20.0)
    assert expected_rate(doubled, WEEK_ROWS) == pytest.approx(20 / 2_000, rel=0.1)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=50), st.integers(1, 100))
def test_an_expected_rate_lies_within_twice_the_range_of_its_weeks_and_has_no_unit(incidents, times):
    counts, rows = np.array(incidents, dtype=float), WEEK_ROWS[0] * np.ones(len(incidents))
    rate = expected_rate(counts, rows)
    assert 0.5 * counts.min() / 2_000 <= rate + 1e-12
    assert rate <= 2 * counts.max() / 2_000 + 1e-12
    assert expected_rate(counts, rows * times) == pytest.approx(rate / times)


def test_the_rate_counts_labels_known_by_the_refit_only():
    matrix = FakeMatrix(units=40, days=60, incidents=60)
    refit = matrix.span[0] + timedelta(days=50)
    refit_ms = int(refit.timestamp() * 1000)
    rows = TrainingRows.of(matrix.rows)
    rate = rate_at(rows, Labels.of(matrix.labels(refit)), refit_ms)

    reported = matrix.labels(refit)
    time = matrix.rows["decision_time"]
    known = ~matrix.rows["augmented"] & (reported["complete_at"] <= refit) & reported["label"].notna()
    week = ((time[known].max() - time) // timedelta(days=7)).rsub(0)  # 0: the newest
    started = week[known & (reported["label"] == 1)].groupby(reported["incident"]).min()
    weeks = range(week[known].min(), 1)
    rows_by_week, incidents = ([int((column == number).sum()) for number in weeks] for column in (week[known], started))
    positives = int((reported.loc[known, "label"] == 1).sum())
    expected = expected_rate(np.array(incidents, dtype=float), np.array(rows_by_week, dtype=float))
    assert rate == pytest.approx(expected * positives / len(started))
    assert rate > 0

    matrix.events.loc[matrix.events["known_at"] > refit, "unit"] = "gpu-000"
    assert rate_at(rows, Labels.of(matrix.labels(refit)), refit_ms) == rate
