"""What a run leaves in MLflow: a backtest as one run with a nested run for each refit, a training as one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from evaluation.backtest.frames import BacktestResult
from evaluation.metrics.evaluation import Evaluation
from evaluation.metrics.metrics import ratio
from telemetry.errors import InputError

_FOLD_METRICS = (
    "base_rate", "precision", "precision_at_k", "recall", "average_precision", "roc_auc", "alerts_labelled", "hits",
    "positives", "incidents", "caught",
)  # fmt: skip
_COUNTS = ("n_positive", "n_negative", "n_augmented", "n_incidents")


def record_backtest(
    track: str,
    experiment: str,
    *,
    params: Mapping[str, str],
    tags: Mapping[str, str],
    result: BacktestResult,
    evaluation: Evaluation,
    artifacts: tuple[Path, ...],
) -> str:
    """Record a backtest: the measurements of the whole, and of every refit its data, span, counts and measurements.

    An unchanged backtest that is recorded again adds nothing; a recording that was killed goes on.

    ``tags``: ``dataset_digest``, ``code_revision`` and what else belongs to every run.
    """
    from models.registry.runs import RunRecord, log_series  # noqa: PLC0415 - MLflow is for tracked runs only

    whole = {
        f"{row['model']}.{row['variant']}.{name}": float(value)
        for row in evaluation.table.to_dict("records")
        for name, value in row.items()
        if isinstance(value, int | float | np.number) and not str(name).endswith(("_low", "_high"))
    }
    measured = _by_fold(evaluation.folds) | _risks_by_fold(result.predictions)
    children = []
    for fold, facts in result.folds.groupby("fold", sort=True):
        number = int(str(fold))
        own = facts.set_index("variant")
        told = {
            f"refit.{variant}.{name}": str(row[name])
            for variant, row in own.iterrows()
            for name in ("refit_at", "train_start", "train_end", "span", "calibrated", "fitted")
        }
        counts = {f"{variant}.{name}": float(row[name]) for variant, row in own.iterrows() for name in _COUNTS}
        first = facts.iloc[0]
        told |= {"refit.fold": str(number), "refit.test_start": str(first["test_start"])}
        told |= {"refit.test_end": str(first["test_end"])}
        children.append(
            RunRecord(
                name=f"refit {number:03d} {first['test_start']:%Y-%m-%d %H:%M}",
                params={**params, **told},
                metrics=counts | measured.get(number, {}),
                tags={**tags, "kind": "refit", "fold": str(number)},
            )
        )
    parent = RunRecord("backtest", params, whole, {**tags, "kind": "backtest"}, artifacts)
    return log_series(track, experiment, parent, children).run_id


def check_store(track: str) -> None:
    """Ask the store something before hours of fitting; one that is new is made.

    Raises ``InputError`` if it cannot be used.
    """
    from models.registry.store import opened_store  # noqa: PLC0415 - MLflow takes seconds to import

    with opened_store(track) as mlflow:
        mlflow.MlflowClient().search_experiments(max_results=1)


def record_training(
    track: str,
    experiment: str,
    *,
    params: Mapping[str, str],
    tags: Mapping[str, str],
    metrics: Mapping[str, float | None],
    card: Path,
) -> str:
    """Record a training with its model card, once for each bundle; give the run's id."""
    from models.registry.runs import RunRecord, log_series  # noqa: PLC0415 - as above

    record = RunRecord("train", params, metrics, {**tags, "kind": "train"}, (card,))
    return log_series(track, experiment, record).run_id


def measurements_of(backtest: Path) -> dict[str, Any]:
    """Read what a model card shows of a backtest: the sliding measurements, without their folds and months.

    Raises ``InputError`` if the folder is not the output of a backtest.
    """
    file = backtest / "metrics.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        models = {
            name: {"sliding": {key: each for key, each in found["sliding"].items() if key not in ("monthly", "folds")}}
            for name, found in content["models"].items()
            if "sliding" in found
        }
        return {key: content[key] for key in ("k", "first_time", "last_time", "dataset_digest")} | {"models": models}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            "not the output of a backtest: it has no metrics.json that can be read",
            str(backtest),
            "Give the folder that `predrain backtest --out` wrote.",
        ) from None


def _by_fold(folds: pd.DataFrame) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    names = [name for name in _FOLD_METRICS if name in folds.columns]
    for row in folds.to_dict("records"):
        into = found.setdefault(int(row["fold"]), {})
        into |= {f"{row['model']}.{row['variant']}.{name}": float(row[name]) for name in names}
    return found


def _risks_by_fold(predictions: pd.DataFrame) -> dict[int, dict[str, float]]:
    """Give mean risk over base rate and Brier skill of each model, variant and fold."""
    known = predictions["label"].notna().to_numpy()
    if not known.any():
        return {}
    chosen = predictions.loc[known, ["model", "variant", "fold"]]
    code, keys = pd.MultiIndex.from_frame(chosen.astype({"model": str, "variant": str})).factorize()
    label = predictions.loc[known, "label"].to_numpy(dtype=np.float64)
    risk = predictions.loc[known, "risk"].to_numpy(dtype=np.float64)
    n, positives = np.bincount(code).astype(np.float64), np.bincount(code, label)
    rate = ratio(positives, n)
    ratios = ratio(np.bincount(code, risk), positives)
    skills = 1 - ratio(ratio(np.bincount(code, (risk - label) ** 2), n), rate * (1 - rate))
    found: dict[int, dict[str, float]] = {}
    for at, (model, variant, fold) in enumerate(keys):
        into = found.setdefault(int(fold), {})
        into[f"{model}.{variant}.risk_ratio"] = float(ratios[at])
        into[f"{model}.{variant}.brier_skill"] = float(skills[at])
    return found
