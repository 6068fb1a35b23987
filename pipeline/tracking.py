"""Provenance of results (code revision, library versions, fleet), and the record of a backtest in MLflow."""

import hashlib
import json
import subprocess
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.backtest.frames import BacktestResult
from evaluation.metrics.evaluation import Evaluation
from features.matrix.matrix import FeatureMatrix
from foundation.errors import InputError

_LIBRARIES = (
    "numpy",
    "pandas",
    "pyarrow",
    "numba",
    "scikit-learn",
    "lightgbm",
    "xgboost-cpu",
    "skops",
    "mlflow",
    "predrain",
)
_TIMEOUT_S = 10
_SKETCH_SIZE = 64


def code_revision() -> str:
    """Return the git revision of the running code.

    Returns: the commit, with ``-dirty`` if tracked files were modified; ``unknown`` if the code is not a checkout, e.g.
    an installation inside another repository.
    """
    checkout = Path(__file__).resolve().parents[1]
    try:
        if Path(_git(checkout, "rev-parse", "--show-toplevel")).resolve() != checkout:
            return "unknown"
        commit = _git(checkout, "rev-parse", "HEAD")
        changed = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{commit}-dirty" if changed else commit


def library_versions(names: Iterable[str] = _LIBRARIES) -> dict[str, str]:
    """Return library versions by name, by default of those that affect results; ``absent``: not installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    return versions


def fleet_sketch(units: Iterable[str]) -> list[str]:
    """Return a sketch of a fleet's units: the 64 smallest digests, or all of a smaller fleet.

    Later datasets of the same fleet contain most of the sketched units; those of other fleets hardly any.
    """
    return sorted(hashlib.sha256(unit.encode()).hexdigest()[:16] for unit in set(units))[:_SKETCH_SIZE]


def share_of_fleet(sketch: Collection[str], units: Iterable[str]) -> float:
    """Return the fraction of the sketched units that are in ``units``."""
    known = {hashlib.sha256(unit.encode()).hexdigest()[:16] for unit in units}
    return sum(digest in known for digest in sketch) / max(len(sketch), 1)


def _git(folder: Path, *args: str) -> str:
    process = subprocess.run(
        ["git", "-C", str(folder), *args],  # noqa: S607 - the user's own git, wherever it is
        capture_output=True,
        text=True,
        check=True,
        timeout=_TIMEOUT_S,
    )
    return process.stdout.strip()


_FOLD_METRICS = (
    "base_rate", "precision", "precision_at_k", "recall", "average_precision", "roc_auc", "alerts_labelled", "hits",
    "positives", "incidents", "caught",
)  # fmt: skip


def run_tags(matrix: FeatureMatrix) -> dict[str, str]:
    """Return the tags of every run: the digests of its inputs, and the revision of the code."""
    return {
        "dataset_digest": matrix.config.dataset_digest,
        "matrix_digest": matrix.digest,
        "code_revision": code_revision(),
    }


_COUNTS = ("n_positive", "n_negative", "n_augmented", "n_incidents")


def record_backtest(
    registry: str,
    experiment: str,
    *,
    name: str,
    main: Mapping[str, Any],
    params: Mapping[str, str],
    tags: Mapping[str, str],
    result: BacktestResult,
    evaluation: Evaluation,
    artifacts: tuple[Path, ...],
) -> str:
    """Log a backtest as one run: its metrics, and those of every refit as steps of ``refit.`` metrics.

    Logging an unchanged backtest again adds nothing; interrupted logging is resumed.

    ``name``: name of the run. ``main``: the profile's main metrics, logged without a prefix.
    ``tags``: see :func:`run_tags`.
    """
    from models.registry.store import log_run  # MLflow takes seconds to import

    metrics = {
        f"{row['model']}.{row['variant']}.{name}": float(value)
        for row in evaluation.table.to_dict("records")
        for name, value in row.items()
        if isinstance(value, int | float | np.number) and not str(name).endswith(("_low", "_high"))
    }
    metrics |= {key: float(value) for key, value in main.items() if isinstance(value, int | float)}
    steps: list[dict[str, float | None]] = [{} for _ in range(result.folds["fold"].nunique())]
    for row in result.folds.to_dict("records"):
        steps[row["fold"]] |= {f"refit.{row['variant']}.{name}": float(row[name]) for name in _COUNTS}
    for row in evaluation.folds.to_dict("records"):
        place = f"refit.{row['model']}.{row['variant']}"
        steps[row["fold"]] |= {f"{place}.{name}": float(row[name]) for name in _FOLD_METRICS}
    return log_run(
        registry,
        experiment,
        name=name,
        params=params,
        metrics=metrics,
        steps=steps,
        tags={**tags, "kind": "backtest"},
        artifacts=artifacts,
        only_once=True,
    )


def check_store(registry: str) -> None:
    """Query the store before hours of fitting; create it if it is new.

    Raises ``InputError`` if it is unusable.
    """
    from models.registry.store import opened_store  # MLflow takes seconds to import

    with opened_store(registry) as mlflow:
        mlflow.MlflowClient().search_experiments(max_results=1)


def measurements_of(backtest: Path) -> dict[str, Any]:
    """Read a backtest's metrics for a model card: those of sliding training, without folds and months.

    Raises ``InputError`` if the folder is not the output of a backtest.
    """
    file = backtest / "metrics.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        models = {
            name: {
                "sliding": {key: value for key, value in measured["sliding"].items() if key not in ("monthly", "folds")}
            }
            for name, measured in content["models"].items()
            if "sliding" in measured
        }
        return {key: content[key] for key in ("k", "first_time", "last_time", "dataset_digest")} | {"models": models}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            "not the output of a backtest: metrics.json is missing or damaged",
            str(backtest),
            "Give the folder that `predrain backtest --out` wrote.",
        ) from None
