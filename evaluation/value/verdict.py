"""Whether a fleet's failures are predictable: yes, weakly, no, or that the data cannot tell."""

import math
from dataclasses import dataclass
from typing import Final, Literal

import pandas as pd

from evaluation.metrics.comparison import SLIDING
from evaluation.metrics.estimates import estimate_model
from evaluation.metrics.evaluation import Evaluation
from evaluation.metrics.metrics import interval, resample
from evaluation.metrics.scored import split_predictions

Answer = Literal["yes", "weakly", "no", "too few failures", "no failures", "cannot tell"]

ENOUGH: Final = 20
"""Failures of nodes in the replay that an answer takes; as many as a rollout stage asks for (``policy.stages``)."""

FEWEST: Final = 10
"""With fewer, no interval is believed; as many as ``promotion.min_incidents``."""

CAUGHT: Final = 0.2
"""Share of the replayed failures that must be caught for ``yes``."""

Bounded = tuple[float, float, float]
"""A figure with its 95 % interval."""

_UNKNOWN: Final = (math.nan, math.nan, math.nan)
COUNTING: Final = "history_count"


@dataclass(frozen=True, slots=True)
class Predictability:
    """The answer, and what it rests on; NaN where a figure is not defined.

    ``failures``: those of nodes that the replay could have caught, a cause of several counted once; ``more``: about
    how many are needed beyond them.
    ``precision``: of drain episodes, with its 95 % interval; ``chance``: of drawing at random.
    ``recall``: share of failures caught; ``more_than_counting``: less that which ``history_count`` catches with as many
    alerts; ``lead_hours``: quartiles of the lead time.
    ``without_precursor``: share of failures that stood out to no model, corrected for chance.
    ``reason``: why no answer is given although there are failures; else empty.
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


def unanswered(failures: int) -> Predictability:
    """Give the answer where no failure could be replayed, of so many in the data."""
    return Predictability("too few failures" if failures else "no failures", 0, ENOUGH)


def predictability(
    evaluation: Evaluation, predictions: pd.DataFrame, unforeseen: pd.DataFrame, profile: str, *, seed: int
) -> Predictability:
    """Evaluate a backtest.

    ``predictions``: of all its models; ``unforeseen``: as :func:`evaluation.metrics.lead_time.unforeseen_incidents`
    returns it.

    Yes: the interval of the precision of drain episodes lies above chance, at least :data:`CAUGHT` of the failures are
    caught, and more of them than by counting past failures (the interval of the difference at equal alerts lies above
    0). Weakly: above chance only. No: not above chance, and the interval of the share caught lies below
    :data:`CAUGHT`. Too few failures: neither of these; fewer than :data:`ENOUGH`, and not yes; fewer than
    :data:`FEWEST` always. Failures caught are compared, not precision: a node that fails again and again counts
    there once a failure, and does not carry a baseline by itself.
    """
    row = evaluation.row(profile, SLIDING)
    if row is None or not row["incidents"]:
        return unanswered(1)
    failures = int(row["incidents"])
    more = _more_than_counting(evaluation, predictions, profile, seed)
    chance = float(row["episode_base_rate"])
    above_chance = float(row["episode_precision_low"]) > chance
    few: Final = "too few failures"
    answer: Answer = "weakly" if above_chance else "no" if float(row["recall_high"]) < CAUGHT else few
    if above_chance and more[1] > 0 and float(row["recall"]) >= CAUGHT:
        answer = "yes"
    if failures < FEWEST or (failures < ENOUGH and answer != "yes"):
        answer = few
    unseen, unlucky = 1 - float(unforeseen["seen"].mean()), 1 - float(unforeseen["chance"].mean())
    return Predictability(
        answer, failures, 0 if answer != few else ENOUGH - failures if failures < ENOUGH else failures,
        _bounded(row, "episode_precision"), chance, _bounded(row, "recall"), more,
        (row["lead_time_q25_hours"], row["lead_time_median_hours"], row["lead_time_q75_hours"]),
        min(unseen / unlucky, 1.0) if unlucky else math.nan,
    )  # fmt: skip


def _bounded(row: pd.Series, name: str) -> Bounded:
    return float(row[name]), float(row[f"{name}_low"]), float(row[f"{name}_high"])


def _more_than_counting(evaluation: Evaluation, predictions: pd.DataFrame, profile: str, seed: int) -> Bounded:
    """Compare the failures caught on the same resamples."""
    chosen = (predictions["variant"] == SLIDING) & predictions["model"].isin([profile, COUNTING])
    parts = split_predictions(predictions[chosen.to_numpy()], evaluation.k)
    weights = resample(parts[0].shared.n_clusters, evaluation.replicates, seed)
    recall = {part.model: estimate_model(part, weights) for part in parts}
    one, two = recall[profile], recall[COUNTING]
    bounds = interval(one.replicates["recall"] - two.replicates["recall"])
    return one.point["recall"] - two.point["recall"], bounds.low, bounds.high
