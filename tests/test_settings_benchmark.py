"""The comparison of searched settings with given ones."""

from __future__ import annotations

from datetime import timedelta

import pytest

from benchmarks.settings import GIVEN, SEARCHED, replay
from models.config import ModelsSection, TrainingSection
from models.sliding import run_backtest
from pipeline.params import Params
from tests.models.fake_matrix import FakeMatrix

MODELS = ModelsSection.model_validate(
    {
        "profile": "lightgbm",
        "learners": ["lightgbm"],
        "parallel": {"members": ["lightgbm"]},
        "cascade": {"stages": ["lightgbm"]},
        "settings": {"lightgbm": {"n_estimators": 8}},
    }
)
PARAMS = Params(training=TrainingSection(span=timedelta(days=14), refit_every=timedelta(days=7)))


def test_both_sides_replay_the_same_decisions_and_the_given_one_is_the_backtest(tmp_path):
    matrix = FakeMatrix(units=20, days=34, incidents=60, strength=3.0, seed=8)
    predictions, k, seen = replay(matrix, PARAMS, MODELS, 3, tmp_path)
    key = ["decision_time", "unit"]
    given, searched = (predictions[predictions["variant"] == variant] for variant in (GIVEN, SEARCHED))
    assert given[key].reset_index(drop=True).equals(searched[key].reset_index(drop=True))
    alone = run_backtest(matrix, training=PARAMS.training, models=MODELS, backtest=PARAMS.backtest, seed=PARAMS.seed)
    theirs = alone.predictions
    theirs = theirs[(theirs["model"] == "lightgbm") & (theirs["variant"] == "sliding")]
    assert given["score"].tolist() == theirs["score"].tolist()
    assert k == alone.k
    assert [trial["trial"] for trial in seen["trials"]] == [0, 1, 2, 3]
    assert sum(trial["chosen"] for trial in seen["trials"]) == 1


def test_a_fleet_with_nothing_to_search_on_is_told(tmp_path):
    with pytest.raises(SystemExit, match="too few incidents to search on"):
        replay(FakeMatrix(units=20, days=34, incidents=6, strength=3.0, seed=8), PARAMS, MODELS, 3, tmp_path)
