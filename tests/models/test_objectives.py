from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import expit, log_expit
from sklearn.metrics import average_precision_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from features.errors import InputError
from models.config import OBJECTIVES
from models.contributions import TREES, contributions
from models.fit_facts import FitFacts
from models.learners import make_learner
from models.native import read_learner, write_learner
from models.objectives.focal import FocalClassifier, focal_derivatives, probability_of
from models.objectives.hazard import MIN_EVENTS, HazardClassifier, used_edges
from models.objectives.ranker import LARGEST_GROUP, RankClassifier, sigmoid_map
from models.odds import log_odds, logit

LIGHT = {"n_estimators": 20, "min_child_samples": 5, "verbose": -1}
XGB = {"n_estimators": 20}
HOUR = 3_600_000


def known_deviations(estimator):
    if isinstance(estimator, HazardClassifier) and estimator.library == "xgboost":
        return {}
    # To repeat a row is not to weigh it twice: leaves count rows, and ranking pairs rows within a group.
    return {"check_sample_weight_equivalence_on_dense_data": "leaves' minimum and ranking pairs count rows"}


@parametrize_with_checks(
    [
        FocalClassifier(settings=LIGHT),
        RankClassifier("lightgbm", settings=LIGHT),
        RankClassifier("xgboost", settings=XGB),
        HazardClassifier("lightgbm", settings=LIGHT),
        HazardClassifier("xgboost", settings=XGB),
    ],
    expected_failed_checks=known_deviations,
)
def test_sklearn_contract(estimator, check):
    check(estimator)


