"""Learners that see some feature groups: no other column reaches them, and bundles and explanations know it."""

import copy
from datetime import timedelta
from functools import cache

import numpy as np
import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from features.vocabulary import FeatureColumn
from foundation.times import instant_ms
from models.bundle.store import load_bundle, save_bundle
from models.config import ModelsSection, TrainingSection
from models.explanation.contributions import explained_by
from models.rows.training_set import Labels
from models.training.trainer import Trainer
from tests.models.fake_matrix import FakeMatrix

NAMES = ("lightgbm", "random_forest")
SETTINGS = {"lightgbm": {"n_estimators": 12, "min_child_samples": 5}, "random_forest": {"n_estimators": 6}}
GROUPS = ("telemetry", "telemetry", "onset", "history", "onset", "static")
SOME = st.sets(st.sampled_from(sorted(set(GROUPS))), min_size=1, max_size=3).map(sorted)


@cache
def fleet():
    matrix = FakeMatrix(units=24, days=30, incidents=40, seed=3)
    matrix.columns = [FeatureColumn.of(group, f"f{i}", "mean") for i, group in enumerate(GROUPS)]
    return matrix, Labels.of(matrix.labels(matrix.span[1]))


def fit(groups, poison=None):
    """Fit on a small fleet; ``poison`` takes the place of the columns that the first learner does not see."""
    matrix, labels = fleet()
    if poison is not None:
        matrix = copy.copy(matrix)
        matrix.features = matrix.features.copy()
        matrix.features[:, [group not in groups["lightgbm"] for group in GROUPS]] = poison
    models = ModelsSection(
        profile="mean_log_odds", learners=NAMES, settings=SETTINGS, groups=groups, horizons=(),
        parallel={"members": NAMES}, cascade={"stages": NAMES},
    )  # fmt: skip
    training, names = TrainingSection(negative_ratio=20), ("mean_log_odds", "cascade")
    trainer = Trainer(matrix, training=training, models=models, seed=7, names=names)
    fitted = trainer.fit(instant_ms(matrix.span[1]), labels, timedelta(days=21))
    rows = matrix.rows.head(24)
    return fitted, fitted.score(matrix.features[:24], rows["decision_time"], rows["unit"]), matrix.features[:24]


@settings(max_examples=6, deadline=None)
@given(SOME, st.sampled_from([np.nan, 0.0, 1e9, -1e9]))
def test_what_a_learner_does_not_see_changes_neither_learners_nor_ensembles(seen, poison):
    groups = dict.fromkeys(NAMES, seen)
    plain, scores, X = fit(groups)
    pd.testing.assert_frame_equal(scores, fit(groups, poison)[1], check_exact=True)
    hidden = [group not in seen for group in GROUPS]
    assert not explained_by(plain, "mean_log_odds", X)[0][:, hidden].any()


@settings(max_examples=5, deadline=None)
@given(SOME, SOME)
def test_a_bundle_gives_the_same_scores_and_reasons(tmp_path_factory, of_first, of_second):
    fitted, scores, X = fit(dict(zip(NAMES, (of_first, of_second), strict=True)))
    path = save_bundle(tmp_path_factory.mktemp("groups") / "bundle", fitted, {"profile": "mean_log_odds"}).path
    assert "`lightgbm` uses only " in (path / "MODEL_CARD.md").read_text()
    loaded = load_bundle(path).fitted
    times, units = scores["decision_time"][:24], scores["unit"][:24]
    pd.testing.assert_frame_equal(loaded.score(X, times, units), scores, check_exact=True)
    for model in ("mean_log_odds", "cascade"):
        np.testing.assert_array_equal(explained_by(loaded, model, X)[0], explained_by(fitted, model, X)[0])
    assert (np.abs(explained_by(loaded, "mean_log_odds", X)[0]).sum(axis=0) > 0).any()


def test_a_learner_whose_groups_the_features_lack_sees_all_columns():
    pd.testing.assert_frame_equal(fit({"lightgbm": ("peers",)})[1], fit({"lightgbm": None})[1], check_exact=True)
