"""A prior: laid onto columns, started from, weighed on the fleet's own tail, and alone before any failure."""

from __future__ import annotations

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
from features.errors import InputError
from features.times import instant_ms
from models.bundle.store import load_bundle, save_bundle
from models.config import BacktestSection, ModelsSection, TrainingSection
from models.learners.factory import make_learner
from models.learners.prior import CARD, MODEL, SHIPPED, StartedFromPrior, fit_prior, load_prior, write_prior
from models.rows.training_set import Labels
from models.training.final import fit_final
from models.training.trainer import Trainer
from tests.models.fake_matrix import FakeMatrix
from tests.models.small_models import COLUMNS, rows

NAMES = [column.name for column in COLUMNS]
SMALL = {"n_estimators": 20, "learning_rate": 0.2, "min_child_samples": 5}
ONE = ModelsSection(profile="lightgbm", learners=("lightgbm",), horizons=(), settings={"lightgbm": SMALL})
TRAINING = TrainingSection(window=timedelta(days=15), negative_ratio=20)


@cache
def prior():
    X, y = rows(2000, seed=5)
    return fit_prior(X, y, np.ones(len(y)), NAMES, seed=1, made_of={"fleets": 1})


def log_odds(booster, X):
    return np.asarray(booster.predict(X, raw_score=True))


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(len(COLUMNS))), st.integers(0, len(COLUMNS)), st.floats(0.1, 1), st.floats(-5, 5))
def test_laid_onto_other_columns_it_scores_as_with_the_missing_ones_unknown(order, known, weight, shift):
    X, _ = rows(200, seed=6)
    kept = order[:known]
    columns = [replace(COLUMNS[0], name="foreign"), *(COLUMNS[i] for i in kept)]
    unknown = np.full_like(X, np.nan)
    unknown[:, kept] = X[:, kept]
    given_rows = np.column_stack([np.arange(len(X), dtype=np.float32), X[:, kept]])
    laid = prior().on(columns, weight=weight, shift=shift)
    plain = log_odds(lightgbm.Booster(model_str=prior().model), unknown) * weight + shift
    np.testing.assert_allclose(log_odds(laid, given_rows), plain, rtol=1e-9, atol=1e-9)
    parts = np.asarray(laid.predict(given_rows, pred_contrib=True))
    assert not parts[:, 0].any()  # what it never saw explains nothing


def test_a_learner_that_starts_from_it_keeps_its_trees_and_its_own_level():
    X, y = rows(400, seed=7)
    learner = make_learner("lightgbm", seed=3, settings={"n_estimators": 6})
    fitted = StartedFromPrior(learner, prior(), COLUMNS, 0.5).fit(X, y)
    before = lightgbm.Booster(model_str=prior().model).num_trees()
    assert fitted.booster_.num_trees() == before + 3
    start = np.asarray(fitted.booster_.predict(X, num_iteration=before))
    assert start.mean() == pytest.approx(y.mean(), abs=1e-6)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda folder: (folder / CARD).unlink(), "no prior in "),
        (lambda folder: (folder / CARD).write_text("{}"), "is not readable"),
        (lambda folder: (folder / MODEL).write_text(prior().model.replace("0.", "1.", 1)), "not the one that its card"),
    ],
)
def test_a_damaged_prior_is_refused(tmp_path, damage, what):
    write_prior(prior(), tmp_path)
    assert load_prior(str(tmp_path)) == prior()
    damage(tmp_path)
    with pytest.raises(InputError, match="parameter training") as refused:
        load_prior(str(tmp_path))
    assert what in refused.value.what


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


def prior_of(matrix, folder, *, sign=1.0):
    folder.mkdir()
    write_prior(learned(tuple(column.name for column in matrix.columns), sign), folder)
    return TRAINING.model_copy(update={"prior": str(folder)})


def fitted_at_the_end(matrix, training):
    trainer = Trainer(matrix, training=training, models=ONE, k=3, seed=7)
    end = matrix.span[1]
    return trainer.fit(instant_ms(end), Labels.of(matrix.labels(end)), timedelta(days=21))


def test_a_prior_that_misleads_is_left_out(tmp_path):
    matrix = FakeMatrix(units=24, days=30, incidents=40, seed=3)
    misled = fitted_at_the_end(matrix, prior_of(matrix, tmp_path / "prior", sign=-1.0))
    own = fitted_at_the_end(matrix, TRAINING)
    assert (misled.prior_weight, own.prior_weight) == (0.0, None)
    X = matrix.features[:50]
    assert (log_odds(misled.learners["lightgbm"].booster_, X) == log_odds(own.learners["lightgbm"].booster_, X)).all()


def test_the_report_says_where_a_prior_was_left_out_and_where_it_was_alone():
    used = {"fitted": True, "calibrated": True, "thinned_to": None, "prior_weight": 0.0, "refit_ms": 0}
    facts = [
        {"fold": 0, "unfit": "no incident", "sliding": used | {"fitted": False, "stand_in": "prior"}},
        {"fold": 1, "unfit": None, "sliding": used},
    ]
    skipped = skipped_of([Fold(None, fold) for fold in facts], SimpleNamespace(never_fit=()))
    assert skipped == (
        "fold (fold 0): no incident; scored by prior only",
        "prior (fold 1): left out, it ranked the newest labels no better than own data alone",
    )


def test_a_prior_weighs_less_the_more_own_failures_there_are(tmp_path):
    few, many = (FakeMatrix(units=24, days=30, incidents=n, seed=3) for n in (4, 150))
    training = prior_of(few, tmp_path / "prior")
    weights = [fitted_at_the_end(matrix, training).prior_weight for matrix in (few, many)]
    assert weights[0] > 1.5 * weights[1]


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
    by_prior = log_odds(load_prior(training.prior).on(matrix.columns), X)
    assert scored["rank"].to_numpy().argmin() == by_prior.argmax()
    assert scored["risk"].max() < 0.01
