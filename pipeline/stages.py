"""The stages of the pipeline, each a function from files to files, run by dvc.yaml and the command line."""

import json
import platform
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from evaluation.backtest.frames import BacktestResult
from evaluation.backtest.run import run_backtest
from evaluation.drift.verdict import drift_frames
from evaluation.metrics.evaluation import evaluate
from evaluation.metrics.oracle import oracle_predictions, read_truth
from features.engine import Engine
from features.matrix.matrix import FeatureMatrix
from foundation.files import disk_errors, write_bytes
from foundation.running import Progress
from models.bundle.store import CARD, save_bundle
from models.config import BASELINES
from models.learners.baselines import make_baseline
from models.training.final import fit_final
from pipeline.artefacts import (
    VALUE,
    figures,
    load_evaluation,
    save_evaluation,
    write_frame,
    write_json,
    write_plots,
)
from pipeline.assessment.text import answer_text, recommendation
from pipeline.decisions import bundle_decisions, decision_extras, with_horizons
from pipeline.matrix_stage import check_made_with
from pipeline.params import Params, flatten
from pipeline.report.context import AlertEntry, ReportContext, Simulated, select_alerts
from pipeline.tracking import (
    check_store,
    code_revision,
    fleet_sketch,
    library_versions,
    measurements_of,
    record_backtest,
    run_tags,
)

EXPERIMENT = "predrain"
"""Name of the MLflow experiment that runs are recorded in."""

MODEL = "predrain"
"""Name of the registered model; a new bundle becomes its ``challenger``."""

MAX_ALERTS_SHOWN = 20
"""Number of alerts that the report shows with their reasons."""

EXPLAINED_ALERTS = 200
"""Maximum number of alerts explained per fold, the riskiest first; the report shows some of them."""

_FACTS_SHOWN = ("scenario", "seed", "acceleration")

PREDICTION_COLUMNS = [
    "decision_time", "node", "gpu", "risk", "score", "rank", "alert", "label", "fold", "model",
]  # fmt: skip
"""Columns of predictions.parquet."""


