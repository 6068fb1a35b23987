from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from models.calibration import Calibrator, fit_calibrator


def sample(n=4000, slope=0.6, intercept=-2.0, seed=0):
    rng = np.random.default_rng(seed)
    score = rng.normal(-3, 2, n)
    return score, (rng.random(n) < expit(intercept + slope * score)).astype(int)


def fit(score, label, method="sigmoid", n_incidents=50, base_rate=0.01, log_odds=True):
    return fit_calibrator(score, label, method=method, n_incidents=n_incidents, base_rate=base_rate, log_odds=log_odds)


@pytest.mark.parametrize("method", ["sigmoid", "isotonic"])
@pytest.mark.parametrize("log_odds", [True, False])
def test_risks_match_frequencies(method, log_odds):
    score, label = sample()
    calibrator = fit(score, label, method, log_odds=log_odds)
    new_score, new_label = sample(seed=1)
    risk = calibrator.risk(new_score)
    assert risk.mean() == pytest.approx(new_label.mean(), rel=0.25)
    top = np.argsort(-risk)[:400]
    assert risk[top].mean() == pytest.approx(new_label[top].mean(), rel=0.35)


@settings(deadline=None, max_examples=60)
@given(
    scores=st.lists(st.floats(-40, 40), min_size=1, max_size=60),
    seed=st.integers(0, 10**6),
    method=st.sampled_from(["sigmoid", "isotonic"]),
    incidents=st.integers(0, 20),
    log_odds=st.booleans(),
)
def test_risks_rise_with_the_score_and_stay_inside_zero_and_one(scores, seed, method, incidents, log_odds):
    score = np.array(scores)
    label = np.random.default_rng(seed).integers(-1, 2, len(score))
    calibrator = fit(score, label, method, incidents, 0.002, log_odds)
    grid = np.linspace(-60, 60, 501)
    risk = calibrator.risk(grid)
    assert (np.diff(risk) >= 0).all()
    assert ((risk > 0) & (risk < 1)).all()
    assert Calibrator.from_json(calibrator.to_json()) == calibrator


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


def test_unlabelled_rows_do_not_count():
    score, label = sample()
    hidden = label.copy()
    hidden[::2] = -1
    assert fit(score, hidden) == fit(score[1::2], label[1::2])
