"""A prior: laid onto columns, pooled with own learners by the fleet's newest labels, and alone before any failure."""

from dataclasses import replace
from datetime import timedelta
from functools import cache
from types import SimpleNamespace

import lightgbm
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.backtest.frames import Fold, skipped_of
from foundation.errors import InputError
from foundation.times import instant_ms
from models.bundle.store import load_bundle, save_bundle
from models.config import BacktestSection, ModelsSection, TrainingSection
from models.explanation.contributions import explained_by
from models.learners.prior import CARD, MODEL, SHIPPED, fit_prior, fit_share, load_prior, write_prior
from models.rows.row_reader import logit
from models.rows.training_set import Labels
from models.training.final import fit_final
from models.training.trainer import Trainer
from tests.models.fake_matrix import FakeMatrix
from tests.models.small_models import COLUMNS, rows

NAMES = [column.name for column in COLUMNS]
SMALL_LEARNERS = {
    "lightgbm": {"n_estimators": 20, "learning_rate": 0.2, "min_child_samples": 5},
    "xgboost": {"n_estimators": 20},
    "random_forest": {"n_estimators": 6},
}
ONE = ModelsSection(profile="lightgbm", learners=("lightgbm",), horizons=(), settings=SMALL_LEARNERS)
TRAINING = TrainingSection(window=timedelta(days=15), negative_ratio=20)


@cache
def prior():
    X, y = rows(2000, seed=5)
    return fit_prior(X, y, np.ones(len(y)), NAMES, seed=1, made_of={"fleets": 1})


def log_odds(booster, X):
    return np.asarray(booster.predict(X, raw_score=True))


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(len(COLUMNS))), st.integers(0, len(COLUMNS)))
def test_laid_onto_other_columns_it_scores_as_with_the_missing_ones_unknown(order, known):
    X, _ = rows(200, seed=6)
    known_columns = order[:known]
    columns = [replace(COLUMNS[0], name="foreign"), *(COLUMNS[i] for i in known_columns)]
    unknown = np.full_like(X, np.nan)
    unknown[:, known_columns] = X[:, known_columns]
    given_rows = np.column_stack([np.arange(len(X), dtype=np.float32), X[:, known_columns]])
    laid = prior().model_for(columns).booster_
    plain = log_odds(lightgbm.Booster(model_str=prior().model), unknown)
    np.testing.assert_allclose(log_odds(laid, given_rows), plain, rtol=1e-9, atol=1e-9)
    parts = np.asarray(laid.predict(given_rows, pred_contrib=True))
    assert not parts[:, 0].any()  # what it never saw explains nothing


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda folder: (folder / CARD).unlink(), "no prior in "),
        (lambda folder: (folder / CARD).write_text("{}"), "is not readable"),
        (lambda folder: (folder / MODEL).write_text(prior().model.replace("0.", "1.", 1)), "does not match its card"),
    ],
)
def test_a_damaged_prior_is_refused(tmp_path, damage, what):
    write_prior(prior(), tmp_path)
    assert load_prior(str(tmp_path)) == prior()
    damage(tmp_path)
    with pytest.raises(InputError, match="parameter training") as refused:
        load_prior(str(tmp_path))
    assert what in refused.value.problem


def test_the_shipped_prior_is_small_and_knows_the_columns_of_the_default_parameters():
    shipped = load_prior(SHIPPED)
    assert len(shipped.model) + len(shipped.card.model_dump_json()) < 300_000
    assert {"onset", "history"} <= {name.split("__")[0] for name in shipped.card.columns}
    assert not any(name.startswith("static") for name in shipped.card.columns)
    assert shipped.card.made_of["incidents"] > 500


@cache
def learned(names, sign):
    """Fit a prior on the signal of a fleet like those below, or on its opposite."""
    like = FakeMatrix(units=30, days=30, incidents=80, seed=91)
    label = like.labels(None)["label"].fillna(0).to_numpy(dtype=int)
    return fit_prior(like.features * sign, label, np.ones(len(label)), names, seed=1, made_of={})


def scored(fitted, matrix):
    """Score the first rows as if they were one decision time's."""
    times = pd.Series(matrix.rows["decision_time"][:1]).repeat(50)
    return fitted.score(matrix.features[:50], times, [f"g{i}" for i in range(50)])


def prior_of(matrix, folder, *, sign=1.0):
    folder.mkdir()
    write_prior(learned(tuple(column.name for column in matrix.columns), sign), folder)
    return TRAINING.model_copy(update={"prior": str(folder)})


def fitted_at_the_end(matrix, training, models=ONE):
    trainer = Trainer(matrix, training=training, models=models, k=3, seed=7, names=(models.profile,))
    end = matrix.span[1]
    return trainer.fit(instant_ms(end), Labels.of(matrix.labels(end)), timedelta(days=21))


