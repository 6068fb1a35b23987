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


def average_precision(score, positive):
    return float(Ranking.build(score, positive).both()[0][0])


def roc_auc(score, positive):
    return float(Ranking.build(score, positive).both()[1][0])


@given(rows)
def test_average_precision_and_auc_equal_scikit_learn(drawn):
    score, positive, _ = split(drawn)
    if positive.any():
        assert average_precision(score, positive) == pytest.approx(average_precision_score(positive, score))
    else:
        assert np.isnan(average_precision(score, positive))
    if positive.any() and not positive.all():
        assert roc_auc(score, positive) == pytest.approx(roc_auc_score(positive, score))
    else:
        assert np.isnan(roc_auc(score, positive))


@given(rows, st.randoms(use_true_random=False))
def test_order_of_rows_does_not_matter(drawn, random):
    score, positive, _ = split(drawn)
    shuffled = list(drawn)
    random.shuffle(shuffled)
    other, labels, _ = split(shuffled)
    np.testing.assert_array_equal(average_precision(score, positive), average_precision(other, labels))
    np.testing.assert_array_equal(roc_auc(score, positive), roc_auc(other, labels))
    for whole in (score.astype(int), score.astype(int) * -50_000):  # ranks: sorted as 16 bits where they fit
        np.testing.assert_array_equal(average_precision(whole, positive), average_precision(whole * 1.0, positive))
        np.testing.assert_array_equal(roc_auc(whole, positive), roc_auc(whole * 1.0, positive))


@given(rows, st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=4))
def test_weights_by_unit_equal_repeating_the_units_rows(drawn, weights):
    score, positive, unit = split(drawn)
    average, auc = Ranking.build(score, positive, unit, 5).both(np.array(weights, float))
    for at, weight in enumerate(weights):
        repeat = np.repeat(np.arange(len(unit)), np.array(weight)[unit])
        labels = positive[repeat]
        if labels.any():
            assert average[at] == pytest.approx(average_precision_score(labels, score[repeat]))
        else:
            assert np.isnan(average[at])
        if labels.any() and not labels.all():
            assert auc[at] == pytest.approx(roc_auc_score(labels, score[repeat]))
        else:
            assert np.isnan(auc[at])


def test_many_replicates_are_cut_into_chunks_without_a_trace(monkeypatch):
    rng = np.random.default_rng(1)
    ranking = Ranking.build(rng.random(300), rng.random(300) < 0.1, rng.integers(0, 9, 300), 9)
    weights = rng.integers(0, 4, (50, 9)).astype(float)
    whole = ranking.both(weights)
    monkeypatch.setattr("evaluation.metrics.metrics._CELLS_PER_CHUNK", 100)
    np.testing.assert_allclose(ranking.both(weights), whole, rtol=1e-12)
    assert ranking.both(np.empty((0, 9)))[0].shape == (0,)


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
    measured = calibration(risk, positive)
    assert measured.rows.sum() == len(drawn)
    assert measured.positives.sum() == positive.sum()
    assert (np.diff(measured.mean_risk) > 0).all()
    assert 0 <= measured.error <= 1
    assert measured.brier == pytest.approx(brier_score_loss(positive, risk))
    assert measured.rows @ measured.mean_risk == pytest.approx(risk.sum())


def test_calibration_leaves_out_rows_without_a_risk_and_survives_none():
    assert calibration([0.5, np.nan], [True, True]).rows.sum() == 1
    none = calibration([np.nan], [True])
    assert none.rows.size == 0
    assert np.isnan([none.error, none.brier, none.brier_skill, none.risk_ratio]).all()
    one_class = calibration([0.1, 0.2], [False, False])
    assert np.isnan([one_class.brier_skill, one_class.risk_ratio]).all()
