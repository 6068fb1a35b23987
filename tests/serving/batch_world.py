"""A small dataset, its matrix, and a bundle fitted on it in a moment, for the tests of batch scoring."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from features.config import DecisionSection, FeatureSection, LabelSection
from features.matrix.matrix import FeatureMatrix
from models.bundle.store import Bundle, save_bundle
from models.calibration.fitting import Calibrator
from models.calibration.horizons import HorizonMap, Link
from models.ensembles import Stacker
from models.learners.factory import FitRows, fit_learners, make_learner
from models.training.fitted import FittedModels
from serving.scores.batch import ServedModel
from telemetry.dataset.store import Dataset
from tests.features.small_fleet import (
    HOUR,
    SMALL,
    T0,
    events_of,
    gpus,
    inventory_of,
    make_matrix,
    samples_of,
    write_dataset,
    xid,
)

HOURS = 24
DECISION = DecisionSection(every=3 * HOUR)
LABELS = LabelSection(horizon=6 * HOUR)
SETTINGS = {
    "lightgbm": {"n_estimators": 12, "min_child_samples": 5},
    "xgboost": {"n_estimators": 12},
    "logistic": {},
}
STALE = "gpu07"
"""Sends its last sample at 15:00."""
SILENT = "gpu08"
"""Is installed and never sends a sample."""
PATCHY = "gpu09"
"""Sends one sample in four from 12:00 on."""
HOLLOW = "gpu04"
"""Its rows hold no value from 12:00 on."""
DOWN = "gpu06"
"""Has an incident at 17:00 and is not repaired."""


@dataclass(frozen=True)
class World:
    """What the tests share."""

    dataset: Dataset
    matrix: FeatureMatrix
    bundle: Bundle

    @property
    def model(self) -> ServedModel:
        return ServedModel(self.bundle)


def make_world(folder: Path) -> World:
    inventory = inventory_of(gpus(12))
    samples = telemetry(inventory)
    events = events_of(
        [
            xid(3.2, "gpu01", "node0"),
            {**xid(5, "gpu01", "node0", ""), "type": "repair"},
            xid(10.5, "gpu02", "node0", "48"),
            {**xid(13, "gpu02", "node0", ""), "type": "repair"},
            xid(17, DOWN, "node1"),
        ]
    )
    dataset = write_dataset(folder / "data", inventory, samples=samples, events=events, hours=HOURS)
    matrix = make_matrix(dataset, folder / "matrix", decision=DECISION, labels=LABELS)
    return World(dataset, matrix, save_bundle(folder / "bundle", fitted_on(matrix), manifest(matrix)))


def telemetry(inventory: pd.DataFrame) -> pd.DataFrame:
    samples = samples_of(inventory, HOURS, seed=3)
    # What is pushed out of range becomes null; a dataset holds it as it was given.
    samples["gpu_util_pct"] = samples["gpu_util_pct"].clip(0, 100)
    time, gpu = samples["timestamp"], samples["gpu"]
    late = time > T0 + 12 * HOUR
    numbers = np.arange(len(samples))
    gone = (gpu == SILENT) | ((gpu == STALE) & (time > T0 + 15 * HOUR)) | ((gpu == PATCHY) & late & (numbers % 4 != 0))
    samples = samples[~gone].reset_index(drop=True)
    hollow = (samples["gpu"] == HOLLOW) & (samples["timestamp"] > T0 + 12 * HOUR)
    for name in samples.columns[3:]:
        samples[name] = samples[name].mask(hollow)
    return samples


def fitted_on(matrix: FeatureMatrix, *, refit_at: datetime = T0 + HOURS * HOUR) -> FittedModels:
    X = matrix.values()
    signal = np.nan_to_num(X[:, 0]) + np.random.default_rng(1).normal(0, 10, len(X))
    y = (signal > np.quantile(signal, 0.8)).astype(int)
    learners = fit_learners(
        {name: make_learner(name, seed=3, settings=setting) for name, setting in SETTINGS.items()}, FitRows(X, y)
    )
    models = (*SETTINGS, "mean_log_odds")
    return FittedModels(
        refit_at=refit_at,
        train_start=T0,
        train_end=refit_at,
        span=timedelta(days=1),
        columns=tuple(matrix.columns),
        models=models,
        k=2,
        prior_shift=-0.5,
        learners=learners,
        members=("lightgbm", "xgboost"),
        min_votes=None,
        stacker=Stacker((0.5, 0.5), 0.0),
        cascade=None,
        baselines={},
        calibrators={name: Calibrator("sigmoid", 0.9, -0.2) for name in models},
        horizons={name: HorizonMap(6.0, 0.1, (Link(1.0, -1.0, 0.3),), (Link(24.0, -2.0, 0.5),)) for name in models},
        n_positive=int(y.sum()),
        n_negative=int((1 - y).sum()),
        n_incidents=3,
    )


def manifest(matrix: FeatureMatrix, *, features: FeatureSection = SMALL, **more: Any) -> dict[str, Any]:
    config = matrix.config
    params = {
        "telemetry": {"step": "10m"},
        "decision": config.decision.model_dump(mode="json"),
        "labels": config.labels.model_dump(mode="json"),
        "features": features.model_dump(mode="json"),
    }
    return {
        "profile": "mean_log_odds",
        "channels": list(config.channels),
        "params": params,
        "data": {
            "unit": config.unit,
            "units": 12,
            "incidents": 3,
            "first": config.span[0].isoformat(),
            "last": config.span[1].isoformat(),
        },
        "decisions": {"thresholds": None, "until": None, "why": "no backtest was given"},
        **more,
    }
