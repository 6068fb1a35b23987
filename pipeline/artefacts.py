"""Output files of a backtest, from which the report is built.

::

    O/predictions.parquet       predictions of the profile: pipeline.stages.PREDICTION_COLUMNS
    O/predictions_all.parquet   predictions of every model and variant
    O/metrics.json              all metrics, nested
    O/summary.json              main metrics of the profile, flat
    O/plots/                    plots of the profile for DVC: precision by month, PR curve, lead times, calibration
    O/value.json                GPU-hours that actions on the risks would have saved and spent, if the dataset was given
    O/evaluation/               metrics as data frames, folds, alerts to show, and context.json
"""

import dataclasses
import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import TypeAdapter

from evaluation.metrics.comparison import SLIDING
from evaluation.metrics.evaluation import Evaluation
from foundation.errors import InputError
from foundation.files import FolderSwap, disk_errors, refuse_other_content, write_bytes
from pipeline.report.context import ReportContext

EVALUATION_FOLDER = "evaluation"
"""Folder of data frames inside a backtest's output."""

VALUE = "value.json"
"""File of the GPU-hours that actions on a backtest's risks would have saved and spent."""

_ATTRIBUTIONS = "attributions.parquet"

_EXTRA = "extra_"
_FIGURES = (
    "episode_precision", "precision", "precision_at_k", "recall", "base_rate", "average_precision", "roc_auc",
    "lead_time_median_hours",
)  # fmt: skip
_COUNTS = ("alerts", "episodes", "episodes_known", "episodes_right", "incidents", "caught")
_CONTEXT = TypeAdapter(ReportContext)

_FRAMES = tuple(field.name for field in dataclasses.fields(Evaluation) if field.type is pd.DataFrame)
_SCALARS = ("k", "replicates", "nodes", "units", "times", "oracle_coverage", "drain_hours")


def write_frame(frame: pd.DataFrame, path: Path) -> None:
    """Write a frame as Parquet, atomically; the same frame gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, frame.to_parquet(index=False, compression="zstd"))


def figures(evaluation: Evaluation, profile: str) -> dict[str, Any]:
    """Return a profile's main metrics, flat, with test period and fleet size; empty if it made no predictions.

    Metrics of different periods or numbers of incidents are not comparable; ``dvc metrics diff`` shows both.
    """
    row = evaluation.row(profile, SLIDING)
    if row is None:
        return {}
    shares = {name: float(row[name]) for name in _FIGURES}
    rounded = {name: None if math.isnan(value) else round(value, 6) for name, value in shares.items()}
    period = {"first_time": evaluation.first_time.isoformat(), "last_time": evaluation.last_time.isoformat()}
    return rounded | period | {"nodes": evaluation.nodes} | {name: int(row[name]) for name in _COUNTS}


def write_plots(out: Path, evaluation: Evaluation, profile: str) -> None:
    """Write ``OUT/plots/``: plots of a profile for ``dvc plots``, as images, which need no network."""
    from pipeline.report.plots import PLOTS, as_file  # matplotlib takes a second to import

    folder = out / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PLOTS.items():
        with disk_errors(folder):
            write_bytes(folder / f"{name}.svg", as_file(draw(evaluation, profile)).encode())


def write_json(content: dict[str, Any], path: Path) -> None:
    """Write a JSON object, atomically, with sorted keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk_errors(path):
        write_bytes(path, (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())


def save_evaluation(out: Path, evaluation: Evaluation, context: ReportContext) -> None:
    """Write ``OUT/evaluation/``, atomically.

    Raises ``InputError`` if the path has other content, or the disk is full.
    """
    target = out / EVALUATION_FOLDER
    refuse_other_content(target, "context.json", "a backtest")
    with FolderSwap(target) as swap, disk_errors(target):
        for name in _FRAMES:
            write_frame(getattr(evaluation, name), swap.path / f"{name}.parquet")
        write_frame(context.folds, swap.path / "context_folds.parquet")
        if context.attributions is not None:
            write_frame(context.attributions, swap.path / _ATTRIBUTIONS)
        for name, frame in context.extras.items():
            write_frame(frame, swap.path / f"{_EXTRA}{name}.parquet")
        measured = {name: getattr(evaluation, name) for name in _SCALARS}
        measured |= {name: getattr(evaluation, name).isoformat() for name in ("first_time", "last_time")}
        if math.isnan(evaluation.oracle_coverage):
            measured["oracle_coverage"] = None
        content = {"evaluation": measured, "context": _CONTEXT.dump_python(context, mode="json")}
        write_json(content, swap.path / "context.json")
        swap.commit()


def load_evaluation(out: Path) -> tuple[Evaluation, ReportContext]:
    """Read what :func:`save_evaluation` wrote.

    Raises ``InputError`` if ``out`` is not the output of a backtest.
    """
    folder = out / EVALUATION_FOLDER
    try:
        content = json.loads((folder / "context.json").read_text(encoding="utf-8"))
        frames = {name: pd.read_parquet(folder / f"{name}.parquet") for name in _FRAMES}
        folds = pd.read_parquet(folder / "context_folds.parquet")
        made_of = folder / _ATTRIBUTIONS
        attributions = pd.read_parquet(made_of) if made_of.exists() else None
        extras = {
            path.stem.removeprefix(_EXTRA): pd.read_parquet(path) for path in sorted(folder.glob(f"{_EXTRA}*.parquet"))
        }
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(
            f"not the output of a backtest: {error.filename} is missing",
            str(out),
            "Give the folder that `predrain backtest --out` wrote, or run it again.",
        ) from None
    measured: dict[str, Any] = content["evaluation"]
    if measured["oracle_coverage"] is None:
        measured["oracle_coverage"] = math.nan
    for name in ("first_time", "last_time"):
        measured[name] = datetime.fromisoformat(measured[name])
    frames_of_context = {"folds": folds, "attributions": attributions, "extras": extras}
    context = _CONTEXT.validate_python(content["context"] | frames_of_context)
    return Evaluation(**measured, **frames), context
