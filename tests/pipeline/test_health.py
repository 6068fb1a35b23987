import json
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest

from evaluation.backtest.run import run_backtest
from evaluation.drift.verdict import drift_frames
from features.vocabulary import FeatureColumn
from foundation.errors import InputError
from models.bundle.store import load_bundle, save_bundle
from models.config import BacktestSection, CascadeSection, ModelsSection, ParallelSection, TrainingSection
from models.training.final import fit_final
from models.training.fitted import FittedModels
from pipeline import health
from pipeline.health import check_health
from pipeline.report.sections import what_changed
from tests.models.fake_matrix import START, FakeMatrix
from tests.processes import invoke

MODELS = ModelsSection(
    profile="logistic",
    learners=("logistic",),
    parallel=ParallelSection(members=("logistic",)),
    cascade=CascadeSection(stages=("logistic",)),
)
TRAINING = TrainingSection(window=timedelta(days=15), negative_ratio=8)
FITTED = START + timedelta(days=25)
LATER = START + timedelta(days=34)


def fleet(jump=0.0):
    matrix = FakeMatrix(units=24, days=36, incidents=50, companions=8, seed=3)
    late = (matrix.rows["decision_time"] >= FITTED).to_numpy()
    matrix.features[late, :2] += jump
    return matrix


def fleet_of_makes(categories, codes):
    """A fleet with a static category; ``codes`` gives each row's, of its unit's number and whether it is late."""
    matrix = fleet()
    number = matrix.rows["unit"].str[-3:].astype(int).to_numpy()
    late = (matrix.rows["decision_time"] >= FITTED).to_numpy()
    matrix.features = np.c_[matrix.features, codes(number, late)].astype(np.float32)
    matrix.columns = [*matrix.columns, FeatureColumn.of("static", "model", "code", categories=categories)]
    return matrix


def save(path, matrix):
    fitted = fit_final(matrix, training=TRAINING, models=MODELS, backtest=BacktestSection(), seed=7, until=FITTED)
    save_bundle(path, fitted, {"profile": "logistic", "params": {"seed": 7}})
    return path


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return save(tmp_path_factory.mktemp("health") / "bundle", fleet())


@pytest.fixture(scope="module")
def bundle_of_makes(tmp_path_factory):
    return save(tmp_path_factory.mktemp("makes") / "bundle", fleet_of_makes(("A", "B"), lambda unit, _: unit % 3 == 0))


@pytest.fixture
def opened(monkeypatch):
    def put(matrix):
        monkeypatch.setattr(health.FeatureMatrix, "open", staticmethod(lambda _path: matrix))

    return put


def test_a_model_on_a_steady_fleet_is_healthy_and_its_outcomes_are_counted(bundle, opened, tmp_path):
    matrix = fleet()
    opened(matrix)
    result = check_health(bundle, tmp_path, until=LATER)
    assert result.healthy
    assert result.findings.summary == "no drift found"
    assert result.fitted_at == FITTED
    assert result.checked_at == LATER
    labels = matrix.labels(LATER + timedelta(milliseconds=1))
    rows = matrix.rows
    inside = (rows["decision_time"] >= FITTED) & (rows["decision_time"] <= LATER) & ~rows["augmented"]
    assert result.risks.positives == (labels["label"][inside & (labels["complete_at"] <= LATER)] == 1).sum()
    assert result.alerts.right + result.alerts.wrong > 0
    text = result.to_text()
    assert "no drift detected" in text
    assert "verdict: no drift found" in text
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["healthy"] is True


def test_risks_a_tenth_of_the_failures_are_drift(bundle, opened, tmp_path, monkeypatch):
    opened(fleet())
    risk = FittedModels.risk
    monkeypatch.setattr(FittedModels, "risk", lambda self, *given: risk(self, *given) / 10)
    result = check_health(bundle, tmp_path, until=LATER)
    assert result.findings.causes == ("risks",)
    assert not result.healthy
    assert "DRIFT: the risks are miscalibrated. Risks are too low: more failures than predicted." in result.to_text()


def test_what_was_not_known_at_the_check_changes_nothing(bundle, opened, tmp_path):
    opened(fleet())
    honest = check_health(bundle, tmp_path, until=LATER)
    poisoned = fleet()
    poisoned.features[(poisoned.rows["decision_time"] > LATER).to_numpy()] = 1e6
    poisoned.events = poisoned.events[poisoned.events["known_at"] <= LATER]
    opened(poisoned)
    assert check_health(bundle, tmp_path, until=LATER) == honest


