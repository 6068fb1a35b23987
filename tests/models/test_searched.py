"""What a search chose is summed up from its table, for the report and for the bundle."""

from __future__ import annotations

import math
from datetime import timedelta

import pandas as pd

from models.bundle.store import load_bundle, save_bundle
from models.config import BacktestSection, CalibrationSection, ModelsSection, SearchSection, TrainingSection
from models.search import Searched, search_table
from models.searched import search_facts
from models.sliding import fit_final
from tests.models.fake_matrix import FakeMatrix
from tests.models.small_models import fitted_models

TRIALS = pd.DataFrame(
    {
        "learner": "mlp",
        "trial": [0, 1, 2],
        "settings": ["{}", '{"epochs": 20, "hidden_layer_sizes": [32, 16]}', '{"epochs": 5}'],
        "fold_1": [0.1, 0.3, 0.2],
        "fold_2": [0.3, 0.5, 0.2],
        "mean": [0.2, 0.4, 0.2],
        "chosen": [False, True, False],
    }
)
FOUND = {
    "logistic": Searched("logistic", {"C": 0.1}, pd.DataFrame(), "settings of logistic stay: nothing to try"),
    "mlp": Searched("mlp", {"epochs": 20, "hidden_layer_sizes": (32, 16)}, TRIALS, "trial 1 of mlp gains 0.2000"),
}


def test_what_was_chosen_is_told_beside_what_was_given():
    facts = search_facts(search_table(FOUND))
    assert facts["mlp"] == {
        "settings": {"epochs": 20, "hidden_layer_sizes": [32, 16]}, "given": {}, "mean": 0.4, "given_mean": 0.2,
        "tried": 3, "folds": 2, "why": "trial 1 of mlp gains 0.2000",
    }  # fmt: skip
    assert search_facts(None) == {}


def test_settings_that_could_not_be_compared_are_told_with_the_reason():
    for found in (FOUND, {"logistic": FOUND["logistic"]}):
        facts = search_facts(search_table(found))["logistic"]
        assert math.isnan(facts.pop("mean"))
        assert math.isnan(facts.pop("given_mean"))
        assert facts == {
            "settings": {"C": 0.1}, "given": {"C": 0.1}, "tried": 0, "folds": 0,
            "why": "settings of logistic stay: nothing to try",
        }  # fmt: skip


def test_the_bundle_says_what_was_chosen(tmp_path):
    facts = {"profile": "mean_rank", "params": {"seed": 42}}
    path = save_bundle(tmp_path / "b", fitted_models(), {**facts, "search": search_facts(search_table(FOUND))}).path
    kept = load_bundle(path).manifest["search"]
    assert kept["mlp"]["settings"] == {"epochs": 20, "hidden_layer_sizes": [32, 16]}
    assert kept["logistic"]["mean"] is None
    card = (path / "MODEL_CARD.md").read_text()
    assert (
        "- `logistic`: C 0.1. settings of logistic stay: nothing to try.\n"
        "- `mlp`: epochs 20, hidden_layer_sizes (32, 16). Mean average precision 0.4000 over 2 folds, 0.2000 with the "
        "given settings; 3 tried: trial 1 of mlp gains 0.2000.\n"
    ) in card
    plain = save_bundle(tmp_path / "plain", fitted_models(), facts).path
    assert "Searched settings" not in (plain / "MODEL_CARD.md").read_text()


def test_the_last_fit_tells_what_its_search_chose():
    matrix = FakeMatrix(units=40, days=40, incidents=60, companions=4)
    models = ModelsSection.model_validate(
        {
            "profile": "logistic",
            "learners": ["logistic"],
            "parallel": {"members": ["logistic"]},
            "cascade": {"stages": ["logistic"]},
            "calibration": CalibrationSection(slice=timedelta(days=5)),
        }
    )
    found = {}
    for draws in (0, 2):
        training = TrainingSection(span=timedelta(days=10), negative_ratio=5, search=SearchSection(draws=draws))
        fitted = fit_final(matrix, training=training, models=models, backtest=BacktestSection(), seed=1)
        found[draws] = fitted.searched
        regular = fitted.learners["logistic"].classifier_.C
        assert regular == found[draws].get("logistic", {"settings": {}})["settings"].get("C", 0.001)
    assert found[0] == {}
    assert list(found[2]) == ["logistic"]
    assert found[2]["logistic"]["tried"] == 3
    assert found[2]["logistic"]["folds"] == 3
