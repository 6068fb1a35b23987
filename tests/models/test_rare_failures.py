"""Boosted trees where one row in 1,400 is positive: what makes the libraries' defaults collapse, and that ours hold."""

from __future__ import annotations

import lightgbm
import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import average_precision_score
from threadpoolctl import threadpool_limits

from models.learners.factory import make_learner

RATE = 7e-4


def rare(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Make rows of twelve features, three of which are higher for positives, and their labels."""
    rng = np.random.default_rng(seed)
    y = np.zeros(rows, dtype=np.int64)
    y[rng.choice(rows, round(RATE * rows), replace=False)] = 1
    X = rng.normal(size=(rows, 12)).astype(np.float32)
    X[y == 1, :3] += 2.0
    return X, y


TRAIN, TEST = rare(101, 20_000), rare(102, 40_000)


def precision_of(learner) -> float:
    with threadpool_limits(limits=1):
        fitted = learner.fit(*TRAIN)
        return average_precision_score(TEST[1], fitted.predict_proba(TEST[0])[:, 1])


def raw_lightgbm(**more):
    return lightgbm.LGBMClassifier(n_jobs=1, verbose=-1, random_state=0, **more)


def largest_leaf(learner) -> float:
    trees = learner.booster_.trees_to_dataframe()
    return float(trees.loc[trees["left_child"].isna(), "value"].abs().max())


def histogram_boosting(**more):
    return HistGradientBoostingClassifier(early_stopping=False, random_state=0, **more)


def test_the_libraries_defaults_collapse_and_ours_hold():
    collapsed = [precision_of(raw_lightgbm()), precision_of(histogram_boosting())]
    ours = [precision_of(make_learner(name, seed=1)) for name in ("lightgbm", "xgboost")]
    assert max(collapsed) < 10 * RATE
    assert min(ours) > 50 * RATE


def test_the_collapse_is_newton_steps_without_a_bound():
    raw, ours = raw_lightgbm().fit(*TRAIN), make_learner("lightgbm", seed=1).fit(*TRAIN)
    # A leaf of 20 rows with one positive: gradient about 1, hessian 20 * RATE, so a step of 71 times the rate of 0.1.
    prior = np.log(RATE / (1 - RATE))
    step = 0.1 * (1 - 20 * RATE) / (20 * RATE * (1 - RATE))
    first = raw.booster_.trees_to_dataframe().query("tree_index == 0 and left_child.isna()")["value"]
    assert first.max() >= prior + step
    assert largest_leaf(raw) > 100
    assert largest_leaf(ours) < 1.1 * abs(prior)


@pytest.mark.parametrize(
    "more",
    [
        {"reg_lambda": 1.0},
        {"min_child_weight": 1.0},
        {"boost_from_average": False},
    ],
    ids=lambda more: next(iter(more)),
)
def test_any_bound_on_the_step_prevents_it(more):
    assert precision_of(raw_lightgbm(**more)) > 50 * RATE


def test_a_weight_of_positives_does_not_prevent_it():
    assert precision_of(raw_lightgbm(scale_pos_weight=1 / RATE)) < 10 * RATE


def test_the_bound_that_histogram_boosting_needs_is_its_l2():
    assert precision_of(histogram_boosting(l2_regularization=1.0)) > 50 * RATE