def test_the_doctor_says_what_changed_and_fails(bundle, opened, tmp_path):
    opened(fleet(jump=3.0))
    arguments = ["doctor", "--model", str(bundle), "--matrix", str(tmp_path), "--until", "2026-02-04"]
    result = invoke(*arguments, code=1)
    assert "DRIFT: the readings changed without a known cause. F0, f1 changed" in result.output
    content = json.loads(invoke(*arguments, "--json", code=1).output)
    assert content["healthy"] is False
    assert {verdict["cause"] for verdict in content["findings"]["verdicts"]} >= {"readings"}
    invoke("doctor", "--model", bundle, code=2)


def test_a_bundle_without_reference_a_matrix_of_other_columns_and_one_without_rows_are_refused(
    bundle, opened, tmp_path
):
    opened(fleet())
    with pytest.raises(InputError, match="no decision between the fit at 2026-01-26 00:00 UTC and the check at"):
        check_health(bundle, tmp_path, until=FITTED - timedelta(hours=1))
    other_fleet = fleet()
    other_fleet.columns = other_fleet.columns[::-1]
    opened(other_fleet)
    with pytest.raises(InputError, match="the features of the matrix and the bundle differ"):
        check_health(bundle, tmp_path)
    fitted = load_bundle(bundle).fitted
    older = tmp_path / "older"
    save_bundle(older, replace(fitted, reference=None), {"profile": "logistic"})
    with pytest.raises(InputError, match="the bundle has no reference of its training data"):
        check_health(older, tmp_path)


def test_categories_that_a_matrix_numbers_in_another_order_change_nothing(bundle_of_makes, opened, tmp_path):
    opened(fleet_of_makes(("A", "B"), lambda unit, _: unit % 3 == 0))
    plain = check_health(bundle_of_makes, tmp_path, until=LATER)
    opened(fleet_of_makes(("B", "A"), lambda unit, _: unit % 3 != 0))
    assert check_health(bundle_of_makes, tmp_path, until=LATER) == plain
    assert plain.healthy


def test_a_category_that_came_after_the_fit_is_scored_as_unknown_and_reported_as_a_change_of_the_fleet(
    bundle_of_makes, opened, tmp_path
):
    opened(fleet_of_makes(("A", "B"), lambda unit, late: np.where(late & (unit < 6), np.nan, unit % 3 == 0)))
    unknown = check_health(bundle_of_makes, tmp_path, until=LATER)
    opened(fleet_of_makes(("C", "A", "B"), lambda unit, late: np.where(late & (unit < 6), 0, 1 + (unit % 3 == 0))))
    result = check_health(bundle_of_makes, tmp_path, until=LATER)
    assert (result.risks, result.alerts) == (unknown.risks, unknown.alerts)
    [verdict] = [verdict for verdict in result.findings.verdicts if verdict.cause == "fleet"]
    assert any(fact.startswith("model C: 0% before, 25% now") for fact in verdict.facts)


def test_the_report_tells_what_changed_at_each_refit():
    matrix = FakeMatrix(units=24, days=40, incidents=50, companions=8, seed=3)
    late = (matrix.rows["decision_time"] >= START + timedelta(days=27)).to_numpy()
    matrix.features[late, :2] += 3
    result = run_backtest(matrix, training=TRAINING, models=MODELS, backtest=BacktestSection(), seed=7)
    extras = drift_frames(result.drift, result.folds)
    assert set(extras) == {"drift_checks", "drift_verdicts"}
    assert len(extras["drift_checks"]) == result.folds["fold"].nunique() - 1
    context = SimpleNamespace(folds=result.folds, extras=extras, profile="logistic", unit_word="GPU")
    section = what_changed(context)
    assert section.key == "what-changed"
    assert "checks found drift" in section.introduction[0]
    texts = [cell.text + cell.note for table in section.tables for row in table.rows for cell in row]
    assert any("F0, f1 changed" in text for text in texts)
    for table in section.tables:
        assert all(len(row) == len(table.header) for row in table.rows)
    assert what_changed(SimpleNamespace(extras={})) is None
