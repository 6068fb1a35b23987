"""All models of one refit, fitted on a few rows in a moment, for the tests of bundle, explanation and registry."""

from datetime import UTC, datetime, timedelta
from functools import cache

import numpy as np
import pandas as pd

from features.vocabulary import FeatureColumn
from models.calibration.fitting import Calibrator
from models.config import BASELINES, LEARNERS
from models.ensembles import Stacker, fit_cascade
from models.learners.baselines import make_baseline
from models.learners.factory import FitRows, fit_learners, make_learner
from models.training.fitted import FittedModels

SMALL = {
    "lightgbm": {"n_estimators": 12, "min_child_samples": 5},
    "xgboost": {"n_estimators": 12},
    "random_forest": {"n_estimators": 6, "max_depth": 4},
    "logistic": {},
    "mlp": {"hidden_layer_sizes": [4], "epochs": 3, "batch_size": 16},
}
WINDOW = timedelta(hours=6)
COLUMNS = (
    FeatureColumn.of("telemetry", "gpu_temp_c", "mean", window=WINDOW, unit="C"),
    FeatureColumn.of("telemetry", "power_w", "mean", window=WINDOW, unit="W"),
    FeatureColumn.of("telemetry", "pcie_replay_total", "rise", window=WINDOW),
    FeatureColumn.of("history", "xid_memory", "count", window=timedelta(days=30), scope="gpu"),
    FeatureColumn.of("history", "xid_memory", "count", window=timedelta(days=30), scope="node"),
    FeatureColumn.of("static", "model", "code", categories=("A", "B")),
)
T0 = datetime(2026, 1, 1, tzinfo=UTC)


def rows(n=300, seed=0):
    """Features in which the replays and the temperature tell positives apart, and labels."""
    rng = np.random.default_rng(seed)
    y = rng.random(n) < 0.15
    X = np.column_stack(
        [
            rng.normal(60, 5, n) + 8 * y,
            rng.normal(400, 60, n),
            rng.poisson(0.3, n) + 6 * y * (rng.random(n) < 0.7),
            rng.poisson(0.1, n) + y,
            rng.poisson(0.4, n),
            rng.integers(0, 2, n),
        ]
    ).astype(np.float32)
    X[rng.random(X.shape) < 0.05] = np.nan
    return X, y.astype(int)


@cache
def fitted_models() -> FittedModels:
    """Fit every learner and ensemble."""
    X, y = rows()
    learners = fit_learners(
        {name: make_learner(name, seed=3, settings=SMALL[name]) for name in LEARNERS}, FitRows(X, y)
    )
    stages = [(name, make_learner(name, seed=4, settings=SMALL[name])) for name in ("lightgbm", "xgboost", "mlp")]
    times = np.arange(len(y)) * 3_600_000
    cascade = fit_cascade(
        stages, X, y, np.ones(len(y)), times=times, purge_ms=0, recall_floor=0.9, fitted_first=learners["lightgbm"]
    )
    models = (*BASELINES, *LEARNERS, "intersection", "mean_rank", "stacked", "cascade")
    return FittedModels(
        refit_at=T0 + timedelta(days=30),
        train_start=T0,
        train_end=T0 + timedelta(days=28, hours=18),
        span=timedelta(days=28),
        columns=COLUMNS,
        models=models,
        k=5,
        prior_shift=-2.3456789,
        learners=learners,
        members=("lightgbm", "xgboost", "random_forest"),
        min_votes=None,
        stacker=Stacker((0.1 + 0.2, 1 / 3, 0.4), -0.1),
        cascade=cascade,
        baselines={name: make_baseline(name, columns=COLUMNS, seed=9) for name in BASELINES},
        calibrators={name: Calibrator("sigmoid", 1.1, -0.2) for name in models},
        n_positive=50,
        n_negative=250,
        n_augmented=10,
        n_incidents=9,
        calibrated=True,
    )


def score(fitted, seed=1):
    """Scores of fresh rows at three decision times."""
    X, _ = rows(90, seed)
    times = pd.Series(pd.date_range(T0 + timedelta(days=30), periods=3, freq="6h").repeat(30))
    return fitted.score(X, times, [f"g{i % 30:02d}" for i in range(90)])
