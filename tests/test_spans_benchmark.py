"""The comparison of training spans: a rule that takes its refits from fixed spans gives what it gives alone."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pandas as pd
import pytest

from benchmarks.spans import ON_DRIFT, REFERENCE, replay, rules, table
from models.assessment import assess
from models.config import ModelsSection, TrainingSection
from models.scored import split_predictions
from models.sliding import run_backtest
from models.trainer import Trainer
from pipeline.params import Params
from tests.models.fake_matrix import START, FakeMatrix

MODELS = ModelsSection.model_validate(
    {
        "profile": "lightgbm",
        "learners": ["lightgbm"],
        "parallel": {"members": ["lightgbm"]},
        "cascade": {"stages": ["lightgbm"]},
        "settings": {"lightgbm": {"n_estimators": 8}},
    }
)


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    matrix = FakeMatrix(units=20, days=34, incidents=60, strength=3.0, seed=8)
    training = TrainingSection(spans=("7d", "14d"), refit_every="10d", hysteresis=0.0)
    params = Params(training=training)
    work = tmp_path_factory.mktemp("finished")
    return matrix, params, work, *replay(matrix, params, MODELS, work)


@pytest.mark.system
def test_choosing_among_fitted_spans_equals_choosing_while_replaying(replayed):
    matrix, params, _, predictions, fleet = replayed
    first = predictions["decision_time"].min()
    assert first >= START + timedelta(days=15)
    alone = run_backtest(
        matrix,
        training=params.training,
        models=MODELS,
        backtest=params.backtest.model_copy(update={"first_test": first.to_pydatetime()}),
        seed=params.seed,
    )
    mine = predictions[predictions["variant"] == REFERENCE]
    theirs = alone.predictions
    theirs = theirs[(theirs["model"] == "lightgbm") & (theirs["variant"] == "sliding")]
    key = ["decision_time", "unit"]
    columns = [*key, "score", "risk", "rank", "alert", "fold"]
    one, two = (frame[columns].sort_values(key, ignore_index=True) for frame in (mine, theirs))
    pd.testing.assert_frame_equal(one, two)
    assert fleet.k == alone.k


def test_every_rule_is_tested_on_the_same_decisions_and_told_with_its_cost(replayed):
    *_, predictions, fleet = replayed
    sizes = predictions.groupby("variant", observed=True).size()
    assert sizes.nunique() == 1
    assert set(sizes.index) == {"7 d", "14 d", "expanding", ON_DRIFT, *rules(["lightgbm"])}
    parts = split_predictions(predictions.assign(failure_class="other"), fleet.k)
    found = {part.variant: assess(part, np.ones((0, part.n_units))) for part in parts}
    lines = table(found, [fleet])
    assert len(lines) == 2 + len(sizes)
    assert any(line.startswith("| auto |") and " x " in line for line in lines)
    done, folds = fleet.refits[ON_DRIFT]
    assert len(fleet.checks[ON_DRIFT]) == folds
    assert fleet.checks[ON_DRIFT][0] == "the first fit"
    assert any(line.startswith(f"| {ON_DRIFT} |") and f"{done} of {folds} refits" in line for line in lines)


def test_what_is_finished_is_neither_fitted_nor_chosen_again(replayed, monkeypatch):
    matrix, params, work, predictions, fleet = replayed
    for name in ("fit", "choose_span"):
        monkeypatch.setattr(Trainer, name, None)
    again, found = replay(matrix, params, MODELS, work)
    pd.testing.assert_frame_equal(again, predictions)
    assert (found.chosen, found.checks, found.refits) == (fleet.chosen, fleet.checks, fleet.refits)
    assert all(found.seconds[name] >= fleet.seconds[name] for name in ("7 d", "expanding", ON_DRIFT))
