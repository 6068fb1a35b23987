import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from models.calibration.horizons import HorizonMap, Link
from models.config import ModelsSection, PrecisionTargetsSection
from pipeline import decisions as module
from pipeline.decisions import bundle_decisions, decision_extras, with_horizons
from pipeline.report.sections import decisions as section
from tests.evaluation.fleet_matrix import FleetMatrix, folds, predictions

MAPS = tuple(HorizonMap(24.0, -5.0, (Link(6.0, -1.2, 0.1),)) for _ in range(4))

PARAMS = {"labels.horizon": "1d", "models.learners": "lightgbm"}


@pytest.fixture(scope="module")
def extras():
    matrix = FleetMatrix()
    frame = predictions(matrix)
    result = SimpleNamespace(predictions=frame, folds=folds(), k=2, horizons=(), models=("good", "blind"))
    models = ModelsSection.model_construct(profile="good", precision_targets=PrecisionTargetsSection(horizon=None))
    return decision_extras(result, matrix, models, None)


def context(extras, profile="good"):
    return SimpleNamespace(extras=extras, profile=profile, unit_word="GPU", dataset_digest="d1", params=PARAMS)


def test_a_run_leaves_its_promises_and_decisions_as_frames(extras):
    assert set(extras) == {"promises", "decisions", "unforeseen"}
    assert set(extras["decisions"]["kind"]) == {"precision", "budget"}


def test_the_report_says_what_was_promised_and_what_became_of_it(extras):
    decisions = section(context(extras))
    assert decisions.key == "decisions"
    _, promised, unforeseen = decisions.tables
    assert ("good", "30.0 %", "kept") in [tuple(row[at].text for at in (0, 1, 5)) for row in promised.rows]
    assert unforeseen.rows[0][0].text == "all"
    for table in decisions.tables:
        assert all(len(row) == len(table.header) for row in table.rows)
    never = [row for row in section(context(extras, "blind")).tables[1].rows if row[0].text == "blind"]
    assert {row[2].text.partition(" ")[0] for row in never} == {"0"}
    assert section(context({})) is None


def test_a_bundle_carries_the_decisions_of_its_profile(extras, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "load_evaluation", lambda _path: (None, context(extras)))
    carried = bundle_decisions(tmp_path, "good", "d1", PARAMS)
    assert [threshold["kind"] for threshold in carried["thresholds"]] == ["precision"] * 3 + ["budget"]
    assert carried["thresholds"][0]["bound"]["lower"] >= 0.3
    assert json.loads(json.dumps(carried, allow_nan=False)) == carried
    assert bundle_decisions(tmp_path, "other", "d1", PARAMS)["why"] == "the backtest did not score the profile other"
    assert bundle_decisions(tmp_path, "good", "d2", PARAMS)["why"] == "the backtest ran on another dataset"


def test_thresholds_of_other_parameters_are_not_taken_over(extras, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "load_evaluation", lambda _path: (None, context(extras)))
    carried = bundle_decisions(tmp_path, "good", "d1", PARAMS | {"labels.horizon": "6h"})
    assert carried["thresholds"] is None
    assert carried["why"] == "the backtest ran with other parameters: labels.horizon 1d, not 6h"
    assert carried["differs"] == ["labels.horizon 1d, not 6h"]
    for name in ("backtest.k", "models.learners", "models.horizons", "training.memory"):
        assert bundle_decisions(tmp_path, "good", "d1", PARAMS | {name: "other"})["thresholds"]


def test_a_bundle_without_a_backtest_says_why_it_has_no_thresholds():
    carried = bundle_decisions(None, "good", "d1", PARAMS)
    assert carried["thresholds"] is None
    assert carried["why"].startswith("no backtest was given")


def test_further_horizons_stand_behind_all_other_columns():
    frame = pd.DataFrame({"risk": np.float32([0.01, 0.2]), "fold": np.int32([0, 3]), "model": "good"})
    out = with_horizons(frame, SimpleNamespace(horizons=MAPS))
    assert list(out.columns) == ["risk", "fold", "model", "risk_6h"]
    assert (out["risk_6h"] < out["risk"]).all()
    assert with_horizons(frame, SimpleNamespace(horizons=())) is frame
