"""The main job from a dataset to files: what stands in them, and that the same input gives the same bytes."""

import hashlib
import json
import shutil
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from features.matrix.matrix import FeatureMatrix
from foundation.errors import InputError
from models.bundle.store import CARD, load_bundle
from models.config import BASELINES, TrainingSection
from models.registry.store import opened_store
from pipeline.artefacts import VALUE, figures, load_evaluation
from pipeline.matrix_stage import check_made_with, make_matrix
from pipeline.params import Params
from pipeline.stages import backtest_matrix, train_bundle, write_report_for
from pipeline.tracking import record_backtest
from telemetry.dataset.store import Dataset


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_predictions_hold_the_profiles_choice_in_the_contracts_shape(small_backtest: Path) -> None:
    frame = pd.read_parquet(small_backtest / "predictions.parquet")
    assert list(frame.columns) == [
        "decision_time", "node", "gpu", "risk", "score", "rank", "alert", "label", "fold", "model",
        "risk_1h", "risk_6h", "risk_72h",
    ]  # fmt: skip
    assert set(frame["model"]) == {"mean_log_odds"}
    assert not frame.duplicated(["decision_time", "gpu"]).any()
    assert str(frame["decision_time"].dtype) == "datetime64[ms, UTC]"
    assert frame["risk"].between(0, 1).all()
    assert (frame.groupby("decision_time")["rank"].min() == 1).all()
    k = json.loads((small_backtest / "metrics.json").read_text())["k"]
    assert frame[frame["alert"]].groupby("decision_time")["node"].nunique().max() == k
    assert set(frame["label"].dropna().unique()) <= {0, 1}


@pytest.mark.parametrize(
    ("file", "column", "hours"), [("predictions", "label", 24), ("predictions_all", "drain_label", 72)]
)
def test_labels_in_the_predictions_follow_the_definition(small_fleet, small_backtest, file, column, hours):
    frame = pd.read_parquet(small_backtest / f"{file}.parquet").rename(columns={column: "outcome"})
    matrix = FeatureMatrix.open(small_backtest / "matrix")
    incidents = matrix.incidents()
    gap, horizon = matrix.config.labels.gap, timedelta(hours=hours)
    end = Dataset.open(small_fleet).meta.span[1]
    starts = {unit: list(times) for unit, times in incidents.groupby("unit")["start"]}
    for row in frame.sample(min(len(frame), 1500), random_state=1).itertuples():
        low, high = row.decision_time + gap, row.decision_time + gap + horizon
        hit = any(low < start <= high for start in starts.get(row.gpu, []))
        if high > end:
            assert pd.isna(row.outcome)
        elif hit:
            assert row.outcome == 1
        else:
            assert pd.isna(row.outcome) or row.outcome == 0


def test_metrics_say_where_they_come_from_and_that_the_fleet_is_simulated(small_backtest: Path) -> None:
    metrics = json.loads((small_backtest / "metrics.json").read_text())
    assert metrics["simulated"]["acceleration"] == 60.0
    assert len(metrics["dataset_digest"]) == 64
    assert metrics["models"]["mean_log_odds"]["sliding"]["precision_at_k"] is not None
    assert metrics["models"]["oracle"]["oracle"]["precision_at_k"] is not None
    page = (small_backtest / "report" / "index.html").read_text()
    assert "imulated" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_alerts_in_the_report_carry_readable_reasons(small_backtest: Path) -> None:
    _, context = load_evaluation(small_backtest)
    assert context.alerts
    assert all(alert.reasons and alert.method for alert in context.alerts)
    assert all("__" not in reason for alert in context.alerts for reason in alert.reasons)


def test_the_report_holds_every_parameter_that_risks_depend_on(small_backtest: Path) -> None:
    _, context = load_evaluation(small_backtest)
    assert context.params["labels.xids.bus"] == "79, 143"
    assert context.params["labels.horizon"] == "1d"
    assert context.params["models.learners"].startswith("lightgbm")


def test_what_is_saved_is_what_is_read(small_backtest: Path, tmp_path: Path) -> None:
    first = write_report_for(small_backtest, tmp_path / "one").read_bytes()
    assert first == (small_backtest / "report" / "index.html").read_bytes()


def test_a_backtest_of_what_the_profile_needs_predicts_the_same(small_params, small_backtest, tmp_path):
    (tmp_path / VALUE).write_text("{}")  # of an earlier backtest, which this one replaces
    backtest_matrix(FeatureMatrix.open(small_backtest / "matrix"), small_params, tmp_path, full=False)
    assert not (tmp_path / VALUE).exists()
    assert (tmp_path / "predictions.parquet").read_bytes() == (small_backtest / "predictions.parquet").read_bytes()
    fitted = pd.read_parquet(tmp_path / "predictions_all.parquet")
    assert set(fitted["variant"]) == {"sliding"}
    assert set(fitted["model"]) == {*BASELINES, "lightgbm", "logistic", "mean_log_odds"}
    assert "trained once" not in write_report_for(tmp_path).read_text()


