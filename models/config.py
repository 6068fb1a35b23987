"""Parameters of training, models, backtest, serving and promotion."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from pydantic import Field, field_validator

from features.config import Group
from foundation.durations import Duration, PositiveDuration
from foundation.settings import Section

Learner = Literal[
    "lightgbm", "xgboost", "random_forest", "logistic", "mlp",
    "lstm", "cnn1d",
]  # fmt: skip
Baseline = Literal["random", "history_count", "vendor_rules"]
Combiner = Literal["intersection", "min_votes", "mean_rank", "mean_log_odds", "stacked"]

LEARNERS: tuple[Learner, ...] = ("lightgbm", "xgboost", "random_forest", "logistic", "mlp")
"""Learners that need no optional dependency."""

SEQUENCE: tuple[Learner, ...] = ("lstm", "cnn1d")
"""Sequence learners, which read raw windows and need the extra ``sequence``."""

ALL_LEARNERS: tuple[Learner, ...] = (*LEARNERS, *SEQUENCE)
"""All learners, in the order of reports."""

BASELINES: tuple[Baseline, ...] = ("random", "history_count", "vendor_rules")
"""Baselines in the order of reports."""


COMBINERS: tuple[Combiner, ...] = ("intersection", "min_votes", "mean_rank", "mean_log_odds", "stacked")
"""Combiners in the order of reports; each is also a model name."""

CASCADE = "cascade"
"""Model name of the cascade."""

PRIOR = "prior"
"""Learner name of the prior, which scores alone while there is nothing to fit on."""


class TrainingSection(Section):
    """``training``: selection of training rows, and refit interval."""

    window: Duration | Literal["auto", "expanding"] = "auto"
    """Training window (the paper's L_train); ``auto``: chosen at each refit, on a purged validation tail, from all
    history and the ``candidate_windows`` with 100 incidents (without telemetry: all history); ``expanding``: all
    history."""

    candidate_windows: tuple[PositiveDuration, ...] = Field(
        tuple(timedelta(days=days) for days in (7, 14, 28, 56, 90)), min_length=1
    )
    """Candidates for ``auto``; those longer than the history are skipped and reported."""

    refit_every: PositiveDuration = timedelta(days=7)
    """Interval of refits of the sliding training; without telemetry at most 3 in a row are skipped for lack of new
    incidents."""

    negative_ratio: int = Field(default=200, ge=1)
    """Negatives sampled per positive; without telemetry at most 50,000 or 5 per positive. Scores are corrected (prior
    odds)."""

    augmentation: int = Field(default=4, ge=0)
    """Additional training rows per incident at times off the grid, within the horizon; 0: none."""

    hysteresis: float = Field(default=0.02, ge=0)
    """``auto`` keeps the current window unless the validation score of another is better by more than this share."""

    prior: str | None = Field(default="shipped", min_length=1)
    """Model of other fleets that is pooled with learners and parallel ensembles: ``shipped``, a folder of ``predrain
    prior build`` (Dask workers read the same path), or null; see [a young fleet](../models.md#a-young-fleet)."""

    memory: int = Field(default=4096, ge=4)
    """Memory limit for features while models are fitted, in MiB; if needed, fewer negatives are sampled ([large
    fleets](../scale.md#training))."""

    @field_validator("window")
    @classmethod
    def _positive(cls, value: timedelta | str) -> timedelta | str:
        if isinstance(value, timedelta) and value <= timedelta(0):
            raise ValueError("must be positive, such as '28d'")
        return value

    @property
    def bytes_of_a_fit(self) -> int:
        """Share of ``memory`` for the rows of one fit (float32), in bytes."""
        return self.memory * 2**19

    @property
    def bytes_held(self) -> int:
        """Share of ``memory`` for caching the newest rows of the matrix, in bytes."""
        return self.memory * 2**18


class ParallelSection(Section):
    """``models.parallel``: members vote with their top-K sets."""

    members: tuple[Learner, ...] = ("lightgbm", "xgboost", "random_forest")
    """Members of the ensemble (the paper intersects three)."""

    combiner: Combiner = "intersection"
    """Combiner of the members (in the paper ``intersection``)."""

    min_votes: int | None = None
    """For ``min_votes``: top-K votes that an alert needs; null: all."""

    @field_validator("members")
    @classmethod
    def _distinct(cls, value: tuple[Learner, ...]) -> tuple[Learner, ...]:
        repeated = [name for name in value if value.count(name) > 1]
        if repeated:
            raise ValueError(f"contains {repeated[0]} twice")
        return value


class CascadeSection(Section):
    """``models.cascade``: each stage passes on only the suspicious GPUs."""

    stages: tuple[Learner, ...] = ("lightgbm", "random_forest")
    """Learners from first to last; the last gives the score."""

    recall_floor: float = Field(default=0.95, gt=0, le=1)
    """Minimum share of validation positives that each stage keeps."""


class CalibrationSection(Section):
    """``models.calibration``: mapping of scores to risks."""

    slice: Duration = timedelta(days=14)
    """Length of the slice between training and refit for calibration; at most a third of the window."""

    refit: bool = True
    """Refit the learners on the whole window after calibration; doubles the time."""

    level: Literal["slice", "recent"] = "recent"
    """``slice``: the mean risk is the calibration slice's share of positives; ``recent``: the rate expected from recent
    and earlier weeks ([0007](../decisions/0007-promises.md))."""


class PrecisionTargetsSection(Section):
    """``models.precision_targets``: precisions to promise if earlier outcomes support them."""

    values: tuple[float, ...] = (0.3, 0.5, 0.85)
    """Precisions to promise if the outcomes of earlier refits support them
    ([promises](../decisions/0007-promises.md))."""

    confidence: float = Field(default=0.9, gt=0, lt=1)
    """One-sided confidence of every bound."""

    horizon: PositiveDuration | None = timedelta(hours=72)
    """A drain is right if an incident follows within this time of its first alert, or within ``labels.horizon`` if
    longer; null: within ``labels.horizon``."""

    @field_validator("values")
    @classmethod
    def _shares(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or not all(0 < target < 1 for target in value):
            raise ValueError("give precisions between 0 and 1, such as [0.3, 0.5, 0.85]")
        return value


class ModelsSection(Section):
    """``models``: models to train, and the profile."""

    profile: str = "mean_log_odds"
    """The model whose predictions count: a learner, a baseline or an ensemble."""

    learners: tuple[Learner, ...] = ("lightgbm", "xgboost", "random_forest")
    """Learners to train and compare (also ``logistic``, ``mlp``, and with PyTorch ``lstm``, ``cnn1d``); a backtest fits
    learners outside the profile only with ``--full``."""

    settings: dict[Learner, dict[str, Any]] = Field(default_factory=dict)
    """Overrides of a learner's settings, by learner. ``class_weight: balanced`` and ``scale_pos_weight`` raise all
    scores: risks are calibrated only with enough incidents in the calibration slice."""

    groups: dict[Learner, tuple[Group, ...] | None] = Field({"xgboost": ("onset",)})
    """Feature groups of a learner. Default, also if its groups are not computed: all. ``{xgboost: null}`` in a later
    file removes the default."""

    parallel: ParallelSection = ParallelSection()
    cascade: CascadeSection = CascadeSection()
    calibration: CalibrationSection = CalibrationSection()
    precision_targets: PrecisionTargetsSection = PrecisionTargetsSection()

    horizons: tuple[PositiveDuration, ...] = tuple(timedelta(hours=hours) for hours in (1, 6, 24, 72))
    """Further horizons: columns ``risk_1h`` and so on in ``predictions.parquet``."""

    @field_validator("groups")
    @classmethod
    def _of_columns(cls, value: dict[Learner, Any]) -> dict[Learner, Any]:
        if windowed := sorted(set(SEQUENCE).intersection(value)):
            raise ValueError(f"{windowed[0]} reads raw windows, which belong to no group: leave it out")
        return value


class BacktestSection(Section):
    """``backtest``: test period and alert budget."""

    first_test: datetime | Literal["auto"] = "auto"
    """First scored decision time; ``auto``: after a third of the dataset, or as soon as the shortest window fits."""

    last_test: datetime | Literal["auto"] = "auto"
    """Last scored decision time; ``auto``: the end of the dataset."""

    k: int | Literal["auto"] = "auto"
    """Alert budget: nodes per decision time; ``auto``: the expected number of nodes with a positive label, at least
    1."""

    cooldown: PositiveDuration | None = None
    """``backtest.k`` then counts nodes newly alerted within 24 hours, and a node is alerted again only after this, or
    after the drain horizon at twice the risk ([0027](../decisions/0027-episodes.md)). ``null``: the ``k`` riskiest of
    each decision time; ``predrain score`` always does so."""

    bootstrap: int = Field(default=200, ge=0)
    """Bootstrap replicates (by node) for intervals; 0: none."""

    @field_validator("first_test", "last_test")
    @classmethod
    def _aware(cls, value: datetime | str) -> datetime | str:
        if isinstance(value, datetime) and value.tzinfo is None:
            raise ValueError(f"{value.isoformat()} has no time zone: write it with one, such as '2026-01-01T00:00:00Z'")
        return value


class ServingSection(Section):
    """``serving``: batch scoring, and freshness requirements of telemetry."""

    stale_after: Duration = timedelta(hours=1)
    """A unit whose newest usable sample is older at the decision time is ``unknown``; at least two steps and the
    delay."""

    min_completeness: float = Field(default=0.5, ge=0, le=1)
    """A unit with a smaller share of the expected samples in the last decision interval is ``unknown``; 0: never."""

    max_explained: int = Field(default=200, ge=0)
    """Maximum units with reasons per decision time, by descending risk."""

    max_reasons: int = Field(default=3, ge=0)
    """Maximum reasons per unit."""

    retention: Duration = timedelta(days=35)
    """Retention of scored decisions."""


class PromotionSection(Section):
    """``promotion``: gate that a challenger must pass on recent decisions to become the champion."""

    period: PositiveDuration = timedelta(days=28)
    """Maximum period of the newest out-of-sample decisions on which champion and challenger are compared."""

    min_incidents: int = Field(default=10, ge=1)
    """Minimum incidents to decide precision, or the recall of a class."""

    bootstrap: int = Field(default=1000, ge=100)
    """Bootstrap replicates (by node) of the gate."""

    precision_margin: float = Field(default=0.05, ge=0, le=1)
    """Maximum loss of precision at K, at the lower bound of its interval."""

    margin_share: float = Field(default=0.5, ge=0, le=1)
    """Limit of the margins of precision and recall, as a share of the value of the champion."""

    risk_ratio: tuple[float, float] = (0.5, 2.0)
    """Limits of the mean risk over the base rate."""

    brier_margin: float = Field(default=0.02, ge=0)
    """Maximum loss of Brier skill."""

    recall_margin: float = Field(default=0.1, ge=0, le=1)
    """Maximum loss of recall, also per failure class."""

    @field_validator("risk_ratio")
    @classmethod
    def _ascending(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 < value[0] < 1 < value[1]:
            raise ValueError("must be a number below 1 and one above it, such as [0.5, 2.0]")
        return value


THREADS = 1
"""Threads per learner. With more, summation order, and so the last bits, depend on the machine; and if other programs
use the cores, waiting OpenMP threads slow a small fit twentyfold. ``fit_all`` fits several learners concurrently
instead."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings and factory of a learner.

    ``defaults``: default settings, which can be overridden.
    ``build``: takes a seed below 2**31 and all settings; returns an unfitted scikit-learn classifier.
    ``more``: further settings that can be overridden; by default, the library's values apply.
    """

    defaults: Mapping[str, Any]
    build: Callable[[int, dict[str, Any]], Any]
    more: tuple[str, ...] = ()
