"""How large the null check is, and the parameters that it trains with."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from pipeline.params import Params, load_params

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large a check is.

    ``acceleration``: of the fleet whose incidents are shuffled.
    ``seed``: of the fleets and all draws.
    """

    gpus: int
    days: int
    incidents: int
    acceleration: float
    seed: int = 151


QUICK = Size(gpus=64, days=45, incidents=150, acceleration=60.0)
"""A fleet that finds large leaks, in a minute of computing."""

MODERATE = Size(gpus=256, days=60, incidents=500, acceleration=25.0)
"""A fleet that finds moderate ones, at a few minutes of computing a run."""

LARGE = Size(gpus=512, days=90, incidents=900, acceleration=15.0)
"""A fleet that finds small ones, at a quarter of an hour a run."""


def small_params() -> Params:
    """Parameters of the quick check: few trees, few windows, every kind of learner and ensemble."""
    base = load_params([ROOT / "params.yaml"])
    training = base.training.model_copy(
        update={
            "span": timedelta(days=21),
            "spans": (timedelta(days=21),),
            "refit_every": timedelta(days=14),
            "augmentation": 2,
        }
    )
    features = base.features.model_copy(
        update={"windows": (timedelta(hours=6),), "history_windows": (timedelta(days=7), timedelta(days=30))}
    )
    learners = ("lightgbm", "xgboost", "logistic")
    models = base.models.model_copy(
        update={
            "learners": learners,
            "parallel": base.models.parallel.model_copy(update={"members": learners}),
            "cascade": base.models.cascade.model_copy(update={"stages": ("lightgbm", "logistic")}),
            "settings": {"lightgbm": {"n_estimators": 60}, "xgboost": {"n_estimators": 60}},
        }
    )
    backtest = base.backtest.model_copy(update={"k": 4, "bootstrap": 100})
    return base.model_copy(update={"training": training, "features": features, "models": models, "backtest": backtest})


def moderate_params() -> Params:
    """Take the parameters of params.yaml on one span."""
    base = load_params([ROOT / "params.yaml"])
    training = base.training.model_copy(update={"span": timedelta(days=28), "refit_every": timedelta(days=14)})
    return base.model_copy(update={"training": training})