def train_bundle(
    matrix: FeatureMatrix,
    params: Params,
    out: Path,
    *,
    registry: str | None = None,
    until: datetime | None = None,
    backtest: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Fit all models as of the end of the data, save them as a bundle, record the run and register the bundle.

    ``until``: fit as of this earlier time (aware), so that newer decisions are left for `predrain promote`.
    Raises ``InputError`` if the matrix was made with other parameters, see
    :func:`pipeline.matrix_stage.check_made_with`, or nothing can be fitted.
    """
    params = check_made_with(matrix, params)
    measured = {} if backtest is None else {"metrics": measurements_of(backtest)}  # fails before hours of fitting
    decisions = bundle_decisions(backtest, params.models.profile, matrix.config.dataset_digest, _shown_params(params))
    if registry is not None:
        check_store(registry)
    fitted = fit_final(
        matrix,
        training=params.training,
        models=params.models,
        backtest=params.backtest,
        seed=params.seed,
        until=until,
        progress=_counted(progress),
    )
    if fitted.stand_in is not None:
        decisions = {
            "thresholds": None,
            "until": None,
            "why": f"{fitted.stand_in} only: no failure of this fleet",
            "differs": [],
        }
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
            "data": _data_facts(matrix, fitted.refit_at),
            **measured,
            "decisions": decisions,
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
    if fitted.stand_in is not None:
        summary["marked"] = (
            f"{fitted.stand_in} only: the model learned from no failure of this fleet, and promises nothing"
        )
    if fitted.thinned_to is not None:
        summary["negatives_a_positive_in_memory"] = fitted.thinned_to
    if registry is not None:
        from models.registry.store import log_run, register_bundle  # MLflow takes seconds to import

        run_id = log_run(
            registry,
            EXPERIMENT,
            name=f"{params.models.profile} fitted to {fitted.refit_at:%Y-%m-%d %H:%M}",
            params=flatten(params.model_dump(mode="json")),
            metrics={key: float(value) for key, value in summary.items() if isinstance(value, int)},
            tags=run_tags(matrix)
            | {"kind": "train", "bundle_digest": bundle.digest, "refit_at": fitted.refit_at.isoformat()},
            artifacts=(out / CARD,),
            only_once=True,
        )
        summary["challenger"] = f"{MODEL} version {register_bundle(registry, MODEL, out, run_id=run_id)}"
    return summary


def backtest_matrix(
    matrix: FeatureMatrix,
    params: Params,
    out: Path,
    *,
    truth: Path | None = None,
    registry: str | None = None,
    progress: Progress | None = None,
    full: bool = True,
    brief: bool = False,
    engine: Engine | None = None,
) -> None:
    """Run the backtest and write its predictions, metrics and evaluation under ``out``.

    Fitted learners are cached in ``OUT/.fits``, for a run after a kill or with other parameters. The folder may be
    deleted.

    ``truth``: the simulator's ground truth; an empty folder counts as none. Used by the evaluation only.
    ``brief``: skip explanations and drift checks, which read rows from the whole matrix.
    ``engine``: runs the refits; default: threads of this process. Results are bit-identical with any engine.
    Raises ``InputError`` if the matrix was made with other parameters, see
    :func:`pipeline.matrix_stage.check_made_with`, or a parameter is invalid for it.
    """
    params = check_made_with(matrix, params)
    if registry is not None:
        check_store(registry)
    out.mkdir(parents=True, exist_ok=True)
    risks = read_truth(truth) if truth is not None and any(truth.iterdir()) else None
    result = run_backtest(
        matrix,
        training=params.training,
        models=params.models,
        backtest=params.backtest,
        seed=params.seed,
        progress=_counted(progress),
        cache=out / ".fits",
        explain=0 if brief else EXPLAINED_ALERTS,
        full=full,
        watch=not brief,
        engine=engine,
    )
    pa.default_memory_pool().release_unused()  # return the memory of the fits
    best = None if risks is None else oracle_predictions(result.predictions, risks, result.k)
    evaluation = evaluate(
        result.predictions,
        k=result.k,
        bootstrap=params.backtest.bootstrap,
        seed=params.seed,
        oracle=best,
        drain_reach=result.drain_reach,
    )
    extras = decision_extras(result, matrix, params.models, best)
    extras |= {} if brief else drift_frames(result.drift, result.folds)
    simulated = _simulated_facts(matrix)
    context = ReportContext(
        dataset=f"dataset {matrix.config.dataset_digest[:12]}"
        if simulated is None
        else f"simulated fleet, scenario {simulated['scenario']}, seed {simulated['seed']}",
        dataset_digest=matrix.config.dataset_digest,
        code_revision=code_revision(),
        span=matrix.span,
        unit=matrix.unit,
        simulated=None if simulated is None else Simulated(**{name: simulated[name] for name in _FACTS_SHOWN}),
        profile=params.models.profile,
        every=params.decision.every,
        gap=params.labels.gap,
        horizon=params.labels.horizon,
        folds=result.folds,
        skipped=(*result.skipped, *_unavailable(matrix)),
        alerts=_alerts(result, params.models.profile),
        params=_shown_params(params),
        attributions=result.attributions,
        extras=extras,
    )
    metrics = evaluation.to_metrics()
    chosen = with_horizons(profile_predictions(result.predictions, params.models.profile), result)
    (out / VALUE).unlink(missing_ok=True)  # it belongs to the predictions replaced below
    write_frame(chosen, out / "predictions.parquet")
    write_frame(result.predictions, out / "predictions_all.parquet")
    save_evaluation(out, evaluation, context)
    write_json(
        {
            "profile": params.models.profile,
            "dataset_digest": matrix.config.dataset_digest,
            "code_revision": context.code_revision,
            "libraries": {"python": platform.python_version(), **library_versions()},
            "simulated": simulated,
            "skipped": list(context.skipped),
            **metrics,
        },
        out / "metrics.json",
    )
    main = {"k": result.k, **figures(evaluation, params.models.profile)}
    write_json(main, out / "summary.json")
    write_plots(out, evaluation, params.models.profile)
    if registry is not None:
        record_backtest(
            registry,
            EXPERIMENT,
            name=f"backtest of {params.models.profile}: {context.dataset}",
            main=main,
            params=flatten(params.model_dump(mode="json")),
            tags=run_tags(matrix) | {"bootstrap": str(params.backtest.bootstrap)},
            result=result,
            evaluation=evaluation,
            artifacts=(out / "metrics.json",),
        )


def _unavailable(matrix: FeatureMatrix) -> list[str]:
    """List the baselines for which this matrix has no data."""
    reasons = {name: make_baseline(name, columns=matrix.columns, seed=0).unavailable() for name in BASELINES}
    return [f"{name} ranks units arbitrarily: {reason}" for name, reason in reasons.items() if reason]


def profile_predictions(predictions: pd.DataFrame, profile: str) -> pd.DataFrame:
    """Return the profile's rows for predictions.parquet: one per decision time and unit, ranks from 1."""
    rows = predictions[(predictions["model"] == profile) & (predictions["variant"] == "sliding")]
    rows = rows.sort_values(["decision_time", "rank"], kind="stable")
    return rows[PREDICTION_COLUMNS].reset_index(drop=True)


def write_report_for(backtest: Path, out: Path | None = None) -> Path:
    """Write the report of a finished backtest to ``OUT/report/`` (default: the backtest's own folder).

    Raises ``InputError`` if it cannot be written; an older report is kept then.
    """
    from pipeline.report.report import render_report  # only a report needs matplotlib

    evaluation, context = load_evaluation(backtest)
    value = json.loads((backtest / VALUE).read_text(encoding="utf-8")) if (backtest / VALUE).is_file() else None
    verdict = () if value is None else (answer_text(value), *recommendation(value))
    target = (out or backtest) / "report" / "index.html"
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(target, render_report(evaluation, context, value, verdict).encode())
    return target


def _counted(progress: Progress | None) -> Callable[[int, int, str], None] | None:
    return None if progress is None else lambda n_done, total, _what: progress(n_done, total)


def _simulated_facts(matrix: FeatureMatrix) -> dict[str, Any] | None:
    for source in matrix.config.sources:
        if source.get("kind") == "simulated":
            return {key: source[key] for key in (*_FACTS_SHOWN, "gpus", "days")}
    return None


def _alerts(result: BacktestResult, profile: str) -> tuple[AlertEntry, ...]:
    reasons = {(reason.decision_time, reason.unit): reason for reason in result.reasons}
    entries = []
    for row in select_alerts(result.predictions, profile, "sliding", MAX_ALERTS_SHOWN).itertuples():
        known = reasons.get((row.decision_time.to_pydatetime(), str(row.unit)))
        label = None if pd.isna(row.label) else int(row.label)
        entries.append(
            AlertEntry(
                decision_time=row.decision_time.to_pydatetime(),
                node=str(row.node),
                unit=str(row.unit),
                risk=None if pd.isna(row.risk) else float(row.risk),
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
    return flatten({name: getattr(params, name).model_dump(mode="json") for name in chosen})


def _data_facts(matrix: FeatureMatrix, as_of: datetime) -> dict[str, Any]:
    return {
        "unit": matrix.unit,
        "units": int(matrix.rows["unit"].nunique()),
        "incidents": len(matrix.incidents(as_of)),
        "first": matrix.span[0].isoformat(),
        "last": matrix.span[1].isoformat(),
        "fleet": fleet_sketch(matrix.rows["unit"].cat.categories),
    }
