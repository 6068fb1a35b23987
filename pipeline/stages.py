"""The stages of the main job, each a function from files to files; dvc.yaml and the command run these."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from features.building import build_matrix
from features.matrix import FeatureMatrix
from models.bundle import save_bundle
from models.evaluation import evaluate
from models.oracle import read_truth
from models.sliding import BacktestResult, fit_final, run_backtest
from pipeline.artefacts import load_evaluation, save_evaluation, write_frame, write_json
from pipeline.params import Params
from pipeline.provenance import code_revision, library_versions
from pipeline.report import AlertEntry, ReportContext, Simulated, select_alerts, write_report
from telemetry.errors import InputError
from telemetry.store import Dataset

Progress = Callable[[int, int], None]
"""Called with the work done and all work, in the units of the stage."""

EXPERIMENT = "predrain"
"""Name of the MLflow experiment that runs are recorded in."""

MODEL = "predrain"
"""Name of the registered model; a new bundle becomes its ``challenger``."""

SHOWN_ALERTS = 20
"""Alerts that the report shows with their reasons."""

EXPLAINED_ALERTS = 200
"""Alerts of a fold that are explained, the riskiest first: those that the report shows are among them."""

PREDICTION_COLUMNS = [
    "decision_time", "node", "gpu", "risk", "score", "rank", "alert", "label", "fold", "model",
]  # fmt: skip
"""Columns of predictions.parquet."""


def make_matrix(dataset: Path, params: Params, out: Path, *, progress: Progress | None = None) -> FeatureMatrix:
    """Compute the feature matrix of a dataset, or take the one at ``out`` if it is the same.

    Raises
    ------
    InputError
        If there is no dataset, its step is not ``telemetry.step``, or a parameter does not fit it.
    """
    found = Dataset.open(dataset)
    if found.meta.step != params.telemetry.step:
        raise InputError(
            f"the dataset's step is {found.meta.step}, telemetry.step is {params.telemetry.step}",
            str(dataset),
            "Set telemetry.step to the dataset's step, or import it again with the other one.",
        )
    return build_matrix(
        found,
        out,
        decision=params.decision,
        labels=params.labels,
        features=params.features,
        training=params.training,
        seed=params.seed,
        progress=progress,
    )


def train_bundle(
    matrix: FeatureMatrix, params: Params, out: Path, *, track: str | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Fit all models as of the end of the data, save them as a bundle, record the run and register the bundle.

    Returns
    -------
    dict
        What was fitted on what, for the terminal.
    """
    fitted = fit_final(
        matrix,
        training=params.training,
        models=params.models,
        backtest=params.backtest,
        seed=params.seed,
        progress=_counted(progress),
    )
    bundle = save_bundle(
        out,
        fitted,
        {
            "profile": params.models.profile,
            "channels": [channel.name for channel in matrix.config.channels.values()],
            "params": params.model_dump(mode="json"),
            "dataset_digest": matrix.config.dataset_digest,
            "code_revision": code_revision(),
            "simulated": _simulated_facts(matrix),
        },
    )
    summary = {
        "bundle": str(out),
        "profile": params.models.profile,
        "train_start": fitted.train_start.isoformat(),
        "train_end": fitted.train_end.isoformat(),
        "positives": fitted.n_positive,
        "negatives": fitted.n_negative,
        "incidents": fitted.n_incidents,
    }
    if track is not None:
        from models.registry import register_bundle  # noqa: PLC0415 - as in _record

        metrics = {key: float(value) for key, value in summary.items() if isinstance(value, int)}
        run_id = _record(track, "train", params, metrics, matrix, {"bundle_digest": bundle.digest})
        summary["challenger"] = f"{MODEL} version {register_bundle(track, MODEL, out, run_id=run_id)}"
    return summary


