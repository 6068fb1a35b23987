"""Verdict on whether a fleet's failures are predictable: yes, weakly, no, or undecidable from the data."""

import math
from dataclasses import dataclass
from typing import Final, Literal

import pandas as pd

from evaluation.metrics.aggregation import split_predictions
from evaluation.metrics.comparison import SLIDING
from evaluation.metrics.estimates import estimate_model
from evaluation.metrics.evaluation import Evaluation
from evaluation.metrics.metrics import interval, resample

Answer = Literal["yes", "weakly", "no", "too few failures", "no failures", "cannot tell"]

MIN_FAILURES_UNLESS_YES: Final = 20
"""Minimum number of replayed node failures for an answer other than ``yes``; as for rollout stages
(``policy.stages``)."""

MIN_FAILURES: Final = 10
"""Minimum number of failures for any answer; as ``promotion.min_incidents``."""

MIN_RECALL: Final = 0.2
"""Minimum share of the replayed failures that must be caught for ``yes``."""

Bounded = tuple[float, float, float]
"""A value with its 95 % interval."""

_UNKNOWN: Final = (math.nan, math.nan, math.nan)
COUNT_BASELINE: Final = "history_count"


@dataclass(frozen=True, slots=True)
class Predictability:
    """The answer with its evidence; undefined values are NaN.

    ``failures``: node failures that the replay could have caught, a common cause counted once; ``more``: approximate
    number of additional failures needed.
    ``precision``: precision of drain episodes, with its 95 % interval; ``chance``: precision of random alerts.
    ``recall``: share of failures caught; ``more_than_counting``: its difference to that of ``history_count`` at equal
    alerts; ``lead_hours``: quartiles of the lead time.
    ``without_precursor``: share of failures that no model ranked high beforehand, corrected for chance.
    ``reason``: why there is no answer although there are failures; otherwise empty.
    """

    answer: Answer
    failures: int
    more: int = 0
    precision: Bounded = _UNKNOWN
    chance: float = math.nan
    recall: Bounded = _UNKNOWN
    more_than_counting: Bounded = _UNKNOWN
    lead_hours: Bounded = _UNKNOWN
    without_precursor: float = math.nan
    reason: str = ""


def no_answer(failures: int) -> Predictability:
    """Return the answer if no failure could be replayed; ``failures``: number of failures in the data."""
    return Predictability("too few failures" if failures else "no failures", 0, MIN_FAILURES_UNLESS_YES)


def predictability(
    evaluation: Evaluation, predictions: pd.DataFrame, unforeseen: pd.DataFrame, profile: str, *, seed: int
) -> Predictability:
    """Derive the answer from a backtest.

    ``predictions``: of all models; ``unforeseen``: from :func:`evaluation.metrics.lead_time.unforeseen_incidents`.

    Yes: the interval of the precision of drain episodes lies above chance, at least :data:`MIN_RECALL` of the failures
    are caught, and significantly more than by counting past failures (at equal alerts). Weakly: above chance only. No:
    not above chance, and the interval of recall lies below :data:`MIN_RECALL`. Too few failures: none of these, or
    fewer than :data:`MIN_FAILURES_UNLESS_YES` and not yes, or fewer than :data:`MIN_FAILURES`. Models are compared by
    recall, not precision, so that a baseline cannot win by one node that fails repeatedly.
    """
    row = evaluation.row(profile, SLIDING)
    if row is None or not row["incidents"]:
        return no_answer(1)
    failures = int(row["incidents"])
    gain = _more_than_counting(evaluation, predictions, profile, seed)
    chance = float(row["episode_base_rate"])
    above_chance = float(row["episode_precision_low"]) > chance
    too_few: Final = "too few failures"
    answer: Answer = "weakly" if above_chance else "no" if float(row["recall_high"]) < MIN_RECALL else too_few
    if above_chance and gain[1] > 0 and float(row["recall"]) >= MIN_RECALL:
        answer = "yes"
    if failures < MIN_FAILURES or (failures < MIN_FAILURES_UNLESS_YES and answer != "yes"):
        answer = too_few
    more = MIN_FAILURES_UNLESS_YES - failures if failures < MIN_FAILURES_UNLESS_YES else failures
    missed, missed_by_chance = 1 - float(unforeseen["seen"].mean()), 1 - float(unforeseen["chance"].mean())
    return Predictability(
        answer, failures, more if answer == too_few else 0,
        _bounded(row, "episode_precision"), chance, _bounded(row, "recall"), gain,
        (row["lead_time_q25_hours"], row["lead_time_median_hours"], row["lead_time_q75_hours"]),
        min(missed / missed_by_chance, 1.0) if missed_by_chance else math.nan,
    )  # fmt: skip


def _bounded(row: pd.Series, name: str) -> Bounded:
    return float(row[name]), float(row[f"{name}_low"]), float(row[f"{name}_high"])


def _more_than_counting(evaluation: Evaluation, predictions: pd.DataFrame, profile: str, seed: int) -> Bounded:
    """Compare the recall of the profile and of ``history_count`` on the same resamples."""
    chosen = (predictions["variant"] == SLIDING) & predictions["model"].isin([profile, COUNT_BASELINE])
    parts = split_predictions(predictions[chosen.to_numpy()], evaluation.k)
    weights = resample(parts[0].shared.n_clusters, evaluation.replicates, seed)
    recall = {part.model: estimate_model(part, weights) for part in parts}
    profile_estimate, baseline_estimate = recall[profile], recall[COUNT_BASELINE]
    bounds = interval(profile_estimate.replicates["recall"] - baseline_estimate.replicates["recall"])
    return profile_estimate.point["recall"] - baseline_estimate.point["recall"], bounds.low, bounds.high