def test_the_bundle_is_trained_and_loads(small_params, small_backtest, tmp_path, monkeypatch):
    """With memory for a few hundred rows, which summary, bundle and card report."""
    matrix = FeatureMatrix.open(small_backtest / "matrix")
    monkeypatch.setattr(TrainingSection, "bytes_of_a_fit", property(lambda _: 4 * len(matrix.columns) * 400))
    summary = train_bundle(matrix, small_params, tmp_path / "bundle")
    assert summary["positives"] > 0
    bundle, card = load_bundle(tmp_path / "bundle"), tmp_path / "bundle" / CARD
    assert bundle.profile == "mean_log_odds"
    assert bundle.manifest["simulated"]["scenario"] == "base"
    ratio = summary["negatives_a_positive_in_memory"]
    assert summary["positives"] + summary["negatives"] <= 400
    assert bundle.fitted.thinned_to == ratio < small_params.training.negative_ratio
    assert f"`training.memory` limited the negatives to {ratio} per positive" in card.read_text()


def test_runs_are_named_after_what_they_are_and_have_the_profiles_figures_as_columns(
    small_backtest: Path, empty_store: Path, tmp_path: Path
) -> None:
    uri = f"sqlite:///{shutil.copy(empty_store, tmp_path)}"
    evaluation, context = load_evaluation(small_backtest)
    main = figures(evaluation, context.profile)
    result: Any = SimpleNamespace(folds=context.folds)
    run_id = record_backtest(
        uri, "predrain", name=f"backtest of {context.profile}", main=main, params={}, tags={}, result=result,
        evaluation=evaluation, artifacts=(),
    )  # fmt: skip
    with opened_store(uri) as mlflow:
        run = mlflow.MlflowClient().get_run(run_id)
    assert run.info.run_name == "backtest of mean_log_odds"
    assert run.data.metrics["recall"] == main["recall"]
    assert run.data.metrics["incidents"] == main["incidents"]
    assert not any(isinstance(value, str) for value in run.data.metrics.values())


def test_a_dataset_of_another_step_is_refused(small_fleet: Path, small_params: Params, tmp_path: Path) -> None:
    hourly = small_params.telemetry.model_copy(update={"step": timedelta(hours=1)})
    with pytest.raises(InputError, match=r"the dataset's step is 10m, but telemetry\.step is 1h"):
        make_matrix(small_fleet, small_params.model_copy(update={"telemetry": hourly}), tmp_path / "matrix")


def test_a_report_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not the output of a backtest"):
        write_report_for(tmp_path)


def test_a_killed_backtest_goes_on_and_ends_the_same(small_fleet, small_params, small_backtest, tmp_path, monkeypatch):
    matrix = FeatureMatrix.open(small_backtest / "matrix")
    truth = small_fleet.with_name("fleet-truth")

    def stop(n_done: int, _total: int) -> None:
        if n_done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backtest_matrix(matrix, small_params, tmp_path / "out", truth=truth, progress=stop)
    assert list((tmp_path / "out" / ".fits").iterdir())
    backtest_matrix(matrix, small_params, tmp_path / "out", truth=truth)
    resumed = {name: digest for name, digest in digests(tmp_path / "out").items() if not name.startswith(".fits")}
    old_digests = digests(small_backtest)
    assert resumed == {name: old_digests[name] for name in resumed}
    changed = small_params.backtest.model_copy(update={"bootstrap": 11, "cooldown": timedelta(days=5)})
    monkeypatch.setattr("models.learners.factory.lightgbm.LGBMClassifier.fit", lambda *_: pytest.fail("fitted again"))
    backtest_matrix(matrix, small_params.model_copy(update={"backtest": changed}), tmp_path / "out")
    second, first = (pq.read_table(out / "predictions_all.parquet") for out in (tmp_path / "out", small_backtest))
    assert second.drop_columns("alert").equals(first.drop_columns("alert"))
    assert not second["alert"].equals(first["alert"])
    assert load_evaluation(tmp_path / "out")[1].budget_period == "day"


@pytest.mark.parametrize(
    ("section", "change", "difference"),
    [
        ("labels", {"horizon": timedelta(hours=48)}, "labels.horizon 1d, not 2d"),
        ("decision", {"every": timedelta(hours=12)}, "decision.every 6h, not 12h"),
        ("features", {"groups": ("static",)}, "features.groups telemetry, history, .*, not static"),
        ("training", {"augmentation": 0}, "training.augmentation 2, not 0"),
    ],
)
def test_parameters_that_say_something_else_than_the_matrix_are_refused(
    small_params: Params, small_backtest: Path, tmp_path: Path, section: str, change: dict[str, object], difference: str
) -> None:
    matrix = FeatureMatrix.open(small_backtest / "matrix")
    params = small_params.model_copy(update={section: getattr(small_params, section).model_copy(update=change)})
    for stage in (backtest_matrix, train_bundle):
        with pytest.raises(InputError, match=f"the matrix was made with {difference}"):
            stage(matrix, params, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_parameters_of_the_fit_alone_may_differ_from_the_matrixs(small_params: Params, small_backtest: Path) -> None:
    training = small_params.training.model_copy(update={"negative_ratio": 30})
    changed = small_params.model_copy(update={"seed": 7, "training": training})
    check_made_with(FeatureMatrix.open(small_backtest / "matrix"), changed)


def test_a_full_disk_loses_nothing(small_params, small_backtest, tmp_path, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(small_backtest, out, ignore=shutil.ignore_patterns("matrix"))
    old_digests = digests(out)

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match="the disk is full"):
        backtest_matrix(FeatureMatrix.open(small_backtest / "matrix"), small_params, out)
    new_digests = digests(out)
    assert {name: new_digests[name] for name in old_digests} == old_digests
