"""The ranking and calibration metrics against plain slow oracles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, brier_score_loss, roc_auc_score

from evaluation.metrics.metrics import Ranking, calibration, rank_curve

rows = st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.integers(0, 4)), min_size=1, max_size=60)


def split(drawn):
    score, positive, unit = (np.array(column) for column in zip(*drawn, strict=True))
    return score.astype(float), positive.astype(bool), unit


def measured(score, positive):
    return np.concatenate(Ranking.build(score, positive).precision_and_auc())


def expected(score, positive):
    """Average precision and area of scikit-learn; NaN where it has none."""
    average = average_precision_score(positive, score) if positive.any() else np.nan
    return [average, roc_auc_score(positive, score) if 0 < positive.sum() < len(positive) else np.nan]


@given(rows)
def test_average_precision_and_auc_equal_scikit_learn(drawn):
    score, positive, _ = split(drawn)
    np.testing.assert_allclose(measured(score, positive), expected(score, positive), rtol=1e-6)


@given(rows, st.randoms(use_true_random=False))
def test_order_of_rows_does_not_matter(drawn, random):
    score, positive, _ = split(drawn)
    shuffled = list(drawn)
    random.shuffle(shuffled)
    shuffled_score, labels, _ = split(shuffled)
    np.testing.assert_array_equal(measured(score, positive), measured(shuffled_score, labels))
    for integers in (score.astype(int), score.astype(int) * -50_000):  # ranks: sorted as 16 bits where they fit
        np.testing.assert_array_equal(measured(integers, positive), measured(integers * 1.0, positive))


@given(rows, st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=4))
def test_weights_by_unit_equal_repeating_the_units_rows(drawn, weights):
    score, positive, unit = split(drawn)
    values = Ranking.build(score, positive, unit, 5).precision_and_auc(np.array(weights, float))
    for weight, *figures in zip(weights, *values, strict=True):
        repeat = np.repeat(np.arange(len(unit)), np.array(weight)[unit])
        np.testing.assert_allclose(figures, expected(score[repeat], positive[repeat]), rtol=1e-6)


def test_many_replicates_are_cut_into_chunks_without_a_trace(monkeypatch):
    rng = np.random.default_rng(1)
    ranking = Ranking.build(rng.random(300), rng.random(300) < 0.1, rng.integers(0, 9, 300), 9)
    weights = rng.integers(0, 4, (50, 9)).astype(float)
    at_once = ranking.precision_and_auc(weights)
    monkeypatch.setattr("evaluation.metrics.metrics._CELLS_PER_CHUNK", 100)
    np.testing.assert_allclose(ranking.precision_and_auc(weights), at_once, rtol=1e-12)
    assert ranking.precision_and_auc(np.empty((0, 9)))[0].shape == (0,)


@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=60))
def test_rank_curve_counts_what_a_loop_counts(drawn):
    rank = np.array([pair[0] for pair in drawn])
    positive = np.array([pair[1] for pair in drawn])
    curve = rank_curve(rank, positive)
    assert curve["k"][0] == 1
    assert curve["k"][-1] == rank.max()
    for k, precision, recall in zip(*curve.values(), strict=True):
        taken = rank <= k
        hits = sum(positive[taken])
        assert precision == pytest.approx(hits / taken.sum() if taken.any() else np.nan, nan_ok=True)
        assert recall == pytest.approx(hits / positive.sum() if positive.any() else np.nan, nan_ok=True)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.01, 0.02, 0.2, 0.5, 1.0]), st.booleans()), min_size=1, max_size=80))
def test_calibration_bins_hold_every_row_once_and_equal_risks_together(drawn):
    risk = np.array([pair[0] for pair in drawn])
    positive = np.array([pair[1] for pair in drawn])
    result = calibration(risk, positive)
    assert result.rows.sum() == len(drawn)
    assert result.positives.sum() == positive.sum()
    assert (np.diff(result.mean_risk) > 0).all()
    assert 0 <= result.error <= 1
    if 0 < positive.mean() < 1:
        spread = positive.mean() * (1 - positive.mean())
        assert result.brier_skill == pytest.approx(1 - brier_score_loss(positive, risk) / spread)
    assert result.rows @ result.mean_risk == pytest.approx(risk.sum())


def test_calibration_leaves_out_rows_without_a_risk_and_survives_none():
    assert calibration([0.5, np.nan], [True, True]).rows.sum() == 1
    none = calibration([np.nan], [True])
    assert none.rows.size == 0
    assert np.isnan([none.error, none.brier_skill, none.risk_ratio]).all()
    one_class = calibration([0.1, 0.2], [False, False])
    assert np.isnan([one_class.brier_skill, one_class.risk_ratio]).all()
