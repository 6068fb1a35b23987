"""Parameters of the models room: training sets, learners, ensembles, calibration, backtest."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Literal

from pydantic import Field, field_validator

from features.config import Duration, Section

Learner = Literal["lightgbm", "xgboost", "random_forest", "logistic", "mlp"]
Baseline = Literal["random", "history_count", "vendor_rules"]
Combiner = Literal["intersection", "min_votes", "mean_rank", "stacked"]

LEARNERS: tuple[Learner, ...] = ("lightgbm", "xgboost", "random_forest", "logistic", "mlp")
"""Learners in the order of reports."""

BASELINES: tuple[Baseline, ...] = ("random", "history_count", "vendor_rules")
"""Baselines in the order of reports."""


class TrainingSection(Section):
    """``training``: which rows a model is fitted on, and how often."""

    span: Duration | Literal["auto"] = "auto"
    """Training span (the paper's L_train); ``auto`` chooses among ``spans`` at each refit on a purged tail."""

    spans: tuple[Duration, ...] = (timedelta(days=14), timedelta(days=28), timedelta(days=56), timedelta(days=84))
    """Candidate spans for ``auto``; those longer than the history are skipped and named."""

    refit_every: Duration = timedelta(days=7)
    """Time between two refits of the sliding training."""

    negative_ratio: int = Field(default=20, ge=1)
    """Negatives kept for each positive in a training set; scores are corrected back (prior odds)."""

    augmentation: int = Field(default=4, ge=0)
    """Extra training windows for each incident at times off the decision grid, all within the horizon; 0: none."""

    hysteresis: float = Field(default=0.02, ge=0)
    """``auto`` keeps the span in use unless another's validation score is better by more than this share."""

    @field_validator("span", "spans", "refit_every")
    @classmethod
    def _positive(cls, value: timedelta | str | tuple[timedelta, ...]) -> timedelta | str | tuple[timedelta, ...]:
        given = value if isinstance(value, tuple) else (value,)
        if not given or any(isinstance(each, timedelta) and each <= timedelta(0) for each in given):
            raise ValueError("must be positive, such as '28d'")
        return value


class ParallelSection(Section):
    """``models.parallel``: members vote with their top-K sets."""

    members: tuple[Learner, ...] = ("lightgbm", "xgboost", "random_forest")
    """Members of the ensemble (the paper intersects three; it does not say which)."""

    combiner: Combiner = "intersection"
    """How members are joined; the paper's is ``intersection``."""

    min_votes: int | None = None
    """For ``min_votes``: alerts need this many members' top-K; null means all of them."""


class CascadeSection(Section):
    """``models.cascade``: each stage passes on only the suspicious GPUs."""

    stages: tuple[Learner, ...] = ("lightgbm", "mlp")
    """Learners from first to last; the last gives the score."""

    recall_floor: float = Field(default=0.95, gt=0, le=1)
    """Each stage's threshold keeps at least this share of validation positives."""


class CalibrationSection(Section):
    """``models.calibration``: from scores to risks."""

    method: Literal["isotonic", "sigmoid"] = "sigmoid"
    """Map fitted on a later slice than training; sigmoid needs fewer positives."""

    slice: Duration = timedelta(days=14)
    """Length of the slice between training and refit that calibration is fitted on; at most a third of the span."""

    refit: bool = False
    """Fit the learners again on the whole span once the slice has served, at twice the time."""


class ModelsSection(Section):
    """``models``: what is trained and which of it is the profile's choice."""

    profile: str = "mean_rank"
    """Name of the model whose predictions are the profile's: a learner, a baseline or an ensemble."""

    learners: tuple[Learner, ...] = LEARNERS
    """Single learners to train."""

    settings: dict[Learner, dict[str, Any]] = Field(default_factory=dict)
    """Overrides of a learner's settings, by learner."""

    parallel: ParallelSection = ParallelSection()
    cascade: CascadeSection = CascadeSection()
    calibration: CalibrationSection = CalibrationSection()


class BacktestSection(Section):
    """``backtest``: which part of the dataset is replayed, and how many alerts."""

    first_test: datetime | Literal["auto"] = "auto"
    """First decision time that is scored; ``auto``: half of the dataset, or as soon as the shortest span fits."""

    last_test: datetime | Literal["auto"] = "auto"
    """Last decision time that is scored; ``auto``: the end of the dataset."""

    k: int | Literal["auto"] = "auto"
    """Alert budget a decision time; ``auto``: the expected positives a decision time, at least 1."""

    bootstrap: int = Field(default=200, ge=0)
    """Bootstrap replicates (resampling GPUs) for the intervals of the report; 0: none."""

    @field_validator("first_test", "last_test")
    @classmethod
    def _aware(cls, value: datetime | str) -> datetime | str:
        if isinstance(value, datetime) and value.tzinfo is None:
            raise ValueError(f"{value.isoformat()} has no time zone: write it with one, such as '2026-01-01T00:00:00Z'")
        return value
