"""The paper's setting from params/paper.yaml, end to end on a small simulated fleet."""

import json
from pathlib import Path

import pandas as pd
import pytest

from features.matrix.matrix import FeatureMatrix
from models.bundle.store import load_bundle
from pipeline.matrix_stage import make_matrix
from pipeline.params import load_params
from pipeline.stages import backtest_matrix, train_bundle, write_report_for

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
QUICK = """
decision: {every: 12h}
features: {windows: [6h]}
training: {candidate_windows: [14d, 21d], refit_every: 14d, augmentation: 1}
models:
  settings:
    lightgbm: {n_estimators: 20}
    mlp: {epochs: 2}
    lstm: {epochs: 1, hidden: 8}
    cnn1d: {epochs: 1, hidden: 8, filters: 4}
backtest: {bootstrap: 20}
"""


@pytest.fixture(scope="module")
def paper(small_fleet, tmp_path_factory):
    out = tmp_path_factory.mktemp("paper")
    (out / "quick.yaml").write_text(QUICK)
    params = load_params([ROOT / "params.yaml", ROOT / "params" / "paper.yaml", out / "quick.yaml"])
    matrix = make_matrix(small_fleet, params, out / "matrix")
    backtest_matrix(matrix, params, out)
    write_report_for(out)
    return out, params


def test_the_features_are_the_papers_and_nothing_else(paper):
    matrix = FeatureMatrix.open(paper[0] / "matrix")
    assert {column.group for column in matrix.columns} == {"telemetry", "static"}
    four = {"gpu_temp_c", "power_w", "gpu_util_pct", "mem_util_pct"}
    assert {column.channel for column in matrix.columns if column.group == "telemetry"} == four
    assert {column.channel for column in matrix.columns if column.group == "static"} == {"model", "driver", "age"}
    assert matrix.windows([0]).shape == (1, 48, 4)


def test_every_model_of_the_paper_is_scored_with_and_without_sliding(paper):
    frame = pd.read_parquet(paper[0] / "predictions_all.parquet")
    for variant in ("sliding", "train_once"):
        models = set(frame.loc[frame["variant"] == variant, "model"])
        assert {"lightgbm", "mlp", "lstm", "cnn1d", "intersection", "cascade"} <= models
    metrics = json.loads((paper[0] / "metrics.json").read_text())
    assert metrics["profile"] == "intersection"
    # its features hold neither past faults nor error counters, and the report says whose rows that empties
    assert [reason.split(":")[0] for reason in metrics["skipped"] if "arbitrarily" in reason] == [
        "history_count ranks units arbitrarily",
        "vendor_rules ranks units arbitrarily",
    ]
    profile = pd.read_parquet(paper[0] / "predictions.parquet")
    assert (profile.groupby("decision_time")["alert"].sum() <= metrics["k"]).all()
    assert (paper[0] / "report" / "index.html").exists() or any((paper[0] / "report").iterdir())


def test_its_bundle_scores_the_rows_of_the_matrix(paper, tmp_path):
    out, params = paper
    matrix = FeatureMatrix.open(out / "matrix")
    train_bundle(matrix, params, tmp_path / "bundle")
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle.manifest["sequence"]["channels"] == ["gpu_temp_c", "power_w", "gpu_util_pct", "mem_util_pct"]
    from models.sequence.layout import with_windows

    rows = matrix.rows[~matrix.rows["augmented"]].tail(64)
    values = with_windows(matrix, bundle.fitted.learner_names).values(rows.index.to_numpy())
    scored = bundle.fitted.score(values, rows["decision_time"], rows["unit"])
    assert scored["risk"].between(0, 1).all()
    assert set(scored["model"]) == {params.models.profile}