def fleet(n=3000, seed=0):
    """Rows at hourly times, of which the riskier fail, the sooner the higher their first feature."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 5)).astype(np.float32)
    y = (rng.random(n) < expit(1.5 * (X[:, 0] + X[:, 1]) - 4)).astype(int)
    hours = np.where(y == 1, np.clip(rng.uniform(0, 24, n) * np.exp(-X[:, 0].clip(0)), 0.01, 24), np.nan)
    X[rng.random(X.shape) < 0.03] = np.nan
    return X, y, FitFacts.of(np.arange(n) // 30 * HOUR, hours)


def fitted(name, **given):
    X, y, facts = fleet()
    learner = make_learner(name, seed=3, settings={"n_estimators": 25, **given})
    return learner.fit(X, y, sample_weight=np.ones(len(y)), **facts.wanted_by(learner)), X, y


@given(st.floats(-12, 12), st.integers(0, 1), st.floats(0, 4))
def test_focal_derivatives_are_those_of_the_loss(z, y, gamma):
    def loss(at):
        sign = 1 if y else -1
        return -(expit(-sign * at) ** gamma) * log_expit(sign * at)

    first, second = focal_derivatives(np.array([z]), np.array([y]), gamma)
    step = 1e-4
    assert first[0] == pytest.approx((loss(z + step) - loss(z - step)) / (2 * step), abs=1e-6)
    assert second[0] == pytest.approx((loss(z + step) - 2 * loss(z) + loss(z - step)) / step**2, abs=1e-5)


@given(st.floats(0.001, 0.999), st.floats(0, 3))
def test_the_margin_that_minimises_the_focal_loss_stands_for_the_share_of_positives(share, gamma):
    def expected(z):
        own = -(expit(-z) ** gamma) * log_expit(z)
        other = -(expit(z) ** gamma) * log_expit(-z)
        return share * own + (1 - share) * other

    best = minimize_scalar(expected, bounds=(-15, 15), method="bounded", options={"xatol": 1e-10}).x
    assert probability_of(np.array([best]), gamma)[0] == pytest.approx(share, abs=1e-4)


def test_focal_probability_rises_with_the_margin_and_is_the_sigmoid_without_focus():
    z = np.linspace(-30, 30, 2001)
    for gamma in (0.0, 0.5, 1.0, 2.0, 4.0):
        assert (np.diff(probability_of(z, gamma)) >= 0).all()
        assert np.isfinite(probability_of(z, gamma)).all()
    np.testing.assert_allclose(probability_of(z, 0.0), expit(z), rtol=1e-9)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_each_finds_the_signal_and_keeps_the_base_rate(name):
    learner, X, y = fitted(name)
    risk = learner.predict_proba(X)[:, 1]
    assert average_precision_score(y, risk) > 4 * y.mean()
    assert risk.mean() == pytest.approx(y.mean(), rel=0.25)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_saved_learner_scores_the_same_bits(name, tmp_path):
    learner, X, _ = fitted(name)
    file = tmp_path / "learner"
    write_learner(name, learner, file)
    again = read_learner(name, file.read_bytes(), "learner")
    assert np.array_equal(again.predict_proba(X), learner.predict_proba(X))
    assert np.array_equal(contributions(again, X[:5])[0], contributions(learner, X[:5])[0])
    write_learner(name, again, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == file.read_bytes()


@pytest.mark.parametrize("name", ["lightgbm_focal", "lightgbm_hazard"])
def test_a_file_without_its_facts_is_refused(name, tmp_path):
    learner, _, _ = fitted(name)
    write_learner(name, learner, tmp_path / "learner")
    content = (tmp_path / "learner").read_bytes()
    for damaged, why in (
        (content.partition(b"\n")[2], "no line 'predrain ...' before the trees"),
        (b'predrain {"other": 1}\n' + content.partition(b"\n")[2], "the facts beside the trees are not"),
        (content.replace(b'_": ', b'_": null, "x": ', 1), "the facts beside the trees are not"),
    ):
        with pytest.raises(InputError, match=why):
            read_learner(name, damaged, "learners/x.txt")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_contributions_add_up_to_differences_in_log_odds(name):
    """Exactly for the sigmoid of a margin; to first order for the others, so that the sign and size are right."""
    learner, X, _ = fitted(name, **({"edges_hours": []} if name.endswith("hazard") else {}))
    values, method = contributions(learner, X[:200])
    assert method == TREES
    total, odds = values.sum(axis=1), log_odds(learner, X[:200])
    if name != "lightgbm_focal":
        np.testing.assert_allclose(total - total[0], odds - odds[0], atol=2e-4)
    assert np.corrcoef(total, odds)[0, 1] > 0.95


def test_ranks_go_through_a_rising_sigmoid():
    rng = np.random.default_rng(0)
    z = rng.normal(size=4000)
    y = (rng.random(4000) < expit(2 * z - 3)).astype(int)
    slope, intercept = sigmoid_map(5 * z + 7, y, np.ones(4000))
    assert slope == pytest.approx(0.4, rel=0.15)
    assert intercept == pytest.approx(-3 - 0.4 * 7, rel=0.15)
    assert sigmoid_map(-z, y, np.ones(4000))[0] == 0
    assert np.isfinite(sigmoid_map(y.astype(float), y, np.ones(4000))).all()
    flat = sigmoid_map(np.zeros(4000), y, np.ones(4000))
    assert expit(flat[1]) == pytest.approx(y.mean(), rel=0.01)


@pytest.mark.parametrize("name", ["lightgbm_rank", "xgboost_rank"])
def test_a_ranker_does_not_learn_which_times_are_bad(name):
    """The first feature says at which times much fails, the second which unit does: only the latter orders units."""
    rng = np.random.default_rng(1)
    time = np.arange(6000) // 30
    bad = (time % 4 == 0).astype(np.float32)
    X = np.column_stack([bad, rng.normal(size=6000)]).astype(np.float32)
    y = (rng.random(6000) < expit(3 * bad + X[:, 1] - 4)).astype(int)

    def reliance(learner):
        facts = FitFacts.of(time * HOUR)
        learner.fit(X, y, sample_weight=np.ones(6000), **facts.wanted_by(learner))
        size = np.abs(contributions(learner, X)[0]).mean(axis=0)
        return size[0] / size.sum()

    assert reliance(make_learner("lightgbm", seed=1, settings={"colsample_bytree": 1.0})) > 0.5
    assert reliance(make_learner(name, seed=1, settings={"colsample_bytree": 1.0})) < 0.25


def test_rows_of_one_time_are_one_group_and_large_groups_are_dealt_out():
    times = np.array([5, 3, 5, 3, 3, 9]) * HOUR
    order, sizes = RankClassifier()._groups(6, times)
    assert sizes.tolist() == [3, 2, 1]
    assert order.tolist() == [1, 3, 4, 0, 2, 5]
    assert RankClassifier(group_hours=6)._groups(6, times)[1].tolist() == [5, 1]
    order, sizes = RankClassifier()._groups(2 * LARGEST_GROUP + 1, None)
    assert sizes.sum() == 2 * LARGEST_GROUP + 1
    assert sizes.max() - sizes.min() <= 1
    assert sizes.max() <= LARGEST_GROUP
    assert sorted(order.tolist()) == list(range(2 * LARGEST_GROUP + 1))


@settings(max_examples=50)
@given(st.lists(st.floats(0.1, 24), max_size=60), st.lists(st.sampled_from([1.0, 3.0, 6.0, 12.0, 24.0]), max_size=5))
def test_used_borders_leave_enough_failures_on_either_side(hours, edges):
    found = used_edges(np.array(hours), edges)
    assert set(found) <= set(edges)
    assert found == sorted(set(found))
    borders = [-np.inf, *found, np.inf]
    if found:
        for low, high in pairwise(borders):
            assert sum(low < hour <= high for hour in hours) >= MIN_EVENTS


@pytest.mark.parametrize("library", ["lightgbm", "xgboost"])
def test_hazards_make_the_risk_and_tell_soon_from_late(library):
    rng = np.random.default_rng(2)
    n = 6000
    X = rng.normal(size=(n, 3)).astype(np.float32)
    soon, late = rng.random(n) < expit(2 * X[:, 0] - 5), rng.random(n) < expit(2 * X[:, 1] - 5)
    hours = np.where(soon, 0.5, np.where(late, 20.0, np.nan))
    y = (soon | late).astype(int)
    tuned = {"n_estimators": 80, "learning_rate": 0.1, "reg_lambda": 1.0}
    learner = HazardClassifier(library, (1.0, 6.0), tuned, 1).fit(X, y, hours_to_incident=hours)
    assert learner.edges_ == [1.0]
    hazards = learner.hazards(X)
    np.testing.assert_allclose(1 - np.prod(1 - hazards, axis=1), learner.predict_proba(X)[:, 1], rtol=1e-9)
    risks = learner.risks(X)
    assert (np.diff(risks, axis=1) >= 0).all()
    np.testing.assert_allclose(risks[:, -1], learner.predict_proba(X)[:, 1], rtol=1e-12)
    first, second = X[:, 0] > 1.5, X[:, 1] > 1.5
    assert hazards[first & ~second, 0].mean() > 3 * hazards[second & ~first, 0].mean()
    assert hazards[second & ~first, 1].mean() > 3 * hazards[first & ~second, 1].mean()
    assert risks.mean(axis=0) == pytest.approx([soon.mean(), y.mean()], rel=0.2)


@pytest.mark.parametrize("library", ["lightgbm", "xgboost"])
def test_without_times_there_is_one_interval_and_unknown_ones_count_as_late(library):
    X, y, facts = fleet()
    plain = HazardClassifier(library, settings={"n_estimators": 10}).fit(X, y)
    assert plain.edges_ == []
    assert plain.start_ == [pytest.approx(float(logit(np.array([y.mean()]))[0]), abs=0.02)]
    unknown = np.where(np.arange(len(y)) % 2 == 0, np.nan, facts.hours_to_incident)
    assert np.isfinite(
        HazardClassifier(library, settings={"n_estimators": 10}).fit(X, y, hours_to_incident=unknown).risks(X)
    ).all()


def test_settings_of_their_own_are_checked():
    for name, given_settings, said in (
        ("lightgbm_focal", {"focal_gamma": -1}, "focal_gamma is -1 (parameter models.settings.lightgbm_focal."),
        (
            "lightgbm_rank",
            {"objective": "rank:ndcg"},
            "unknown objective 'rank:ndcg' (parameter models.settings.lightgbm_rank.objective). "
            "Choose one of lambdarank, rank_xendcg.",
        ),
        (
            "xgboost_hazard",
            {"edges_hours": [0, 6]},
            "[0, 6] is no list of hours (parameter models.settings.xgboost_hazard.edges_hours). "
            "Give positive numbers, such as [1.0, 6.0], or an empty list for one interval.",
        ),
        ("xgboost_rank", {"group_hours": "day"}, "'day' is not a number"),
    ):
        with pytest.raises(InputError) as caught:
            make_learner(name, seed=1, settings=given_settings)
        assert str(caught.value).startswith(said)
    with pytest.raises(ValueError, match="gamma is -1: give 0 or more"):
        FocalClassifier(gamma=-1).fit(np.eye(4), [0, 1, 0, 1])


def test_facts_go_to_those_that_ask_and_follow_their_rows():
    facts = FitFacts.of([3, 1, 2], [np.nan, 0.5, np.nan])
    assert facts.wanted_by(make_learner("lightgbm", seed=1)) == {}
    assert list(facts.wanted_by(make_learner("xgboost_rank", seed=1))) == ["times"]
    assert list(facts.wanted_by(make_learner("lightgbm_hazard", seed=1))) == ["hours_to_incident"]
    assert FitFacts().wanted_by(make_learner("lightgbm_hazard", seed=1)) == {}
    some = facts.take(np.array([2, 1]))
    assert some.times.tolist() == [2, 1]
    assert some.hours_to_incident[1] == 0.5