def replay(
    matrix: FeatureMatrix,
    params: Params,
    out: Path,
    *,
    truth: Path | None = None,
    track: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Run the backtest and write its predictions, metrics and evaluation under ``out``.

    Finished folds are kept in ``OUT/.folds`` until the last file is written, so that a killed run goes on where it was.

    Parameters
    ----------
    truth : Path, optional
        The simulator's truth; an empty folder counts as none. Read by the evaluation only.
    """
    out.mkdir(parents=True, exist_ok=True)
    risks = read_truth(truth) if truth is not None and any(truth.iterdir()) else None
    folds = out / ".folds"
    result = run_backtest(
        matrix,
        training=params.training,
        models=params.models,
        backtest=params.backtest,
        seed=params.seed,
        progress=_counted(progress),
        checkpoint=folds,
        explain=EXPLAINED_ALERTS,
    )
    evaluation = evaluate(
        result.predictions, k=result.k, bootstrap=params.backtest.bootstrap, seed=params.seed, truth=risks
    )
    context = ReportContext(
        dataset=_name_of(matrix),
        dataset_digest=matrix.config.dataset_digest,
        code_revision=code_revision(),
        span=matrix.span,
        unit=matrix.unit,
        simulated=_simulated(matrix),
        profile=params.models.profile,
        every=params.decision.every,
        gap=params.labels.gap,
        horizon=params.labels.horizon,
        folds=result.folds,
        skipped=tuple(map(str, result.skipped)),
        alerts=_alerts(result, params.models.profile),
        params=_shown_params(params),
        attributions=result.attributions,
    )
    metrics = evaluation.to_metrics()
    write_frame(profile_predictions(result.predictions, params.models.profile), out / "predictions.parquet")
    write_frame(result.predictions, out / "predictions_all.parquet")
    save_evaluation(out, evaluation, context)
    write_json(
        {
            "profile": params.models.profile,
            "dataset_digest": matrix.config.dataset_digest,
            "code_revision": context.code_revision,
            "libraries": library_versions(),
            "simulated": _simulated_facts(matrix),
            "skipped": list(context.skipped),
            **metrics,
        },
        out / "metrics.json",
    )
    shutil.rmtree(folds, ignore_errors=True)
    if track is not None:
        flat = {
            f"{model}.{variant}.{name}": value
            for model, variants in metrics["models"].items()
            for variant, measured in variants.items()
            for name, value in measured.items()
            if isinstance(value, int | float) and not name.endswith(("_low", "_high"))
        }
        tags = {"bootstrap": str(params.backtest.bootstrap)}
        _record(track, "backtest", params, flat, matrix, tags, [out / "metrics.json"])


def profile_predictions(predictions: pd.DataFrame, profile: str) -> pd.DataFrame:
    """Give the profile's choice: one row a decision time and unit, ranks from 1, as predictions.parquet holds it."""
    mine = predictions[(predictions["model"] == profile) & (predictions["variant"] == "sliding")]
    mine = mine.sort_values(["decision_time", "rank"], kind="stable")
    return mine[PREDICTION_COLUMNS].reset_index(drop=True)


def write_report_for(backtest: Path, out: Path | None = None) -> Path:
    """Write the report of a finished backtest to ``OUT/report/`` (default: the backtest's own folder)."""
    evaluation, context = load_evaluation(backtest)
    return write_report(out or backtest, evaluation=evaluation, context=context)


def _counted(progress: Progress | None) -> Callable[[int, int, str], None] | None:
    return None if progress is None else lambda done, total, _what: progress(done, total)


def _name_of(matrix: FeatureMatrix) -> str:
    simulated = _simulated(matrix)
    if simulated is not None:
        return f"simulated fleet, scenario {simulated.scenario}, seed {simulated.seed}"
    return f"dataset {matrix.config.dataset_digest[:12]}"


def _simulated(matrix: FeatureMatrix) -> Simulated | None:
    facts = _simulated_facts(matrix)
    if facts is None:
        return None
    return Simulated(scenario=facts["scenario"], seed=facts["seed"], acceleration=facts["acceleration"])


def _simulated_facts(matrix: FeatureMatrix) -> dict[str, Any] | None:
    for source in matrix.config.sources:
        if source.get("kind") == "simulated":
            return {key: source[key] for key in ("scenario", "seed", "acceleration", "gpus", "days")}
    return None


def _alerts(result: BacktestResult, profile: str) -> tuple[AlertEntry, ...]:
    reasons = {(each.decision_time, each.unit): each for each in result.reasons}
    entries = []
    for row in select_alerts(result.predictions, profile, "sliding", SHOWN_ALERTS).itertuples():
        known = reasons.get((row.decision_time.to_pydatetime(), str(row.unit)))
        label = None if pd.isna(row.label) else int(row.label)
        entries.append(
            AlertEntry(
                decision_time=row.decision_time.to_pydatetime(),
                node=str(row.node),
                unit=str(row.unit),
                risk=float(row.risk),
                label=label,
                failure_class=str(row.failure_class) if label == 1 else None,
                incident_start=row.incident_start.to_pydatetime() if label == 1 else None,
                reasons=known.reasons if known is not None else (),
                method=known.method if known is not None else "",
            )
        )
    return tuple(entries)


def _shown_params(params: Params) -> dict[str, str]:
    chosen = ("decision", "labels", "features", "training", "models", "backtest")
    flat = _flatten({name: getattr(params, name).model_dump(mode="json") for name in chosen})
    return {key: value for key, value in flat.items() if not key.startswith(("labels.xids", "labels.classes"))}


def _flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in content.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return flat


def _record(
    track: str,
    name: str,
    params: Params,
    metrics: Mapping[str, float | None],
    matrix: FeatureMatrix,
    tags: Mapping[str, str],
    artifacts: Sequence[Path] = (),
) -> str:
    from models.registry import log_run  # noqa: PLC0415 - MLflow takes seconds to import, and only tracked runs need it

    return log_run(
        track,
        EXPERIMENT,
        params=_flatten(params.model_dump(mode="json")),
        metrics=metrics,
        tags={"dataset_digest": matrix.config.dataset_digest, "code_revision": code_revision(), **tags},
        artifacts=artifacts,
        name=name,
    )
