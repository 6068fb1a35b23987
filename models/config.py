"""Parameters of the models room: training sets, learners, ensembles, calibration, backtest."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from features.config import Duration, Group, PositiveDuration, Section

Learner = Literal[
    "lightgbm", "xgboost", "random_forest", "logistic", "mlp",
    "lstm", "cnn1d",
]  # fmt: skip
Baseline = Literal["random", "history_count", "vendor_rules"]
Combiner = Literal["intersection", "min_votes", "mean_rank", "mean_log_odds", "stacked"]

LEARNERS: tuple[Learner, ...] = ("lightgbm", "xgboost", "random_forest", "logistic", "mlp")
"""Learners that need no extra."""

SEQUENCE: tuple[Learner, ...] = ("lstm", "cnn1d")
"""Learners that read the window as a sequence; they need the extra ``sequence``."""

ALL_LEARNERS: tuple[Learner, ...] = (*LEARNERS, *SEQUENCE)
"""Every learner there is, in the order of reports."""

BASELINES: tuple[Baseline, ...] = ("random", "history_count", "vendor_rules")
"""Baselines in the order of reports."""


COMBINERS: tuple[Combiner, ...] = ("intersection", "min_votes", "mean_rank", "mean_log_odds", "stacked")
"""Combiners in the order of reports; each is also the name of a model."""

CASCADE = "cascade"
"""Name of the cascade among the models."""

PRIOR = "prior"
"""Name of the prior among learners, where it scores alone because nothing could be fitted yet."""


class TrainingSection(Section):
    """``training``: which rows a model is fitted on, and how often."""

    window: Duration | Literal["auto", "expanding"] = "auto"
    """Training window (the paper's L_train); ``auto`` chooses at each refit, on a purged tail, among all there is
    and those of ``candidate_windows`` with enough incidents, and takes it all where features are histories and static
    ones alone; ``expanding`` takes it all, in whole days."""

    candidate_windows: tuple[PositiveDuration, ...] = Field(
        tuple(timedelta(days=days) for days in (7, 14, 28, 56, 90)), min_length=1
    )
    """Candidate windows for ``auto``; those longer than the history are skipped and named."""

    refit_every: PositiveDuration = timedelta(days=7)
    """Time between two refits of the sliding training."""

    negative_ratio: int = Field(default=200, ge=1)
    """Negatives kept for each positive in a training set; scores are corrected back (prior odds). Where features are
    histories and static ones alone, 50,000 negatives are enough, or five for each positive."""

    augmentation: int = Field(default=4, ge=0)
    """Extra training windows for each incident at times off the decision grid, all within the horizon; 0: none."""

    hysteresis: float = Field(default=0.02, ge=0)
    """``auto`` keeps the span in use unless another's validation score is better by more than this share."""

    prior: str | None = Field(default="shipped", min_length=1)
    """Model of other fleets that learners and parallel ensembles take a share of: ``shipped``, or a folder of
    ``predrain prior build``; null: none. The share falls with own failures, is fitted at each refit on the calibration
    slice, and is 0 where own data alone explain that as well."""

    memory: int = Field(default=4096, ge=4)
    """MiB of features in memory while models are fitted: half for the rows of one fit (where they need more, fewer
    negatives are drawn), a quarter for the newest rows of the matrix."""

    @field_validator("window")
    @classmethod
    def _positive(cls, value: timedelta | str) -> timedelta | str:
        if isinstance(value, timedelta) and value <= timedelta(0):
            raise ValueError("must be positive, such as '28d'")
        return value

    @property
    def bytes_of_a_fit(self) -> int:
        """Bytes of ``memory`` for the rows of one fit, as float32."""
        return self.memory * 2**19

    @property
    def bytes_held(self) -> int:
        """Bytes of ``memory`` for the newest rows of the matrix."""
        return self.memory * 2**18


class ParallelSection(Section):
    """``models.parallel``: members vote with their top-K sets."""

    members: tuple[Learner, ...] = ("lightgbm", "xgboost", "random_forest")
    """Members of the ensemble (the paper intersects three; it does not say which)."""

    combiner: Combiner = "intersection"
    """How members are joined; the paper's is ``intersection``."""

    min_votes: int | None = None
    """For ``min_votes``: alerts need this many members' top-K; null means all of them."""

    @field_validator("members")
    @classmethod
    def _distinct(cls, value: tuple[Learner, ...]) -> tuple[Learner, ...]:
        twice = [name for name in value if value.count(name) > 1]
        if twice:
            raise ValueError(f"contains {twice[0]} twice")
        return value


class CascadeSection(Section):
    """``models.cascade``: each stage passes on only the suspicious GPUs."""

    stages: tuple[Learner, ...] = ("lightgbm", "random_forest")
    """Learners from first to last; the last gives the score."""

    recall_floor: float = Field(default=0.95, gt=0, le=1)
    """Each stage's threshold keeps at least this share of validation positives."""

    score: Literal["last", "mean"] = "last"
    """What survivors are ordered by: the ``last`` stage's log-odds (the paper's), or the ``mean`` of all stages'."""


class CalibrationSection(Section):
    """``models.calibration``: from scores to risks."""

    method: Literal["isotonic", "sigmoid"] = "sigmoid"
    """Map fitted on a later slice than training; sigmoid needs fewer positives."""

    slice: Duration = timedelta(days=14)
    """Length of the slice between training and refit that calibration is fitted on; at most a third of the span."""

    refit: bool = True
    """Fit the learners again on the whole span once the slice has served, at twice the time."""

    level: Literal["slice", "recent"] = "recent"
    """Mean risk is set to the slice's rate of positives, or to the rate expected from ``recent`` and earlier weeks."""


class CostsSection(Section):
    """``models.precision_targets.costs``: what drains and failures cost, in one unit such as GPU-hours."""

    unneeded_drain: float = Field(gt=0)
    """Draining a GPU that would not have failed."""

    missed_failure: float = Field(ge=0)
    """A failure that met no drain, without its jobs."""

    lost_job: float = Field(default=0.0, ge=0)
    """What the jobs on a GPU lose on average when it fails under them."""

    needed_drain: float = Field(default=0.0, ge=0)
    """Draining a GPU that would have failed."""

    @model_validator(mode="after")
    def _worth_it(self) -> "CostsSection":
        if self.missed_failure + self.lost_job <= self.needed_drain:
            raise ValueError("missed_failure + lost_job must exceed needed_drain, otherwise no drain pays")
        return self


class PrecisionTargetsSection(Section):
    """``models.precision_targets``: precisions that are promised where earlier outcomes allow it."""

    values: tuple[float, ...] = (0.3, 0.5, 0.85)
    """Precisions to promise, each on its own."""

    confidence: float = Field(default=0.9, gt=0, lt=1)
    """One-sided confidence of every bound: a promise may be wrong in at most this share's rest."""

    horizon: PositiveDuration | None = timedelta(hours=72)
    """A drain is right if an incident follows within this of the alert that begins it, or within ``labels.horizon``
    where that is longer; null: within ``labels.horizon``."""

    costs: CostsSection | None = None
    """Costs to set a further threshold by; null: none."""

    @field_validator("values")
    @classmethod
    def _shares(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or not all(0 < target < 1 for target in value):
            raise ValueError("give precisions between 0 and 1, such as [0.3, 0.5, 0.85]")
        return value


def _default_groups() -> dict[Learner, tuple[Group, ...] | None]:
    return {"xgboost": ("onset",)}


class ModelsSection(Section):
    """``models``: what is trained and which of it is the profile's choice."""

    profile: str = "mean_log_odds"
    """Name of the model whose predictions are the profile's: a learner, a baseline or an ensemble."""

    learners: tuple[Learner, ...] = ("lightgbm", "xgboost", "random_forest")
    """Single learners to train and to compare; those that the profile does not need only by ``--full``."""

    settings: dict[Learner, dict[str, Any]] = Field(default_factory=dict)
    """Overrides of a learner's settings, by learner."""

    groups: dict[Learner, tuple[Group, ...] | None] = Field(default_factory=_default_groups)
    """Feature groups that a learner sees, by learner; null, and where the features have none of the groups: all
    columns."""

    parallel: ParallelSection = ParallelSection()
    cascade: CascadeSection = CascadeSection()
    calibration: CalibrationSection = CalibrationSection()
    precision_targets: PrecisionTargetsSection = PrecisionTargetsSection()

    horizons: tuple[PositiveDuration, ...] = tuple(timedelta(hours=hours) for hours in (1, 6, 24, 72))
    """Further horizons to give risks for, such as 1h, 6h, 24h and 72h; consistent with the risk at labels.horizon."""

    @field_validator("groups")
    @classmethod
    def _of_columns(cls, value: dict[Learner, Any]) -> dict[Learner, Any]:
        if windowed := sorted(set(SEQUENCE).intersection(value)):
            raise ValueError(f"{windowed[0]} reads raw windows, which belong to no group: leave it out")
        return value


class BacktestSection(Section):
    """``backtest``: which part of the dataset is replayed, and how many alerts."""

    first_test: datetime | Literal["auto"] = "auto"
    """First decision time that is scored; ``auto``: a third of the dataset, or as soon as the shortest span fits."""

    last_test: datetime | Literal["auto"] = "auto"
    """Last decision time that is scored; ``auto``: the end of the dataset."""

    k: int | Literal["auto"] = "auto"
    """Alert budget: nodes a decision time; ``auto``: the expected nodes with a positive, at least 1."""

    cooldown: PositiveDuration | None = None
    """With one ``k`` counts nodes newly alerted a day; a node is alerted again only so long after its alert, or after
    the drain horizon on new evidence: twice the risk of that alert. Null: whenever it is among the riskiest."""

    bootstrap: int = Field(default=200, ge=0)
    """Bootstrap replicates (resampling nodes) for the intervals of the report; 0: none."""

    @field_validator("first_test", "last_test")
    @classmethod
    def _aware(cls, value: datetime | str) -> datetime | str:
        if isinstance(value, datetime) and value.tzinfo is None:
            raise ValueError(f"{value.isoformat()} has no time zone: write it with one, such as '2026-01-01T00:00:00Z'")
        return value


class ServingSection(Section):
    """``serving``: batch scoring, and how fresh the telemetry of a unit that is scored must be."""

    stale_after: Duration = timedelta(hours=1)
    """A unit whose newest usable sample is older than this at the decision time is unknown; at least two steps of the
    dataset and the delay, or nothing in one of long steps would ever be fresh."""

    min_completeness: float = Field(default=0.5, ge=0, le=1)
    """A unit with less than this share of the samples expected in the last decision interval is unknown; 0: never."""

    max_explained: int = Field(default=200, ge=0)
    """Units explained at a decision time at most, the riskiest first: half a millisecond each and tree learner."""

    max_reasons: int = Field(default=3, ge=0)
    """Reasons given for a unit at most."""

    retention: Duration = timedelta(days=35)
    """Scored decisions this much older than the newest one are removed."""


class PromotionSection(Section):
    """``promotion``: what a challenger must show on recent decisions before it becomes the champion."""

    period: PositiveDuration = timedelta(days=28)
    """Champion and challenger are compared on at most this much of the newest decisions that neither was trained on."""

    min_incidents: int = Field(default=10, ge=1)
    """Fewer incidents than this decide nothing: neither precision, nor the recall of a failure class."""

    bootstrap: int = Field(default=1000, ge=100)
    """Bootstrap replicates (resampling GPUs) behind the gate's intervals."""

    precision_margin: float = Field(default=0.05, ge=0, le=1)
    """The interval of the difference in precision at K must lie above minus this, and not all of it below zero."""

    margin_share: float = Field(default=0.5, ge=0, le=1)
    """Neither the margin of precision nor that of recall is more than this share of the champion's own value."""

    risk_ratio: tuple[float, float] = (0.5, 2.0)
    """Mean risk over base rate must lie between these."""

    brier_margin: float = Field(default=0.02, ge=0)
    """Brier skill may be lower than the champion's by this much."""

    recall_margin: float = Field(default=0.1, ge=0, le=1)
    """Recall of a failure class may be lower than the champion's by this much."""

    @field_validator("risk_ratio")
    @classmethod
    def _ascending(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 < value[0] < 1 < value[1]:
            raise ValueError("must be a number below 1 and one above it, such as [0.5, 2.0]")
        return value


THREADS = 1
"""Threads of one learner. More make a sum's order, and so its last bit, depend on the machine; and where other
programs use the cores, OpenMP's waiting threads slow a small fit twentyfold. ``fit_all`` fits several
learners concurrently instead."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A learner's settings and its maker.

    ``defaults``: settings the learner is made with unless they are overridden.
    ``build``: from a seed below 2**31 and all settings to an unfitted scikit-learn classifier.
    ``more``: further settings that may be overridden; the library's own default holds until they are.
    """

    defaults: Mapping[str, Any]
    build: Callable[[int, dict[str, Any]], Any]
    more: tuple[str, ...] = ()
