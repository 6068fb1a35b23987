"""Comparisons of models on shared bootstrap samples, and at equal numbers of alerts."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from evaluation.metrics.estimates import Estimate, kind_of, precision_of
from evaluation.metrics.metrics import Floats, Interval, interval, ratio
from models.config import ALL_LEARNERS

SLIDING = "sliding"
TRAIN_ONCE = "train_once"

PAIRED: tuple[str, ...] = ("precision_at_k", "precision", "recall", "average_precision", "roc_auc", "capture")
"""Statistics with paired comparisons."""

_PAIR_COLUMNS = (
    "comparison", "model", "variant", "other_model", "other_variant", "statistic",
    "value", "other_value", "difference", "low", "high",
)  # fmt: skip

_EQUAL_COLUMNS = (
    "variant", "model", "other_model", "alerts", "precision", "other_precision",
    "difference", "low", "high", "best",
)  # fmt: skip


def best_learner(estimates: Sequence[Estimate]) -> Estimate | None:
    """Return the single learner with the highest precision at K; None if no learner has a defined precision.

    It is selected on the same rows it is then compared on, which biases comparisons with ensembles in its favour. Ties
    go to average precision, then to the order of ``ALL_LEARNERS``.
    """
    candidates = [
        (
            estimate.point["precision_at_k"],
            estimate.point["average_precision"],
            -ALL_LEARNERS.index(estimate.scored.model),
            estimate,
        )
        for estimate in estimates
        if kind_of(estimate.scored.model) == "learner" and estimate.scored.variant == SLIDING
        if np.isfinite(estimate.point["precision_at_k"]) and np.isfinite(estimate.point["average_precision"])
    ]
    return max(candidates, key=lambda candidate: candidate[:3])[3] if candidates else None


def paired_differences(estimates: Sequence[Estimate]) -> pd.DataFrame:
    """Compare pairs of models on the same bootstrap samples.

    Comparisons: ``sliding`` (each model's sliding variant with its train-once variant), ``ensemble`` (each sliding
    ensemble with the best sliding learner), ``baseline`` (the best sliding learner with each sliding baseline).

    Returns: one row per comparison and statistic: both values, ``difference`` (positive: ``model`` is better), its
    interval ``low``, ``high`` (NaN if neither side has a hit).
    """
    by_name = {estimate.scored.name: estimate for estimate in estimates}
    pairs: list[tuple[str, Estimate, Estimate]] = []
    for (model, variant), estimate in by_name.items():
        if variant == SLIDING and (model, TRAIN_ONCE) in by_name:
            pairs.append(("sliding", estimate, by_name[model, TRAIN_ONCE]))
    best = best_learner(estimates)
    if best is not None:
        sliding = [estimate for estimate in estimates if estimate.scored.variant == SLIDING]
        pairs += [("ensemble", estimate, best) for estimate in sliding if kind_of(estimate.scored.model) == "ensemble"]
        pairs += [("baseline", best, estimate) for estimate in sliding if kind_of(estimate.scored.model) == "baseline"]
    rows = [pair(comparison, first, second, name) for comparison, first, second in pairs for name in PAIRED]
    return pd.DataFrame(rows, columns=list(_PAIR_COLUMNS))


def equal_alerts(estimates: Sequence[Estimate], weights: Floats) -> pd.DataFrame:
    """Compare each ensemble with the learners of its variant at equal numbers of alerts.

    An intersection may look precise only because it alerts less. Each learner therefore alerts its top-ranked nodes,
    as many as the ensemble does at each decision time.

    Returns: one row per ensemble and learner of a variant: alerts, both precisions, ``difference`` (positive: ``model``
    is better at equal alerts), its interval, and ``best`` (whether ``other_model`` is the most precise learner at this
    number of alerts; selected on the same rows, so optimistic).
    """
    replicates = np.concatenate([np.ones((1, weights.shape[1])), weights])
    rows = []
    for first in estimates:
        scored = first.scored
        if kind_of(scored.model) != "ensemble":
            continue
        budget = scored.per_time(scored.alert)
        precision = precision_of(scored, scored.alert, replicates)
        by_learner = []
        for second in estimates:
            if second.scored.variant == scored.variant and kind_of(second.scored.model) == "learner":
                by_learner.append(
                    (second.scored.model, precision_of(second.scored, second.scored.top(budget), replicates))
                )
        best = most_precise({model: learner_precision[0] for model, learner_precision in by_learner})
        for model, learner_precision in by_learner:
            bounds = difference_interval(precision, learner_precision)
            rows.append(
                (scored.variant, scored.model, model, int(budget.sum()), precision[0], learner_precision[0],
                 precision[0] - learner_precision[0], bounds.low, bounds.high, model == best)
            )  # fmt: skip
    return pd.DataFrame(rows, columns=list(_EQUAL_COLUMNS))


def difference_interval(first: Floats, second: Floats) -> Interval:
    """Interval of ``one - two``; NaN if neither side has a hit, since every resample would be zero.

    ``first``, ``second``: a share on the full sample, then on each resample; shape (1 + replicates,).
    """
    if first[0] == second[0] == 0:
        return Interval(np.nan, np.nan)
    return interval(first[1:] - second[1:])


def most_precise(precision: Mapping[str, float]) -> str | None:
    """Return the learner with the highest precision; ties go to the first in ``ALL_LEARNERS``; None if all are NaN."""
    known = [name for name in ALL_LEARNERS if np.isfinite(precision.get(name, np.nan))]
    return max(known, key=lambda name: precision[name]) if known else None


def oracle_shares(estimates: Sequence[Estimate], oracle: Estimate) -> pd.DataFrame:
    """Each model's precision at K as a share of the oracle's, on the same resamples.

    Returns: ``model``, ``variant``, and ``oracle_share_precision_at_k`` with ``_low`` and ``_high``.
    """
    statistic = "precision_at_k"
    oracle_precision, rows = oracle.point[statistic], []
    for estimate in estimates:
        share = estimate.point[statistic] / oracle_precision if oracle_precision else np.nan
        bounds = interval(ratio(estimate.replicates[statistic], oracle.replicates[statistic]))
        if share == 0:
            # no resample has a hit: divide the exact upper bound by the oracle's point estimate
            bounds = Interval(0.0, estimate.bounds(statistic).high / oracle_precision)
        rows.append((*estimate.scored.name, share, bounds.low, bounds.high))
    column = f"oracle_share_{statistic}"
    return pd.DataFrame(rows, columns=["model", "variant", column, f"{column}_low", f"{column}_high"])


def pair(comparison: str, first: Estimate, second: Estimate, statistic: str) -> tuple[object, ...]:
    """Compare one statistic of two models; returns a row of :func:`paired_differences`."""
    bounds = interval(first.replicates[statistic] - second.replicates[statistic])
    value, other_value = first.point[statistic], second.point[statistic]
    if value == other_value == 0:
        bounds = Interval(np.nan, np.nan)  # neither has a hit, so there is nothing to resample
    return (
        comparison, *first.scored.name, *second.scored.name, statistic,
        value, other_value, value - other_value, bounds.low, bounds.high,
    )  # fmt: skip