@pytest.mark.parametrize("profile", ["lightgbm", "mean_log_odds"])
def test_a_prior_that_misleads_is_left_out(tmp_path, profile):
    matrix = FakeMatrix(units=24, days=30, incidents=40, seed=3)
    models = ONE.model_copy(update={"profile": profile})
    misled = fitted_at_the_end(matrix, prior_of(matrix, tmp_path / "prior", sign=-1.0), models)
    own_fit = fitted_at_the_end(matrix, TRAINING, models)
    assert (misled.prior_weight, own_fit.prior_weight) == (0.0, None)
    pd.testing.assert_frame_equal(scored(misled, matrix), scored(own_fit, matrix), check_exact=True)
    assert set(misled.learners) == set(own_fit.learners)


@pytest.mark.parametrize("profile", ["xgboost", "mean_log_odds", "stacked"])
def test_every_learner_and_ensemble_takes_the_share_of_a_prior_that_helps(tmp_path, profile):
    matrix = FakeMatrix(units=24, days=30, incidents=40, seed=3)
    training = prior_of(matrix, tmp_path / "prior")
    fitted = fitted_at_the_end(matrix, training, ONE.model_copy(update={"profile": profile}))
    share = fitted.prior_weight
    assert 0 < share < 1
    X = matrix.features[:50]
    by_name = {name: logit(learner.predict_proba(X)[:, 1]) for name, learner in fitted.learners.items()}
    names = (profile,) if profile == "xgboost" else fitted.members
    pooled = [(1 - share) * by_name[name] + share * by_name["prior"] + fitted.prior_shift for name in names]
    weights = fitted.stacker.weights if profile == "stacked" else (1 / len(names),) * len(names)
    expected = np.tensordot(weights, pooled, 1) + (fitted.stacker.intercept if profile == "stacked" else 0)
    np.testing.assert_allclose(scored(fitted, matrix)["score"], expected, rtol=1e-5)
    values, _ = explained_by(fitted, profile, X)
    spread = values.sum(axis=1) - expected
    np.testing.assert_allclose(spread, spread[0], atol=1e-4)  # what is added up is the pooled score
    saved = load_bundle(save_bundle(tmp_path / "bundle", fitted, {"profile": profile}).path)
    pd.testing.assert_frame_equal(scored(saved.fitted, matrix), scored(fitted, matrix), check_exact=True)


@pytest.mark.parametrize(
    ("says", "least", "most"),
    [
        (lambda rng, own_score, positive: -own_score, 0, 0),
        (lambda rng, own_score, positive: rng.permutation(own_score), 0, 0.05),
        (lambda rng, own_score, positive: rng.normal(size=len(own_score)) + 3 * positive, 0.2, 0.8),
    ],
    ids=["the opposite", "nothing", "as much, by other signs"],
)
def test_a_prior_has_a_share_by_what_it_adds_whatever_was_believed(says, least, most):
    rng = np.random.default_rng(1)
    positive = rng.random(4000) < 0.02
    own_score = rng.normal(size=4000) + 3 * positive
    prior_says = says(rng, own_score, positive)
    for believed in (0.1, 0.5, 1.0):
        assert least <= fit_share(own_score, prior_says, positive, n_incidents=80, believed=believed) <= most


def test_the_report_says_where_a_prior_was_left_out_and_where_it_was_alone():
    used = {"fitted": True, "calibrated": True, "thinned_to": None, "prior_weight": 0.0, "refit_ms": 0}
    facts = [
        {"fold": 0, "unfit": "no incident", "sliding": used | {"fitted": False, "stand_in": "prior"}},
        {"fold": 1, "unfit": None, "sliding": used},
    ]
    skipped = skipped_of([Fold(None, fold) for fold in facts], SimpleNamespace(never_fit=()))
    assert skipped == (
        "fold (fold 0): no incident; scored by prior only",
        "prior (fold 1): not used, because the data of the fleet alone predict the newest labels as well",
    )


def test_a_prior_weighs_less_the_more_own_failures_there_are(tmp_path):
    few, many = (FakeMatrix(units=24, days=30, incidents=n, seed=3) for n in (4, 150))
    training = prior_of(few, tmp_path / "prior")
    weights = [fitted_at_the_end(matrix, training).prior_weight for matrix in (few, many)]
    assert weights[0] > 1.2 * weights[1]


def test_a_fleet_without_a_failure_is_ranked_by_the_prior_alone_and_risks_stay_low(tmp_path):
    matrix = FakeMatrix(units=20, days=17, incidents=0, seed=3)
    training = prior_of(matrix, tmp_path / "prior")
    fitted = fit_final(matrix, training=training, models=ONE, backtest=BacktestSection(), seed=7)
    assert fitted.stand_in == "prior"
    saved = save_bundle(tmp_path / "bundle", fitted, {"profile": "lightgbm"}).path
    assert "**Prior only**" in (saved / "MODEL_CARD.md").read_text()
    X = matrix.features[:20]
    times, units = pd.Series(matrix.rows["decision_time"][:1]).repeat(20), [f"g{i}" for i in range(20)]
    scored = fitted.score(X, times, units)
    pd.testing.assert_frame_equal(load_bundle(saved).fitted.score(X, times, units), scored, check_exact=True)
    by_prior = log_odds(load_prior(training.prior).model_for(matrix.columns).booster_, X)
    assert scored["rank"].to_numpy().argmin() == by_prior.argmax()
    assert scored["risk"].max() < 0.01
